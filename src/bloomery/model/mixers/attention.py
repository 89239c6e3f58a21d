"""Attention as the mixer of a layer: projections, norms of heads, rotation, and a backend of `attend`.

B batch, T time, D width, H query heads, K key/value heads, E head width, S keys that are seen, Q = H E.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Layer
from bloomery.model.attention.attend import Backend, DocumentLayout, attend, decode
from bloomery.model.cache import LayerCache
from bloomery.model.norms import build_norm
from bloomery.model.rope import Rotary, rotate


class SequenceExchange(Protocol):
    """Carries heads between ranks that share each sequence; each rank has some of its tokens (`parallel.context`).

    Texts that are generated with a cache are not shared: each rank has its own.
    """

    size: int  # ranks that share a sequence

    def to_heads(
        self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's share of the heads, from this rank's tokens of all heads."""

    def to_tokens(self, y_BHTE: Tensor) -> Tensor:
        """The way back: this rank's tokens of all heads."""


def plain_backend(config: ModelConfig) -> str:
    """The backend of `model.attention` that supports the config, also with the more keys than queries of a cache."""
    return "sdpa" if config.attention_softcap is None else "math"


class Attention(nn.Module):
    """Causal attention of a layer, with heads that share keys and values.

    With `config.attention_gate` q_proj has two numbers for each of a query: head by head its query, then the gate of
    the head's output (arXiv:2505.06708).
    """

    def __init__(self, config: ModelConfig, layer: Layer, backend: str) -> None:
        super().__init__()
        self.config = config
        self.head_dim = layer.head_dim
        self.window = layer.window
        self.backend: str | Backend = backend
        # One new token of each text goes to Triton's kernel for decoding.
        self.decodes_with_kernel = backend == "triton"
        self.exchange: SequenceExchange | None = None  # with ranks that share the sequences
        self.scale = layer.attention_scale
        width = config.hidden_size
        query_width = layer.query_width
        key_width = layer.key_width
        gated_width = 2 * query_width if config.attention_gate else query_width
        self.q_proj = nn.Linear(width, gated_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.output_bias)
        if config.qk_norm in ("head", "rotated_head"):
            self.q_norm = build_norm(config, layer.head_dim)
            self.k_norm = build_norm(config, layer.head_dim)
        elif config.qk_norm == "full":
            self.q_norm = build_norm(config, query_width)
            self.k_norm = build_norm(config, key_width)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: LayerCache | None
    ) -> Tensor:
        # All heads next to each other: q is [B, T, H E], k and v are [B, T, K E].
        config = self.config
        q = self.q_proj(x_BTD)
        k = self.k_proj(x_BTD)
        v = self.v_proj(x_BTD)
        gate_BTQ = None
        if config.attention_gate:
            q_and_gate = q.unflatten(-1, (-1, 2, self.head_dim))
            q, gate_BTQ = (x.flatten(-2) for x in q_and_gate.unbind(-2))

        # Queries and keys are normed over all heads at once, or, once split into heads, each by itself, before or after
        # their rotation. Norm and rotation both compute in float32: nothing is rounded between them.
        norm_dtype = v.dtype if rotary is None else torch.promote_types(v.dtype, torch.float32)
        if config.qk_norm == "full":
            q = self.q_norm(q, norm_dtype)
            k = self.k_norm(k, norm_dtype)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if config.qk_norm == "head":
            q = self.q_norm(q, norm_dtype)
            k = self.k_norm(k, norm_dtype)
        if rotary is not None:
            rotated_dtype = norm_dtype if config.qk_norm == "rotated_head" else v.dtype
            q = rotate(q, rotary, rotated_dtype)
            k = rotate(k, rotary, rotated_dtype)
        if config.qk_norm == "rotated_head":
            q = self.q_norm(q, v.dtype)
            k = self.k_norm(k, v.dtype)
        if rotary is not None and rotary.query_scale is not None:
            q = q * rotary.query_scale.to(v.dtype)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q, k, v))

        # While text is generated, the new tokens also see the keys and values of all tokens before, from a cache. Where
        # its texts differ in length it also says which keys each one sees, windows included.
        backend = self.backend
        window = self.window
        if cache is not None:
            k_BKTE, v_BKTE, mask = cache.extend(k_BKTE, v_BKTE)
            backend = plain_backend(config)
            if mask is not None:
                layout = DocumentLayout(mask_B1TS=mask)
                window = None
            if self.decodes_with_kernel and q_BHTE.shape[2] == 1:
                backend = decode
                layout = DocumentLayout(num_keys_B=cache.num_keys(q_BHTE.device))

        # Other ranks may have the other tokens of these sequences: attention then sees all tokens of some of the heads.
        exchange = self.exchange if cache is None else None
        if exchange is not None:
            q_BHTE, k_BKTE, v_BKTE = exchange.to_heads(q_BHTE, k_BKTE, v_BKTE)
        y_BHTE = attend(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            layout,
            backend=backend,
            window=window,
            softcap=config.attention_softcap,
            scale=self.scale,
            dropout=config.attention_dropout if self.training else 0.0,
        )
        if exchange is not None:
            y_BHTE = exchange.to_tokens(y_BHTE)
        y_BTQ = y_BHTE.transpose(1, 2).flatten(2)
        if gate_BTQ is not None:
            y_BTQ = y_BTQ * torch.sigmoid(gate_BTQ)
        projected: Tensor = self.o_proj(y_BTQ)
        return projected
