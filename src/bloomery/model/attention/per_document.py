"""One call per document of packed sequences, on the CPU: no work on masked keys, no mask, memory linear in T.

Plain documents take torch's flash kernel; those with dropout, a soft-cap or a window shorter than they are take
blockwise attention. An operator of its own: the number of documents changes every step, and recompiles nothing.
Legend: B batch, T time, H query heads, K key heads, E head width, L length of one document.
"""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.model.attention import blockwise
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    Task,
    attention_operator,
    sums_like,
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _lengths(rows: QueryDocuments) -> list[int]:
    """The length of each document, row after row."""
    first_BT = rows.first_BT
    assert first_BT is not None
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


def _spare(q_1HLE: Tensor) -> int:
    """Zeros to put behind a document so that lengths repeat: torch keeps some 3 MB of half-precision kernels for each.

    In steps of 64 tokens, an eighth of a long document at most. Float32 has no kernels of its own for a length.
    """
    length = q_1HLE.shape[2]
    exact = q_1HLE.dtype in (torch.float32, torch.float64)
    return 0 if exact else -length % max(64, 1 << max(0, length.bit_length() - 4))


def _lengthened(parts: Iterable[Tensor], spare: int) -> list[Tensor]:
    """[1, H, L + spare, ...]. No real query sees the zeros, and what they would give their keys is zero."""
    return [F.pad(x, (0, 0) * (x.ndim - 3) + (0, spare)) if spare else x for x in parts]


def _shortened(parts: Iterable[Tensor], length: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :, :length] for x in parts)


def _task(
    kind: type[Task], length: int, number: int, seed: Tensor | None, options: Options
) -> Task | None:
    """The blockwise task of a document; None where the flash kernel supports it."""
    window, softcap, scale, dropout = options
    window = None if window is None or window >= length else window
    if window is None and softcap is None and dropout == 0:
        return None
    return kind(
        None, None, None if seed is None else seed + (number << 32), window, softcap, scale, dropout
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    seed: Tensor | None,
    options: Options,
    kind: type[Task] = Task,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of documents of these lengths, row after row; `kind` is blockwise attention's."""
    outs = []
    totals = []
    documents = zip(*(_documents(x, lengths) for x in (q, k, v)), strict=True)
    for number, (q_one, k_one, v_one) in enumerate(documents):
        task = _task(kind, lengths[number], number, seed, options)
        if task is None:
            longer = _lengthened((q_one, k_one, v_one), _spare(q_one))
            out, total = _shortened(
                _flash(*longer, 0.0, True, scale=options.scale), lengths[number]
            )
        else:
            out, total = blockwise.forward(q_one, k_one, v_one, task)
        outs.append(out)
        totals.append(total)
    return _joined(outs, len(q)), _joined(totals, len(q))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    lengths: list[int],
    seed: Tensor | None,
    options: Options,
    kind: type[Task] = Task,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grads = []
    parts = (_documents(x, lengths) for x in (grad, q, k, v, out, sums))
    for number, one in enumerate(zip(*parts, strict=True)):
        task = _task(kind, lengths[number], number, seed, options)
        if task is None:
            longer = _lengthened(one, _spare(one[1]))
            grads.append(
                _shortened(
                    _flash_backward(*longer, 0.0, True, scale=options.scale), lengths[number]
                )
            )
        else:
            d_out, query, key, value, out_one, sums_one = one
            grads.append(blockwise.backward(d_out, query, key, value, out_one, sums_one, task))
    dq, dk, dv = (_joined(part, len(q)) for part in zip(*grads, strict=True))
    return dq, dk, dv


def _sums_by_token(q_BHTE: Tensor) -> Tensor:
    """[B, H, T] as `_joined` lays it out: [B, T, H] in memory."""
    return sums_like(q_BHTE.transpose(1, 2)).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryDocuments, options: Options
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, _lengths(rows), rows.seed, options)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    rows: QueryDocuments,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(grad, q, k, v, out, sums, _lengths(rows), rows.seed, options)


# On the CPU only; `first_BT` is required.
per_document = attention_operator(
    "per_document", _forward, _backward, sums=_sums_by_token, device="cpu"
)
