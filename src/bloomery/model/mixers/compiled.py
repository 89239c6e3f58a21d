"""Convolutions and the gated delta rule on a CPU as compiled code: `mixers.cpp`, in place of PyTorch's products.

PyTorch's operators write dozens of [B, T, H, 64, 64] and [B, T, H, E] in float32 for each layer; the code keeps a chunk
of one head in the first caches, and saves its inputs alone for backward (benchmarks/README.md).

Legend: B batch, T time, C convolved numbers, K tokens that a kernel sees, H value heads, E width of a key, F of
a value.
"""

import functools
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import library as operators

from bloomery.model.native import VECTORS, Library, library

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 64  # of a block of the convolution, whose weight's gradient is summed by itself
TAPS = 16  # that a kernel may have
PLAIN, SILU, GATED = range(3)


class _Convolution(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "weight", "bounds", "out", "dx", "dweight")),
        *((name, c_int64) for name in ("tokens", "documents", "channels", "kernel", "form")),
    )


class _Rule(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "grad", "decay", "beta", "bounds", "out", "dqkv")),
        *((name, c_void_p) for name in ("ddecay", "dbeta", "gate", "gain", "dgate", "dgain")),
        *((name, c_int64) for name in ("documents", "key_heads", "value_heads")),
        *((name, c_int64) for name in ("key_width", "value_width")),
        ("eps", c_float),
    )


class HeadSizes(NamedTuple):
    """Of a delta rule: heads, and the width of one."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int


@functools.cache
def _code() -> Any:
    """The functions of `mixers.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model.mixers", "mixers.cpp", VECTORS))
    for function in (code.mixers_convolve, code.mixers_convolve_backward):
        function.argtypes = (POINTER(_Convolution), c_int, c_int)
        function.restype = None
    for function in (code.mixers_delta_rule, code.mixers_delta_rule_backward):
        function.argtypes = (POINTER(_Rule), c_int, c_int)
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


def _bounds(first_BT: Tensor | None, batch: int, length: int) -> np.ndarray[Any, Any]:
    """Where documents start among the B T tokens, row after row, and the end of the last one."""
    if first_BT is None:
        return np.arange(0, batch * length + 1, length)
    starts = np.flatnonzero(first_BT.numpy() == np.arange(length))
    return np.append(starts, batch * length).astype(np.int64)


# Convolutions


def _convolution_call(
    x: Tensor, weight_KC: Tensor, bounds: np.ndarray[Any, Any], form: int
) -> _Convolution:
    assert x.is_contiguous() and weight_KC.is_contiguous() and weight_KC.dtype == torch.float32
    return _Convolution(
        x=x.data_ptr(),
        weight=weight_KC.data_ptr(),
        bounds=bounds.ctypes.data,
        tokens=x.shape[0] * x.shape[1],
        documents=len(bounds) - 1,
        channels=weight_KC.shape[1],
        kernel=len(weight_KC) - 1,
        form=form,
    )


def _dtype(x: Tensor, form: int) -> torch.dtype:
    """Of what is convolved, and of its gradient."""
    return torch.float32 if form == SILU else x.dtype


@operators.custom_op("bloomery::convolution", mutates_args=(), device_types="cpu")
def _convolution(x: Tensor, weight_KC: Tensor, first_BT: Tensor | None, form: int) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:2], weight_KC.shape[1], dtype=_dtype(x, form))
    bounds = _bounds(first_BT, *x.shape[:2])
    call = _convolution_call(x, weight_KC, bounds, form)
    call.out = out.data_ptr()
    _code().mixers_convolve(byref(call), x.dtype == torch.bfloat16, torch.get_num_threads())
    return out


@operators.custom_op("bloomery::convolution_backward", mutates_args=(), device_types="cpu")
def _convolution_backward(
    grad: Tensor, x: Tensor, weight_KC: Tensor, first_BT: Tensor | None, form: int
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    grad = grad.contiguous()
    assert grad.dtype == _dtype(x, form)
    dx = torch.empty_like(x)
    num_blocks = -(-grad.shape[0] * grad.shape[1] // TOKENS)
    dweight = weight_KC.new_empty(num_blocks, *weight_KC.shape)
    bounds = _bounds(first_BT, *x.shape[:2])
    call = _convolution_call(x, weight_KC, bounds, form)
    call.grad = grad.data_ptr()
    call.dx = dx.data_ptr()
    call.dweight = dweight.data_ptr()
    _code().mixers_convolve_backward(
        byref(call), x.dtype == torch.bfloat16, torch.get_num_threads()
    )
    return dx, dweight.sum(0)


@_convolution.register_fake
def _(x: Tensor, weight_KC: Tensor, first_BT: Tensor | None, form: int) -> Tensor:
    del first_BT
    return x.new_empty(*x.shape[:2], weight_KC.shape[1], dtype=_dtype(x, form))


@_convolution_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight_KC: Tensor, first_BT: Tensor | None, form: int
) -> tuple[Tensor, Tensor]:
    del grad, first_BT, form
    return x.new_empty(x.shape), torch.empty_like(weight_KC)


def _save_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:3])
    ctx.form = inputs[3]


def _differentiate_convolution(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = _convolution_backward(grad, *ctx.saved_tensors, ctx.form)
    return dx, dweight, None, None


_convolution.register_autograd(_differentiate_convolution, setup_context=_save_convolution)


def convolution(
    x_BTC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    first_BT: Tensor | None,
    form: int = PLAIN,
) -> Tensor:
    """[B, T, C] in the dtype of `x`, float32 or bfloat16; sums are float32.

    `form`: PLAIN; SILU of the result, as float32; or GATED: `x` is [B, T, 3 C], the gates before and after and what is
    convolved. first_BT: where the document of each token starts in its row; None: every row is one.
    """
    convolved: Tensor = _convolution(x_BTC, taps_of(weight_CK, bias_C), first_BT, form)
    return convolved


def taps_of(weight_CK: Tensor, bias_C: Tensor | None) -> Tensor:
    """Float32 [K + 1, C]: the weight of the own token first, and last the bias."""
    assert weight_CK.shape[1] <= TAPS
    weight = weight_CK.float()
    bias = torch.zeros_like(weight[:, 0]) if bias_C is None else bias_C.float()
    return torch.cat((weight.flip(1).mT, bias[None]))


# The delta rule


class RuleInputs(NamedTuple):
    """What a delta net's tokens are mixed from, between the projections of its input and that of its output.

    `qkv` [B, T, C]: queries and keys of key heads, values of value heads, before their convolution and SiLU, whose
    weight is [K + 1, C] as `convolution` lays it out. decay, beta: [B, T, H], float32. gate: [B, T, H F]. gain: [F].
    """

    qkv: Tensor
    weight_KC: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor
    gain: Tensor

    def contiguous(self) -> "RuleInputs":
        return RuleInputs(*(tensor.contiguous() for tensor in self))


def _rule_call(
    convolved: Tensor,
    inputs: RuleInputs,
    bounds: np.ndarray[Any, Any],
    sizes: HeadSizes,
    eps: float,
) -> _Rule:
    assert inputs.decay.dtype == inputs.beta.dtype == inputs.gain.dtype == torch.float32
    assert inputs.gate.dtype == inputs.qkv.dtype and convolved.dtype == torch.float32
    return _Rule(
        qkv=convolved.data_ptr(),
        decay=inputs.decay.data_ptr(),
        beta=inputs.beta.data_ptr(),
        gate=inputs.gate.data_ptr(),
        gain=inputs.gain.data_ptr(),
        bounds=bounds.ctypes.data,
        documents=len(bounds) - 1,
        eps=eps,
        **sizes._asdict(),
    )


@operators.custom_op("bloomery::delta_net", mutates_args=(), device_types="cpu")
def _delta_net(
    qkv: Tensor,
    weight_KC: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    gain: Tensor,
    first_BT: Tensor | None,
    sizes: list[int],
    eps: float,
) -> Tensor:
    inputs = RuleInputs(qkv, weight_KC, decay, beta, gate, gain).contiguous()
    convolved = _convolution(inputs.qkv, inputs.weight_KC, first_BT, SILU)
    out = torch.empty_like(inputs.gate)
    bounds = _bounds(first_BT, *qkv.shape[:2])
    call = _rule_call(convolved, inputs, bounds, HeadSizes(*sizes), eps)
    call.out = out.data_ptr()
    _code().mixers_delta_rule(byref(call), qkv.dtype == torch.bfloat16, torch.get_num_threads())
    return out


@operators.custom_op("bloomery::delta_net_backward", mutates_args=(), device_types="cpu")
def _delta_net_backward(
    grad: Tensor,
    qkv: Tensor,
    weight_KC: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    gain: Tensor,
    first_BT: Tensor | None,
    sizes: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    inputs = RuleInputs(qkv, weight_KC, decay, beta, gate, gain).contiguous()
    convolved = _convolution(inputs.qkv, inputs.weight_KC, first_BT, SILU)
    head_sizes = HeadSizes(*sizes)
    bounds = _bounds(first_BT, *qkv.shape[:2])
    dconvolved = torch.empty_like(convolved)
    ddecay = torch.empty_like(inputs.decay)
    dbeta = torch.empty_like(inputs.beta)
    dgate = torch.empty_like(inputs.gate)
    # Of each key head of each document, so that their sum has one order.
    dgains = gain.new_empty(len(bounds) - 1, head_sizes.key_heads, len(gain))
    call = _rule_call(convolved, inputs, bounds, head_sizes, eps)
    call.grad = grad.data_ptr()
    call.dqkv = dconvolved.data_ptr()
    call.ddecay = ddecay.data_ptr()
    call.dbeta = dbeta.data_ptr()
    call.dgate = dgate.data_ptr()
    call.dgain = dgains.data_ptr()
    _code().mixers_delta_rule_backward(
        byref(call), qkv.dtype == torch.bfloat16, torch.get_num_threads()
    )
    del convolved
    dqkv, dweight = _convolution_backward(dconvolved, inputs.qkv, inputs.weight_KC, first_BT, SILU)
    return dqkv, dweight, ddecay, dbeta, dgate, dgains.sum((0, 1))


@_delta_net.register_fake
def _(qkv: Tensor, *others: Any) -> Tensor:
    qkv.new_empty(qkv.shape, dtype=torch.float32)  # convolved
    gate: Tensor = others[3]
    return gate.new_empty(gate.shape)


@_delta_net_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    qkv: Tensor = inputs[0]
    convolved = qkv.new_empty(qkv.shape, dtype=torch.float32)
    dconvolved = torch.empty_like(convolved)
    others = [tensor.new_empty(tensor.shape) for tensor in inputs[2:6]]
    del grad, convolved
    dqkv = qkv.new_empty(qkv.shape)
    del dconvolved
    return dqkv, inputs[1].new_empty(inputs[1].shape), *others


def _save_rule(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _differentiate_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _delta_net_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *gradients, None, None, None


_delta_net.register_autograd(_differentiate_rule, setup_context=_save_rule)


def delta_net(inputs: RuleInputs, first_BT: Tensor | None, sizes: HeadSizes, eps: float) -> Tensor:
    """What each token reads, normed by head and gated: [B, T, H F] in the dtype of `qkv`.

    Queries and keys are made of length one here, queries times E^-0.5. first_BT: where the document of each token
    starts in its row; None: every row is one. Backward keeps the inputs alone. eps: of the norm.
    """
    read: Tensor = _delta_net(*inputs, first_BT, list(sizes), eps)
    return read
