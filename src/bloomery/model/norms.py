"""Layer and RMS norms, computed in float32 whatever surrounds them.

They answer in the dtype of the next matmul: cast once here, q, k and v share what they save for backward.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.facts.config import ModelConfig


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul of `x` under autocast; that of `x` where no autocast is on."""
    device = x.device.type
    # `is_autocast_available` breaks torch 2.9's compile
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def widened(x: Tensor) -> Tensor:
    """In float32 at least: what sums and exponentials are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_given(x: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which on a GPU widens what a norm is given: backward would keep that. Its kernels, which take
    half precision, compute in float32 in any case.
    """
    device = x.device.type
    if device == "meta" or x.dtype == torch.float32 or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class RMSNormFunction(torch.autograd.Function):
    """RMS norm that saves its input and one number per row.

    torch has no fused kernel for it on the CPU: the composite runs six passes and saves three copies of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normed, scale = _normed(x, gain, eps)
        ctx.save_for_backward(x, gain, scale)
        return normed.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, gain, scale = ctx.saved_tensors
        grad = widened(grad)
        normed = widened(x) * scale
        product = grad * normed
        with torch.autocast(x.device.type, enabled=False):
            overlap = (product @ gain).unsqueeze(-1).div_(-x.shape[-1])
        grad_x = (grad * gain).addcmul_(normed, overlap).mul_(scale)
        # frozen under an adapter
        grad_gain = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x.to(x.dtype), grad_gain, None, None


def _normed(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm in float32 at least, and what each row was multiplied by."""
    wide = widened(x)
    scale = (
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )
    return (wide * scale).mul_(gain), scale


class RMSNormOperator(Protocol):
    def __call__(self, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * gain over the last axis, as `dtype`."""


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """An `RMSNormOperator`: torch's kernel, and on a CPU, which has none, `RMSNormFunction`."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch_rms_norm(x, gain, eps, dtype)
    # one token is normed as fast as an autograd function is called
    if not torch.is_grad_enabled():
        return _normed(x, widened(gain), eps)[0].to(dtype)
    normed: Tensor = RMSNormFunction.apply(x, widened(gain), eps, dtype)  # type: ignore[no-untyped-call]  # torch's `apply`
    return normed


def torch_rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """An `RMSNormOperator`: torch's kernel, which takes input and gain of one dtype."""
    if x.dtype == gain.dtype:
        with as_given(x):
            return F.rms_norm(x, x.shape[-1:], gain, eps).to(dtype)
    return F.rms_norm(widened(x), x.shape[-1:], widened(gain), eps).to(dtype)


class RMSNorm(nn.Module):
    """`unit_offset`: the gain is 1 + weight; without a weight it is 1.

    A simulation hands in the operator of the device it stands for.
    """

    def __init__(
        self, width: int, eps: float, *, unit_offset: bool, has_weight: bool = True
    ) -> None:
        super().__init__()
        self.operator: RMSNormOperator = rms_norm
        self.weight = nn.Parameter(torch.empty(width)) if has_weight else None
        self.width = width
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `dtype`; None: in the dtype of the next matmul."""
        if self.weight is None:
            gain = x.new_ones(x.shape[-1])
        else:
            gain = widened(self.weight) + 1 if self.unit_offset else self.weight
        return self.operator(x, gain, self.eps, dtype or working_dtype(x))


class LayerNorm(nn.Module):
    """`unit_offset`: the gain is 1 + weight."""

    def __init__(self, width: int, eps: float, *, bias: bool, unit_offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `dtype`; None: in the dtype of the next matmul."""
        gain = self.weight + 1 if self.unit_offset else self.weight
        with as_given(x) if x.dtype == gain.dtype else nullcontext():
            normed = F.layer_norm(x, self.weight.shape, gain, self.bias, self.eps)
        return normed.to(dtype or working_dtype(x))


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    has_offset = config.norm in ("rms_unit_offset", "layer_unit_offset")
    if config.norm in ("layer", "layer_unit_offset"):
        return LayerNorm(width, config.norm_eps, bias=config.norm_bias, unit_offset=has_offset)
    return RMSNorm(width, config.norm_eps, unit_offset=has_offset)
