"""FlexAttention and `varlen_attn`: torch's fused kernels for packed rows on GPUs.

Legend: B batch, T time, N blocks of a row, H query heads, K key heads, E head width.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bloomery.model.attention_operator import Options

FLEX_BLOCK = 128


def block_mask(first_BT: Tensor | None, length: int, window: int | None, device: torch.device) -> object:
    """FlexAttention's BlockMask, made from block bounds: no [T, T] tensor exists, unlike in `create_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.zeros(1, length, dtype=torch.int64, device=device) if first_BT is None else first_BT

    def sees(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = first[b, query] if len(first) > 1 else first[0][query]
        seen = (key <= query) & (key >= start)
        return seen if window is None else seen & (query - key < window)

    query_N = torch.arange(0, length, FLEX_BLOCK, device=device)
    last_N = (query_N + FLEX_BLOCK - 1).clamp(max=length - 1)
    lowest_BN1, highest_BN1 = first[:, query_N, None], first[:, last_N, None]  # starts never fall along a row
    if window is not None:
        lowest_BN1 = torch.maximum(lowest_BN1, query_N[:, None] - window + 1)
        highest_BN1 = torch.maximum(highest_BN1, last_N[:, None] - window + 1)
    touched_BNN = (query_N <= query_N[:, None]) & (last_N >= lowest_BN1)
    whole_N1 = query_N[:, None] + FLEX_BLOCK <= length  # of an incomplete last block the mask is always asked
    full_BNN = whole_N1 & (query_N < query_N[:, None]) & (query_N >= highest_BN1)
    return BlockMask.from_kv_blocks(
        *_listed(touched_BNN & ~full_BNN), *_listed(touched_BNN & full_BNN), FLEX_BLOCK, sees, (length, length)
    )


def _listed(blocks_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and their numbers first in a row."""
    order = torch.argsort(blocks_BNN.int(), dim=-1, descending=True, stable=True)
    return blocks_BNN.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, first_BT: Tensor | None, options: Options) -> Tensor:
    """[B, H, T, E]; compiled by torch on first use. No dropout; no backward on the CPU."""
    assert options.dropout == 0, "FlexAttention has no dropout"
    softcap = options.softcap
    mask = block_mask(first_BT, q_BHTE.shape[2], options.window, q_BHTE.device)

    def cap(score: Tensor, _b: Tensor, _h: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return _compiled_flex()(
        q_BHTE, k_BKTE, v_BKTE, score_mod=None if softcap is None else cap, block_mask=mask, scale=options.scale,
        enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
    )  # fmt: skip


def document_offsets(first_BT: Tensor) -> Tensor:
    """int32 [n + 1]: where each document starts in the rows laid end to end, then the total.

    n is rounded up to a power of two with empty documents, so that compiled blocks see few shapes.
    """
    position_T = torch.arange(first_BT.shape[1], device=first_BT.device)
    starts = (first_BT == position_T).flatten().nonzero().squeeze(1)
    spare = (1 << (len(starts) - 1).bit_length()) - len(starts) + 1
    return torch.nn.functional.pad(starts, (0, spare), value=first_BT.numel()).int()


def varlen(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, offsets: Tensor, options: Options) -> Tensor:
    """[B, H, T, E]; half types on a GPU, from torch 2.12 on. `offsets`: `document_offsets`."""
    from torch.nn.attention.varlen import varlen_attn

    assert options.dropout == 0, "varlen_attn has no dropout"
    assert options.softcap is None, "varlen_attn has no soft-cap"
    assert options.window is None, "windows are FlexAttention's"
    batch, heads, length, _ = q_BHTE.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTE, k_BKTE, v_BKTE))
    out = varlen_attn(
        q, k, v, offsets, offsets, length, length,
        scale=options.scale, window_size=(-1, 0), enable_gqa=heads != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return torch.unflatten(out, 0, (batch, length)).transpose(1, 2)
