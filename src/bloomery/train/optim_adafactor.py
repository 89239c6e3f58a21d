"""Adafactor (arXiv:1804.04235): second moments as rows and columns, updates clipped, no wait for the device."""

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.train.optim_pieces import (
    Gate,
    Rounding,
    State,
    alike,
    counted,
    exact_gradient,
    no_steps,
    root_mean_square,
    row_slices,
    stacked,
    times,
)

SMALLEST_SQUARE = 1e-30  # added to squared gradients: epsilon 1 of the paper's algorithm 4
SMALLEST_WEIGHT = 1e-3  # a tensor's root mean square counts as at least this: epsilon 2
DECAY = -0.8  # of 1 - beta2 with the step: section 7.2
LARGEST_UPDATE = 1.0  # root mean square of an update before it is scaled: d of section 6


@final
class Adafactor(torch.optim.Optimizer):
    """Equal to torch.optim.Adafactor in float32, and unlike it: matrices of a shape go in stacks, large ones in rows.

    State, whatever the weights' type: float32 `row_var` [..., R, 1] and `col_var` [..., 1, C] of a matrix, `variance`
    of a vector; `step`. Scratch, however large a matrix is: three float32 pieces (`optim_pieces.piece_size`), four and
    a half where weights are rounded at random. All arithmetic is float32; bfloat16 weights are rounded as `rounding`
    says. (torch takes epsilon 1 from the weights' type: 8e-3 for bfloat16, far above the squares of usual gradients;
    and it reads two numbers a parameter back.)
    """

    def __init__(
        self, params: list[dict[str, object]], *, lr: float, weight_decay: float = 0.0, rounding: Rounding
    ) -> None:
        self._rounding = rounding
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None, *, gate: Gate | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for parameter in ready:
                if not self.state[parameter]:
                    self.state[parameter].update(_fresh(parameter))
            for run in alike(ready, lambda p: (p.shape, p.dtype, float(self.state[p]["step"]))):
                self._step(run, lr=group["lr"], decay=group["weight_decay"], gate=gate)

    def _step(self, run: list[nn.Parameter], *, lr: float, decay: float, gate: Gate | None) -> None:
        states = [self.state[parameter] for parameter in run]
        step = max([counted(state) for state in states])  # they are equal
        rate = min(lr, step**-0.5)
        sizes_N = root_mean_square([p.detach() for p in run]).clamp(min=SMALLEST_WEIGHT) * times(rate, gate)
        update = _Update(run, gate)
        update.learn(states, times(step**DECAY, gate))
        factor_N = -sizes_N / (update.size_N() / LARGEST_UPDATE).clamp(min=1.0)
        keep = 1 - times(lr * decay, gate)
        for rows in update.slices:
            step_NRC = update.piece(rows) * factor_N.view(-1, *[1] * run[0].ndim)
            self._move(run, rows, step_NRC, keep=keep, step=int(step))

    def _move(self, run: list[nn.Parameter], rows: slice, step_NRC: Tensor, *, keep: Any, step: int) -> None:
        weights = [p.detach()[rows] for p in run]
        if weights[0].dtype == torch.float32:
            torch._foreach_mul_(weights, keep)
            torch._foreach_add_(weights, list(step_NRC.unbind(0)))
            return
        moved_NRC = stacked(weights).to(torch.float32).mul_(keep).add_(step_NRC)
        for parameter, weight, moved in zip(run, weights, moved_NRC, strict=True):
            self._rounding.write(weight, moved, parameter, step, rows.start or 0)


def _fresh(parameter: nn.Parameter) -> State:
    shape, device = list(parameter.shape), parameter.device

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=device)

    if parameter.ndim < 2:
        return {"step": no_steps(), "variance": zeros(*shape)}
    return {"step": no_steps(), "row_var": zeros(*shape[:-1], 1), "col_var": zeros(*shape[:-2], 1, shape[-1])}


@final
class _Update:
    """The gradients of parameters of one shape over the roots of their squares' estimates, in slices of rows."""

    def __init__(self, run: list[nn.Parameter], gate: Gate | None) -> None:
        shape, device = run[0].shape, run[0].device
        whole = len(run) > 1 or len(shape) != 2
        self.slices = [slice(None)] if whole else row_slices(shape[0], shape[1], device)
        self._gradient_NRC = stacked([p.grad for p in run if p.grad is not None])
        self._gate, self._whole = gate, whole or len(self.slices) == 1
        self._numel = math.prod(shape)
        self._scales: tuple[Tensor, ...] = ()
        self._kept: Tensor | None = None

    def _gradient(self, rows: slice) -> Tensor:
        return exact_gradient(self._gradient_NRC[:, rows], self._gate)

    def learn(self, states: list[State], share: float | Tensor) -> None:
        """Moves the estimates in `states` by `share` towards this gradient's squares."""
        if "variance" in states[0]:
            variance = stacked([state["variance"] for state in states])
            variance.lerp_(self._gradient(slice(None)).square().add_(SMALLEST_SQUARE), share)
            _put_back(states, "variance", variance)
            self._scales = (variance.clamp(min=SMALLEST_SQUARE).rsqrt_(),)
            return
        row, col = (stacked([state[slot] for state in states]) for slot in ("row_var", "col_var"))
        rows_new, col_sum = torch.empty_like(row), torch.zeros_like(col)
        for rows in self.slices:
            squares = self._gradient(rows).square().add_(SMALLEST_SQUARE)
            rows_new[:, rows] = squares.mean(-1, keepdim=True)
            col_sum += squares.sum(-2, keepdim=True)
        row.lerp_(rows_new, share)
        col.lerp_(col_sum.div_(self._gradient_NRC.shape[-2]), share)
        _put_back(states, "row_var", row)
        _put_back(states, "col_var", col)
        row, col = row.clamp(min=SMALLEST_SQUARE), col.clamp(min=SMALLEST_SQUARE)
        # The paper's R C / sum(R), a factor each: their product would leave float32 where gradients are small.
        self._scales = ((row / row.mean(-2, keepdim=True)).rsqrt_(), col.rsqrt_())

    def size_N(self) -> Tensor:
        """Root mean square of each update."""
        squares_N = sum(self.piece(rows).square().flatten(1).sum(1) for rows in self.slices)
        assert isinstance(squares_N, Tensor)
        return (squares_N / self._numel).sqrt()

    def piece(self, rows: slice) -> Tensor:
        """[N, rows, ...]; a single one is kept, of several each is computed again."""
        if self._kept is not None:
            return self._kept
        first, *others = self._scales
        update = self._gradient(rows) * (first[:, rows] if others else first)
        for other in others:
            update *= other
        self._kept = update if self._whole else None
        return update


def _put_back(states: list[State], slot: str, values_N: Tensor) -> None:
    """A stack of one is a view of the state itself."""
    if len(states) > 1:
        torch._foreach_copy_([state[slot] for state in states], list(values_N.unbind(0)))
