"""Attention over packed documents on a CPU as compiled code: `attention.cpp`, in place of torch's flash kernel.

torch's kernel computes masked keys too, and its backward takes several times the time of its products: forward and
backward of a layer of SmolLM2 took 55 ms of a core, 13 here (benchmarks/README.md). Documents with dropout, a soft-cap
or a window shorter than they are take blockwise attention, as in `per_document`.
Legend: B batch, T time, N = B T tokens, H query heads, K key heads, E head width.
"""

import functools
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bloomery.model.attention import per_document
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    attention_operator,
    like_projection,
)
from bloomery.model.attention.per_document import document_bounds, sums_by_token
from bloomery.model.native import VECTORS, Library, library

DTYPES = (torch.float32, torch.bfloat16)


class _Input(Structure):
    _fields_ = (("numbers", c_void_p), ("token", c_int64), ("head", c_int64))


class _Call(Structure):
    _fields_ = (
        *((name, _Input) for name in ("q", "k", "v", "out", "grad")),
        *(
            (name, c_void_p)
            for name in ("into", "dq", "dk", "dv", "sums", "dk_heads", "dv_heads", "bounds")
        ),
        *((name, c_int64) for name in ("documents", "heads", "kv_heads", "width")),
        ("scale", c_float),
    )


@functools.cache
def _code() -> Any:
    """The functions of `attention.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model.attention", "attention.cpp", VECTORS))
    code.attention_begin.argtypes = (c_int,)
    code.attention_begin.restype = c_char_p
    code.attention_begin(1)
    for function in (code.attention_forward, code.attention_backward):
        function.argtypes = (POINTER(_Call), c_int, c_int)
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


def _is_supported(bounds: np.ndarray[Any, Any], q: Tensor, options: Options) -> bool:
    """Whether the compiled code computes these documents."""
    max_length = int(np.diff(bounds).max())
    return (
        options.softcap is None
        and options.dropout == 0
        and (options.window is None or options.window >= max_length)
        and q.dtype in DTYPES
    )


def _tokens(x_BHTE: Tensor) -> Tensor:
    """[B T, H, E]: a view where the tensor is [B, T, H, E] in memory."""
    rows = x_BHTE.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _input(x_NHE: Tensor) -> _Input:
    return _Input(x_NHE.data_ptr(), x_NHE.stride(0), x_NHE.stride(1))


def _call(q: Tensor, k: Tensor, v: Tensor, bounds: np.ndarray[Any, Any], scale: float) -> _Call:
    return _Call(
        q=_input(q),
        k=_input(k),
        v=_input(v),
        bounds=bounds.ctypes.data,
        documents=len(bounds) - 1,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        width=q.shape[2],
        scale=scale,
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
) -> tuple[Tensor, Tensor]:
    bounds = document_bounds(documents)
    if not _is_supported(bounds, q, options):
        return per_document.forward(q, k, v, np.diff(bounds).tolist(), documents.seed, options)
    output = like_projection(q)
    sums = sums_by_token(q)
    q_NHE = _tokens(q)
    k_NHE = _tokens(k)
    v_NHE = _tokens(v)
    call = _call(q_NHE, k_NHE, v_NHE, bounds, options.scale)
    call.into = output.data_ptr()
    call.sums = sums.data_ptr()
    _code().attention_forward(byref(call), q.dtype == torch.bfloat16, torch.get_num_threads())
    return output, sums


def gradients_by_head(q_BHTE: Tensor, k_BKTE: Tensor) -> Tensor:
    """Empty [2, B T, H, E] float32, for gradients of keys and values of query heads that share them.

    They are added in the order of the heads, whichever thread computes which.
    """
    batch, heads, length, width = q_BHTE.shape
    shares_keys = heads != k_BKTE.shape[1]
    shape = (2, batch * length, heads, width) if shares_keys else (2, 0)
    return q_BHTE.new_empty(shape, dtype=torch.float32)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    documents: QueryDocuments,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = document_bounds(documents)
    if not _is_supported(bounds, q, options):
        return per_document.backward(
            grad, q, k, v, output, sums, np.diff(bounds).tolist(), documents.seed, options
        )
    # Inputs are read by token and head, and gradients are written in the layout of a projection.
    dq = like_projection(q)
    dk = like_projection(k)
    dv = like_projection(v)
    q_NHE = _tokens(q)
    k_NHE = _tokens(k)
    v_NHE = _tokens(v)
    out_NHE = _tokens(output)
    grad_NHE = _tokens(grad)
    call = _call(q_NHE, k_NHE, v_NHE, bounds, options.scale)
    call.out = _input(out_NHE)
    call.grad = _input(grad_NHE)
    call.dq = dq.data_ptr()
    call.dk = dk.data_ptr()
    call.dv = dv.data_ptr()
    call.sums = sums.data_ptr()
    # Query heads that share keys have gradients of their own first, so that the sum has one order.
    key_gradients, value_gradients = gradients_by_head(q, k)
    call.dk_heads = key_gradients.data_ptr()
    call.dv_heads = value_gradients.data_ptr()
    _code().attention_backward(byref(call), q.dtype == torch.bfloat16, torch.get_num_threads())
    return dq, dk, dv


# On the CPU only; `first_BT` is required.
compiled = attention_operator("compiled", _forward, _backward, sums=sums_by_token, device="cpu")
