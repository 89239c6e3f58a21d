"""What a training step asks of its numbers, answered without any, and memory that operators take for themselves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.model.attention import blockwise, per_document
from bloomery.model.attention.blockwise import Options, Rows, like_projection, sums_like
from bloomery.model.limits import ATTENTION_BLOCK, CPU_SCORES, GPU_SCORES
from bloomery.model.quantization.sizes import DEQUANTIZED_ON_CPU, DEQUANTIZED_ON_GPU, PIECE_BYTES
from bloomery.simulate.gpu_kernels import flash_backward
from bloomery.simulate.tracker import tracing

_aten = torch.ops.aten
Operator = Callable[..., Any]


class Answers(TorchDispatchMode):
    """Answers what only numbers could tell, and shows memory that operators take for themselves.

    A step asks its tensors two things: whether loss and norm are finite (they are), and which labels are learned (all).
    `gpu`: tiles of blockwise attention have a GPU's size.
    """

    def __init__(self, *, gpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        tiles = _Tiles(gpu=gpu)
        self._answers: dict[Operator, Operator] = {
            _aten._local_scalar_dense.default: lambda _x: 1.0,
            _aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.ndim, dtype=torch.int64),
            _aten.logsumexp.default: _log_sum_exp,
            torch.ops.bloomery.blockwise.default: tiles.forward,
            torch.ops.bloomery.blockwise_backward.default: tiles.backward,
            torch.ops.bloomery.flash_backward.default: flash_backward,
            torch.ops.bloomery.quantised_product.default: _Dequantised(gpu=gpu).product,
            torch.ops.bloomery.quantised_product_backward.default: _Dequantised(gpu=gpu).product_backward,
            torch.ops.bloomery.per_document.default: _per_document,
            torch.ops.bloomery.per_document_backward.default: _per_document_backward,
        }

    def __torch_dispatch__(
        self, operator: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = operator if tracing() else self._answers.get(operator, operator)
        return answer(*args, **(kwargs or {}))


def _log_sum_exp(x: Tensor, axes: list[int], keepdim: bool = False) -> Tensor:
    """torch's own holds the exponentials for a moment, out of a dispatch mode's sight."""
    exponentials = (x - torch.amax(x, axes, keepdim=True)).exp_()
    return exponentials.sum(axes, keepdim).log_()


class _Dequantised:
    """Products with a quantised weight: its floats, and those of a piece of it in their making."""

    def __init__(self, *, gpu: bool) -> None:
        self._piece = DEQUANTIZED_ON_GPU if gpu else DEQUANTIZED_ON_CPU

    def product(
        self, x: Tensor, _codes: Tensor, _scales: Tensor, _outer: Tensor, out: int, into: int, *_: Any
    ) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x, self._weight(x, out, into))

    def product_backward(
        self, grad: Tensor, _codes: Tensor, _scales: Tensor, _outer: Tensor, out: int, into: int, *_: Any
    ) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return grad @ self._weight(grad, out, into)

    def _weight(self, like: Tensor, out: int, into: int) -> Tensor:
        weight = like.new_empty(out, into)
        like.new_empty(PIECE_BYTES * min(self._piece, out * into), dtype=torch.uint8)
        return weight


class _Task(blockwise.Task):
    """Work on as many tiles as are alive at once, with random bits from nowhere."""

    def query_blocks(self, length: int) -> Iterator[tuple[slice, list[blockwise.Tile]]]:
        *_, last = blockwise.Task.query_blocks(self, length)
        yield last[0], last[1][-2:]

    def dropped(self, tile: blockwise.Tile, shares: Tensor) -> Tensor:
        words = torch.empty(-(-shares.numel() // 4), dtype=torch.int64, device=shares.device)
        halves = words.view(torch.int16)[: shares.numel()].view(shares.shape)
        return halves < tile.number


class _Tiles:
    """Blockwise attention's own code on fake tensors, for the rows of a micro-batch that go together."""

    def __init__(self, *, gpu: bool) -> None:
        self._scores = GPU_SCORES if gpu else CPU_SCORES

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, sums = like_projection(q), sums_like(q)
        part, task = self._first(q, rest)
        with torch.autocast("cpu", enabled=False):
            out[part], sums[part] = blockwise.forward(q[part], k[part], v[part], task)
        return out, sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (like_projection(x) for x in (q, k, v))
        part, task = self._first(q, rest)
        with torch.autocast("cpu", enabled=False):
            found = blockwise.backward(grad[part], q[part], k[part], v[part], out[part], sums[part], task)
        dq[part], dk[part], dv[part] = found
        return dq, dk, dv

    def _first(self, q: Tensor, rest: tuple[Any, ...]) -> tuple[slice, _Task]:
        rows, options = _split(rest)
        part = slice(0, max(1, self._scores // (q.shape[1] * min(q.shape[2], ATTENTION_BLOCK) ** 2)))
        return part, _Task(None if rows.first_BT is None else rows.first_BT[part], None, rows.seed, *options)


def _split(rest: tuple[Any, ...]) -> tuple[Rows, Options]:
    """What an attention operator gets behind its tensors."""
    return Rows(*rest[:3]), Options(*rest[3:])


def _per_document(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    with _one_document_a_row():
        return per_document._forward(q, k, v, *_split(rest))


def _per_document_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    with _one_document_a_row():
        return per_document._backward(grad, q, k, v, out, sums, *_split(rest))


@contextmanager
def _one_document_a_row() -> Iterator[None]:
    """Where documents begin stands in numbers; whole rows are what holds most."""

    def lengths(first_BT: Tensor) -> list[int]:
        return [first_BT.shape[1]] * len(first_BT)

    with (
        mock.patch.multiple(per_document, _lengths=lengths, Task=_Task),
        torch.autocast("cpu", enabled=False),
    ):
        yield
