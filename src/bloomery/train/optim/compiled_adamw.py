"""AdamW of parameters on a CPU as compiled code: `adamw.cpp`, in one pass over weights, gradients and moments.

The bits are those of the operations of `adamw.ChunkedAdamW`, which compares a small update of both before it relies on
this.
"""

import functools
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    addressof,
    byref,
    c_float,
    c_int,
    c_int16,
    c_int64,
    c_uint32,
    c_void_p,
)
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bloomery.model.native import VECTORS, Library, library

Moments = Literal["float32", "bfloat16", "int8"]
_KINDS: tuple[Moments, ...] = ("float32", "bfloat16", "int8")  # as the enum of `adamw.cpp`
DTYPES = (torch.float32, torch.bfloat16)  # of weights and their gradients


class _Adam(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "gradients", "first", "second")),
        *((name, c_void_p) for name in ("first_scales", "second_scales", "seeds")),
        *((name, c_int64) for name in ("count", "piece")),
        *((name, c_float) for name in ("first_weight", "second_weight", "correction", "eps")),
        *((name, c_float) for name in ("rate", "kept", "factor")),
        ("rounds_gradients", c_int),
    )


class AdamRates(NamedTuple):
    """The numbers of an update, rounded to float32 where they are used.

    `first_weight`, `second_weight`: of the gradient and its square in the moments. `correction`: what the root of the
    second moment is divided by. `rate`: of the update, negative. `kept`: the factor of the weights. `factor`: of the
    gradients.
    """

    first_weight: float
    second_weight: float
    correction: float
    eps: float
    rate: float
    kept: float
    factor: float = 1.0


@functools.cache
def _code() -> Any:
    """The functions of `adamw.cpp`. Raises Uncompiled."""
    flags = ("-ffp-contract=off", "-fno-math-errno")
    code: Any = library(Library("bloomery.train.optim", "adamw.cpp", VECTORS, flags))
    code.adamw.argtypes = (POINTER(_Adam), c_int, c_int, c_int, c_int)
    code.adamw.restype = None
    code.round_at_random.argtypes = (c_uint32, c_void_p, c_void_p, c_int64)
    code.round_at_random.restype = None
    code.random_bits.argtypes = (c_uint32, POINTER(c_int16), c_int64)
    code.random_bits.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine. Raises Uncompiled."""
    _code()


def rounded_at_random(exact: Tensor, seed: int) -> Tensor:
    """`common.round_stochastically` of contiguous float32 with the bits of `seed`, a new tensor. Raises Uncompiled."""
    assert exact.dtype == torch.float32 and exact.is_contiguous()
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    _code().round_at_random(seed & 0xFFFFFFFF, exact.data_ptr(), rounded.data_ptr(), exact.numel())
    return rounded


def update(
    weights: Tensor,
    gradients: Tensor,
    moments: Sequence[Sequence[Tensor]],
    *,
    kind: Moments,
    rates: AdamRates,
    piece: int,
    seeds: Sequence[Sequence[int]],
    at_random: bool,
    rounds_gradients: bool = False,
) -> None:
    """Update weights and both moments in place.

    `moments`: the stored tensors of each, one, or levels and scales. `seeds`: three lists, by piece of `piece` values,
    of the bits that round weights and both moments at random. `at_random`: whether weights are rounded so.
    `rounds_gradients`: to their dtype, to the nearest, after they are multiplied by `rates.factor`.
    """
    (first, *first_scales), (second, *second_scales) = moments
    tensors = [weights, gradients, first, second, *first_scales, *second_scales]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert weights.dtype == gradients.dtype and weights.dtype in DTYPES
    by_piece = [seed & 0xFFFFFFFF for of_piece in zip(*seeds, strict=True) for seed in of_piece]
    words = (c_uint32 * len(by_piece))(*by_piece)
    call = _Adam(
        weights=weights.data_ptr(),
        gradients=gradients.data_ptr(),
        first=first.data_ptr(),
        second=second.data_ptr(),
        first_scales=first_scales[0].data_ptr() if first_scales else None,
        second_scales=second_scales[0].data_ptr() if second_scales else None,
        seeds=addressof(words),
        count=weights.numel(),
        piece=piece,
        rounds_gradients=rounds_gradients,
        **rates._asdict(),
    )
    _code().adamw(
        byref(call),
        weights.dtype == torch.bfloat16,
        _KINDS.index(kind),
        at_random,
        torch.get_num_threads(),
    )
