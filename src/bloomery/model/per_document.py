"""One call per document of packed rows, on the CPU: no work on foreign keys, no mask, memory that grows with T.

Plain documents take torch's flash kernel; those with dropout, a soft-cap or a window shorter than they are take
blockwise attention. An operator of its own: the number of documents changes every step, and recompiles nothing.
Legend: B batch, T time, H query heads, K key heads, E head width, L length of one document.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bloomery.model import blockwise
from bloomery.model.blockwise import Context, Options, Task, like_projection

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _lengths(first_BT: Tensor) -> list[int]:
    """The length of each document, row after row."""
    starts = np.flatnonzero(first_BT.numpy() == np.arange(first_BT.shape[1]))
    lengths: list[int] = np.diff(starts, append=first_BT.numel()).tolist()
    return lengths


def _documents(x_BHT: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """[1, H, L, ...] of each document; views where the tensor is [B, T, H, ...] in memory."""
    rows = x_BHT.transpose(1, 2).flatten(0, 1)[None]
    return torch.split(rows.transpose(1, 2), lengths, 2)


def _joined(parts: Iterable[Tensor], batch: int) -> Tensor:
    """The inverse of `_documents`, [B, T, H, ...] in memory."""
    rows = torch.cat([part.transpose(1, 2) for part in parts], 1)
    return torch.unflatten(rows[0], 0, (batch, -1)).transpose(1, 2)


def _task(length: int, number: int, seed: Tensor | None, options: Options) -> Task | None:
    """What blockwise attention has to do for a document; None where the flash kernel does."""
    window, softcap, scale, dropout = options
    window = None if window is None or window >= length else window
    if window is None and softcap is None and dropout == 0:
        return None
    return Task(None, None, None if seed is None else seed + (number << 32), window, softcap, scale, dropout)


@torch.library.custom_op("bloomery::per_document", mutates_args=(), device_types="cpu")
def _forward(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    first_BT: Tensor,
    seed: Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    lengths, outs, sums = _lengths(first_BT), [], []
    documents = zip(*(_documents(x, lengths) for x in (q_BHTE, k_BKTE, v_BKTE)), strict=True)
    with torch.autocast("cpu", enabled=False):
        for number, (q, k, v) in enumerate(documents):
            task = _task(lengths[number], number, seed, Options(window, softcap, scale, dropout))
            out, total = blockwise.forward(q, k, v, task) if task else _flash(q, k, v, 0.0, True, scale=scale)
            outs.append(out)
            sums.append(total)
    return _joined(outs, len(q_BHTE)), _joined(sums, len(q_BHTE))


@_forward.register_fake
def _(q_BHTE: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q_BHTE.shape
    sums_BTH = q_BHTE.new_empty(batch, length, heads, dtype=torch.promote_types(q_BHTE.dtype, torch.float32))
    return like_projection(q_BHTE), sums_BTH.transpose(1, 2)


@torch.library.custom_op("bloomery::per_document_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    out_BHTE: Tensor,
    sums_BHT: Tensor,
    first_BT: Tensor,
    seed: Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, grads = _lengths(first_BT), []
    parts = (_documents(x, lengths) for x in (grad_BHTE, q_BHTE, k_BKTE, v_BKTE, out_BHTE, sums_BHT))
    with torch.autocast("cpu", enabled=False):
        for number, (grad, q, k, v, out, sums) in enumerate(zip(*parts, strict=True)):
            task = _task(lengths[number], number, seed, Options(window, softcap, scale, dropout))
            if task is None:
                grads.append(_flash_backward(grad, q, k, v, out, sums, 0.0, True, scale=scale))
            else:
                grads.append(blockwise.backward(grad, q, k, v, out, sums, task))
    dq, dk, dv = (_joined(part, len(q_BHTE)) for part in zip(*grads, strict=True))
    return dq, dk, dv


@_backward.register_fake
def _(_grad: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *_rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return like_projection(q_BHTE), like_projection(k_BKTE), like_projection(v_BKTE)


def _save(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.options = Options(*inputs[5:])


def _differentiate(ctx: Context, grad_BHTE: Tensor, _grad_sums: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad_BHTE, *ctx.saved_tensors, *ctx.options), *[None] * 6


_forward.register_autograd(_differentiate, setup_context=_save)


def per_document(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, first_BT: Tensor, seed: Tensor | None, options: Options
) -> Tensor:
    """[B, H, T, E]. `first_BT`: where each token's document starts; a 0-dim `seed` decides what dropout drops."""
    outputs: tuple[Tensor, Tensor] = _forward(q_BHTE, k_BKTE, v_BKTE, first_BT, seed, *options)
    return outputs[0]
