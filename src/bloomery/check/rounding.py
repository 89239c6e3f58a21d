"""How far rounding can take a result from the exact one, and how far a result is from it.

Every bound here follows from the unit roundoff of a dtype and the number of roundings on the way to a result; none was
fitted to a device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.core.device import products_take_tf32

# Half the distance between 1 and the next number: the largest relative error of one rounding to nearest.
UNIT_ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# Errors of roundings are independent to a good approximation and each is `u / sqrt(3)` at the root mean square, so n of
# them give `u sqrt(n / 3)`. Four times `u sqrt(n)` is seven times that: no healthy tile comes near it, and a tile that
# holds other numbers has an error of about 1.
SAFETY = 4.0
SMALLEST_SQUARE = 1e-36  # of a tensor of zeros, which is divided by: float32 holds it
TILE = 32  # rows and columns: smaller than any tile of a kernel, so that one wrong tile cannot hide in a matrix

# Unit roundoffs of devices that round more than the dtype says. A float32 product with TensorFloat-32, which attention
# kernels of NVIDIA's GPUs take unasked; exponentials and divisions of GPUs in float32, which are right to a few units.
TF32 = 2.0**-11
GPU_FUNCTIONS = 2.0**-22
BFLOAT16_INSIDE = "gfx90a"  # whose float16 matmuls of a backward convert their factors to bfloat16


def device_roundoff(
    dtype: torch.dtype, device: torch.device, *, arch: str = "", in_attention: bool = False
) -> float:
    """The unit roundoff of matmuls and functions in a dtype on a device. `arch`: such as gfx90a or sm_90."""
    roundoff = UNIT_ROUNDOFF[dtype]
    if device.type == "cpu":
        return roundoff
    if dtype == torch.float16 and arch == BFLOAT16_INSIDE:
        return UNIT_ROUNDOFF[torch.bfloat16]
    if dtype != torch.float32:
        return roundoff
    takes_tf32 = products_take_tf32() or (in_attention and arch.startswith("sm_"))
    return TF32 if takes_tf32 else GPU_FUNCTIONS


def bound_of(unit_roundoff: float, *, roundings: int, terms: int = 1) -> float:
    """The largest error of a tile that rounding explains, relative to the tile: S (u sqrt(n) + u32 sqrt(k)).

    `roundings`: n, on the longest way from an input to the result. `terms`: k, of its longest sum, which is
    accumulated in float32 (u32) whatever the dtype of its factors.
    """
    accumulated = UNIT_ROUNDOFF[torch.float32] * math.sqrt(terms)
    return SAFETY * (unit_roundoff * math.sqrt(roundings) + accumulated)


def bound_in(dtype: torch.dtype, roundoff: float, *, roundings: int, terms: int) -> float:
    """`bound_of` numbers that the device gives in `dtype`, which may round more than its matmuls."""
    return bound_of(max(roundoff, UNIT_ROUNDOFF.get(dtype, 0.0)), roundings=roundings, terms=terms)


def tile_error(result: Tensor, exact: Tensor, *, least_size: float = 0.0) -> float:
    """The largest root mean square error of a tile of 32 x 32 numbers, relative to the tile; infinite for NaN.

    A tile whose exact numbers are small next to those of the whole tensor, or to `least_size`, is measured relative to
    these: sums that cancel leave rounding alone.
    """
    wide = torch.float64 if exact.dtype == torch.float64 else torch.float32
    exact = _matrix(exact.detach().cpu().to(wide))
    difference = _matrix(result.detach().cpu().to(wide)) - exact
    tensor_square = float(exact.square().mean())
    scales = _tile_means(exact.square()).clamp_(
        min=max(tensor_square, least_size**2, SMALLEST_SQUARE)
    )
    error = float((_tile_means(difference.square_()) / scales).max().sqrt())
    return error if math.isfinite(error) else math.inf


def typical_size(tensor: Tensor) -> float:
    return float(tensor.detach().float().square().mean().sqrt())


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)


def _tile_means(matrix: Tensor) -> Tensor:
    """The mean of each tile; those at the ends have fewer numbers."""
    return F.avg_pool2d(matrix[None, None], TILE, ceil_mode=True)[0, 0]
