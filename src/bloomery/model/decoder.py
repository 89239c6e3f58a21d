"""The decoder: tokens in, whatever the head makes of them out. Parameter names are those of transformers' Llama.

B batch, T time, D width, H query heads, K key/value heads, E head width, F width inside the MLP, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.attention.attend import Backend, DocumentLayout, attend, layout_of
from bloomery.model.cache import Cache, LayerCache
from bloomery.model.compiled_scores import RowsOf
from bloomery.model.config import ModelConfig
from bloomery.model.heads import Head, Logits
from bloomery.model.norms import build_norm
from bloomery.model.rope import Rotary, rotary_tables, rotate
from bloomery.model.transformers_backend import TransformersBackbone, output_of

ALL_LOGITS = Logits()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def plain_backend(config: ModelConfig) -> str:
    """The backend of `model.attention` that supports the config, with or without a cache."""
    return "sdpa" if config.attention_softcap is None else "math"


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.config = config
        self.window = config.window(layer)
        self.backend: str | Backend = backend
        self.scale = (
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        )
        width = config.hidden_size
        queries = config.query_width
        keys = config.key_width
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, width, bias=config.output_bias)
        if config.qk_norm != "none":
            self.q_norm = build_norm(
                config, config.head_dim if config.qk_norm == "head" else queries
            )
            self.k_norm = build_norm(config, config.head_dim if config.qk_norm == "head" else keys)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: LayerCache | None
    ) -> Tensor:
        config = self.config
        q = self.q_proj(x_BTD)
        k = self.k_proj(x_BTD)
        v = self.v_proj(x_BTD)
        # Norm and rotation both compute in float32: nothing is rounded between them.
        between = v.dtype if rotary is None else torch.promote_types(v.dtype, torch.float32)
        if config.qk_norm == "full":
            q = self.q_norm(q, between)
            k = self.k_norm(k, between)
        q, k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (q, k, v))
        if config.qk_norm == "head":
            q = self.q_norm(q, between)
            k = self.k_norm(k, between)
        if rotary is not None:
            q = rotate(q, rotary, v.dtype)
            k = rotate(k, rotary, v.dtype)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q, k, v))
        backend = self.backend
        window = self.window
        if cache is not None:
            k_BKTE, v_BKTE, mask = cache.extend(k_BKTE, v_BKTE)
            backend = plain_backend(config)
            if mask is not None:
                layout = DocumentLayout(mask_B1TS=mask)
                window = None
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
        projected: Tensor = self.o_proj(y_BHTE.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[config.activation]
        self.gate_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
            if config.gated_mlp
            else None
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: with a gate as in arXiv:2002.05202, without one a plain two-layer MLP."""
        if self.gate_proj is None:
            inner_BTF = self.activate(self.up_proj(x_BTD))
        else:
            inner_BTF = self.activate(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        projected: Tensor = self.down_proj(inner_BTF)
        return projected


class Block(nn.Module):
    """One layer. Which norms exist follows `norm_placement`; their names are those of transformers for each case."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.dropout = config.residual_dropout
        for name in config.block_norms:
            self.add_module(name, build_norm(config, config.hidden_size))
        self.self_attn = Attention(config, layer, backend)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        layout: DocumentLayout,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Two additions to the residual stream, with norms before, after or on both sides."""
        before = self.placement != "after"
        after = self.placement != "before"
        y_BTD = self.input_layernorm(x_BTD) if before else x_BTD
        y_BTD = self.drop(self.self_attn(y_BTD, rotary, layout, cache))
        x_BTD = x_BTD + (self.post_attention_layernorm(y_BTD) if after else y_BTD)
        y_BTD = x_BTD
        if before:  # Llama calls the norm before its MLP post_attention_layernorm
            y_BTD = (self.pre_feedforward_layernorm if after else self.post_attention_layernorm)(
                x_BTD
            )
        y_BTD = self.drop(self.mlp(y_BTD))
        return x_BTD + (self.post_feedforward_layernorm(y_BTD) if after else y_BTD)

    def drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout) if self.dropout and self.training else x_BTD


def blank_embedding(rows: int, width: int) -> nn.Embedding:
    """Its weight is undefined: drawing one on the meta device would import torch's compiler, which takes a second."""
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return embedding


class Backbone(nn.Module):
    """Everything below the head."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embedding_noise = 0.0  # of NEFTune, in training
        # whether backward adds to the embedding's `.grad` by itself: `compiled_scores.RowsOf`
        self.adds_rows = False
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = blank_embedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, backend) for layer in range(config.num_layers)
        )
        self.norm = build_norm(config, config.hidden_size)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        positions = self.positions(tokens_BT, positions_BT, cache)
        x_BTD = self.embed(tokens_BT, positions)
        layout = layout_of(documents_BT, backend=self.backend)
        rotary = self.rotary(positions)
        for layer, block in enumerate(self.layers):
            x_BTD = block(
                x_BTD, rotary[layer], layout, None if cache is None else cache.layers[layer]
            )
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        normed: Tensor = self.norm(x_BTD)
        return normed

    def positions(
        self, tokens_BT: Tensor, positions_BT: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """[B, T] when given, else [T] from where the cache ends, [B, 1] for several of its slots."""
        count = tokens_BT.shape[1]
        end = count if cache is None else cache.length + count
        if (
            self.config.positions == "learned"
            and end > self.config.max_positions
            and positions_BT is None
        ):
            raise UserError(
                f"{end:,} tokens exceed the model's {self.config.max_positions:,} learned positions",
                fix="shorten the text",
            )
        if positions_BT is not None:
            return positions_BT
        return (
            torch.arange(end, device=tokens_BT.device)
            if cache is None
            else cache.positions(count, tokens_BT.device)
        )

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTD: Tensor
        if self.adds_rows and torch.is_grad_enabled():
            x_BTD = RowsOf.apply(self.embed_tokens.weight, tokens_BT)  # type: ignore[no-untyped-call]  # torch's `apply`
        else:
            x_BTD = self.embed_tokens(tokens_BT)
        if self.embedding_noise and self.training:
            # NEFTune (arXiv:2310.05914): uniform in +-alpha / sqrt(T D), as in transformers.
            bound = self.embedding_noise / (x_BTD.shape[1] * x_BTD.shape[2]) ** 0.5
            x_BTD = x_BTD + torch.empty_like(x_BTD).uniform_(-bound, bound)
        if self.config.scale_embeddings:
            # Gemma rounds the factor to the weights' precision, and was trained that way.
            x_BTD = x_BTD * torch.tensor(self.config.hidden_size**0.5, dtype=x_BTD.dtype).item()
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.embed_positions(positions)
        rate = self.config.embedding_dropout
        return F.dropout(x_BTD, rate) if rate and self.training else x_BTD

    def rotary(self, positions: Tensor) -> list[Rotary | None]:
        """The tables of every layer; layers share at most two of them."""
        config = self.config
        if config.positions == "learned":
            return [None] * config.num_layers
        shared = rotary_tables(positions, config, config.rope_theta, config.rope_scaling)
        local = shared
        if config.local_rope_theta is not None:
            local = rotary_tables(positions, config, config.local_rope_theta, None)
        rotating = config.rotary_layers or (True,) * config.num_layers
        tables = [
            shared if config.window(layer) is None else local for layer in range(config.num_layers)
        ]
        return [table if turns else None for table, turns in zip(tables, rotating, strict=True)]


class Step(Protocol):
    """A forward of few tokens that is computed in another way, such as `model.compiled_step`."""

    def takes(self, tokens: Sequence[Sequence[int]], first: int, cache: Cache) -> bool:
        """Whether it appends these tokens to the slots from `first` on."""

    def __call__(
        self, tokens: Sequence[Sequence[int]], first: int, cache: Cache, *, every: bool = False
    ) -> Tensor:
        """Does so; logits after the last token of each slot, or after `every` token: float32 [N, V]."""


class Decoder(nn.Module):
    """`attention` is a backend of `model.attention`; None: the plain one. `step` computes steps of decoding, if set.

    Build it on the meta device, then initialize or read the parameters (`model.io.weights`).
    """

    def __init__(self, config: ModelConfig, *, attention: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.step: Step | None = None
        self.model: Backbone | TransformersBackbone
        if config.transformers_backend is not None:
            self.model = TransformersBackbone(config, attention or plain_backend(config))
            self.lm_head = output_of(self.model.whole)
            self.tie()
            return
        self.model = Backbone(config, attention or plain_backend(config))
        if config.head == "values":
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Tie the head to the embedding if the config does; repeat after replacing parameters.

        What transformers' layers compute from the config alone is computed then, too.
        """
        if isinstance(self.model, TransformersBackbone):
            self.model.restore()
        if self.config.tie_embeddings and self.config.head == "tokens":
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        head: Head = ALL_LOGITS,
        cache: Cache | None = None,
    ) -> Tensor:
        """`head` of the last hidden states: by default all logits [B, T, V].

        positions_BT: int64, counted from the start of each document (default: from the start of the row or the cache).
        documents_BT: int64, the document of each token in its sequence, from 0; padding is -1; masks attention.
        """
        hidden_BTD = self.model(tokens_BT, positions_BT, documents_BT, cache)
        return self.apply_head(hidden_BTD, head)

    def apply_head(self, hidden_BTD: Tensor, head: Head) -> Tensor:
        """The head's output for the last hidden states."""
        if self.config.head == "values":
            return head(hidden_BTD, self.score, None)
        return head(hidden_BTD, self.lm_head, self.config.final_softcap)
