"""One call per document of packed sequences, on the CPU: no work on masked keys, no mask, memory linear in T.

Plain documents take torch's flash kernel; those with dropout, a soft-cap or a window shorter than they are take
blockwise attention. An operator of its own: the number of documents changes every step, and recompiles nothing.
Legend: B batch, T time, H query heads, K key heads, E head width, L length of one document.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.model.attention import blockwise
from bloomery.model.attention.blockwise import (
    AttentionCall,
    Options,
    QueryDocuments,
    attention_operator,
    sums_like,
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def document_bounds(documents: QueryDocuments) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where documents start among the B T tokens, row after row, and the end of the last one."""
    first_BT = documents.first_BT
    assert first_BT is not None
    starts = np.flatnonzero(first_BT.numpy() == np.arange(first_BT.shape[1]))
    return np.append(starts, first_BT.numel()).astype(np.int64)


def _lengths(documents: QueryDocuments) -> list[int]:
    """The length of each document, row after row."""
    lengths: list[int] = np.diff(document_bounds(documents)).tolist()
    return lengths


def _documents(x_BHT: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """[1, H, L, ...] of each document; views where the tensor is [B, T, H, ...] in memory."""
    rows = x_BHT.transpose(1, 2).flatten(0, 1)[None]
    return torch.split(rows.transpose(1, 2), lengths, 2)


def _joined(parts: Iterable[Tensor], batch: int) -> Tensor:
    """The inverse of `_documents`, [B, T, H, ...] in memory."""
    rows = torch.cat([part.transpose(1, 2) for part in parts], 1)
    return torch.unflatten(rows[0], 0, (batch, -1)).transpose(1, 2)


def _padding(q_1HLE: Tensor) -> int:
    """How many zeros to append to a document, so that lengths repeat.

    torch keeps some 3 MB of half-precision kernels for each length, of float32 none. Lengths are padded to multiples
    of 64 tokens; of a longer document, to multiples of a power of two that is an eighth of its length at most.
    """
    length = q_1HLE.shape[2]
    if q_1HLE.dtype in (torch.float32, torch.float64):
        return 0
    multiple = max(64, 1 << max(0, length.bit_length() - 4))
    return -length % multiple


def _padded(parts: Iterable[Tensor], padding: int) -> list[Tensor]:
    """[1, H, L + padding, ...]. No real query sees the zeros, and their own gradients are zero."""
    return [F.pad(x, (0, 0) * (x.ndim - 3) + (0, padding)) if padding else x for x in parts]


def _trimmed(parts: Iterable[Tensor], length: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :, :length] for x in parts)


def _document_call(
    call_class: type[AttentionCall], length: int, number: int, seed: Tensor | None, options: Options
) -> AttentionCall | None:
    """The blockwise call of a document; None where the flash kernel supports it."""
    hides_keys = options.window is not None and options.window < length
    if not hides_keys and options.softcap is None and options.dropout == 0:
        return None
    return call_class(
        first_BT=None,
        reach=None,
        seed=None if seed is None else seed + (number << 32),
        window=options.window if hides_keys else None,
        softcap=options.softcap,
        scale=options.scale,
        dropout=options.dropout,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    seed: Tensor | None,
    options: Options,
    call_class: type[AttentionCall] = AttentionCall,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, E] and the log-sum-exp [B, H, T] of documents of these lengths, row after row.

    `call_class`: of the documents that blockwise attention computes.
    """
    outputs = []
    sums = []
    documents = zip(*(_documents(x, lengths) for x in (q, k, v)), strict=True)
    for number, (query, key, value) in enumerate(documents):
        call = _document_call(call_class, lengths[number], number, seed, options)
        if call is None:
            inputs = _padded((query, key, value), _padding(query))
            document_output, document_sums = _trimmed(
                _flash(*inputs, 0.0, True, scale=options.scale), lengths[number]
            )
        else:
            document_output, document_sums = blockwise.forward(query, key, value, call)
        outputs.append(document_output)
        sums.append(document_sums)
    return _joined(outputs, len(q)), _joined(sums, len(q))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    lengths: list[int],
    seed: Tensor | None,
    options: Options,
    call_class: type[AttentionCall] = AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; arguments as in `forward`, whose results `output` and `sums` are."""
    gradients = []
    documents = zip(*(_documents(x, lengths) for x in (grad, q, k, v, output, sums)), strict=True)
    for number, tensors in enumerate(documents):
        call = _document_call(call_class, lengths[number], number, seed, options)
        d_output, query, key, value, document_output, document_sums = tensors
        if call is None:
            inputs = _padded(tensors, _padding(query))
            gradients.append(
                _trimmed(_flash_backward(*inputs, 0.0, True, scale=options.scale), lengths[number])
            )
        else:
            gradients.append(
                blockwise.backward(
                    d_output, query, key, value, document_output, document_sums, call
                )
            )
    dq, dk, dv = (
        _joined(document_parts, len(q)) for document_parts in zip(*gradients, strict=True)
    )
    return dq, dk, dv


def sums_by_token(q_BHTE: Tensor) -> Tensor:
    """Empty [B, H, T] for log-sum-exps, as `_joined` lays them out: [B, T, H] in memory."""
    return sums_like(q_BHTE.transpose(1, 2)).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, _lengths(documents), documents.seed, options)


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
    return backward(grad, q, k, v, output, sums, _lengths(documents), documents.seed, options)


# On the CPU only; `first_BT` is required.
per_document = attention_operator(
    "per_document", _forward, _backward, sums=sums_by_token, device="cpu"
)
