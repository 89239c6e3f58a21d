"""Fake tensors: the bytes of live ones, and results and temporary memory of operators that torch cannot derive.

torch.distributed._tools.MemTracker counts the same (a test compares them); its module hooks do not survive the tracing
of compiled blocks, and forbid a second micro-batch.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bloomery.model.acting import kind_of
from bloomery.model.attention import blockwise, per_document
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.attention.blockwise import Options, QueryDocuments, attention_operator, like_projection, sums_like
from bloomery.model.decoder import Block
from bloomery.model.norms import RMSNormFunction, widened
from bloomery.model.quantization.sizes import DEQUANTIZED_ON_CPU, DEQUANTIZED_ON_GPU, PIECE_BYTES
from bloomery.model.rope import Rotary

_aten, _native = torch.ops.aten, torch.ops.bloomery
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


class MemoryTracker(TorchDispatchMode):
    """Bytes by kind at the moment when most are alive: `peak`.

    Storages are counted once, however many tensors share them. A storage created in backward counts as `temporaries`,
    else as `activations`; `call` names earlier tensors, `gradients` returns the current gradients.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.gradients, self.hidden = gradients, False
        self.peak: dict[str, float] = {}
        self._kinds: dict[int, tuple[str, int]] = {}  # by a storage's identity, for as long as it lives
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._flat: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # FSDP frees and fills such as it goes
        self._totals: dict[str, float] = {"gradients": 0.0}
        self._now = self._highest = 0

    def call(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors are of that kind."""
        for storage in storages_of(tensors):
            self._watch(storage, kind)
            self._note(id(storage), kind, self._kinds[id(storage)][1])

    def forget_peak(self) -> None:
        self.peak, self._highest = {}, 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Tensors created meanwhile take no memory: a fused kernel keeps them in registers."""
        before, self.hidden = self.hidden, True
        try:
            yield
        finally:
            self.hidden = before

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel, which holds nothing of its own."""

        def run(*args: Any) -> Any:
            with self.unseen():
                return function(*args)

        return run

    def _watch(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key not in self._kinds:
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._note(key, kind, storage.nbytes())

    def _gone(self, key: int) -> None:
        self._note(key, self._kinds[key][0], 0)
        del self._kinds[key], self._watched[key]
        self._flat.pop(key, None)

    def _note(self, key: int, kind: str, size: int) -> None:
        before, held = self._kinds.get(key, (kind, 0))
        self._totals[before] = self._totals.get(before, 0.0) - held
        self._totals[kind] = self._totals.get(kind, 0.0) + size
        self._now += size - held
        self._kinds[key] = kind, size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for key, reference in list(self._flat.items()):  # a storage is resized where no dispatch mode sees it
            resized = reference()
            if resized is not None and resized.nbytes() != self._kinds[key][1]:
                self._note(key, self._kinds[key][0], resized.nbytes())
        if self._flat:
            self._note_peak()
        result = func(*args, **(kwargs or {}))
        if self.hidden:
            return result
        backward = torch._C._current_graph_task_id() != -1
        for tensor in tree_leaves(result):
            for storage in storages_of([tensor]):
                self._watch(storage, "temporaries" if backward else "activations")
                if func is _aten.empty.memory_format and tensor.ndim == 1:
                    self._flat[id(storage)] = self._watched[id(storage)]
        self._note_peak()
        return result

    def _note_peak(self) -> None:
        if self._now <= self._highest:
            return
        self._highest, self.peak = self._now, dict(self._totals)
        for storage in {id(storage): storage for storage in storages_of(self.gradients())}.values():
            kind, size = self._kinds.get(id(storage), ("gradients", 0))
            self.peak[kind] -= size
            self.peak["gradients"] = self.peak.get("gradients", 0.0) + size


def storages_of(things: Iterable[object]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, DTensors' local ones included."""
    tensors = [getattr(thing, "_local_tensor", thing) for thing in things]
    return [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]


class FakeResults(TorchDispatchMode):
    """Results that depend on values, and the temporary memory of operators.

    A step reads two values: whether loss and norm are finite (yes), and which labels are loss tokens (all).
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._tracker = tracker
        self._answers: dict[object, Callable[..., Any]] = {
            _aten._local_scalar_dense.default: lambda _x: 1.0,
            _aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.ndim, dtype=torch.int64),
            _aten.logsumexp.default: _log_sum_exp,
            _native.blockwise.default: _blockwise,
            _native.blockwise_backward.default: _blockwise_backward,
            _native.flash_backward.default: _flash_backward,
            _native.per_document.default: _per_document,
            _native.per_document_backward.default: _per_document_backward,
            _native.quantized_matmul.default: lambda x, *rest: F.linear(x, _weight(x, rest)),
            _native.quantized_matmul_backward.default: lambda grad, *rest: grad @ _weight(grad, rest),
        }

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = None if self._tracker.hidden else self._answers.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return answer(*args, **(kwargs or {}))


def _log_sum_exp(x: Tensor, axes: list[int], keepdim: bool = False) -> Tensor:
    """torch's own holds the exponentials for a moment, out of a dispatch mode's sight."""
    exponentials = (x - torch.amax(x, axes, keepdim=True)).exp_()
    return exponentials.sum(axes, keepdim).log_()


def _weight(like: Tensor, stored: tuple[Any, ...]) -> Tensor:
    """A dequantized weight, and the temporary memory of one piece."""
    *_, outputs, inputs, _reader = stored
    weight = like.new_empty(outputs, inputs)
    piece = DEQUANTIZED_ON_CPU if kind_of(like.device) == "cpu" else DEQUANTIZED_ON_GPU
    like.new_empty(PIECE_BYTES * min(piece, outputs * inputs), dtype=torch.uint8)
    return weight


class _Task(blockwise.Task):
    """Work on as many tiles as are alive at once, with random bits from nowhere."""

    def query_blocks(self, length: int) -> Iterator[tuple[slice, list[blockwise.Tile]]]:
        *_, (queries, tiles) = blockwise.Task.query_blocks(self, length)
        yield queries, tiles[-2:]

    def dropped(self, tile: blockwise.Tile, shares: Tensor) -> Tensor:
        words = torch.empty(-(-shares.numel() // 4), dtype=torch.int64, device=shares.device)
        return words.view(torch.int16)[: shares.numel()].view(shares.shape) < tile.number


def _group(q: Tensor, rest: tuple[Any, ...]) -> tuple[slice, blockwise.Task]:
    """The first rows that go together."""
    first_BT, _reach, seed = rest[:3]
    return next(_Task(first_BT, None, seed, *rest[3:]).groups(q))


def _blockwise(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, sums = like_projection(q), sums_like(q)
    part, task = _group(q, rest)
    out[part], sums[part] = blockwise.forward(q[part], k[part], v[part], task)
    return out, sums


def _blockwise_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    wholes = tuple(like_projection(x) for x in (q, k, v))
    part, task = _group(q, rest)
    found = blockwise.backward(grad[part], q[part], k[part], v[part], out[part], sums[part], task)
    for whole, some in zip(wholes, found, strict=True):
        whole[part] = some
    return wholes


def _per_document(q: Tensor, k: Tensor, v: Tensor, first_BT: Tensor, _reach: None, seed: Any, *rest: Any) -> Any:
    """One document per sequence: document starts are values, and one document needs most memory."""
    return per_document.forward(q, k, v, [first_BT.shape[1]] * len(first_BT), seed, Options(*rest), _Task)


def _per_document_backward(*given: Any) -> Any:
    grad, q, k, v, out, sums, first_BT, _reach, seed, *rest = given
    lengths = [first_BT.shape[1]] * len(first_BT)
    return per_document.backward(grad, q, k, v, out, sums, lengths, seed, Options(*rest), _Task)


# A GPU's kernels


class GpuFunctions(TorchFunctionMode):
    """While it is entered, functions keep for backward what a GPU's kernels keep.

    Fake tensors are on the CPU for every device: PyTorch without CUDA or ROCm has no autograd for others.
    """

    @classmethod
    def around(cls, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same from every caller: autograd enters no mode in backward, when a checkpoint is recomputed."""

        def run(*args: Any, **kwargs: Any) -> Tensor:
            with cls():
                return forward(*args, **kwargs)

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is F.rms_norm:
            given = kwargs or {}
            return RMSNormFunction.apply(args[0], widened(given["weight"]), given["eps"], args[0].dtype)  # type: ignore[no-untyped-call]  # torch's `apply`
        return func(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keeps a mask of one byte per value; the CPU kernel keeps the scaled mask."""
    del inplace
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a fake operator has no values")


_flash = attention_operator("flash", _never, _never, sums=sums_like)


def flash(q: Tensor, k: Tensor, v: Tensor, _layout: DocumentLayout, options: Options) -> Tensor:
    """A backend of attention: FlashAttention-2 (Dao, arXiv:2307.08691) as PyTorch calls it."""
    return _flash(q, k, v, QueryDocuments(None, None, None), options)


def _flash_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, sums: Tensor, *_: Any) -> Any:
    """With its temporary memory: the queries' gradient in float32, and one more value per query."""
    gradients = tuple(like_projection(x) for x in (q, k, v))
    summed = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(sums)
    del summed
    return gradients


# Compiled blocks: torch.compile cuts the graph of a block's forward and backward where the fewest bytes cross (the
# partitioner of AOTAutograd, which Inductor uses too). The same two graphs run here operator by operator.


def compile_blocks(blocks: Iterable[Block], tracker: MemoryTracker) -> None:
    """In place: blocks that are alike share a pair of graphs, traced when the first of them runs."""
    shared: dict[object, _Graphs] = {}
    for block in blocks:
        graphs = shared.setdefault(block.self_attn.window, _Graphs(block, tracker))
        block.forward = graphs.forward_of(block)  # type: ignore[method-assign]


class _Graphs:
    """A block as two graphs of tensors: parameters, buffers of quantized weights, arguments of forward."""

    def __init__(self, block: Block, tracker: MemoryTracker) -> None:
        self._tracker, self._inside = tracker, nn.Module()
        self._inside.block, self._inside.forward = block, block.forward
        self._names = [name for name, _ in (*self._inside.named_parameters(), *self._inside.named_buffers())]
        self._traced: dict[bool, Callable[..., Tensor]] = {}  # by whether there is a rotation

    def forward_of(self, block: Block) -> Callable[..., Tensor]:
        def forward(x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: None = None) -> Tensor:
            assert cache is None, "training has no cache"
            names = [field.name for field in fields(layout) if getattr(layout, field.name) is not None]
            seen, tables = [getattr(layout, name) for name in names], [] if rotary is None else list(rotary)
            given = [*block.parameters(), *block.buffers()], tables, seen, x_BTD
            if (turns := rotary is not None) not in self._traced:
                self._traced[turns] = self._trace(names, turns=turns)
                with self._tracker.unseen():
                    self._traced[turns](*given)
            return self._traced[turns](*given)

        return forward

    def _trace(self, names: list[str], *, turns: bool) -> Callable[..., Tensor]:
        from functorch.compile import (  # type: ignore[import-untyped]  # part of torch
            aot_function,
            min_cut_rematerialization_partition,
        )
        from torch._inductor.decomposition import select_decomp_table

        def whole(parameters: list[Tensor], tables: list[Tensor], seen: list[Tensor], x_BTD: Tensor) -> Any:
            given = x_BTD, Rotary(*tables) if turns else None, DocumentLayout(**dict(zip(names, seen, strict=True)))
            return torch.func.functional_call(self._inside, dict(zip(self._names, parameters, strict=True)), given)

        def compiled(graph: torch.fx.GraphModule, _inputs: object) -> Callable[[list[Tensor]], Any]:
            def run(inputs: list[Tensor]) -> Any:
                return _Fused(graph, self._tracker).boxed_run(inputs)

            run._boxed_call = True  # type: ignore[attr-defined]  # read by aot_function
            return run

        traced: Callable[..., Any] = aot_function(
            whole, fw_compiler=compiled, partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )  # fmt: skip
        return traced


class _Fused(torch.fx.Interpreter):
    """Runs a graph and lets go of each tensor, inputs included, after its last use, as Inductor's code does.

    A result takes memory only where a kernel of a library reads it, straight or through views, or the graph hands it
    out: the rest Inductor keeps in registers.
    """

    def __init__(self, graph: torch.fx.GraphModule, tracker: MemoryTracker) -> None:
        super().__init__(graph)
        self._tracker = tracker
        self._stored = {node for node in graph.graph.nodes if _library(node) or _is_read(node)}

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or n in self._stored:
            return super().run_node(n)
        with self._tracker.unseen():
            return super().run_node(n)


def _library(node: Node) -> bool:
    """Whether Inductor calls a library kernel for it: a matmul, an attention."""
    foreign = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    return node.target in _PRODUCTS or foreign or "attention" in str(node.target)


def _is_read(node: Node) -> bool:
    views = [u for u in node.users if getattr(u.target, "is_view", False) or u.target is operator.getitem]
    return any(u.op == "output" or _library(u) for u in node.users) or any(_is_read(view) for view in views)
