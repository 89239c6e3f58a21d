"""Liquid AI's families: hybrids of short convolutions and attention."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bloomery.facts.config import Mixer, ModelConfig, ShortConvolution
from bloomery.facts.config_fields import LARGEST, Fields, HfKeys, ModelFacts
from bloomery.facts.family import BIASES, LLAMA_KEYS, Family, StoredExperts, StoredNames
from bloomery.facts.family_rules import first_window, mixers_by_type
from bloomery.facts.family_rules_experts import lfm2_experts, write_lfm2_experts
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_NAMES = {
    "input_layernorm": "operator_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
_LFM2_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}


def _lfm2_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Its own names of two keys win over the common ones, and its attention drops nothing, as in transformers."""
    attention_layers = fields.get("full_attn_idxs")
    if attention_layers is not None and not isinstance(attention_layers, list):
        raise fields.refuse("full_attn_idxs", "a list of layers")
    width = facts["intermediate_size"]
    if fields.get("block_ff_dim") is not None:
        width = fields.size("block_ff_dim", LARGEST["intermediate_size"])
    tied = "tie_word_embeddings" if fields.get("tie_embedding") is None else "tie_embedding"
    return {
        "mixers": mixers_by_type(
            fields,
            facts["num_layers"],
            lambda n: (
                "full_attention" if attention_layers is None or n in attention_layers else "conv"
            ),
        ),
        "short_convolution": _convolution(fields),
        "intermediate_size": _width_of_mlp(fields, width),
        "tie_embeddings": fields.flag(tied),
        "activation": "silu",
        "attention_dropout": 0.0,
    }


def _convolution(fields: Fields) -> ShortConvolution:
    return ShortConvolution(
        kernel=fields.size("conv_L_cache", 2**10), bias=fields.flag("conv_bias")
    )


def _width_of_mlp(fields: Fields, width: int) -> int:
    """Two thirds of what the file states, times a factor, rounded up to a multiple; in that order, as transformers."""
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    if fields.get("block_ffn_dim_multiplier") is None:
        return width
    width = int(fields.number("block_ffn_dim_multiplier", low=1e-6, high=1e3) * width)
    multiple = fields.size("block_multiple_of", 2**16)
    return multiple * -(-width // multiple)


def _write_lfm2(config: ModelConfig) -> HfKeys:
    names: dict[Mixer, str] = {"attention": "full_attention", "short_convolution": "conv"}
    sizes = config.short_convolution
    assert sizes is not None
    return {
        "layer_types": [names[mixer] for mixer in config.mixers],
        "conv_L_cache": sizes.kernel,
        "conv_bias": sizes.bias,
        "block_auto_adjust_ff_dim": False,
    }


def _fresh_lfm2(sizes: Mapping[str, Any]) -> HfKeys:
    """Attention in each third layer: about as in LFM2, whose config class has it in all of them."""
    return {
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": list(range(2, sizes["num_layers"], 3)),
    }


def _lfm2_moe_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """As LFM2, whose older spellings its class does not know."""
    if fields.get("layer_types") is None:
        raise fields.refuse("layer_types", "a list of layers: conv or full_attention")
    tied = "tie_word_embeddings" if fields.get("tie_embedding") is None else "tie_embedding"
    return {
        "mixers": mixers_by_type(fields, facts["num_layers"], lambda _: "conv"),
        "short_convolution": _convolution(fields),
        "tie_embeddings": fields.flag(tied),
        "activation": "silu",
        "attention_dropout": 0.0,
        **lfm2_experts(fields, facts),
    }


def _write_lfm2_moe(config: ModelConfig) -> HfKeys:
    keys = {
        key: value for key, value in _write_lfm2(config).items() if not key.startswith("block_")
    }
    return keys | write_lfm2_experts(config)


def _fresh_lfm2_moe(sizes: Mapping[str, Any]) -> HfKeys:
    """Attention in each third layer, MLPs in the first ones, as in LFM2-8B-A1B."""
    layers = sizes["num_layers"]
    kinds = ["full_attention" if n % 3 == 2 else "conv" for n in range(layers)]
    return {"layer_types": kinds, "num_dense_layers": min(2, layers // 3)}


# The kind of each layer that a file of LFM3 does not state, by its number's remainder by 4; the first is a convolution.
_LFM3_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
_LFM3_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _lfm3_kinds(fields: Fields, layers: int) -> list[str]:
    stated = fields.entries("layer_types", layers)
    return stated or ["conv" if n == 0 else _LFM3_KINDS[n % 4] for n in range(layers)]


def _lfm3_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    slides = [kind == "sliding_attention" for kind in _lfm3_kinds(fields, layers)]
    if not any(slides):
        return ()
    window = fields.size("sliding_window", 2**31)
    return tuple(window if each else None for each in slides)


def _lfm3_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    if not fields.flag("use_sandwich_norm"):
        raise fields.lacks("use_sandwich_norm", "true, or the model goes through transformers")
    kinds = _lfm3_kinds(fields, facts["num_layers"])
    return {
        "mixers": mixers_by_type(fields, facts["num_layers"], lambda n: kinds[n]),
        "short_convolution": _convolution(fields),
        "head_gate": fields.flag("use_attention_gate"),
        # Its config class takes Llama's name for the same number, and the last one that it sees.
        "norm_eps": fields.number(
            "norm_eps" if fields.get("rms_norm_eps") is None else "rms_norm_eps", high=1.0
        ),
        "activation": "silu",
    }


def _write_lfm3(config: ModelConfig) -> HfKeys:
    sizes = config.short_convolution
    assert sizes is not None
    windows = config.sliding_window or (None,) * config.num_layers
    return {
        "layer_types": [
            "conv"
            if mixer == "short_convolution"
            else "full_attention"
            if window is None
            else "sliding_attention"
            for mixer, window in zip(config.mixers, windows, strict=True)
        ],
        "sliding_window": first_window(config),
        "conv_L_cache": sizes.kernel,
        "conv_bias": sizes.bias,
        "use_attention_gate": config.head_gate,
        "use_sandwich_norm": True,
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "lfm2": Family(
            "Lfm2ForCausalLM",
            "LFM2",
            {"qk_norm": "head"},
            keys=MappingProxyType({**LLAMA_KEYS, "norm_eps": "norm_eps"}),
            extra=_lfm2_facts,
            write=_write_lfm2,
            fresh=_fresh_lfm2,
            defaults={
                "vocab_size": 65536,
                "hidden_size": 2560,
                "intermediate_size": 12288,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 128_000,
                "norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": True,
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 256,
            },
            stored=StoredNames(renamed=_LFM2_NAMES),
            gguf=GgufGraph(
                "lfm2",
                {"qk_norm": "head"},
                free=("mixers",),
                renamed={"model.norm": "token_embd_norm"},
                keys={"conv_L_cache": "shortconv.l_cache"},
            ),
        ),
        "lfm2_moe": Family(
            "Lfm2MoeForCausalLM",
            "LFM2 MoE",
            {"qk_norm": "head"},
            keys=MappingProxyType({**LLAMA_KEYS, "norm_eps": "norm_eps"}),
            extra=_lfm2_moe_facts,
            write=_write_lfm2_moe,
            fresh=_fresh_lfm2_moe,
            gguf=GgufGraph(
                "lfm2moe",
                {"qk_norm": "head"},
                full_width=True,
                free=("mixers",),
                renamed={"model.norm": "token_embd_norm"},
                keys={"conv_L_cache": "shortconv.l_cache"},
                experts=GgufExperts(
                    ("normalized_sigmoid",),
                    states_weights=True,
                    choice_bias=(True,),
                    leading_mlps=True,
                ),
            ),
            defaults={
                "vocab_size": 65536,
                "hidden_size": 2048,
                "intermediate_size": 7168,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 128_000,
                "norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "conv_L_cache": 3,
                "num_dense_layers": 2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
                "use_expert_bias": True,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
            },
            stored=StoredNames(
                renamed={
                    **_LFM2_NAMES,
                    "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
                    "mlp.gate": "feed_forward.gate",
                },
                experts=StoredExperts(
                    prefix="feed_forward.experts",
                    module="feed_forward.experts",
                    modules={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
                ),
            ),
        ),
        "lfm3": Family(
            "Lfm3ForCausalLM",
            "LFM3",
            {"qk_norm": "head", "norm_placement": "both"},
            keys=MappingProxyType({**LLAMA_KEYS, "norm_eps": "norm_eps"}),
            flags=BIASES,
            windows=_lfm3_windows,
            extra=_lfm3_facts,
            write=_write_lfm3,
            unwritten=("rope_scaling", "rope_theta", "rope_local_base_freq"),
            has_local_rope=True,
            defaults={
                "vocab_size": 128_000,
                "hidden_size": 2048,
                "intermediate_size": 7680,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "max_position_embeddings": 128_000,
                "norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_parameters": _LFM3_ROPE,
                "tie_word_embeddings": True,
                "conv_L_cache": 7,
                "sliding_window": 256,
                "use_sandwich_norm": True,
                "use_attention_gate": True,
            },
            stored=StoredNames(
                renamed={
                    **_NAMES,
                    "post_attention_layernorm": "post_operator_norm",
                    "pre_feedforward_layernorm": "ffn_norm",
                    "post_feedforward_layernorm": "post_ffn_norm",
                    "self_attn.g_proj": "self_attn.gate_proj",
                },
                in_memory={"self_attn.gate_proj": "self_attn.g_proj"},
            ),
        ),
    }
)
