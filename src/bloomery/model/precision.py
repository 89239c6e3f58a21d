"""What a matrix product computes in."""

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives a matrix product of `x`; that of `x` where no autocast is on."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # `is_autocast_available` breaks torch 2.9's compile
        return torch.get_autocast_dtype(device)
    return x.dtype


def widened(x: Tensor) -> Tensor:
    """In float32 at least: what sums and exponentials are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
