"""AdamW (arXiv:1711.05101) in pieces of bounded size, with 8-bit or 16-bit moments, on the device or the host."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.facts.limits import INT8_BLOCK, INT8_SMALLEST
from bloomery.facts.optimizers import saves_memory
from bloomery.model.native import Uncompiled
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim import compiled_adamw
from bloomery.train.optim.common import (
    Gate,
    Rounding,
    Span,
    State,
    batches_of,
    concatenated,
    decay_groups,
    factor_in,
    float32_gradient,
    gated,
    increment_step,
    parameters_with_state,
    scale_gradients,
    square_root_,
    zero_step,
)
from bloomery.train.optim.compiled_adamw import AdamRates, Moments
from bloomery.train.optim.placement import PieceStates, StatePlacement


class MomentFormat(Protocol):
    """How one moment is stored. A flat piece of it is decoded to float32 and encoded again."""

    @property
    def slot(self) -> str: ...

    @property
    def dtype_name(self) -> Moments: ...

    def initial_state(self, parameter: Tensor) -> State: ...

    def stored_tensors(self, state: State, span: Span) -> list[Tensor]:
        """Views of the stored tensors of a span, sliced along their first dimension."""
        ...

    def decode(self, stored: list[Tensor]) -> Tensor:
        """Flat float32 of concatenated spans; the stored tensor itself if that is float32."""
        ...

    def encode(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]: ...

    def from_float(self, moment: Tensor) -> State:
        """The state of `initial_state` with the values of a floating-point moment in the parameter's shape."""
        ...


@final
@dataclass(frozen=True)
class FloatMoment:
    """float32, or bfloat16 with stochastic rounding: round-to-nearest would lose changes below 1/256."""

    slot: str
    dtype: torch.dtype
    rounding: Rounding

    @property
    def dtype_name(self) -> Moments:
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def initial_state(self, parameter: Tensor) -> State:
        return {
            self.slot: torch.zeros_like(
                parameter, dtype=self.dtype, memory_format=torch.contiguous_format
            )
        }

    def stored_tensors(self, state: State, span: Span) -> list[Tensor]:
        return [span.view_of(state[self.slot])]

    def decode(self, stored: list[Tensor]) -> Tensor:
        return stored[0].to(torch.float32)

    def encode(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]:
        if self.dtype == torch.float32:
            return [exact]
        parts = exact.split_with_sizes([span.size for span in spans])
        rounded_parts = [
            self.rounding.to_bfloat16(part, span.parameter, step, span.start, self.slot)
            for part, span in zip(parts, spans, strict=True)
        ]
        return [torch.cat(rounded_parts)]

    def from_float(self, moment: Tensor) -> State:
        return {self.slot: moment.to(self.dtype)}


@final
@dataclass(frozen=True)
class Int8Moment:
    """One byte per value and a float32 scale per block of 256, its largest magnitude: 1.016 bytes per value.

    Level k of n is (k/n)^4 of the scale. The decades below the scale have 56, 31, 18, 10, 6, ... levels per sign, those
    of dynamic tree quantization (arXiv:2110.02861, section 2.2) 64, 32, 16, 8, 4, ...; this needs two square roots, no
    table search. Encoding a decoded moment gives the same levels. Squares (`signed` False) have 255 levels and never
    round to zero in a nonzero block: the update divides by their root.
    """

    slot: str
    signed: bool

    @property
    def dtype_name(self) -> Moments:
        return "int8"

    @property
    def scale_slot(self) -> str:
        return f"{self.slot}_scale"

    def initial_state(self, parameter: Tensor) -> State:
        blocks = -(-parameter.numel() // INT8_BLOCK)
        device = parameter.device
        dtype = torch.int8 if self.signed else torch.uint8
        return {
            self.slot: torch.zeros(blocks, INT8_BLOCK, dtype=dtype, device=device),
            self.scale_slot: torch.zeros(blocks, dtype=torch.float32, device=device),
        }

    def stored_tensors(self, state: State, span: Span) -> list[Tensor]:
        blocks = slice(span.start // INT8_BLOCK, -(-span.stop // INT8_BLOCK))
        return [state[self.slot][blocks], state[self.scale_slot][blocks]]

    def decode(self, stored: list[Tensor]) -> Tensor:
        """Float32 [blocks * INT8_BLOCK] from levels [blocks, INT8_BLOCK] and scales [blocks].

        The fourth power of a level's share of the highest, times the scale; a signed level keeps its sign.
        """
        levels, scales = stored
        shares = levels.to(torch.float32).div_(127 if self.signed else 255)
        squares = shares.square()
        fourth_powers = (
            shares.mul_(shares.abs()).mul_(squares) if self.signed else squares.square_()
        )
        return fourth_powers.mul_(scales[:, None]).view(-1)

    def encode(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]:  # noqa: ARG002 (of the protocol)
        blocks = exact.view(-1, INT8_BLOCK)
        scales = (blocks.abs() if self.signed else blocks).amax(1)
        shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        if not self.signed:
            levels = square_root_(square_root_(shares)).mul_(255).round_().clamp_(min=1)
            return [levels.to(torch.uint8), scales]
        roots = square_root_(square_root_(shares.abs()))
        levels = roots.mul_(127).round_().mul_(shares.sign_())
        return [levels.to(torch.int8), scales]

    def from_float(self, moment: Tensor) -> State:
        flat = moment.to(torch.float32).flatten()
        levels, scales = self.encode(F.pad(flat, (0, -len(flat) % INT8_BLOCK)), [], 0)
        return {self.slot: levels, self.scale_slot: scales}


def moment_format(
    slot: str, parameter: nn.Parameter, state_dtype: str, rounding: Rounding
) -> MomentFormat:
    """With `state_dtype` float32, moments of bfloat16 weights are bfloat16, as in torch."""
    if state_dtype == "int8" and rounding.shards.full_numel(parameter) >= INT8_SMALLEST:
        return Int8Moment(slot, signed=slot == "exp_avg")
    is_half = state_dtype == "bfloat16" or (
        state_dtype == "float32" and parameter.dtype == torch.bfloat16
    )
    return FloatMoment(slot, torch.bfloat16 if is_half else torch.float32, rounding)


@final
class ChunkedAdamW(torch.optim.Optimizer):
    """Equal to torch.optim.AdamW in float32. `placement`: where the states are stored.

    State: `exp_avg` and `exp_avg_sq` in the parameter's shape, or as int8 and uint8 [blocks, 256] with
    `exp_avg_scale` and `exp_avg_sq_scale`, float32 [blocks]; `step`. Both moments take 8, 4 or 2 + 8/256 bytes per
    parameter; tensors under 4,096 values keep 8. Scratch: five float32 pieces (`common.piece_size`), half a piece more
    for stochastic rounding on a CPU.
    """

    def __init__(
        self,
        params: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: str,
        rounding: Rounding,
        placement: StatePlacement,
        compiled: bool | None = None,
    ) -> None:
        """`compiled`: whether compiled code updates parameters on a CPU; None: where it is here and agrees."""
        self._compiled = compiled
        self._state_dtype = state_dtype
        self._rounding = rounding
        self._placement = placement
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                empty = self._empty_state(parameter)
                placement.expect({(parameter, slot): value for slot, value in empty.items()})
                self._compiles(parameter)  # the code is compiled now, so that no step waits for it

    def step(  # type: ignore[override]  # torch's takes a closure that computes the loss
        self,
        closure: None = None,  # noqa: ARG002 (torch's, unused)
        *,
        gate: Gate | None = None,
    ) -> None:
        self._step(gate, 1.0)

    @torch.optim.Optimizer.profile_hook_step  # with the hooks of a step
    def step_scaled(self, factor: float) -> None:
        """One update by the gradients times a factor, which may be scaled in place."""
        self._step(None, factor)

    @torch.no_grad()
    def _step(self, gate: Gate | None, factor: float) -> None:
        for group in self.param_groups:
            parameters = parameters_with_state(self, group, self._initial_state)
            for parameter in parameters:
                increment_step(self.state[parameter])
            in_torch = list[nn.Parameter]()
            for parameter in parameters:
                if self._compiles(parameter):
                    self._update_compiled(parameter, group, gate, factor)
                else:
                    in_torch.append(parameter)
            scale_gradients([p.grad for p in in_torch if p.grad is not None], factor)
            for batch in batches_of(in_torch, self._batch_key, nn.Parameter.numel, self._rounding):
                self._update(batch, group, gate)

    def _formats(self, parameter: nn.Parameter) -> tuple[MomentFormat, MomentFormat]:
        first, second = (
            moment_format(slot, parameter, self._state_dtype, self._rounding)
            for slot in ("exp_avg", "exp_avg_sq")
        )
        return first, second

    def _initial_state(self, parameter: nn.Parameter) -> State:
        states = [moment.initial_state(parameter) for moment in self._formats(parameter)]
        placed = {
            slot: self._placement.place((parameter, slot), value)
            for state in states
            for slot, value in state.items()
        }
        return {"step": zero_step(), **placed}

    def _empty_state(self, parameter: nn.Parameter) -> State:
        """Without data: of a parameter that has none."""
        like = torch.empty_like(parameter, device="meta")
        return {
            slot: value
            for moment in self._formats(parameter)
            for slot, value in moment.initial_state(like).items()
        }

    def loaded_state(self, parameter: nn.Parameter, slots: State, *, name: str) -> State:
        """Placed copies of a checkpoint's state of this parameter. Raises UserError for another format.

        Floating-point states are converted to float32 or int8, for a run that a fallback continues in these.
        """
        formats = self._formats(parameter)
        if self._state_dtype != "bfloat16":
            for moment in formats:
                stored = slots.get(moment.slot)
                if (
                    stored is not None
                    and stored.is_floating_point()
                    and stored.shape == parameter.shape
                ):
                    slots = slots | moment.from_float(stored)

        expected = self._empty_state(parameter)  # the dtypes and shapes that the slots must have
        for slot, value in expected.items():
            stored = slots.get(slot)
            if stored is None or (stored.dtype, stored.shape) != (value.dtype, value.shape):
                raise UserError(
                    f"the saved state {name}.{slot} does not match optimizer.state_dtype={self._state_dtype}",
                    where="optimizer.safetensors of the checkpoint",
                    fix="resume with the recipe that the run was started with",
                )
        placed = {
            slot: self._placement.place(
                (parameter, slot), slots[slot].to(parameter.device, copy=True)
            )
            for slot in expected
        }
        return {"step": slots["step"].clone(), **placed}

    def settle(self) -> None:
        """Wait until the host can read every state."""
        self._placement.settle()

    def _batch_key(self, parameter: nn.Parameter) -> object:
        """Small parameters with equal keys share a piece."""
        return (
            parameter.dtype,
            float(self.state[parameter]["step"]),
            type(self._formats(parameter)[0]),
        )

    def _compiles(self, parameter: nn.Parameter) -> bool:
        """Whether compiled code updates it, to the same bits. Rows of a shard begin within a piece."""
        return (
            parameter.device.type == "cpu"
            and parameter.dtype in compiled_adamw.DTYPES
            and parameter.is_contiguous()
            and type(parameter.data) is Tensor  # a fake tensor has no memory
            and parameter not in self._rounding.shards.full_parameters
            and (compiled_code_agrees() if self._compiled is None else self._compiled)
        )

    def _update_compiled(
        self, parameter: nn.Parameter, group: dict[str, Any], gate: Gate | None, factor: float
    ) -> None:
        """`factor`: of the gradient, which is rounded to its dtype as if it were scaled in place."""
        if gate is not None and not gate.open:
            return
        assert parameter.grad is not None
        state = self.state[parameter]
        step = round(float(state["step"]))
        formats = self._formats(parameter)
        whole = Span(parameter, 0, parameter.numel())
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        rates = AdamRates(
            first_weight=gated(1 - beta1, gate),
            second_weight=gated(1 - beta2, gate),
            correction=math.sqrt(1 - beta2**step),
            eps=group["eps"],
            rate=gated(-lr / (1 - beta1**step), gate),
            kept=1 - gated(lr * group["weight_decay"], gate),
            factor=factor_in(parameter.dtype, factor) if gate is None else float(gate.factor),
        )
        piece = self._rounding.piece_size(parameter.device)
        at_random = self._rounding.stochastic and parameter.dtype == torch.bfloat16
        starts = range(0, parameter.numel(), piece)
        slots = (
            () if at_random else None,
            *((moment.slot,) if moment.dtype_name == "bfloat16" else None for moment in formats),
        )
        seeds = [
            [0] * len(starts)
            if slot is None
            else self._rounding.seeds_of_pieces(parameter, step, starts, *slot)
            for slot in slots
        ]
        compiled_adamw.update(
            parameter.detach(),
            parameter.grad.contiguous(),
            [moment.stored_tensors(state, whole) for moment in formats],
            kind=formats[0].dtype_name,
            rates=AdamRates(*map(float, rates)),
            piece=piece,
            seeds=seeds,
            at_random=at_random,
            rounds_gradients=gate is None and factor != 1.0,
        )

    def _update(self, batch: list[nn.Parameter], group: dict[str, Any], gate: Gate | None) -> None:
        formats = self._formats(batch[0])
        step = round(float(self.state[batch[0]]["step"]))

        # Several small parameters are one piece; a single one is divided where it is larger than a piece.
        pieces = [[Span(parameter, 0, parameter.numel()) for parameter in batch]]
        if len(batch) == 1:
            numel = batch[0].numel()
            length = self._rounding.piece_size(batch[0].device)
            pieces = [
                [Span(batch[0], start, min(start + length, numel))]
                for start in range(0, numel, length)
            ]
        stored_pieces = [self._stored(spans, formats) for spans in pieces]

        visits = self._placement.visits(stored_pieces, batch[0].device)
        padding = INT8_BLOCK if isinstance(formats[0], Int8Moment) else 1
        for spans, stored, states in zip(pieces, stored_pieces, visits, strict=True):
            moments = [moment.decode(state) for moment, state in zip(formats, states, strict=True)]
            self._update_piece(spans, moments, group, step, gate, padding)
            for moment, value, targets in zip(formats, moments, stored, strict=True):
                self._placement.send(moment.encode(value, spans, step), targets)

    def _stored(self, spans: list[Span], formats: Sequence[MomentFormat]) -> PieceStates:
        piece: PieceStates = []
        for moment in formats:
            by_span = [moment.stored_tensors(self.state[span.parameter], span) for span in spans]
            piece.append([list(views) for views in zip(*by_span, strict=True)])
        return piece

    def _update_piece(
        self,
        spans: list[Span],
        moments: Sequence[Tensor],
        group: dict[str, Any],
        step: int,
        gate: Gate | None,
        padding: int,
    ) -> None:
        """Update the moments and weights of a piece in place, each span padded to a multiple of `padding`.

        What is not needed any more is deleted, so that five float32 pieces exist at most.
        """
        lr = group["lr"]
        weight_decay = group["weight_decay"]
        (beta1, beta2) = group["betas"]
        first, second = moments
        gradients = [
            span.view_of(gradient.contiguous())
            for span in spans
            if (gradient := span.parameter.grad) is not None
        ]
        gradient = float32_gradient(_padded(gradients, padding), gate)
        first.lerp_(gradient, gated(1 - beta1, gate))
        second.lerp_(gradient.square(), gated(1 - beta2, gate))
        del gradient
        update = square_root_(second.clone()).div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        torch.div(first, update, out=update).mul_(gated(-lr / (1 - beta1**step), gate))

        weights = [span.view_of(span.parameter.detach()) for span in spans]
        updated = (
            _padded(weights, padding)
            .to(torch.float32)
            .mul_(1 - gated(lr * weight_decay, gate))
            .add_(update)
        )
        del update
        start = 0
        for span, weight in zip(spans, weights, strict=True):
            values = updated[start : start + span.size]
            self._rounding.write(weight, values, span.parameter, step, span.start)
            start += -(-span.size // padding) * padding


@functools.cache
def compiled_code_agrees() -> bool:
    """Whether compiled code is here and gives the bits of PyTorch's operations: an update of each format says so."""
    try:
        compiled_adamw.build()
    except Uncompiled:
        return False
    return all(
        _bits_of_an_update(dtype, state_dtype, compiled=False)
        == _bits_of_an_update(dtype, state_dtype, compiled=True)
        for dtype in compiled_adamw.DTYPES
        for state_dtype in ("float32", "bfloat16", "int8")
    )


def _bits_of_an_update(dtype: torch.dtype, state_dtype: str, *, compiled: bool) -> list[bytes]:
    """Weights and states after two updates of as many values as have 8-bit states, and some more."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, INT8_SMALLEST + 5, generator=generator)
    parameter = nn.Parameter(drawn[0].to(dtype))
    rounding = Rounding({parameter: ""}, 0, stochastic=True)
    optimizer = ChunkedAdamW(
        [{"params": [parameter], "weight_decay": 0.1}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=state_dtype,
        rounding=rounding,
        placement=StatePlacement(offload=False),
        compiled=compiled,
    )
    for gradient in drawn[1:]:
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    tensors = [parameter.detach(), *optimizer.state[parameter].values()]
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.ndim]


def _padded(parts: Sequence[Tensor], multiple: int) -> Tensor:
    """Concatenated, each padded to a multiple."""
    padded_parts = [
        F.pad(part, (0, -part.numel() % multiple)) if part.numel() % multiple else part
        for part in parts
    ]
    return concatenated(padded_parts)


def build(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    plan: OptimizerPlan,
    rounding: Rounding,
    placement: StatePlacement,
) -> list[torch.optim.Optimizer]:
    """torch's AdamW, unless the plan has a memory setting that torch's lacks."""
    if not saves_memory(plan):
        return [torch_adamw(named_parameters, plan)]
    return [
        ChunkedAdamW(
            decay_groups(named_parameters, plan.weight_decay),
            lr=plan.learning_rate,
            betas=plan.betas,
            eps=plan.eps,
            state_dtype=plan.state_dtype,
            rounding=rounding,
            placement=placement,
        )
    ]


def torch_adamw(
    named_parameters: Mapping[str, nn.Parameter], plan: OptimizerPlan
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        decay_groups(named_parameters, plan.weight_decay),
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.eps,
        fused=plan.fused,
    )


@final
class ExactAdamW:
    """Algorithm 2 of arXiv:1711.05101, with decay as in PyTorch: relative to the learning rate."""

    def __init__(self, plan: OptimizerPlan, decay: float) -> None:
        self._plan = plan
        self._decay = decay
        self._steps = 0
        self._mean: Tensor | float = 0.0
        self._square: Tensor | float = 0.0

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        self._steps += 1
        beta1, beta2 = self._plan.betas
        rate = self._plan.learning_rate
        self._mean = beta1 * self._mean + (1 - beta1) * gradient
        self._square = beta2 * self._square + (1 - beta2) * gradient.square()
        mean = self._mean / (1 - beta1**self._steps)
        square = self._square / (1 - beta2**self._steps)
        decayed = weight * (1 - rate * self._decay)
        updated: Tensor = decayed - rate * mean / (square.sqrt() + self._plan.eps)
        return updated


def exact(plan: OptimizerPlan, decay: float) -> ExactAdamW:
    """`decay`: the weight decay of the parameter."""
    return ExactAdamW(plan, decay)
