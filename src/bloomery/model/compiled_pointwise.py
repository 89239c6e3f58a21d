"""RMS norms and the gates of MLPs and experts on a CPU as compiled code: `pointwise.cpp`, in one pass each way.

PyTorch has no kernel of an RMS norm on a CPU, takes three passes for SiLU(gate) up and five for their gradients, and
keeps SiLU(gate), which backward computes again here.
"""

import functools
import math
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch import library as operators

from bloomery.model import norms
from bloomery.model.native import VECTORS, Library, library

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 64  # of a task, whose gradient of the gain is summed by itself


class _Normed(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "gain", "scales", "out", "dx", "dgain")),
        *((name, c_int64) for name in ("rows", "width")),
        ("eps", c_float),
    )


class _Gated(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "grad", "out", "dgate", "dup")),
        ("count", c_int64),
    )


class _Weighted(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "weights", "out", "dx", "dweights")),
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_float) for name in ("limit", "slope", "offset")),
    )


@functools.cache
def _code() -> Any:
    """The functions of `pointwise.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model", "pointwise.cpp", VECTORS))
    for function in (code.pointwise_norm, code.pointwise_norm_backward):
        function.argtypes = (POINTER(_Normed), c_int, c_int, c_int)
        function.restype = None
    for function in (code.pointwise_gate, code.pointwise_gate_backward):
        function.argtypes = (POINTER(_Gated), c_int, c_int)
        function.restype = None
    for function in (code.pointwise_weigh, code.pointwise_weigh_backward):
        function.argtypes = (POINTER(_Weighted), c_int, c_int)
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


# RMS norm


def _norm_call(x: Tensor, gain_D: Tensor, scales: Tensor) -> _Normed:
    assert x.is_contiguous() and gain_D.is_contiguous() and gain_D.dtype == torch.float32
    return _Normed(
        x=x.data_ptr(),
        gain=gain_D.data_ptr(),
        scales=scales.data_ptr(),
        rows=scales.numel(),
        width=len(gain_D),
    )


@operators.custom_op("bloomery::rms_norm", mutates_args=(), device_types="cpu")
def _rms_norm(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    out = torch.empty_like(x, dtype=dtype)
    call = _norm_call(x, gain_D.contiguous(), scales)
    call.out = out.data_ptr()
    call.eps = eps
    halves = (x.dtype == torch.bfloat16, dtype == torch.bfloat16)
    _code().pointwise_norm(byref(call), *halves, torch.get_num_threads())
    return out, scales


@operators.custom_op("bloomery::rms_norm_backward", mutates_args=(), device_types="cpu")
def _rms_norm_backward(
    grad: Tensor, x: Tensor, gain_D: Tensor, scales: Tensor, trains_gain: bool
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    grad = grad.contiguous()
    dx = torch.empty_like(x)
    num_tasks = -(-scales.numel() // ROWS) if trains_gain else 0
    dgains = gain_D.new_empty(num_tasks, len(gain_D))
    call = _norm_call(x, gain_D.contiguous(), scales)
    call.grad = grad.data_ptr()
    call.dx = dx.data_ptr()
    call.dgain = dgains.data_ptr() if trains_gain else None
    halves = (x.dtype == torch.bfloat16, grad.dtype == torch.bfloat16)
    _code().pointwise_norm_backward(byref(call), *halves, torch.get_num_threads())
    return dx, dgains.sum(0)


@_rms_norm.register_fake
def _(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del gain_D, eps
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, gain_D: Tensor, scales: Tensor, trains_gain: bool
) -> tuple[Tensor, Tensor]:
    del grad, scales, trains_gain
    return x.new_empty(x.shape), torch.empty_like(gain_D)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain_D, _, _ = inputs
    _, scales = output
    ctx.save_for_backward(x, gain_D, scales)
    ctx.mark_non_differentiable(scales)


def _differentiate_norm(ctx: Any, grad: Tensor, _scales: Tensor | None) -> tuple[Any, ...]:
    trains_gain = ctx.needs_input_grad[1]
    dx, dgain = _rms_norm_backward(grad, *ctx.saved_tensors, trains_gain)
    return dx, dgain if trains_gain else None, None, None


_rms_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """A `norms.RMSNormOperator`. torch's compiler fuses PyTorch's with what surrounds it."""
    if torch.compiler.is_compiling() or x.dtype not in DTYPES or dtype not in DTYPES:
        return norms.rms_norm(x, gain, eps, dtype)
    normed: Tensor = _rms_norm(x, norms.widened(gain), eps, dtype)[0]
    return normed


# SiLU times up


@operators.custom_op("bloomery::silu_times", mutates_args=(), device_types="cpu")
def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.contiguous()
    up = up.contiguous()
    assert gate.dtype == up.dtype and gate.shape == up.shape
    out = torch.empty_like(gate)
    call = _Gated(gate=gate.data_ptr(), up=up.data_ptr(), out=out.data_ptr(), count=gate.numel())
    _code().pointwise_gate(byref(call), gate.dtype == torch.bfloat16, torch.get_num_threads())
    return out


@operators.custom_op("bloomery::silu_times_backward", mutates_args=(), device_types="cpu")
def _silu_times_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate = gate.contiguous()
    up = up.contiguous()
    grad = grad.contiguous()
    dgate = torch.empty_like(gate)
    dup = torch.empty_like(up)
    call = _Gated(
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        grad=grad.data_ptr(),
        dgate=dgate.data_ptr(),
        dup=dup.data_ptr(),
        count=gate.numel(),
    )
    is_half = gate.dtype == torch.bfloat16
    _code().pointwise_gate_backward(byref(call), is_half, torch.get_num_threads())
    return dgate, dup


@_silu_times.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    del up
    return gate.new_empty(gate.shape)


@_silu_times_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    del grad
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _differentiate_gate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _silu_times_backward(grad, *ctx.saved_tensors)
    return dgate, dup


_silu_times.register_autograd(_differentiate_gate, setup_context=_save_gate)


def can_fuse(gate: Tensor, up: Tensor) -> bool:
    """Whether `silu_times` takes them. torch's compiler fuses PyTorch's operators with what surrounds them."""
    return gate.dtype == up.dtype and gate.dtype in DTYPES and not torch.compiler.is_compiling()


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) up, of one shape and dtype, rounded once. Backward keeps both."""
    product: Tensor = _silu_times(gate, up)
    return product


# Gates of experts, times the weights of their rows


def _weighted_call(
    x_SF: Tensor, weights_S: Tensor, limit: float, slope: float, offset: float
) -> _Weighted:
    assert x_SF.is_contiguous() and weights_S.is_contiguous()
    assert weights_S.dtype == torch.float32 and len(weights_S) == len(x_SF)
    return _Weighted(
        x=x_SF.data_ptr(),
        weights=weights_S.data_ptr(),
        rows=len(x_SF),
        width=x_SF.shape[1] // 2,
        limit=limit,
        slope=slope,
        offset=offset,
    )


@operators.custom_op("bloomery::weighted_gate", mutates_args=(), device_types="cpu")
def _weighted_gate(
    x_SF: Tensor, weights_S: Tensor, limit: float, slope: float, offset: float
) -> Tensor:
    x_SF = x_SF.contiguous()
    weights_S = weights_S.contiguous()
    out = x_SF.new_empty(len(x_SF), x_SF.shape[1] // 2)
    call = _weighted_call(x_SF, weights_S, limit, slope, offset)
    call.out = out.data_ptr()
    _code().pointwise_weigh(byref(call), x_SF.dtype == torch.bfloat16, torch.get_num_threads())
    return out


@operators.custom_op("bloomery::weighted_gate_backward", mutates_args=(), device_types="cpu")
def _weighted_gate_backward(
    grad: Tensor, x_SF: Tensor, weights_S: Tensor, limit: float, slope: float, offset: float
) -> tuple[Tensor, Tensor]:
    x_SF = x_SF.contiguous()
    weights_S = weights_S.contiguous()
    grad = grad.contiguous()
    assert grad.dtype == x_SF.dtype
    dx = torch.empty_like(x_SF)
    dweights = torch.empty_like(weights_S)
    call = _weighted_call(x_SF, weights_S, limit, slope, offset)
    call.grad = grad.data_ptr()
    call.dx = dx.data_ptr()
    call.dweights = dweights.data_ptr()
    is_half = x_SF.dtype == torch.bfloat16
    _code().pointwise_weigh_backward(byref(call), is_half, torch.get_num_threads())
    return dx, dweights


@_weighted_gate.register_fake
def _(x_SF: Tensor, weights_S: Tensor, limit: float, slope: float, offset: float) -> Tensor:
    del weights_S, limit, slope, offset
    return x_SF.new_empty(x_SF.shape[0], x_SF.shape[1] // 2)


@_weighted_gate_backward.register_fake
def _(
    grad: Tensor, x_SF: Tensor, weights_S: Tensor, limit: float, slope: float, offset: float
) -> tuple[Tensor, Tensor]:
    del grad, limit, slope, offset
    return x_SF.new_empty(x_SF.shape), torch.empty_like(weights_S)


def _save_weighted(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x_SF, weights_S, *numbers = inputs
    ctx.save_for_backward(x_SF, weights_S)
    ctx.numbers = numbers


def _differentiate_weighted(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx, dweights = _weighted_gate_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return dx, dweights, None, None, None


_weighted_gate.register_autograd(_differentiate_weighted, setup_context=_save_weighted)


def can_weigh(x_SF: Tensor, weights_S: Tensor) -> bool:
    """Whether `weighted_gate` takes them."""
    is_compiling = torch.compiler.is_compiling()
    return x_SF.dtype in DTYPES and weights_S.dtype == torch.float32 and not is_compiling


def weighted_gate(
    x_SF: Tensor,
    weights_S: Tensor,
    *,
    limit: float = math.inf,
    slope: float = 1.0,
    offset: float = 0.0,
) -> Tensor:
    """gate sigmoid(slope gate) (up + offset) weight, rounded once: [S, F / 2] of rows whose first half is gate.

    gate is at most the limit, up is between both signs of it. Backward keeps what comes in.
    """
    product: Tensor = _weighted_gate(x_SF, weights_S, limit, slope, offset)
    return product
