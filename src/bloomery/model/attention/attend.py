"""Causal self-attention over packed sequences, with one function for every backend.

Legend: B batch, T queries, S keys, H query heads, K key heads (H is a multiple of K), E head width.
Rows may hold several documents; a token sees its own document alone. Padding (document -1) is a document of its own,
so no row of the softmax is ever empty.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.model.attention.blockwise import (
    Attention,
    Options,
    QueryDocuments,
    blockwise,
    reach_of,
)
from bloomery.model.attention.compiled import compiled
from bloomery.model.attention.per_document import per_document
from bloomery.model.attention.triton_attention import decode as triton_decode
from bloomery.model.attention.triton_attention import triton
from bloomery.model.norms import working_dtype

FLEX_BLOCK = 128


def block_mask(
    first_BT: Tensor | None, length: int, window: int | None, device: torch.device
) -> object:
    """FlexAttention's BlockMask, made from block bounds: no [T, T] tensor exists, unlike in `create_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if first_BT is None:
        first_BT = torch.zeros(1, length, dtype=torch.int64, device=device)
    first_keys_BT = first_BT

    def sees(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = first_keys_BT[b, query] if len(first_keys_BT) > 1 else first_keys_BT[0][query]
        in_document = (key <= query) & (key >= start)
        return in_document if window is None else in_document & (query - key < window)

    query_N = torch.arange(0, length, FLEX_BLOCK, device=device)
    last_N = (query_N + FLEX_BLOCK - 1).clamp(max=length - 1)
    # starts never fall along a row
    lowest_BN1 = first_keys_BT[:, query_N, None]
    highest_BN1 = first_keys_BT[:, last_N, None]
    if window is not None:
        lowest_BN1 = torch.maximum(lowest_BN1, query_N[:, None] - window + 1)
        highest_BN1 = torch.maximum(highest_BN1, last_N[:, None] - window + 1)
    touched_BNN = (query_N <= query_N[:, None]) & (last_N >= lowest_BN1)
    # of an incomplete last block the mask is always asked
    whole_N1 = query_N[:, None] + FLEX_BLOCK <= length
    full_BNN = whole_N1 & (query_N < query_N[:, None]) & (query_N >= highest_BN1)
    return BlockMask.from_kv_blocks(
        *_listed(touched_BNN & ~full_BNN),
        *_listed(touched_BNN & full_BNN),
        FLEX_BLOCK,
        sees,
        (length, length),
    )


def _listed(blocks_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and their numbers first in a row."""
    order = torch.argsort(blocks_BNN.int(), dim=-1, descending=True, stable=True)
    return blocks_BNN.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    # As one operator of the dispatcher, whose result selective checkpointing can keep: else compiled code calls its
    # kernels past the dispatcher. PyTorch before 2.10 has no such setting, and attention is computed again.
    name = "wrap_inductor_compiled_regions"
    options: dict[str, Any] | None = {name: True} if hasattr(config, name) else None
    return torch.compile(flex_attention, dynamic=False, options=options)


def document_offsets(first_BT: Tensor) -> Tensor:
    """int32 [n + 1]: where each document starts in the rows laid end to end, then the total.

    n is rounded up to a power of two with empty documents, so that compiled blocks see few shapes.
    """
    position_T = torch.arange(first_BT.shape[1], device=first_BT.device)
    starts = (first_BT == position_T).flatten().nonzero().squeeze(1)
    spare = (1 << (len(starts) - 1).bit_length()) - len(starts) + 1
    return torch.nn.functional.pad(starts, (0, spare), value=first_BT.numel()).int()


@dataclass(frozen=True)
class DocumentLayout:
    """Which positions see each other: computed once a forward, shared by the layers. All None: one document a row."""

    first_BT: Tensor | None = None  # where the document of each token starts in its row, int64
    mask_B1TS: Tensor | None = None  # sdpa, mask and math: True where the query may see the key
    reach: Tensor | None = None  # blockwise: `reach_of`
    offsets: Tensor | None = None  # varlen: `document_offsets`
    # sdpa, mask and math: of pictures whose tokens see each other both ways, the number of each token's, else -1.
    pictures_BT: Tensor | None = None
    # Of a cache, int32: the first keys that each text's new token sees.
    num_keys_B: Tensor | None = None


class DocumentBorders(NamedTuple):
    """What the host must know of documents: found there, or the host waits for the device that finds it."""

    offsets: Tensor  # `document_offsets`, on the device of the documents
    reach: Tensor  # `reach_of`, on the host


def borders_of(documents_BT: Tensor) -> DocumentBorders:
    """Of documents on the host."""
    first_BT = document_starts(documents_BT)
    return DocumentBorders(document_offsets(first_BT), reach_of(first_BT))


def layout_of(
    documents_BT: Tensor | None, *, backend: str, borders: DocumentBorders | None = None
) -> DocumentLayout:
    """Document numbers are contiguous in a row, padding is -1; None: every row is one document. Runs uncompiled.

    `borders`: of these documents, where they are known.
    """
    if documents_BT is None:
        return DocumentLayout()
    assert backend != "sdpa", (
        "sdpa does not keep documents apart: pass documents_BT=None or take another backend"
    )
    first_BT = document_starts(documents_BT)
    if backend in ("mask", "math"):
        position_T = torch.arange(first_BT.shape[1], device=first_BT.device)
        started_BTS = position_T >= first_BT[..., None]
        return DocumentLayout(
            first_BT, (started_BTS & (position_T <= position_T[:, None]))[:, None]
        )
    if backend == "varlen":
        offsets = document_offsets(first_BT) if borders is None else borders.offsets
        return DocumentLayout(first_BT, offsets=offsets)
    if backend == "blockwise":
        reach = reach_of(first_BT) if borders is None else borders.reach
        return DocumentLayout(first_BT, reach=reach)
    return DocumentLayout(first_BT)


def document_starts(documents_BT: Tensor) -> Tensor:
    """The position in its row at which each token's document starts: int64 [B, T]."""
    position_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    changed_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    changed_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return torch.where(changed_BT, position_T, 0).cummax(1).values


def causal_mask(queries: int, keys: int, *, window: int | None, device: torch.device) -> Tensor:
    """[T, S], True where seen: the queries are the last T of the S positions; a window counts the query itself."""
    distance_TS = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(
        keys, device=device
    )
    seen_TS = distance_TS >= 0
    return seen_TS if window is None else seen_TS & (distance_TS < window)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    layout: DocumentLayout,
    *,
    backend: "str | Backend",
    window: int | None,
    softcap: float | None,
    scale: float,
    dropout: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[B, H, T, E]. `window`: keys a query sees, itself included; `softcap`: c tanh(score / c) on the scaled scores;
    `sinks_H`: a logit of each head that takes a share of its softmax, and has no value.

    `sdpa`, `mask` and `math` take more keys than queries (a cache): the queries are then the last positions of a row.
    `backend`: a name, or a function in its place.
    Randomness of dropout comes from torch's default generator. Raises AssertionError where `supports` names a reason.
    """
    dtype = working_dtype(q_BHTE)
    q_BHTE = q_BHTE.to(dtype)
    k_BKSE = k_BKSE.to(dtype)
    v_BKSE = v_BKSE.to(dtype)
    options = Options(
        None if window is None or window >= k_BKSE.shape[2] else window,
        softcap,
        scale,
        dropout,
        sinks_H,
    )
    run = _BACKENDS[backend] if isinstance(backend, str) else backend
    return run(q_BHTE, k_BKSE, v_BKSE, layout, options)


def _seen(q_BHTE: Tensor, k_BKSE: Tensor, layout: DocumentLayout, window: int | None) -> Tensor:
    """The mask of a layer, broadcastable to [B, H, T, S]."""
    pictures_BT = layout.pictures_BT
    if layout.mask_B1TS is not None and window is None and pictures_BT is None:
        return layout.mask_B1TS
    causal_TS = causal_mask(q_BHTE.shape[2], k_BKSE.shape[2], window=window, device=q_BHTE.device)
    seen = causal_TS if layout.mask_B1TS is None else causal_TS & layout.mask_B1TS
    if pictures_BT is None:
        return seen
    same_BTT = (pictures_BT[:, None] == pictures_BT[..., None]) & (pictures_BT >= 0)[:, None]
    num_old = k_BKSE.shape[2] - q_BHTE.shape[2]  # keys of a cache: a picture is read as a whole
    return seen | F.pad(same_BTT, (num_old, 0))[:, None]


def _sdpa(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    """scaled_dot_product_attention, with a mask only where the causal flag is not enough."""
    assert options.softcap is None, "scaled_dot_product_attention has no soft-cap"
    assert options.sinks_H is None, "scaled_dot_product_attention has no sinks"
    queries = q_BHTE.shape[2]
    keys = k_BKSE.shape[2]
    has_no_mask = layout.mask_B1TS is None and options.window is None and layout.pictures_BT is None
    mask = None
    if not (has_no_mask and queries in (1, keys)):
        mask = _seen(q_BHTE, k_BKSE, layout, options.window)
    # A branch: compiled for every length, the comparison is a symbol, which the flag may not be.
    causal = True if has_no_mask and queries == keys and queries > 1 else False  # noqa: SIM210 - bool() keeps the symbol
    return F.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        mask,
        options.dropout,
        causal,
        scale=options.scale,
        enable_gqa=q_BHTE.shape[1] != k_BKSE.shape[1],
    )


def _math(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    """Every score at once, softmax in float32 (float64 stays): the plainest form, and the oracle of the others."""
    batch, heads, queries, width = q_BHTE.shape
    _, key_heads, keys, _ = k_BKSE.shape
    # heads that share keys
    grouped = q_BHTE.reshape(batch, key_heads, heads // key_heads * queries, width)
    scores = (grouped @ k_BKSE.mT).view(batch, heads, queries, keys) * options.scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~_seen(q_BHTE, k_BKSE, layout, options.window), float("-inf"))
    if options.sinks_H is not None:
        sinks = options.sinks_H.to(scores.dtype)[:, None, None].expand(batch, -1, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    shares = torch.softmax(scores, -1)[..., :keys]
    shares = F.dropout(shares, options.dropout).to(q_BHTE.dtype)
    return (shares.reshape(batch, key_heads, -1, keys) @ v_BKSE).view(q_BHTE.shape)


def _blockwise(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    rows = QueryDocuments(layout.first_BT, layout.reach, _seed(options.dropout))
    return blockwise(q_BHTE, k_BKTE, v_BKTE, rows, options)


def _triton(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    assert options.sinks_H is None, "sinks have not been tried with Triton"
    documents = QueryDocuments(layout.first_BT, None, _seed(options.dropout))
    return triton(q_BHTE, k_BKTE, v_BKTE, documents, options)


def decode(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    """Triton's kernel for one new token of each text, over the keys of a cache; no gradients."""
    assert q_BHTE.shape[2] == 1, "several tokens of a text see different keys"
    assert options.window is None, "a cache keeps no key before a window"
    assert options.sinks_H is None, "the kernel for decoding has no sinks"
    numbers: Tensor = triton_decode(
        q_BHTE, k_BKSE, v_BKSE, layout.num_keys_B, options.softcap, options.scale
    )
    return numbers


def _by_document(
    run: Attention,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    layout: DocumentLayout,
    options: Options,
) -> Tensor:
    first_BT = layout.first_BT
    if first_BT is None:
        first_BT = torch.zeros(q_BHTE.shape[0], q_BHTE.shape[2], dtype=torch.int64)
    return run(
        q_BHTE, k_BKTE, v_BKTE, QueryDocuments(first_BT, None, _seed(options.dropout)), options
    )


def _flex(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    """[B, H, T, E]; compiled by torch on first use. No dropout; no backward on the CPU."""
    assert options.dropout == 0, "FlexAttention has no dropout"
    assert options.sinks_H is None, "sinks have not been tried with FlexAttention"
    softcap = options.softcap
    mask = block_mask(layout.first_BT, q_BHTE.shape[2], options.window, q_BHTE.device)

    def cap(score: Tensor, _b: Tensor, _h: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return _compiled_flex()(
        q_BHTE,
        k_BKTE,
        v_BKTE,
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        scale=options.scale,
        enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
    )


def _varlen(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, layout: DocumentLayout, options: Options
) -> Tensor:
    """[B, H, T, E]; half types on a GPU, from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    assert options.dropout == 0, "varlen_attn has no dropout"
    assert options.softcap is None, "varlen_attn has no soft-cap"
    assert options.sinks_H is None, "varlen_attn has no sinks"
    assert options.window is None, "windows are FlexAttention's"
    batch, heads, length, _ = q_BHTE.shape
    offsets = layout.offsets
    if offsets is None:  # every row is a document
        offsets = torch.arange(
            0, batch * length + 1, length, dtype=torch.int32, device=q_BHTE.device
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTE, k_BKTE, v_BKTE))
    context_NHE = varlen_attn(
        q,
        k,
        v,
        offsets,
        offsets,
        length,
        length,
        scale=options.scale,
        window_size=(-1, 0),
        enable_gqa=heads != k.shape[1],
    )
    assert isinstance(context_NHE, Tensor)
    return torch.unflatten(context_NHE, 0, (batch, length)).transpose(1, 2)


def _seed(dropout: float) -> Tensor | None:
    """A draw of torch's default generator on the CPU: restoring its state repeats every mask."""
    return torch.randint(2**62, ()) if dropout else None


Backend = Callable[[Tensor, Tensor, Tensor, DocumentLayout, Options], Tensor]
_BACKENDS: dict[str, Backend] = {
    "sdpa": _sdpa,
    "mask": _sdpa,
    "per_document": partial(_by_document, per_document),
    "compiled": partial(_by_document, compiled),
    "varlen": _varlen,
    "flex": _flex,
    "blockwise": _blockwise,
    "math": _math,
    "triton": _triton,
}
