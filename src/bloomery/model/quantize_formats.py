"""NF4 and int8 in blocks of 64 weights, and scales in 8 bits: numbers there and back, in plain torch.

NF4 gives bit for bit what bitsandbytes stores and reads, so that its kernels can read ours. N numbers, flat; blocks
follow each other without regard to rows, and the last one may be short.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.model.quantize_facts import BLOCK, SCALES_BLOCK

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LEAST = 1e-38  # a block of zeros is divided by this


def quantise_nf4(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte with the first one above (uint8 [N / 2]), and the largest size in each block (float32)."""
    blocks, scales = _blocks(values_N, BLOCK)
    pairs = _bounds_below(_normed(blocks, scales), nf4_bounds(values_N.device)).view(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1])[: -(-len(values_N) // 2)], scales


def dequantise_nf4(codes: Tensor, scales: Tensor, into_N: Tensor) -> None:
    """Undoes `quantise_nf4`: level times scale in float32, rounded once to the dtype of `into_N`."""
    values = nf4_pairs(codes.device).index_select(0, codes.int()).view(torch.float32)
    _scaled(values[: len(into_N)], scales, into_N)


def quantise_int8(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from -127 to 127 (int8 [N]), and what a step of one is worth in each block (float32)."""
    blocks, largest = _blocks(values_N, BLOCK)
    codes = (_normed(blocks, largest) * 127.0).round_().to(torch.int8)
    return codes.view(-1)[: len(values_N)], largest / 127.0


def dequantise_int8(codes: Tensor, scales: Tensor, into_N: Tensor) -> None:
    """Undoes `quantise_int8`, in float32, rounded once to the dtype of `into_N`."""
    _scaled(codes.float(), scales, into_N)


def quantise_scales(scales_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits (uint8 [N]) and what they are of: the largest of each 256, then the mean (float32).

    The mean is summed in float64: a base that is quantised again, with other threads, is the same to the bit.
    """
    mean = scales_N.double().mean().float()
    blocks, outer = _blocks(scales_N - mean, SCALES_BLOCK)
    levels = dynamic_levels(scales_N.device)
    bounds = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(_normed(blocks, outer), bounds, out_int32=True).to(torch.uint8)
    return codes.view(-1)[: len(scales_N)], torch.cat([outer, mean[None]])


def dequantise_scales(codes: Tensor, outer: Tensor) -> Tensor:
    """Undoes `quantise_scales`."""
    scales = dynamic_levels(codes.device).index_select(0, codes.int())
    result = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
    _scaled(scales, outer[:-1], result, size=SCALES_BLOCK)
    return result.add_(outer[-1])


def _blocks(values_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The values in rows of `size`, float32, zeros after the last; and the largest size in each row."""
    blocks = F.pad(values_N.float(), (0, -len(values_N) % size)).view(-1, size)
    return blocks, blocks.abs().amax(1)


def _normed(blocks: Tensor, scales: Tensor) -> Tensor:
    # A product with the reciprocal, as bitsandbytes' kernels do it: a quotient differs in the last bit.
    return blocks * scales.clamp_min(LEAST).reciprocal()[:, None]


def _bounds_below(values: Tensor, bounds: Tensor) -> Tensor:
    """How many bounds lie below each value, uint8: torch.bucketize, which takes three times as long on a processor."""
    count = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    above = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    for bound in bounds:
        torch.gt(values, bound, out=above)
        count += above.view(torch.uint8)
    return count


def _scaled(values_N: Tensor, scales: Tensor, into_N: Tensor, *, size: int = BLOCK) -> None:
    """into = values times the scale of their block; the values are not needed afterwards."""
    whole = len(values_N) // size * size
    values_N[:whole].view(-1, size).mul_(scales[: whole // size, None])
    if whole < len(values_N):
        values_N[whole:].mul_(scales[-1])
    into_N.copy_(values_N)


@cache
def nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


@cache
def nf4_bounds(device: torch.device) -> Tensor:
    """Half way between the levels."""
    levels = nf4_levels(device)
    return (levels[:-1] + levels[1:]) / 2


@cache
def nf4_pairs(device: torch.device) -> Tensor:
    """The two float32 levels of every byte, as one int64 [256]: a look-up for two weights, of words of 8 bytes."""
    levels = nf4_levels(device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).view(torch.int64).squeeze(1)


@cache
def dynamic_levels(device: torch.device) -> Tensor:
    """256 levels in [-1, 1] whose exponents have ever more fractions: dynamic tree quantisation (arXiv:1511.04561).

    For 10^-6 to 10^0 the middles of 1, 2, 4, ... 64 equal parts of [0.1, 1], with both signs; then 0 and 1.
    """
    positive = []
    for exponent in range(7):
        ends = torch.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append(10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2.0))
    magnitudes = torch.cat(positive)
    return torch.cat([-magnitudes, magnitudes, torch.tensor([0.0, 1.0])]).sort().values.to(device)
