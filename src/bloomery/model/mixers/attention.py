"""Attention as the mixer of a layer: projections, norms of heads, rotation, and a backend of `attend`.

B batch, T time, D width, H query heads, K key/value heads, E head width, S keys that are seen, Q = H E.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Layer
from bloomery.model.attention.attend import Backend, DocumentLayout, attend, decode
from bloomery.model.cache import LayerCache, VisiblePast
from bloomery.model.norms import RMSNorm, build_norm
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
    needs_scores = config.attention_softcap is not None or config.attention_sinks
    return "math" if needs_scores else "sdpa"


class Attention(nn.Module):
    """Causal attention of a layer, with heads that share keys and values.

    With `config.attention_gate` q_proj has two numbers for each of a query: head by head its query, then the gate of
    the head's output (arXiv:2505.06708).

    A layer may have no keys and values of its own: it is given `lent` ones, as its queries see them, which the forward
    of the earlier layer `counting.Layer.keys_of` returns beside its output.
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
        self.sinks: nn.Parameter | None = None
        self.g_proj: nn.Linear | None = None
        self.lends_keys = layer.lends_keys
        self.build(layer)

    def build(self, layer: Layer) -> None:
        """The projections and norms."""
        config = self.config
        width = config.hidden_size
        query_width = layer.query_width
        key_width = layer.key_width
        gated_width = 2 * query_width if config.attention_gate else query_width
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(layer.num_heads))
        if config.head_gate:
            self.g_proj = nn.Linear(width, layer.num_heads, bias=False)
        self.q_proj = nn.Linear(width, gated_width, bias=config.attention_bias)
        has_keys = layer.keys_of is None
        self.k_proj: nn.Linear | None = None
        self.v_proj: nn.Linear | None = None
        if has_keys:
            self.k_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        if has_keys and not layer.keys_are_values:
            self.v_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.output_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.v_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            self.q_norm = build_norm(config, query_width if is_full else layer.head_dim)
            if has_keys:
                self.k_norm = build_norm(config, key_width if is_full else layer.head_dim)
        if config.value_norm and has_keys:
            self.v_norm = RMSNorm(
                layer.head_dim, config.norm_eps, unit_offset=False, has_weight=False
            )

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        layout: DocumentLayout,
        cache: LayerCache | None,
        lent: VisiblePast | None = None,
    ) -> Tensor | tuple[Tensor, VisiblePast]:
        config = self.config
        q_BHTE, gate_BTQ = self.queries(x_BTD, rotary)
        past = self.keys_and_values(x_BTD, rotary) if lent is None else lent

        # While text is generated, the new tokens also see the keys and values of all tokens before, from a cache. Where
        # its texts differ in length it also says which keys each one sees, windows included.
        backend = self.backend
        window = self.window
        if cache is not None:
            if lent is None:
                past = cache.extend(past.keys, past.values)
            backend = plain_backend(config)
            if past.mask is not None:
                layout = DocumentLayout(mask_B1TS=past.mask)
                window = None
            if self.decodes_with_kernel and q_BHTE.shape[2] == 1 and self.sinks is None:
                backend = decode
                layout = DocumentLayout(num_keys_B=cache.num_keys(q_BHTE.device))
        k_BKTE = past.keys
        v_BKTE = past.values

        # Other ranks may have the other tokens of these sequences: attention then sees all tokens of some of the heads.
        exchange = self.exchange if cache is None else None
        if exchange is not None:
            assert self.sinks is None, "each rank would have the sinks of all heads"
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
            sinks_H=self.sinks,
        )
        if exchange is not None:
            y_BHTE = exchange.to_tokens(y_BHTE)
        y_BTQ = self.output(y_BHTE)
        if gate_BTQ is not None:
            y_BTQ = y_BTQ * torch.sigmoid(gate_BTQ)
        if self.g_proj is not None:
            gate_BTH = torch.sigmoid(self.g_proj(x_BTD))
            y_BTQ = (y_BTQ.unflatten(-1, (-1, self.head_dim)) * gate_BTH[..., None]).flatten(-2)
        projected: Tensor = self.o_proj(y_BTQ)
        return (projected, past) if self.lends_keys else projected

    def queries(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, E], and the gate [B, T, H E] of what attention answers."""
        # All heads next to each other: q is [B, T, H E].
        q = self.q_proj(x_BTD)
        gate_BTQ = None
        if self.config.attention_gate:
            q_and_gate = q.unflatten(-1, (-1, 2, self.head_dim))
            q, gate_BTQ = (x.flatten(-2) for x in q_and_gate.unbind(-2))
        q_BHTE = self.turned_heads(q, self.q_norm, rotary)
        if rotary is not None and rotary.query_scale is not None:
            q_BHTE = q_BHTE * rotary.query_scale.to(q_BHTE.dtype).transpose(1, 2)
        return q_BHTE, gate_BTQ

    def output(self, y_BHTE: Tensor) -> Tensor:
        """What the last projection reads, all heads next to each other."""
        return y_BHTE.transpose(1, 2).flatten(2)

    def keys_and_values(self, x_BTD: Tensor, rotary: Rotary | None) -> VisiblePast:
        """Those of the new tokens alone."""
        assert self.k_proj is not None, "the keys of another layer are handed in"
        k = self.k_proj(x_BTD)
        v = k if self.v_proj is None else self.v_proj(x_BTD)
        v_BTKE = v.unflatten(-1, (-1, self.head_dim))
        if self.v_norm is not None:
            v_BTKE = self.v_norm(v_BTKE)
        return VisiblePast(
            self.turned_heads(k, self.k_norm, rotary), v_BTKE.transpose(1, 2), mask=None
        )

    def turned_heads(self, x: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
        """Queries or keys, normed and rotated: [B, heads, T, E] of [B, T, heads E].

        They are normed over all heads at once, or, once split into heads, each by itself, before or after their
        rotation. Norm and rotation both compute in float32: nothing is rounded between them.
        """
        dtype = x.dtype
        norm_dtype = dtype if rotary is None else torch.promote_types(dtype, torch.float32)
        if norm is not None and self.config.qk_norm == "full":
            x = norm(x, norm_dtype)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.config.qk_norm == "head":
            x = norm(x, norm_dtype)
        is_normed_last = norm is not None and self.config.qk_norm == "rotated_head"
        if rotary is not None:
            x = rotate(x, rotary, norm_dtype if is_normed_last else dtype)
        if norm is not None and is_normed_last:
            x = norm(x, dtype)
        return x.transpose(1, 2)
