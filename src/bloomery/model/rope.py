"""Rotary positions: frequencies, their stretching, and the rotation itself.

B batch, T time, H heads (query or key), E head width, R half of the part of a head that rotates.
"""

import math
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.facts.config import ModelConfig, RopeScaling
from bloomery.facts.counting import Rotation
from bloomery.facts.pictures import PositionAxes
from bloomery.model.norms import widened
from bloomery.model.pictures import axis_of_frequencies


class Rotary(NamedTuple):
    """cos and sin of every position's angles, float32 [B or 1, T, 1, R]; the factor of queries [B or 1, T, 1, 1].

    `interleave`: neighboring numbers of a head turn together, in place of its halves.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None
    interleave: bool = False


def frequencies(config: ModelConfig, rotation: Rotation, length: Tensor | int) -> Tensor:
    """Radians per position, float32 [R], for a sequence of `length` positions (`dynamic` and `longrope` depend on it).

    Formulas: su et al. 2021 (RoPE); linear and NTK-aware (dynamic) interpolation; Peng et al. 2023 (YaRN);
    Llama 3.1; Ding et al. 2024 (LongRoPE); parametrized as transformers does.
    """
    width = rotation.width
    theta = rotation.theta
    scaling = rotation.scaling
    device = length.device if isinstance(length, Tensor) else None
    powers = torch.arange(0, width, 2, device=device).float() / width
    if scaling is None:
        return 1.0 / theta**powers
    match scaling.kind:
        case "linear":
            return 1.0 / theta**powers / scaling.factor
        case "proportional":
            num_turning = int(scaling.turning_share * width // 2)
            turning = 1.0 / theta ** powers[:num_turning] / scaling.factor
            return F.pad(turning, (0, width // 2 - num_turning))
        case "dynamic":
            stretch = (
                torch.clamp(torch.as_tensor(length).float(), min=config.max_positions)
                / config.max_positions
            )
            longer = theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (
                width / (width - 2)
            )
            return 1.0 / longer**powers
        case "llama3":
            return _llama3(1.0 / theta**powers, scaling, _original(config, scaling))
        case "yarn":
            return _yarn(theta**powers, theta, scaling, _original(config, scaling), width)
        case "longrope":
            is_long = torch.as_tensor(length, device=device) > _original(config, scaling)
            short_factor = torch.tensor(scaling.short_factor, device=device)
            long_factor = torch.tensor(scaling.long_factor, device=device)
            return 1.0 / (torch.where(is_long, long_factor, short_factor) * theta**powers)


def _original(config: ModelConfig, scaling: RopeScaling) -> int:
    return scaling.original_max_positions or config.max_positions


def _llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    # how often a frequency turns within the original context
    turns = original * plain / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(periods: Tensor, theta: float, scaling: RopeScaling, original: int, width: int) -> Tensor:
    def index(turns: float) -> float:
        """The (fractional) frequency that turns so often within the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = index(scaling.beta_fast)
    high = index(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, device=periods.device).float() - low) / (high - low)).clamp(
        0.0, 1.0
    )
    return 1.0 / (scaling.factor * periods) * ramp + 1.0 / periods * (1 - ramp)


def table_scale(config: ModelConfig, scaling: RopeScaling | None) -> float:
    """The factor of cos and sin (YaRN's and LongRoPE's attention temperature)."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(config, scaling)))


@final
class Frequencies:
    """The frequencies of a decoder's rotations, computed on the host and kept on its device.

    A copy in every forward would make the host wait for the device: it could not queue the next micro-batch or token.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._kept: dict[tuple[Rotation, torch.device, int], Tensor] = {}

    def at(self, positions: Tensor, rotation: Rotation) -> Tensor:
        """float32 [R], on the device of the positions."""
        scaling = rotation.scaling
        if scaling is not None and scaling.kind == "dynamic":  # of each length its own
            return frequencies(self.config, rotation, positions.max() + 1)
        if scaling is not None and scaling.kind == "longrope":  # two, of which the length takes one
            original = _original(self.config, scaling)
            short = self._of_length(original, rotation, positions.device)
            long = self._of_length(original + 1, rotation, positions.device)
            return torch.where(positions.max() + 1 > original, long, short)
        return self._of_length(0, rotation, positions.device)

    def _of_length(self, length: int, rotation: Rotation, device: torch.device) -> Tensor:
        key = rotation, device, length
        if key not in self._kept:
            self._kept[key] = frequencies(self.config, rotation, length).to(device)
        return self._kept[key]


def rotary_tables(
    positions: Tensor, kept: Frequencies, rotation: Rotation, axes: PositionAxes | None = None
) -> Rotary:
    """Tables for positions [B, T] or [T]; float32 also under autocast, since angles do not survive bfloat16.

    `axes`: positions are [3, B, T], of which each frequency turns with one.
    """
    frequencies_R = kept.at(positions, rotation)
    turning = positions[..., None]
    if axes is not None:
        axis_R = axis_of_frequencies(axes, len(frequencies_R), positions.device)
        turning = positions[axis_R].movedim(0, -1)
    angles = (turning.float() * frequencies_R).unsqueeze(-2)
    angles = angles if angles.ndim == 4 else angles.unsqueeze(0)
    scale = table_scale(kept.config, rotation.scaling)
    query_scale = None
    if (growth := rotation.query_scale) is not None:
        periods = torch.floor(positions.float() / growth.every)
        query_scale = (1 + growth.beta * torch.log(1 + periods))[..., None, None]
        query_scale = query_scale if query_scale.ndim == 4 else query_scale.unsqueeze(0)
    cos = angles.cos() * scale
    sin = angles.sin() * scale
    return Rotary(cos, sin, query_scale, rotation.interleave)


class _Rotate(torch.autograd.Function):
    """Few passes, and nothing saved but the tables."""

    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x_BTHE.dtype
        return _turned(x_BTHE, cos, sin).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_BTHE: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_BTHE, cos, -sin).to(ctx.dtype), None, None, None


def _turned(x_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves of a head, as in transformers, not neighboring elements."""
    half = cos.shape[-1]
    rotary_part = widened(x_BTHE[..., : 2 * half])
    plain_part = x_BTHE[..., 2 * half :]
    turned = rotary_part * torch.cat((cos, cos), -1)
    turned[..., :half].addcmul_(rotary_part[..., half:], sin, value=-1.0)
    turned[..., half:].addcmul_(rotary_part[..., :half], sin)
    return torch.cat((turned, plain_part.to(turned.dtype)), -1) if plain_part.shape[-1] else turned


def _neighbors_apart(x_BTHE: Tensor, width: int) -> Tensor:
    """The first `width` numbers of a head in the order that `_turned` takes: those of even places, then the others."""
    pairs = x_BTHE[..., :width].unflatten(-1, (-1, 2))
    return torch.cat((pairs[..., 0], pairs[..., 1], x_BTHE[..., width:]), -1)


def rotate(x_BTHE: Tensor, rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """Turns the first 2R numbers of every head, in float32 at least, and answers as `dtype`; the rest stays.

    Neighbors that turn together come out half of 2R apart: in queries and keys alike, so that scores are the same.
    """
    if rotary.interleave:
        x_BTHE = _neighbors_apart(x_BTHE, 2 * rotary.cos.shape[-1])
    # an autograd function costs as much as the rotation of one token
    if not torch.is_grad_enabled():
        return _turned(x_BTHE, rotary.cos, rotary.sin).to(dtype)
    turned: Tensor = _Rotate.apply(x_BTHE, rotary.cos, rotary.sin, dtype)  # type: ignore[no-untyped-call]  # torch's `apply`
    return turned
