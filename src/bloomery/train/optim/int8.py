"""Moments of AdamW as float32, bfloat16 or 8-bit numbers, and how each is read and written in pieces."""

from dataclasses import dataclass
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.train.optim.common import Rounding, Span, State

BLOCK = 256  # numbers that share a scale: arXiv:2110.02861 takes 2048, bitsandbytes 256 today
SMALL = 4096  # tensors of fewer numbers keep float32 moments, as in bitsandbytes: they decide much and weigh nothing


class Moment(Protocol):
    """One number for each of a parameter. A flat piece of it is read as float32 and written back."""

    @property
    def slot(self) -> str: ...

    def fresh(self, parameter: Tensor) -> State: ...

    def raw(self, state: State, span: Span) -> list[Tensor]:
        """Views of what is kept for a span, every tensor cut along its first dimension."""
        ...

    def decoded(self, raw: list[Tensor]) -> Tensor:
        """float32, flat, of spans one behind the other; what is kept itself where that is float32."""
        ...

    def encoded(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]: ...

    def adopted(self, exact: Tensor) -> State:
        """What `fresh` keeps, of numbers in the parameter's shape that another way of keeping them has saved."""
        ...


@final
@dataclass(frozen=True)
class Plain:
    """float32, or bfloat16 rounded at random: to the nearest, an average that moves by less than 1/256 never moves."""

    slot: str
    dtype: torch.dtype
    rounding: Rounding

    def fresh(self, parameter: Tensor) -> State:
        return {self.slot: torch.zeros_like(parameter, dtype=self.dtype, memory_format=torch.contiguous_format)}

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
class EightBit:
    """A byte a number and a float32 scale a block of 256, the largest magnitude in it: 1.016 bytes.

    Level k of n stands for (k/n)^4 of the scale. From the top down the decades have 56, 31, 18, 10, 6, ... levels a
    side; those of dynamic tree quantisation (arXiv:2110.02861, section 2.2) have 64, 32, 16, 8, 4, ..., and need a
    search through a table, where this takes two square roots. What is written and read again is written as the same
    levels, so a moment that does not move keeps its bits. Squares (`signed` False) have 255 levels and never fall to
    zero beside a larger one: a moment over the root of zero would be a step without bound.
    """

    slot: str
    signed: bool

    @property
    def _levels(self) -> int:
        return 127 if self.signed else 255

    def fresh(self, parameter: Tensor) -> State:
        blocks, device = -(-parameter.numel() // BLOCK), parameter.device
        dtype = torch.int8 if self.signed else torch.uint8
        levels = torch.zeros(blocks, BLOCK, dtype=dtype, device=device)
        return {self.slot: levels, f"{self.slot}_scale": torch.zeros(blocks, dtype=torch.float32, device=device)}

    def raw(self, state: State, span: Span) -> list[Tensor]:
        blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        return [state[self.slot][blocks], state[f"{self.slot}_scale"][blocks]]

    def decoded(self, raw: list[Tensor]) -> Tensor:
        levels, scales = raw
        shares = levels.to(torch.float32).div_(self._levels)
        square = shares.square()
        fourth = shares.mul_(shares.abs()).mul_(square) if self.signed else square.square_()
        return fourth.mul_(scales[:, None]).view(-1)

    def encoded(self, exact: Tensor, spans: list[Span], step: int) -> list[Tensor]:  # noqa: ARG002 (a Moment's)
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


def moment(slot: str, parameter: nn.Parameter, states: str, rounding: Rounding) -> Moment:
    """`states`: float32, bfloat16 or int8. Of float32 a bfloat16 weight's moments are bfloat16, as torch's are."""
    if states == "int8" and parameter.numel() >= SMALL:
        return EightBit(slot, signed=slot == "exp_avg")
    half = states == "bfloat16" or (states == "float32" and parameter.dtype == torch.bfloat16)
    return Plain(slot, torch.bfloat16 if half else torch.float32, rounding)
