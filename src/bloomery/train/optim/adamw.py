"""AdamW (arXiv:1711.05101) in chunks of bounded size, with 8-bit or 16-bit moments, on the device or the host."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.limits import INT8_BLOCK as BLOCK
from bloomery.model.limits import INT8_SMALLEST as SMALL
from bloomery.parallel.transfers import CopyStream, has_own_memory, pinned_like, wait_for
from bloomery.train.optim.common import (
    Gate,
    Rounding,
    Span,
    State,
    alike,
    counted,
    exact_gradient,
    gathered,
    no_steps,
    piece_size,
    same_place,
    times,
    with_states,
)


class MomentFormat(Protocol):
    """How one moment is stored. A flat chunk of it is decoded to float32 and encoded again."""

    @property
    def slot(self) -> str: ...

    def fresh(self, parameter: Tensor) -> State: ...

    def raw(self, state: State, span: Span) -> list[Tensor]:
        """Views of the stored tensors of a span, sliced along their first dimension."""
        ...

    def decoded(self, raw: list[Tensor]) -> Tensor:
        """Flat float32 of concatenated spans; the stored tensor itself if that is float32."""
        ...

    def encoded(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]: ...

    def adopted(self, exact: Tensor) -> State:
        """The state of `fresh` with the values of another format, given in the parameter's shape."""
        ...


@final
@dataclass(frozen=True)
class FloatMoment:
    """float32, or bfloat16 with stochastic rounding: round-to-nearest would lose changes below 1/256."""

    slot: str
    dtype: torch.dtype
    rounding: Rounding

    def fresh(self, parameter: Tensor) -> State:
        return {
            self.slot: torch.zeros_like(
                parameter, dtype=self.dtype, memory_format=torch.contiguous_format
            )
        }

    def raw(self, state: State, span: Span) -> list[Tensor]:
        return [state[self.slot].view(-1)[span.start : span.stop]]

    def decoded(self, raw: list[Tensor]) -> Tensor:
        return raw[0].to(torch.float32)

    def encoded(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]:
        if self.dtype == torch.float32:
            return [exact]
        parts = exact.split_with_sizes([span.size for span in spans])
        drawn = [
            self.rounding.to_bfloat16(part, span.parameter, step, span.start, self.slot)
            for part, span in zip(parts, spans, strict=True)
        ]
        return [torch.cat(drawn)]

    def adopted(self, exact: Tensor) -> State:
        return {self.slot: exact.to(self.dtype)}


@final
@dataclass(frozen=True)
class Int8Moment:
    """One byte per number and a float32 scale per block of 256, its largest magnitude: 1.016 bytes per number.

    Level k of n is (k/n)^4 of the scale. The decades below the scale have 56, 31, 18, 10, 6, ... levels per sign, those
    of dynamic tree quantization (arXiv:2110.02861, section 2.2) 64, 32, 16, 8, 4, ...; this needs two square roots, no
    table search. Encoding a decoded moment gives the same levels. Squares (`signed` False) have 255 levels and never
    round to zero in a nonzero block: the update divides by their root.
    """

    slot: str
    signed: bool

    def fresh(self, parameter: Tensor) -> State:
        blocks = -(-parameter.numel() // BLOCK)
        device = parameter.device
        dtype = torch.int8 if self.signed else torch.uint8
        levels = torch.zeros(blocks, BLOCK, dtype=dtype, device=device)
        return {
            self.slot: levels,
            f"{self.slot}_scale": torch.zeros(blocks, dtype=torch.float32, device=device),
        }

    def raw(self, state: State, span: Span) -> list[Tensor]:
        blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        return [state[self.slot][blocks], state[f"{self.slot}_scale"][blocks]]

    def decoded(self, raw: list[Tensor]) -> Tensor:
        """Float32 [blocks * BLOCK] from levels [blocks, BLOCK] and scales [blocks].

        The fourth power of a level's share of the highest, times the scale; a signed level keeps its sign.
        """
        levels, scales = raw
        shares = levels.to(torch.float32).div_(127 if self.signed else 255)
        square = shares.square()
        fourth = shares.mul_(shares.abs()).mul_(square) if self.signed else square.square_()
        return fourth.mul_(scales[:, None]).view(-1)

    def encoded(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]:  # noqa: ARG002 (of the protocol)
        blocks = exact.view(-1, BLOCK)
        scales = (blocks.abs() if self.signed else blocks).amax(1)
        shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        if not self.signed:
            return [shares.sqrt_().sqrt_().mul_(255).round_().clamp_(min=1).to(torch.uint8), scales]
        levels = shares.abs().sqrt_().sqrt_().mul_(127).round_().mul_(shares.sign_())
        return [levels.to(torch.int8), scales]

    def adopted(self, exact: Tensor) -> State:
        flat = exact.to(torch.float32).flatten()
        levels, scales = self.encoded(F.pad(flat, (0, -len(flat) % BLOCK)), [], 0)
        return {self.slot: levels, f"{self.slot}_scale": scales}


def moment(slot: str, parameter: nn.Parameter, states: str, rounding: Rounding) -> MomentFormat:
    """`states`: float32, bfloat16 or int8. With float32, moments of bfloat16 weights are bfloat16, as in torch."""
    if states == "int8" and rounding.shards.numel(parameter) >= SMALL:
        return Int8Moment(slot, signed=slot == "exp_avg")
    half = states == "bfloat16" or (states == "float32" and parameter.dtype == torch.bfloat16)
    return FloatMoment(slot, torch.bfloat16 if half else torch.float32, rounding)


# Of a chunk, by moment and by tensor of a moment: the stored tensors of each span.
Pieces = list[list[list[Tensor]]]


@final
class StatePlacement:
    """Optimizer states on the weights' device, or with `away` in pinned host memory.

    Offloaded chunks are copied to the device in turn, and copies overlap with the update: one chunk is updated, one
    arrives, one or two leave. Device memory: four chunks of states. No difference for weights on the host.
    """

    def __init__(self, *, away: bool) -> None:
        self._away = away
        self._copy_stream = CopyStream()

    def _apart(self, device: torch.device) -> bool:
        return self._away and has_own_memory(device)

    def place(self, fresh: Tensor) -> Tensor:
        """A new state, or one from a checkpoint, in its place."""
        return pinned_like(fresh).copy_(fresh) if self._apart(fresh.device) else fresh

    def visits(
        self, pieces: Sequence[Pieces], device: torch.device
    ) -> Iterator[list[list[Tensor]]]:
        """The states of each chunk in turn, on the device, spans concatenated."""
        if not self._apart(device):
            yield from (
                [[gathered(parts) for parts in moment] for moment in piece] for piece in pieces
            )
            return
        ahead = self._bring(pieces[0], device)
        for number in range(len(pieces)):
            brought, here = ahead
            if number + 1 < len(pieces):
                ahead = self._bring(pieces[number + 1], device)
            wait_for(here, device)
            yield brought

    def _bring(
        self, piece: Pieces, device: torch.device
    ) -> tuple[list[list[Tensor]], torch.cuda.Event]:
        def room(parts: Sequence[Tensor]) -> Tensor:
            sizes = (sum(len(part) for part in parts), *parts[0].shape[1:])
            return torch.empty(sizes, dtype=parts[0].dtype, device=device)

        rooms = [[room(parts) for parts in moment] for moment in piece]

        def copy() -> None:
            for moment, kinds in zip(piece, rooms, strict=True):
                for parts, place in zip(moment, kinds, strict=True):
                    for part, target in zip(
                        parts, place.split_with_sizes([len(p) for p in parts]), strict=True
                    ):
                        target.copy_(part, non_blocking=True)

        return rooms, self._copy_stream.run_after_work(device, copy)

    def send(self, values: list[Tensor], targets: list[list[Tensor]]) -> None:
        """Copy one updated moment of the current chunk to its place."""
        apart = self._apart(values[0].device)

        def copy() -> None:
            """The parts of a chunk in one call; what is in place already is not copied."""
            for value, parts in zip(values, targets, strict=True):
                if len(parts) > 1:
                    cut = value.split_with_sizes([len(part) for part in parts])
                    torch._foreach_copy_(list(parts), list(cut), non_blocking=apart)
                elif not same_place(value, parts[0]):
                    parts[0].copy_(value, non_blocking=apart)

        if apart:
            self._copy_stream.send(values, copy, most_under_way=4)  # two moments per chunk
        else:
            copy()

    def settle(self) -> None:
        """Wait until the host can read every state."""
        self._copy_stream.synchronize()


@final
class ChunkedAdamW(torch.optim.Optimizer):
    """Equal to torch.optim.AdamW in float32. `states`: float32, bfloat16 or int8; `placement`: where they are stored.

    State: `exp_avg` and `exp_avg_sq` in the parameter's shape, or as int8 and uint8 [blocks, 256] with
    `exp_avg_scale` and `exp_avg_sq_scale`, float32 [blocks]; `step`. Both moments take 8, 4 or 2 + 8/256 bytes per
    parameter; tensors under 4,096 numbers keep 8. Scratch: five float32 chunks (`common.piece_size`), half a chunk more
    for stochastic rounding on a CPU.
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
        placement: StatePlacement,
    ) -> None:
        self._states = states
        self._rounding = rounding
        self._home = placement
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's takes a closure that computes the loss
        self,
        closure: None = None,  # noqa: ARG002 (torch's, unused)
        *,
        gate: Gate | None = None,
    ) -> None:
        for group in self.param_groups:
            ready = with_states(self, group, self._fresh)
            for parameter in ready:
                counted(self.state[parameter])
            for run in alike(ready, self._kind, nn.Parameter.numel):
                self._step(run, group, gate)

    def _moments(self, parameter: nn.Parameter) -> tuple[MomentFormat, MomentFormat]:
        first, second = (
            moment(slot, parameter, self._states, self._rounding)
            for slot in ("exp_avg", "exp_avg_sq")
        )
        return first, second

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        states = [m.fresh(parameter) for m in self._moments(parameter)]
        placed = {
            slot: self._home.place(value) for state in states for slot, value in state.items()
        }
        return {"step": no_steps(), **placed}

    def adopted(
        self, parameter: nn.Parameter, slots: dict[str, Tensor], *, name: str
    ) -> dict[str, Tensor]:
        """Copies of a checkpoint's state of this parameter, in their place. Raises UserError for another format.

        Floating-point states are converted to float32 or int8, for a run that a fallback continues in these.
        """
        shape = torch.empty_like(parameter, device="meta")
        for m in self._moments(parameter) if self._states != "bfloat16" else ():
            exact = slots.get(m.slot)
            if exact is not None and exact.is_floating_point() and exact.shape == parameter.shape:
                slots = slots | m.adopted(exact)
        wanted = {
            slot: value for m in self._moments(parameter) for slot, value in m.fresh(shape).items()
        }
        kinds = {slot: (value.dtype, value.shape) for slot, value in slots.items()}
        unlike = [
            slot for slot, value in wanted.items() if kinds.get(slot) != (value.dtype, value.shape)
        ]
        if unlike:
            raise UserError(
                f"the saved state {name}.{unlike[0]} does not match optimizer.state_dtype={self._states}",
                where="optimizer.safetensors of the checkpoint",
                fix="resume with the recipe that the run was started with",
            )
        placed = {
            slot: self._home.place(slots[slot].to(parameter.device, copy=True)) for slot in wanted
        }
        return {"step": slots["step"].clone(), **placed}

    def settle(self) -> None:
        """Wait until the host can read every state."""
        self._home.settle()

    def _kind(self, parameter: nn.Parameter) -> object:
        """Parameters of one kind share a chunk."""
        return (
            parameter.dtype,
            float(self.state[parameter]["step"]),
            type(self._moments(parameter)[0]),
        )

    def _step(self, run: list[nn.Parameter], group: dict[str, Any], gate: Gate | None) -> None:
        moments = self._moments(run[0])
        step = round(float(self.state[run[0]]["step"]))
        size = run[0].numel()
        length = piece_size(run[0].device)
        pieces = [[Span(p, 0, p.numel()) for p in run]]
        if len(run) == 1:
            pieces = [
                [Span(run[0], start, min(start + length, size))] for start in range(0, size, length)
            ]
        kept: list[Pieces] = [
            [  # by moment, by tensor of the moment, by span
                [
                    list(parts)
                    for parts in zip(
                        *(m.raw(self.state[s.parameter], s) for s in spans), strict=True
                    )
                ]
                for m in moments
            ]
            for spans in pieces
        ]
        for spans, homes, raws in zip(
            pieces, kept, self._home.visits(kept, run[0].device), strict=True
        ):
            exact = [m.decoded(raw) for m, raw in zip(moments, raws, strict=True)]
            padding = BLOCK if isinstance(moments[0], Int8Moment) else 1
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
        """Update the moments and weights of a chunk in place."""
        lr = group["lr"]
        decay = group["weight_decay"]
        (beta1, beta2) = group["betas"]
        first, second = moments
        gradients = [
            span.of(p.grad.contiguous()) for span in spans if (p := span.parameter).grad is not None
        ]
        gradient = exact_gradient(_padded(gradients, padding), gate)
        first.lerp_(gradient, times(1 - beta1, gate))
        second.lerp_(gradient.square(), times(1 - beta2, gate))
        del gradient
        update = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        torch.div(first, update, out=update).mul_(times(-lr / (1 - beta1**step), gate))
        weights = [span.of(span.parameter.detach()) for span in spans]
        moved = (
            _padded(weights, padding)
            .to(torch.float32)
            .mul_(1 - times(lr * decay, gate))
            .add_(update)
        )
        del update
        start = 0
        for span, weight in zip(spans, weights, strict=True):
            self._rounding.write(
                weight, moved[start : start + span.size], span.parameter, step, span.start
            )
            start += -(-span.size // padding) * padding


def _padded(parts: Sequence[Tensor], multiple: int) -> Tensor:
    """Concatenated, each padded to a multiple."""
    return gathered(
        [
            F.pad(part, (0, -part.numel() % multiple)) if part.numel() % multiple else part
            for part in parts
        ]
    )
