"""Adafactor (arXiv:1804.04235): factored second moments, clipped updates, no host synchronization."""

import math
from typing import final

import torch
from torch import Tensor, nn

from bloomery.train.optim.common import (
    Gate,
    Rounding,
    Shards,
    State,
    alike,
    counted,
    no_steps,
    root_mean_square,
    row_slices,
    stacked,
    times,
    with_states,
)

SMALLEST_SQUARE = 1e-30  # added to squared gradients: epsilon 1 of algorithm 4
SMALLEST_WEIGHT = 1e-3  # the least root mean square of a tensor: epsilon 2
DECAY = -0.8  # exponent of 1 - beta2 in the step: section 7.2
LARGEST_UPDATE = 1.0  # clipping threshold of the update's root mean square: d of section 6


@final
class Adafactor(torch.optim.Optimizer):
    """Equal to torch.optim.Adafactor in float32, but in stacks of matrices of one shape and in rows of large ones.

    State: float32 `row_var` [..., R, 1] and `col_var` [..., 1, C] of a matrix, `variance` of a vector; `step`. Scratch:
    three float32 pieces (`common.piece_size`), four for bfloat16 weights. Arithmetic is float32; `rounding` rounds
    bfloat16 weights. (torch takes epsilon 1 from the weights' dtype, 8e-3 for bfloat16, far above usual squared
    gradients, and reads two numbers per parameter back.)
    """

    def __init__(
        self,
        params: list[dict[str, object]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        rounding: Rounding,
    ) -> None:
        self._rounding = rounding
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's takes a closure that computes the loss
        self,
        closure: None = None,  # noqa: ARG002 (torch's, unused)
        *,
        gate: Gate | None = None,
    ) -> None:
        for group in self.param_groups:
            ready = with_states(self, group, _fresh)
            for run in alike(ready, self._kind, self._rounding.shards.numel):
                self._step(run, lr=group["lr"], decay=group["weight_decay"], gate=gate)

    def _kind(self, parameter: nn.Parameter) -> object:
        """Parameters of one kind, the same ones on every rank, share a stack."""
        shards = self._rounding.shards
        return (
            shards.shape(parameter),
            shards.across(parameter),
            parameter.dtype,
            float(self.state[parameter]["step"]),
        )

    def _step(self, run: list[nn.Parameter], *, lr: float, decay: float, gate: Gate | None) -> None:
        states = [self.state[parameter] for parameter in run]
        step = max([counted(state) for state in states])  # they are equal
        shards = self._rounding.shards
        weights = [p.detach() for p in run]
        sizes_N = root_mean_square(weights, shards.across(run[0]), shards.numel(run[0])).clamp(
            min=SMALLEST_WEIGHT
        )
        update = _Update(run, gate, shards)
        update.learn(states, step**DECAY)
        update.scale_by(
            -min(lr, step**-0.5) * sizes_N / (update.size_N() / LARGEST_UPDATE).clamp(min=1.0)
        )
        for rows in update.slices:
            self._move(run, rows, update.piece(rows), decay=lr * decay, step=int(step), gate=gate)

    def _move(
        self,
        run: list[nn.Parameter],
        rows: slice,
        step_NRC: Tensor,
        *,
        decay: float,
        step: int,
        gate: Gate | None,
    ) -> None:
        weights = [p.detach()[rows] for p in run]
        if weights[0].dtype == torch.float32:
            torch._foreach_mul_(weights, 1 - times(decay, gate))
            torch._foreach_add_(weights, list(_if_open(gate, step_NRC, 0.0).unbind(0)))
            return
        before_NRC = stacked(weights)
        moved_NRC = _if_open(gate, step_NRC.add_(before_NRC, alpha=1 - decay), before_NRC)
        for parameter, weight, moved in zip(run, weights, moved_NRC, strict=True):
            self._rounding.write(weight, moved, parameter, step, rows.start or 0)


def _if_open(gate: Gate | None, new: Tensor, old: Tensor | float) -> Tensor:
    return new if gate is None else torch.where(gate.open > 0, new, old)


def _fresh(parameter: nn.Parameter) -> State:
    shape = list(parameter.shape)
    device = parameter.device

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=device)

    if parameter.ndim < 2:
        return {"step": no_steps(), "variance": zeros(*shape)}
    return {
        "step": no_steps(),
        "row_var": zeros(*shape[:-1], 1),
        "col_var": zeros(*shape[:-2], 1, shape[-1]),
    }


@final
class _Update:
    """The updates of parameters of one shape, in slices of rows.

    A gradient is read four times, twice for the sums of squares and twice for the update. The gate and its factor apply
    to rows, columns and the result.
    """

    def __init__(self, run: list[nn.Parameter], gate: Gate | None, shards: Shards) -> None:
        shape = run[0].shape
        device = run[0].device
        # of the whole parameter
        self._mesh = shards.across(run[0])
        self._shape = shards.shape(run[0])
        whole = len(run) > 1 or len(shape) != 2
        self.slices = [slice(None)] if whole else row_slices(shape[0], shape[1], device)
        self._gradient_NRC = stacked([p.grad for p in run if p.grad is not None])
        self._gate, self._one = gate, len(self.slices) == 1
        # of rows and columns; of a vector: all, and one
        self._scales: tuple[Tensor, Tensor] | None = None
        self._kept: Tensor | None = None

    def learn(self, states: list[State], weight: float) -> None:
        """Move the second moments in `states` toward this gradient's squares by `weight`."""
        factor = torch.ones(()) if self._gate is None else self._gate.factor
        if "variance" in states[0]:
            squares = self._gradient_NRC.to(torch.float32).mul(factor).square_()
            variance = self._moved(states, "variance", squares, weight)
            self._scales = variance.rsqrt_().mul_(factor), torch.ones(1, device=variance.device)
            return
        # sums of squares
        row_new = torch.empty_like(stacked([state["row_var"] for state in states]))
        col_new = torch.zeros_like(stacked([state["col_var"] for state in states]))
        for rows in self.slices:
            row_new[:, rows], of_columns = _square_sums(self._gradient_NRC[:, rows], -1, -2)
            col_new += of_columns
        col_new = self._mesh.all_reduce_shards(col_new)
        row = self._moved(
            states, "row_var", row_new.mul_(factor.square() / self._gradient_NRC.shape[-1]), weight
        )
        col = self._moved(
            states, "col_var", col_new.mul_(factor.square() / self._shape[-2]), weight
        )
        # The paper's R C / sum(R) as two factors: their product underflows float32 for small gradients.
        mean = row.mean(-2, keepdim=True)
        if self._mesh.shard > 1:
            mean = self._mesh.all_reduce_shards(row.sum(-2, keepdim=True)) / self._shape[-2]
        self._scales = (row / mean).rsqrt_().mul_(factor), col.rsqrt_()

    def _moved(self, states: list[State], slot: str, squares: Tensor, weight: float) -> Tensor:
        """The new second moments, also stored in `states`, clamped above zero."""
        old = stacked([state[slot] for state in states])
        new = _if_open(self._gate, old.lerp(squares.add_(SMALLEST_SQUARE), weight), old)
        torch._foreach_copy_([state[slot] for state in states], list(new.unbind(0)))
        return new.clamp(min=SMALLEST_SQUARE)

    def size_N(self) -> Tensor:
        """The root mean square of each update."""
        assert self._scales is not None
        squares_N = torch.zeros(len(self._gradient_NRC), device=self._gradient_NRC.device)
        for rows in self.slices:
            by_columns = self._by_columns(rows)
            if by_columns.ndim > 2:
                (of_rows,) = _square_sums(by_columns, -1)
                squares_N += of_rows.mul_(self._scales[0][:, rows].square()).flatten(1).sum(1)
            else:
                squares_N += (by_columns * self._scales[0]).square_().sum(1)
            self._kept = by_columns if self._one else None
        return (self._mesh.all_reduce_shards(squares_N) / math.prod(self._shape)).sqrt_()

    def _by_columns(self, rows: slice) -> Tensor:
        assert self._scales is not None
        return self._gradient_NRC[:, rows] * self._scales[1]

    def scale_by(self, factor_N: Tensor) -> None:
        assert self._scales is not None
        row, col = self._scales
        self._scales = row * factor_N.view(-1, *[1] * (row.ndim - 1)), col

    def piece(self, rows: slice) -> Tensor:
        """[N, rows, ...] float32, a buffer to overwrite; call once per slice."""
        assert self._scales is not None
        by_columns = self._by_columns(rows) if self._kept is None else self._kept
        self._kept = None
        return by_columns.mul_(self._scales[0][:, rows])


def _square_sums(matrices: Tensor, *dims: int) -> list[Tensor]:
    """Float32 sums of squares along each of `dims`."""
    if matrices.device.type != "cpu":
        return square_sums_unwritten(matrices, *dims)
    squares = matrices.to(torch.float32).square()
    return [squares.sum(dim, keepdim=True) for dim in dims]


def square_sums_unwritten(matrices: Tensor, *dims: int) -> list[Tensor]:
    """One fused kernel on a GPU; on a CPU slower than materialized squares."""
    norms = [
        torch.linalg.vector_norm(matrices, dim=dim, keepdim=True, dtype=torch.float32)
        for dim in dims
    ]
    return [norm.square_() for norm in norms]
