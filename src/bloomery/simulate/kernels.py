"""What operators give and hold in a simulated step: those that torch cannot derive, and those of a GPU."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.facts.limits import DEQUANTIZE_SCRATCH_BYTES, DEQUANTIZED_ON_CPU, DEQUANTIZED_ON_GPU
from bloomery.model.attention import blockwise, compiled, per_document
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    attention_operator,
    like_projection,
    sums_like,
)
from bloomery.model.heads import SCORE_OPERATORS, ScoreOperators
from bloomery.model.norms import RMSNormFunction, widened
from bloomery.simulate.tracker import MemoryTracker

_aten = torch.ops.aten
_native = torch.ops.bloomery


class FakeResults(TorchDispatchMode):
    """Results that depend on values, and the temporary memory of operators.

    A step reads two values: whether loss and norm are finite (yes), and which labels are loss tokens (all).
    `device_type`: of the device that the step stands for.
    """

    supports_higher_order_operators = True  # as those of dropout in a graph with checkpoints

    def __init__(self, tracker: MemoryTracker, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._tracker = tracker
        self._substitutes: dict[object, Callable[..., Any]] = {
            _aten._local_scalar_dense.default: lambda _x: 1.0,
            _aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.ndim, dtype=torch.int64),
            _aten.logsumexp.default: _log_sum_exp,
            _native.blockwise.default: partial(_blockwise, device_type),
            _native.blockwise_backward.default: partial(_blockwise_backward, device_type),
            _native.flash_backward.default: _flash_backward,
            _native.per_document.default: _per_document,
            _native.per_document_backward.default: _per_document_backward,
            _native.compiled.default: _compiled,
            _native.compiled_backward.default: _compiled_backward,
            _native.quantized_matmul.default: lambda x, *codes_and_shape: F.linear(
                x, _dequantized(x, codes_and_shape, device_type)
            ),
            _native.quantized_matmul_backward.default: lambda grad, *codes_and_shape: (
                grad @ _dequantized(grad, codes_and_shape, device_type)
            ),
        }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        substitute = None if self._tracker.hidden else self._substitutes.get(func)
        if substitute is None:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return substitute(*args, **(kwargs or {}))


def _log_sum_exp(x: Tensor, axes: list[int], keepdim: bool = False) -> Tensor:
    """torch's own holds the exponentials for a moment, out of a dispatch mode's sight."""
    exponentials = (x - torch.amax(x, axes, keepdim=True)).exp_()
    return exponentials.sum(axes, keepdim).log_()


def _dequantized(like: Tensor, codes_and_shape: tuple[Any, ...], device_type: str) -> Tensor:
    """A weight, and the temporary memory of one piece."""
    *_, outputs, inputs, _reader = codes_and_shape
    weight = like.new_empty(outputs, inputs)
    piece = DEQUANTIZED_ON_CPU if device_type == "cpu" else DEQUANTIZED_ON_GPU
    like.new_empty(DEQUANTIZE_SCRATCH_BYTES * min(piece, outputs * inputs), dtype=torch.uint8)
    return weight


class _SimulatedCall(blockwise.AttentionCall):
    """A task of as many tiles as are alive at once; its random bits are memory without values."""

    def query_blocks(self, length: int) -> Iterator[tuple[slice, list[blockwise.Tile]]]:
        # The last query block has the most tiles; while one is computed, the one before is alive.
        *_, (queries, tiles) = blockwise.AttentionCall.query_blocks(self, length)
        yield queries, tiles[-2:]

    def dropped(self, tile: blockwise.Tile, shares: Tensor) -> Tensor:
        num_words = -(-shares.numel() // 4)
        random_words = torch.empty(num_words, dtype=torch.int64, device=shares.device)
        return random_words.view(torch.int16)[: shares.numel()].view(shares.shape) < tile.number


def _first_group(
    q: Tensor, settings: tuple[Any, ...], device_type: str
) -> tuple[slice, blockwise.AttentionCall]:
    """The first rows that go together: the others take the same memory after them."""
    first_BT, _reach, seed, *options = settings
    return next(_SimulatedCall(first_BT, None, seed, *options).groups(q, device_type))


def _blockwise(
    device_type: str, q: Tensor, k: Tensor, v: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    output = like_projection(q)
    sums = sums_like(q)
    rows, task = _first_group(q, settings, device_type)
    output[rows], sums[rows] = blockwise.forward(q[rows], k[rows], v[rows], task)
    return output, sums


def _blockwise_backward(
    device_type: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    *settings: Any,
) -> tuple[Tensor, ...]:
    gradients = tuple(like_projection(x) for x in (q, k, v))
    rows, task = _first_group(q, settings, device_type)
    group_gradients = blockwise.backward(
        grad[rows], q[rows], k[rows], v[rows], output[rows], sums[rows], task
    )
    for gradient, group_gradient in zip(gradients, group_gradients, strict=True):
        gradient[rows] = group_gradient
    return gradients


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, first_BT: Tensor, _reach: None, seed: Any, *options: Any
) -> Any:
    """One document per sequence: document starts are values, and one document needs most memory."""
    lengths = [first_BT.shape[1]] * len(first_BT)
    return per_document.forward(q, k, v, lengths, seed, Options(*options), _SimulatedCall)


def _per_document_backward(*arguments: Any) -> Any:
    grad, q, k, v, output, sums, first_BT, _reach, seed, *options = arguments
    lengths = [first_BT.shape[1]] * len(first_BT)
    return per_document.backward(
        grad, q, k, v, output, sums, lengths, seed, Options(*options), _SimulatedCall
    )


def _compiled(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like_projection(q), sums_like(q)


def _compiled_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    compiled.gradients_by_head(q, k)
    return like_projection(q), like_projection(k), like_projection(v)


def score_operators(tracker: MemoryTracker, device_type: str) -> ScoreOperators:
    """The passes over logits: a fused kernel holds nothing of its own, and compiled code is not called."""

    def nothing(*_: Tensor | int) -> None:
        """Works in place, on tensors that have no memory."""

    return ScoreOperators(
        fuse=tracker.fuse,
        tile_size=SCORE_OPERATORS.tile_size if device_type == "cpu" else len,
        add_log_sums=nothing,
        to_gradient=nothing,
    )


# A GPU's kernels


class GpuFunctions(TorchFunctionMode):
    """While it is entered, functions keep for backward what a GPU's kernels keep.

    Fake tensors are on the CPU for every device: PyTorch without CUDA or ROCm has no autograd for others.
    """

    @classmethod
    def around(cls, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same from every caller: autograd enters no mode in backward, when a checkpoint is recomputed."""

        def run(*args: Any, **kwargs: Any) -> Any:
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
            options = kwargs or {}
            return RMSNormFunction.apply(
                args[0], widened(options["weight"]), options["eps"], args[0].dtype
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
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _output: Tensor, sums: Tensor, *_: Any
) -> Any:
    """With its temporary memory: the queries' gradient in float32, and one more value per query."""
    gradients = tuple(like_projection(x) for x in (q, k, v))
    temporary_tensors = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(sums)
    del temporary_tensors
    return gradients
