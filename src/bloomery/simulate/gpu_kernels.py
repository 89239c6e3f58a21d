"""A GPU's kernels in place of the CPU's, where they hold other memory.

Fake tensors stand on the CPU whatever the plan's device is: PyTorch without CUDA or ROCm differentiates nothing else.
Legend: B batch, T time, H query heads, K key heads, E head width.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bloomery.model import heads, norms
from bloomery.model.attention import attend as attention
from bloomery.model.attention.attend import Layout
from bloomery.model.limits import GPU_PIECE
from bloomery.model.norms import widened, working_dtype
from bloomery.train.optim import common as optim_pieces

FLASH_LIKE = {"sdpa", "varlen", "flex"}
_lean_rms_norm = norms.rms_norm


@contextmanager
def gpu_kernels(*, fused: bool) -> Iterator[None]:
    """While it is entered a GPU's dropout, RMS norm, attention, whole rows of logits and pieces of updates are run.

    `fused`: PyTorch has fused attention for the GPU; without it every score exists.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **how: Any) -> Tensor:
        if how["backend"] in FLASH_LIKE and fused:
            dtype = working_dtype(q)
            attended: Tensor = _flash(q.to(dtype), k.to(dtype), v.to(dtype))[0]
            return attended
        if how["backend"] in FLASH_LIKE | {"mask"}:
            how["backend"] = "math"
        return attention.attend(q, k, v, layout, **how)

    with (
        mock.patch("torch.nn.functional.dropout", _dropout),
        mock.patch.object(norms, "rms_norm", _rms_norm),
        mock.patch.object(heads, "CPU_TILE", sys.maxsize),
        mock.patch.object(optim_pieces, "CPU_PIECE", GPU_PIECE),
        mock.patch("bloomery.model.decoder.attend", attend),
    ):
        yield


def _dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Keeps a mask of one byte a number; the CPU's keeps what it multiplies with."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """torch's fused kernel keeps what ours does, but of a half-precision input the float32 one that it is given."""
    return _lean_rms_norm(x if x.dtype == gain.dtype else widened(x), gain, eps, dtype)


@torch.library.custom_op("bloomery::flash", mutates_args=())
def _flash(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao, arXiv:2307.08691) as PyTorch calls it: the output and a log-sum-exp a query."""
    raise NotImplementedError("it has the memory of an attention, and no numbers")


@_flash.register_fake
def _(q_BHTE: Tensor, _k: Tensor, _v: Tensor) -> tuple[Tensor, Tensor]:
    return _projected(q_BHTE), q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.float32)


@torch.library.custom_op("bloomery::flash_backward", mutates_args=())
def _flash_backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, out_BHTE: Tensor, sums_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("it has the memory of an attention, and no numbers")


@_flash_backward.register_fake
def _(_grad: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *_rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _projected(q_BHTE), _projected(k_BKTE), _projected(v_BKTE)


def flash_backward(_grad: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """With its scratch: the queries' gradient is summed in float32, beside one more number a query."""
    gradients = tuple(_projected(x) for x in (q_BHTE, k_BKTE, v_BKTE))
    summed = torch.empty(q_BHTE.shape, dtype=torch.float32), torch.empty_like(rest[-1])
    del summed
    return gradients


def _projected(x_BHTE: Tensor) -> Tensor:
    return x_BHTE.new_empty(x_BHTE.transpose(1, 2).shape).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad_BHTE: Tensor, _grad_sums: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _flash_backward(grad_BHTE, *ctx.saved_tensors)
    return gradients


_flash.register_autograd(_differentiate, setup_context=_save)
