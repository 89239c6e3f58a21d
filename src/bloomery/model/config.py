"""A decoder described by architectural facts. No field is a model's name; nothing here needs torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. Formulas and defaults are those of transformers' `modeling_rope_utils`."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`family` only says which names a saved checkpoint uses (a key of `families.FAMILIES`); the decoder never reads it."""

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 4096
    norm: Literal["rms", "rms_unit_offset", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # layer norms only
    norm_placement: Literal["before", "after", "both"] = "before"
    qk_norm: Literal["none", "head", "full"] = "none"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0  # the part of each head that rotates
    local_rope_theta: float | None = None  # layers with a sliding window, where it differs
    rotary_layers: tuple[bool, ...] = ()  # layers that rotate at all; empty: every one
    sliding_window: tuple[int | None, ...] = ()  # per layer; empty: none
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    final_softcap: float | None = None
    scale_embeddings: bool = False
    tie_embeddings: bool = False
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def window(self, layer: int) -> int | None:
        """How many keys, itself included, a query of this layer sees; None: all of them."""
        return self.sliding_window[layer] if self.sliding_window else None
