"""Two steps of a plan's training code on fake tensors, and the live tensors at the peak of the second.

Each stage of a pipeline runs alone: forward of its micro-batches until as many are in flight as stages follow, then
backward and forward in turn (1F1B; Narayanan et al., arXiv:2104.04473). Tensors from the neighboring stages are new
tensors of the residual stream; sent ones are freed.

Fake tensors: the bytes of live ones, and results and temporary memory of operators that torch cannot derive.
torch.distributed._tools.MemTracker counts the same (a test compares them); its module hooks do not survive the tracing
of compiled blocks, and forbid a second micro-batch.
"""

import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bloomery.data.batch import Batch
from bloomery.model.acting import acting_as, kind_of
from bloomery.model.attention import blockwise, compiled, per_document
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    attention_operator,
    like_projection,
    sums_like,
)
from bloomery.model.config import ModelConfig, Stage
from bloomery.model.decoder import Block
from bloomery.model.limits import DEQUANTIZED_ON_CPU, DEQUANTIZED_ON_GPU, PIECE_BYTES
from bloomery.model.norms import RMSNormFunction, widened
from bloomery.model.rope import Rotary
from bloomery.parallel.apply import apply
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.stage import cut, stage_of
from bloomery.plan.estimate.memory import ONE_DEVICE, MeshSplit, kinds_of_stages
from bloomery.plan.types import RunPlan
from bloomery.simulate.run import FLASH_LIKE
from bloomery.train.distillation import meta_teacher
from bloomery.train.forward import forward
from bloomery.train.objectives import build_objective, with_text_structure
from bloomery.train.optim.average import average_of
from bloomery.train.optim.build import build_optimizer
from bloomery.train.state import empty_model
from bloomery.train.step import (
    LossScale,
    ModelAndOptimizer,
    clip_factor,
    global_norm,
    scale_gradients,
    train_step,
)

_aten = torch.ops.aten
_native = torch.ops.bloomery
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


class MemoryTracker(TorchDispatchMode):
    """Bytes by kind at the moment when most are alive: `peak`.

    Storages are counted once, however many tensors share them. A storage created in backward counts as `temporaries`,
    else as `activations`; `call` names earlier tensors, `gradients` returns the current gradients.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.gradients = gradients
        self.hidden = False
        self.peak: dict[str, float] = {}
        # by a storage's identity, for as long as it lives
        self._kinds: dict[int, tuple[str, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # FSDP frees and fills such as it goes
        self._flat: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._totals: dict[str, float] = {"gradients": 0.0}
        self._now = self._highest = 0

    def call(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors are of that kind."""
        for storage in storages_of(tensors):
            self._watch(storage, kind)
            self._note(id(storage), kind, self._kinds[id(storage)][1])

    def forget_peak(self) -> None:
        self.peak = {}
        self._highest = 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Tensors created meanwhile take no memory: a fused kernel keeps them in registers."""
        before = self.hidden
        self.hidden = True
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
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # a storage is resized where no dispatch mode sees it
        for key, reference in list(self._flat.items()):
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
            _native.compiled.default: _compiled,
            _native.compiled_backward.default: _compiled_backward,
            _native.quantized_matmul.default: lambda x, *rest: F.linear(x, _weight(x, rest)),
            _native.quantized_matmul_backward.default: lambda grad, *rest: (
                grad @ _weight(grad, rest)
            ),
        }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
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
    out = like_projection(q)
    sums = sums_like(q)
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


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, first_BT: Tensor, _reach: None, seed: Any, *rest: Any
) -> Any:
    """One document per sequence: document starts are values, and one document needs most memory."""
    return per_document.forward(
        q, k, v, [first_BT.shape[1]] * len(first_BT), seed, Options(*rest), _Task
    )


def _per_document_backward(*given: Any) -> Any:
    grad, q, k, v, out, sums, first_BT, _reach, seed, *rest = given
    lengths = [first_BT.shape[1]] * len(first_BT)
    return per_document.backward(grad, q, k, v, out, sums, lengths, seed, Options(*rest), _Task)


def _compiled(q: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return like_projection(q), sums_like(q)


def _compiled_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any
) -> tuple[Tensor, ...]:
    compiled.by_head(q, k)
    return like_projection(q), like_projection(k), like_projection(v)


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
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is F.rms_norm:
            given = kwargs or {}
            return RMSNormFunction.apply(
                args[0], widened(given["weight"]), given["eps"], args[0].dtype
            )  # type: ignore[no-untyped-call]  # torch's `apply`
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


def _flash_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, sums: Tensor, *_: Any
) -> Any:
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
        block.forward = graphs.forward_of(block)  # type: ignore[method-assign]  # a seam of nn.Module


class _Graphs:
    """A block as two graphs of tensors: parameters, buffers of quantized weights, arguments of forward."""

    def __init__(self, block: Block, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._inside = nn.Module()
        self._inside.block = block
        self._inside.forward = block.forward
        self._names = [
            name for name, _ in (*self._inside.named_parameters(), *self._inside.named_buffers())
        ]
        self._traced: dict[bool, Callable[..., Tensor]] = {}  # by whether there is a rotation

    def forward_of(self, block: Block) -> Callable[..., Tensor]:
        def forward(
            x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: None = None
        ) -> Tensor:
            assert cache is None, "training has no cache"
            names = [
                field.name for field in fields(layout) if getattr(layout, field.name) is not None
            ]
            seen = [getattr(layout, name) for name in names]
            tables = [] if rotary is None else list(rotary)
            given = [*block.parameters(), *block.buffers()], tables, seen, x_BTD
            if (turns := rotary is not None) not in self._traced:
                self._traced[turns] = self._trace(names, turns=turns)
                with self._tracker.unseen():
                    self._traced[turns](*given)
            return self._traced[turns](*given)

        return forward

    def _trace(self, names: list[str], *, turns: bool) -> Callable[..., Tensor]:
        from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]  # part of torch
        from torch._inductor.decomposition import select_decomp_table

        def whole(
            parameters: list[Tensor], tables: list[Tensor], seen: list[Tensor], x_BTD: Tensor
        ) -> Any:
            given = (
                x_BTD,
                Rotary(*tables) if turns else None,
                DocumentLayout(**dict(zip(names, seen, strict=True))),
            )
            return torch.func.functional_call(
                self._inside, dict(zip(self._names, parameters, strict=True)), given
            )

        def compiled(graph: torch.fx.GraphModule, _inputs: object) -> Callable[[list[Tensor]], Any]:
            def run(inputs: list[Tensor]) -> Any:
                return _Fused(graph, self._tracker).boxed_run(inputs)

            run._boxed_call = True  # type: ignore[attr-defined]  # read by aot_function
            return run

        traced: Callable[..., Any] = aot_function(
            whole,
            fw_compiler=compiled,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
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
    views = [
        u for u in node.users if getattr(u.target, "is_view", False) or u.target is operator.getitem
    ]
    return any(u.op == "output" or _library(u) for u in node.users) or any(
        _is_read(view) for view in views
    )


OnProgress = Callable[[str], None]


def simulated_step(
    plan: RunPlan,
    *,
    fused: bool,
    split: MeshSplit = ONE_DEVICE,
    on_progress: OnProgress = lambda _text: None,
) -> dict[str, float]:
    """Bytes by part at the peak of the second step; `fused`: the plan's GPU has fused attention kernels.

    Two micro-batches stand for any number of them: from the second one on gradients are added to gradients. The first
    step makes the optimizer's states, for which one is enough.
    """
    mesh = _fake_mesh(split) if split.shard > 1 else None
    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, mesh=mesh, fused=fused)
        batches = [_batch(plan) for _ in range(min(2, plan.train.accumulation))]
        teacher = meta_teacher(plan) if plan.objective.spec.extra_forwards else None
        tracker.call("weights", [] if teacher is None else weights(teacher))
        tracker.call(
            "inputs",
            [tensor for batch in batches for tensor in batch.tensors()],
        )
        objective = build_objective(plan, lambda _: teacher or meta_teacher(plan))

        def step(count: int) -> None:
            train_step(
                model_and_optimizer, batches[:count], objective, plan=plan.train, lr_scale=1.0
            )

        return _peak(plan, model_and_optimizer, tracker, step, len(batches), on_progress)


@dataclass(frozen=True)
class StagePosition:
    """Which of so many stages."""

    index: int
    stages: int

    @property
    def ahead(self) -> int:
        """Micro-batches that wait for their backward while one more goes forward."""
        return self.stages - self.index - 1

    def stage(self, config: ModelConfig) -> Stage:
        """The part of the decoder that is here, with as many layers as the fullest stage has."""
        stage = stage_of(config, self.index, self.stages)
        most_layers = math.ceil(config.num_layers / self.stages)
        first = min(stage.layers.start, config.num_layers - most_layers)
        return replace(stage, layers=range(first, first + most_layers))

    def under_way(self, plan: RunPlan) -> int:
        """Micro-batches that the stage holds at most."""
        return min(self.ahead + 1, plan.train.accumulation)


def stage_positions(stages: int) -> list[StagePosition]:
    """One of each kind."""
    return [StagePosition(index, stages) for index in kinds_of_stages(stages)]


def simulated_stage(
    plan: RunPlan,
    place: StagePosition,
    *,
    fused: bool,
    on_progress: OnProgress = lambda _text: None,
) -> dict[str, float]:
    """Bytes by part at the peak of the stage's second step; `fused` as in `simulated_step`.

    One micro-batch after the first backward stands for all that follow: from then on gradients are added to gradients.
    """
    last = place.ahead == 0

    def sent() -> Tensor:
        shape = (
            plan.train.micro_batch_size,
            plan.data.sequence_length,
            plan.model.config.hidden_size,
        )
        return torch.empty(shape, dtype=next(model_and_optimizer.model.parameters()).dtype)

    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, place=place, fused=fused)
        objective = build_objective(plan, meta_teacher)
        scale = model_and_optimizer.loss_scale
        factor = 1.0 if scale is None else scale.value

        def ahead() -> Tensor | GradientEdge:
            batch = _batch(plan)
            output = forward(
                model_and_optimizer.model,
                batch,
                objective.head(batch),
                precision=plan.train.precision,
                hidden_BTD=sent().requires_grad_() if place.index else None,
            )
            if not last:
                return get_gradient_edge(output.head)
            return objective.loss(output.head, batch).total * factor

        def step(count: int) -> None:
            under_way = deque[Tensor | GradientEdge]()
            for number in range(count + place.ahead):
                if number < count:
                    under_way.append(ahead())
                if number >= place.ahead and under_way:
                    torch.autograd.backward(under_way.popleft(), None if last else sent())
            gradients = list(tracker.gradients())
            norm = float(global_norm(gradients) / factor)
            scale_gradients(gradients, clip_factor(norm, plan.train.max_grad_norm) / factor)
            model_and_optimizer.optimizer.step(1.0)
            model_and_optimizer.optimizer.zero_grad()

        named = f"stage {place.index + 1} of {place.stages}, "
        return _peak(
            plan,
            model_and_optimizer,
            tracker,
            step,
            min(place.ahead + 2, plan.train.accumulation),
            on_progress,
            named,
        )


@contextmanager
def _fake_tensors(plan: RunPlan) -> Iterator[MemoryTracker]:
    tracker = MemoryTracker()
    kind = "cpu" if plan.train.device == "cpu" else "cuda"
    functions = nullcontext() if kind == "cpu" else GpuFunctions()
    with FakeTensorMode(allow_non_fake_inputs=True), functions, acting_as(kind, fuse=tracker.fuse):
        yield tracker


def _peak(
    plan: RunPlan,
    model_and_optimizer: ModelAndOptimizer,
    tracker: MemoryTracker,
    step: Callable[[int], None],
    most: int,
    on_progress: OnProgress,
    named: str = "",
) -> dict[str, float]:
    """Of a second step of so many micro-batches, after a first of one."""
    for number, count in (("first", 1), ("second", most)):
        on_progress(f"{named}the {number} of two steps")
        tracker.forget_peak()
        with tracker, FakeResults(tracker):
            step(count)
        tracker.call("optimizer", _states(model_and_optimizer))
    away = plan.train.device != "cpu" and plan.optimizer.offload  # in CPU memory
    return {
        kind: 0.0 if away and kind == "optimizer" else size for kind, size in tracker.peak.items()
    }


def _model_and_optimizer(
    plan: RunPlan,
    tracker: MemoryTracker,
    *,
    fused: bool,
    mesh: DeviceMesh | None = None,
    place: StagePosition | None = None,
) -> ModelAndOptimizer:
    """As `train.state.build_state`, with fake tensors; a compiled block is its graphs, run op by op."""
    model = empty_model(plan)
    if place is not None:
        cut(model, place.stage(plan.model.config))
    train = plan.train
    attention = plan.model.attention
    for module in model.modules():  # `to_empty` swaps tensors, which fake ones refuse
        for name, parameter in module.named_parameters(recurse=False):
            like = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(like, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    model.tie()
    blocks = [block for block in model.model.layers if isinstance(block, Block)]
    for block in blocks if train.device != "cpu" else ():
        if attention in FLASH_LIKE and fused:
            block.self_attn.backend = flash
        elif attention in FLASH_LIKE | {"mask"}:
            block.self_attn.backend = "math"
        block.forward = GpuFunctions.around(block.forward)  # type: ignore[method-assign]  # a seam of nn.Module
    if train.compile:
        compile_blocks(blocks, tracker)
    apply(model, train.model_copy(update={"compile": False, "offload_activations": False}))
    ranks = SINGLE_RANK
    if mesh is not None:
        apply_fsdp(model, train, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        ranks = Mesh(replicate=mesh.size() // num_shards, shard=num_shards, device_mesh=mesh)
    optimizer = build_optimizer(model, plan.optimizer, mesh=ranks)
    tracker.gradients = lambda: [p.grad for p in optimizer.parameters if p.grad is not None]
    tracker.call("weights", weights(model))
    scale = LossScale() if train.precision == "float16" else None
    return ModelAndOptimizer(model, optimizer, scale, average=average_of(model, train.ema_decay))


def _fake_mesh(split: MeshSplit) -> DeviceMesh:
    """A fake process group, this process its first rank; created outside FakeTensorMode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=split.replicate * split.shard
    )
    if split.replicate == 1:
        return init_device_mesh("cpu", (split.shard,))
    return init_device_mesh(
        "cpu", (split.replicate, split.shard), mesh_dim_names=("replicate", "shard")
    )


def _batch(plan: RunPlan) -> Batch:
    """A micro-batch."""
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    numbers = [torch.empty(shape, dtype=torch.int64) for _ in range(4)]
    return with_text_structure(
        Batch(numbers[0], numbers[1], torch.empty(shape), numbers[2], numbers[3]), plan
    )


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Quantized weights are buffers, and so are the initial matrices of PiSSA."""
    yield from model.parameters()
    yield from model.buffers()


def _states(model_and_optimizer: ModelAndOptimizer) -> Iterator[Tensor]:
    """Everything that the optimizer keeps from step to step, and the average of the weights."""
    if model_and_optimizer.average is not None:
        yield from model_and_optimizer.average.tensors.values()
    for member in model_and_optimizer.optimizer.members:
        for state in member.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
