"""AdamW (arXiv:1711.05101) in pieces of bounded size: moments of 8 or 16 bits, in the device's memory or the host's."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.train.optim.common import (
    Gate,
    Rounding,
    Span,
    alike,
    counted,
    exact_gradient,
    gathered,
    no_steps,
    piece_size,
    times,
    with_states,
)
from bloomery.train.optim.int8 import BLOCK, EightBit, Moment, moment
from bloomery.train.optim.offload import Home


@final
class LeanAdamW(torch.optim.Optimizer):
    """Equal to torch.optim.AdamW in float32. `states`: float32, bfloat16 or int8; `home`: where they wait for a step.

    State: `exp_avg` and `exp_avg_sq` in the parameter's shape, or as int8 and uint8 [blocks, 256] beside
    `exp_avg_scale` and `exp_avg_sq_scale`, float32 [blocks]; `step`. Bytes of both moments a parameter: 8, 4, or
    2 + 8/256; tensors under 4,096 numbers keep 8. Scratch, however large a matrix is: five float32 pieces
    (`optim_pieces.piece_size`), on a CPU half a piece more where something is rounded at random.
    """

    def __init__(
        self,
        params: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: str,
        rounding: Rounding,
        home: Home,
    ) -> None:
        self._states, self._rounding, self._home = states, rounding, home
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's takes a closure that computes the loss
        self,
        closure: None = None,  # noqa: ARG002
        *,
        gate: Gate | None = None,
    ) -> None:
        for group in self.param_groups:
            ready = with_states(self, group, self._fresh)
            for parameter in ready:
                counted(self.state[parameter])
            for run in alike(ready, self._kind):
                self._step(run, group, gate)

    def _moments(self, parameter: nn.Parameter) -> tuple[Moment, Moment]:
        first, second = (moment(slot, parameter, self._states, self._rounding) for slot in ("exp_avg", "exp_avg_sq"))
        return first, second

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        states = [m.fresh(parameter) for m in self._moments(parameter)]
        placed = {slot: self._home.place(value) for state in states for slot, value in state.items()}
        return {"step": no_steps(), **placed}

    def adopted(self, parameter: nn.Parameter, slots: dict[str, Tensor], *, name: str) -> dict[str, Tensor]:
        """Copies of a checkpoint's state of this parameter, where states are at home. Raises UserError.

        Floating-point numbers become float32 or int8 ones, for a run that a fallback goes on with in those.
        """
        shape = torch.empty_like(parameter, device="meta")
        for m in self._moments(parameter) if self._states != "bfloat16" else ():
            exact = slots.get(m.slot)
            if exact is not None and exact.is_floating_point() and exact.shape == parameter.shape:
                slots = slots | m.adopted(exact)
        wanted = {slot: value for m in self._moments(parameter) for slot, value in m.fresh(shape).items()}
        kinds = {slot: (value.dtype, value.shape) for slot, value in slots.items()}
        unlike = [slot for slot, value in wanted.items() if kinds.get(slot) != (value.dtype, value.shape)]
        if unlike:
            raise UserError(
                f"the state {name}.{unlike[0]} was not saved as optimizer.states={self._states} keeps it",
                where="the optimizer's part of the checkpoint",
                remedy="resume with the recipe that the run was started with",
            )
        placed = {slot: self._home.place(slots[slot].to(parameter.device, copy=True)) for slot in wanted}
        return {"step": slots["step"].clone(), **placed}

    def settle(self) -> None:
        """Returns when the host may read every state."""
        self._home.settle()

    def _kind(self, parameter: nn.Parameter) -> object:
        """Parameters of one kind go through one piece together."""
        return parameter.dtype, float(self.state[parameter]["step"]), type(self._moments(parameter)[0])

    def _step(self, run: list[nn.Parameter], group: dict[str, Any], gate: Gate | None) -> None:
        moments, step = self._moments(run[0]), round(float(self.state[run[0]]["step"]))
        pieces = [[Span(p, 0, p.numel()) for p in run]] if len(run) > 1 else _cut(run[0])
        kept = [[_cut_out(m, self.state, spans) for m in moments] for spans in pieces]
        for spans, homes, raws in zip(pieces, kept, self._home.visits(kept, run[0].device), strict=True):
            exact = [m.decoded(raw) for m, raw in zip(moments, raws, strict=True)]
            padding = BLOCK if isinstance(moments[0], EightBit) else 1
            self._move(spans, exact, group, step, gate, padding)
            for m, value, targets in zip(moments, exact, homes, strict=True):
                self._home.send(m.encoded(value, spans, step), targets)

    def _move(
        self,
        spans: list[Span],
        moments: Sequence[Tensor],
        group: dict[str, Any],
        step: int,
        gate: Gate | None,
        padding: int,
    ) -> None:
        """Moments and weights of a piece, in place."""
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        first, second = moments
        gradients = [span.of(p.grad.contiguous()) for span in spans if (p := span.parameter).grad is not None]
        gradient = exact_gradient(_padded(gradients, padding), gate)
        first.lerp_(gradient, times(1 - beta1, gate))
        second.lerp_(gradient.square(), times(1 - beta2, gate))
        del gradient
        update = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        torch.div(first, update, out=update).mul_(times(-lr / (1 - beta1**step), gate))
        weights = [span.of(span.parameter.detach()) for span in spans]
        moved = _padded(weights, padding).to(torch.float32).mul_(1 - times(lr * decay, gate)).add_(update)
        del update
        start = 0
        for span, weight in zip(spans, weights, strict=True):
            self._rounding.write(weight, moved[start : start + span.size], span.parameter, step, span.start)
            start += -(-span.size // padding) * padding


def _cut(parameter: nn.Parameter) -> list[list[Span]]:
    size, step = parameter.numel(), piece_size(parameter.device)
    return [[Span(parameter, start, min(start + step, size))] for start in range(0, size, step)]


def _cut_out(m: Moment, states: dict[Tensor, dict[str, Tensor]], spans: list[Span]) -> list[list[Tensor]]:
    """What is kept of each span, by tensor."""
    return [list(parts) for parts in zip(*(m.raw(states[span.parameter], span) for span in spans), strict=True)]


def _padded(parts: Sequence[Tensor], multiple: int) -> Tensor:
    """One behind the other, each of whole blocks."""
    return gathered([F.pad(part, (0, -part.numel() % multiple)) if part.numel() % multiple else part for part in parts])
