"""Families that rotate neighboring numbers of a head: ERNIE 4.5 and its mixture, Helium, Cohere's and GLM's."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config_fields import ModelFacts
from bloomery.facts.family import BIASES, GATE_UP, LLAMA_KEYS, Family, StoredNames
from bloomery.facts.family_rules_dense import (
    cohere_facts,
    rotation_in_windows,
    windows_but_each,
    write_cohere,
    write_rotation_in_windows,
)
from bloomery.facts.family_rules_experts import ernie_experts, write_ernie_experts
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_NEIGHBORS: ModelFacts = {"rope_interleave": True}
# Attention and MLP read the same norm, which only centers, scales and multiplies.
_COHERE_FACTS: ModelFacts = {
    **_NEIGHBORS,
    "norm": "layer",
    "norm_bias": False,
    "norm_placement": "shared",
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_GATE_UP: Mapping[tuple[str, ...], str] = {GATE_UP: "mlp.gate_up_proj"}
_GLM_FUSED: Mapping[tuple[str, ...], str] = {GATE_UP: "ffn_up"}
_GLM_FREE = ("attention_bias", "rotary_share")
_COHERE_METADATA = {"logit_scale": "logit_scale"}
_COHERE_GRAPH = {**_COHERE_FACTS, "tie_embeddings": True}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ernie4_5": Family(
            "Ernie4_5ForCausalLM",
            "ERNIE 4.5",
            _NEIGHBORS,
            flags={
                "attention_bias": "use_bias",
                "output_bias": "use_bias",
                "mlp_bias": "use_bias",
            },
            # Its attention has no dropout, whatever the config says.
            extra=lambda _fields, _facts: {"attention_dropout": 0.0},
            defaults={
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 5e5,
                "tie_word_embeddings": True,
            },
            gguf=GgufGraph("ernie4_5", _NEIGHBORS, free=()),
        ),
        "ernie4_5_moe": Family(
            "Ernie4_5_MoeForCausalLM",
            "ERNIE 4.5 MoE",
            _NEIGHBORS,
            extra=ernie_experts,
            write=write_ernie_experts,
            gguf=GgufGraph(
                "ernie4_5-moe",
                _NEIGHBORS,
                free=(),
                experts=GgufExperts(
                    ("softmax_of_chosen",),
                    choice_bias=(True,),
                    shared=("none", "plain"),
                    leading_mlps=True,
                    states_interval=True,
                ),
            ),
            by_transformers=("use_bias",),  # its head has one, too
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 5e5,
                "tie_word_embeddings": True,
                "intermediate_size": 12288,
                "moe_num_experts": 64,
                "moe_k": 6,
                "moe_intermediate_size": 1536,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
                "moe_layer_interval": 1,
                "moe_norm_min": 1e-12,
                "router_aux_loss_coef": 0.001,
            },
            stored=StoredNames(
                renamed={
                    "mlp.gate.e_score_correction_bias": ("mlp.moe_statics.e_score_correction_bias"),
                    "mlp.shared_expert": "mlp.shared_experts",
                },
                in_memory={"mlp.moe_statics": "mlp.gate.moe_statics"},
            ),
        ),
        "helium": Family(
            "HeliumForCausalLM",
            "Helium",
            _NEIGHBORS,
            flags={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
            defaults={
                "num_key_value_heads": 20,
                "head_dim": 128,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-8,
                "hidden_act": "silu",
                "rope_theta": 1e5,
            },
        ),
        "cohere": Family(
            "CohereForCausalLM",
            "Cohere",
            _COHERE_FACTS,
            keys=LLAMA_KEYS | {"norm_eps": "layer_norm_eps"},
            flags=BIASES,
            extra=cohere_facts,
            write=write_cohere,
            defaults=_COHERE_DEFAULTS | {"rope_theta": 5e5},
            by_transformers=("use_qk_norm",),
            gguf=GgufGraph(
                "command-r", _COHERE_GRAPH, free=("logit_scale",), keys=_COHERE_METADATA
            ),
        ),
        "cohere2": Family(
            "Cohere2ForCausalLM",
            "Cohere 2",
            _COHERE_FACTS,
            keys={key: name for key, name in LLAMA_KEYS.items() if key != "head_dim"}
            | {"norm_eps": "layer_norm_eps"},
            flags=BIASES,
            windows=windows_but_each,
            extra=lambda fields, facts: (
                cohere_facts(fields, facts) | rotation_in_windows(fields, facts)
            ),
            write=lambda config: write_cohere(config) | write_rotation_in_windows(config),
            defaults=_COHERE_DEFAULTS | {"rope_theta": 1e4, "sliding_window": 4096},
            gguf=GgufGraph(
                "cohere2",
                _COHERE_GRAPH,
                free=("logit_scale", "rotary_layers"),
                keys=_COHERE_METADATA,
                window_period=4,
                default_window=4096,
                unrotated_period=4,
            ),
        ),
        "glm": Family(
            "GlmForCausalLM",
            "GLM",
            _NEIGHBORS,
            flags={"attention_bias": "attention_bias"},
            defaults=_GLM_DEFAULTS,
            reads_rotary_share=True,
            stored=StoredNames(fused=_GATE_UP),
            gguf=GgufGraph(
                "chatglm", _NEIGHBORS, free=_GLM_FREE, full_width=True, fused=_GLM_FUSED
            ),
        ),
        "glm4": Family(
            "Glm4ForCausalLM",
            "GLM 4",
            {**_NEIGHBORS, "norm_placement": "both"},
            flags={"attention_bias": "attention_bias"},
            defaults=_GLM_DEFAULTS,
            reads_rotary_share=True,
            stored=StoredNames(
                renamed={
                    "post_attention_layernorm": "post_self_attn_layernorm",
                    "pre_feedforward_layernorm": "post_attention_layernorm",
                    "post_feedforward_layernorm": "post_mlp_layernorm",
                },
                fused=_GATE_UP,
            ),
            gguf=GgufGraph(
                "glm4",
                {**_NEIGHBORS, "norm_placement": "both"},
                free=_GLM_FREE,
                fused=_GLM_FUSED,
            ),
        ),
    }
)
