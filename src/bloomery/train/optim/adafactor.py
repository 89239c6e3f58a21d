"""Adafactor (arXiv:1804.04235): factored second moments, clipped updates, no host synchronization.

N parameters of a stack, R rows, C columns.
"""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.common import (
    Gate,
    Rounding,
    Shards,
    State,
    batches_of,
    decay_groups,
    gated,
    increment_step,
    parameters_with_state,
    root_mean_square,
    row_slices,
    stacked,
    zero_step,
)
from bloomery.train.optim.placement import StatePlacement

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
            parameters = parameters_with_state(self, group, _initial_state)
            numel = self._rounding.shards.full_numel
            for stack in batches_of(parameters, self._stack_key, numel, self._rounding):
                self._update(stack, lr=group["lr"], weight_decay=group["weight_decay"], gate=gate)

    def _stack_key(self, parameter: nn.Parameter) -> object:
        """Parameters with equal keys, the same ones on every rank, share a stack."""
        shards = self._rounding.shards
        return (
            shards.full_shape(parameter),
            shards.mesh_of(parameter),
            parameter.dtype,
            float(self.state[parameter]["step"]),
        )

    def _update(
        self, stack: list[nn.Parameter], *, lr: float, weight_decay: float, gate: Gate | None
    ) -> None:
        states = [self.state[parameter] for parameter in stack]
        step = max([increment_step(state) for state in states])  # they are equal
        shards = self._rounding.shards
        piece = self._rounding.piece_size(stack[0].device)

        # The step is relative to the size of the weights, and the update's own size is clipped (algorithm 4).
        weights = [p.detach() for p in stack]
        weight_rms_N = root_mean_square(
            weights, shards.mesh_of(stack[0]), shards.full_numel(stack[0]), piece
        ).clamp(min=SMALLEST_WEIGHT)
        update = _StackUpdate(stack, gate, shards, piece)
        update.update_moments(states, step**DECAY)
        clipping_N = (update.root_mean_square_N() / LARGEST_UPDATE).clamp(min=1.0)
        update.scale_by(-min(lr, step**-0.5) * weight_rms_N / clipping_N)

        for rows in update.row_slices:
            self._move_rows(
                stack,
                rows,
                update.values(rows),
                decay=lr * weight_decay,
                step=int(step),
                gate=gate,
            )

    def _move_rows(
        self,
        stack: list[nn.Parameter],
        rows: slice,
        update_NRC: Tensor,
        *,
        decay: float,
        step: int,
        gate: Gate | None,
    ) -> None:
        weights = [p.detach()[rows] for p in stack]
        if weights[0].dtype == torch.float32:
            torch._foreach_mul_(weights, 1 - gated(decay, gate))
            torch._foreach_add_(weights, list(_if_open(gate, update_NRC, 0.0).unbind(0)))
            return
        old_NRC = stacked(weights)
        if (
            old_NRC.device.type == "cpu"
        ):  # as a sum of two dtypes does there, unseen by a simulation
            old_NRC = old_NRC.to(update_NRC.dtype)
        new_NRC = _if_open(gate, update_NRC.add_(old_NRC, alpha=1 - decay), old_NRC)
        del old_NRC
        for parameter, weight, new in zip(stack, weights, new_NRC, strict=True):
            self._rounding.write(weight, new, parameter, step, rows.start or 0)


def _if_open(gate: Gate | None, new: Tensor, old: Tensor | float) -> Tensor:
    return new if gate is None else torch.where(gate.open > 0, new, old)


def _initial_state(parameter: nn.Parameter) -> State:
    shape = list(parameter.shape)
    device = parameter.device

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=device)

    if parameter.ndim < 2:
        return {"step": zero_step(), "variance": zeros(*shape)}
    return {
        "step": zero_step(),
        "row_var": zeros(*shape[:-1], 1),
        "col_var": zeros(*shape[:-2], 1, shape[-1]),
    }


@final
class _StackUpdate:
    """The updates of parameters of one shape, in slices of rows.

    A gradient is read four times, twice for the sums of squares and twice for the update. The gate and its factor apply
    to rows, columns and the result.
    """

    def __init__(
        self, stack: list[nn.Parameter], gate: Gate | None, shards: Shards, piece: int
    ) -> None:
        shape = stack[0].shape
        self._mesh = shards.mesh_of(stack[0])
        self._full_shape = shards.full_shape(stack[0])
        # Only a single matrix can be larger than a piece.
        in_one_slice = len(stack) > 1 or len(shape) != 2
        self.row_slices = [slice(None)] if in_one_slice else row_slices(shape[0], shape[1], piece)
        self._gradient_NRC = stacked([p.grad for p in stack if p.grad is not None])
        self._gate = gate
        # Factors of the gradient's rows and of its columns; for vectors one factor per value, and 1.
        self._scales: tuple[Tensor, Tensor] | None = None
        # The gradient times the columns' scale, kept between two reads where it is a single slice.
        self._column_scaled: Tensor | None = None

    def update_moments(self, states: list[State], weight: float) -> None:
        """Move the second moments in `states` toward this gradient's squares by `weight`."""
        factor = torch.ones(()) if self._gate is None else self._gate.factor
        if "variance" in states[0]:
            squares = self._gradient_NRC.to(torch.float32).mul(factor).square_()
            variance = self._updated_moment(states, "variance", squares, weight)
            self._scales = variance.rsqrt_().mul_(factor), torch.ones(1, device=variance.device)
            return

        # Sums of squares along rows and columns. A rank has whole rows of a matrix, so that columns are summed over the
        # ranks; of a stack it has whole matrices.
        row_sums = torch.empty_like(stacked([state["row_var"] for state in states]))
        col_sums = torch.zeros_like(stacked([state["col_var"] for state in states]))
        for rows in self.row_slices:
            row_sums[:, rows], slice_col_sums = _square_sums(self._gradient_NRC[:, rows], -1, -2)
            col_sums += slice_col_sums
        shares_matrices = self._mesh.holders > 1 and len(self._full_shape) == 2
        if shares_matrices:
            col_sums = self._mesh.all_reduce_shards(col_sums)
        row_var = self._updated_moment(
            states,
            "row_var",
            row_sums.mul_(factor.square() / self._gradient_NRC.shape[-1]),
            weight,
        )
        col_var = self._updated_moment(
            states, "col_var", col_sums.mul_(factor.square() / self._full_shape[-2]), weight
        )

        # The paper's R C / sum(R) as two factors: their product underflows float32 for small gradients.
        mean = row_var.mean(-2, keepdim=True)
        if shares_matrices:
            row_var_sum = self._mesh.all_reduce_shards(row_var.sum(-2, keepdim=True))
            mean = row_var_sum / self._full_shape[-2]
        self._scales = (row_var / mean).rsqrt_().mul_(factor), col_var.rsqrt_()

    def _updated_moment(
        self, states: list[State], slot: str, squares: Tensor, weight: float
    ) -> Tensor:
        """The new second moments, also stored in `states`, clamped above zero."""
        old = stacked([state[slot] for state in states])
        new = _if_open(self._gate, old.lerp(squares.add_(SMALLEST_SQUARE), weight), old)
        torch._foreach_copy_([state[slot] for state in states], list(new.unbind(0)))
        return new.clamp(min=SMALLEST_SQUARE)

    def root_mean_square_N(self) -> Tensor:
        """The root mean square of each update."""
        assert self._scales is not None
        squares_N = torch.zeros(len(self._gradient_NRC), device=self._gradient_NRC.device)
        for rows in self.row_slices:
            column_scaled = self._scale_columns(rows)
            if column_scaled.ndim > 2:
                (row_squares,) = _square_sums(column_scaled, -1)
                squares_N += row_squares.mul_(self._scales[0][:, rows].square()).flatten(1).sum(1)
            else:
                squares_N += (column_scaled * self._scales[0]).square_().sum(1)
            self._column_scaled = column_scaled if len(self.row_slices) == 1 else None
        return (self._mesh.all_reduce_shards(squares_N) / math.prod(self._full_shape)).sqrt_()

    def _scale_columns(self, rows: slice) -> Tensor:
        assert self._scales is not None
        return self._gradient_NRC[:, rows] * self._scales[1]

    def scale_by(self, factor_N: Tensor) -> None:
        assert self._scales is not None
        row_scale, col_scale = self._scales
        self._scales = row_scale * factor_N.view(-1, *[1] * (row_scale.ndim - 1)), col_scale

    def values(self, rows: slice) -> Tensor:
        """[N, rows, ...] float32, a buffer to overwrite; call once per slice."""
        assert self._scales is not None
        column_scaled = (
            self._scale_columns(rows) if self._column_scaled is None else self._column_scaled
        )
        self._column_scaled = None
        return column_scaled.mul_(self._scales[0][:, rows])


def _square_sums(matrices: Tensor, *dims: int) -> list[Tensor]:
    """Float32 sums of squares along each of `dims`."""
    if matrices.device.type != "cpu":
        return fused_square_sums(matrices, *dims)
    squares = matrices.to(torch.float32).square()
    return [squares.sum(dim, keepdim=True) for dim in dims]


def fused_square_sums(matrices: Tensor, *dims: int) -> list[Tensor]:
    """One fused kernel on a GPU; on a CPU slower than materialized squares."""
    norms = [
        torch.linalg.vector_norm(matrices, dim=dim, keepdim=True, dtype=torch.float32)
        for dim in dims
    ]
    return [norm.square_() for norm in norms]


def build(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    plan: OptimizerPlan,
    rounding: Rounding,
    placement: StatePlacement,  # noqa: ARG001 (of every builder: these states stay on the device)
) -> list[torch.optim.Optimizer]:
    groups = decay_groups(named_parameters, plan.weight_decay)
    return [Adafactor(groups, lr=plan.learning_rate, rounding=rounding)]


@final
class ExactAdafactor:
    """Algorithm 4 of arXiv:1804.04235 with the constants of PyTorch's: epsilons 1e-30 and 1e-3, threshold 1."""

    def __init__(self, plan: OptimizerPlan, decay: float) -> None:
        self._rate = plan.learning_rate
        self._decay = decay
        self._steps = 0
        self._variances: list[Tensor] = []

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        self._steps += 1
        squares = gradient.square()
        sums = [squares] if gradient.ndim < 2 else [squares.mean(-1, True), squares.mean(-2, True)]
        before = self._variances or [torch.zeros_like(each) for each in sums]
        share: float = self._steps**-0.8
        self._variances = [old + share * (new - old) for old, new in zip(before, sums, strict=True)]

        variance = self._variances[0]
        if gradient.ndim >= 2:
            rows, columns = self._variances
            variance = rows * columns / rows.mean(-2, True).clamp(min=1e-30)
        update = gradient / variance.clamp(min=1e-60).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        size = max(1e-3, float(weight.square().mean().sqrt()))
        rate: float = min(self._rate, self._steps**-0.5)
        return weight * (1 - self._rate * self._decay) - rate * size * update


def exact(plan: OptimizerPlan, decay: float) -> ExactAdafactor:
    """`decay`: the weight decay of the parameter."""
    return ExactAdafactor(plan, decay)
