"""Qwen's mixtures with a shared expert: Qwen2 MoE, and the hybrids Qwen3-Next and Qwen3.5 MoE."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config_fields import HfKeys, ModelFacts
from bloomery.facts.family import BIASES, LLAMA_KEYS, Family
from bloomery.facts.family_rules import write_qwen
from bloomery.facts.family_rules_experts import (
    qwen3_5_moe_facts,
    qwen3_next_facts,
    qwen_shared_experts,
    windows_of_qwen2_moe,
    write_qwen3_5_moe,
    write_qwen3_next,
    write_qwen_shared_experts,
)
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_HYBRID_FACTS: ModelFacts = {
    "norm": "rms_unit_offset",
    "qk_norm": "head",
    "attention_gate": True,
}
_GATED = GgufExperts(("softmax_of_chosen",), shared=("gated",))
_POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
_HYBRID_DEFAULTS: HfKeys = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_moe": Family(
            "Qwen2MoeForCausalLM",
            "Qwen2 MoE",
            flags={"attention_bias": "qkv_bias"},
            windows=windows_of_qwen2_moe,
            extra=qwen_shared_experts,
            write=lambda config: write_qwen(config) | write_qwen_shared_experts(config),
            gguf=GgufGraph(
                "qwen2moe",
                full_width=True,
                has_own_head=True,
                experts=GgufExperts(("softmax",), shared=("gated",)),
            ),
            defaults={
                "num_key_value_heads": 16,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
                "max_window_layers": 28,
                "qkv_bias": True,
                "intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "router_aux_loss_coef": 0.001,
            },
        ),
        "qwen3_next": Family(
            "Qwen3NextForCausalLM",
            "Qwen3-Next",
            _HYBRID_FACTS,
            flags=BIASES,
            extra=qwen3_next_facts,
            write=write_qwen3_next,
            gguf=GgufGraph(
                "qwen3next",
                _HYBRID_FACTS,
                free=("mixers", "rotary_share"),
                renamed=_POST_NORM,
                has_delta_nets=True,
                delta_projections="by_head",
                repeats_keys=False,
                experts=_GATED,
            ),
            reads_rotary_share=True,
            defaults={
                **_HYBRID_DEFAULTS,
                "intermediate_size": 5632,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "norm_topk_prob": True,
            },
        ),
        "qwen3_5_moe_text": Family(
            "Qwen3_5MoeForCausalLM",
            "Qwen3.5 MoE",
            _HYBRID_FACTS,
            flags=BIASES,
            # No layer has an MLP: the one width that its files state is that of experts.
            keys=LLAMA_KEYS | {"intermediate_size": "moe_intermediate_size"},
            extra=qwen3_5_moe_facts,
            write=write_qwen3_5_moe,
            # The shared expert is as wide as the others.
            fresh=lambda sizes: {"shared_expert_intermediate_size": sizes["intermediate_size"]},
            gguf=GgufGraph(
                "qwen35moe",
                _HYBRID_FACTS,
                free=("mixers", "rotary_share"),
                renamed=_POST_NORM,
                has_delta_nets=True,
                experts=_GATED,
            ),
            reads_rotary_share=True,
            classifier="Qwen3_5MoeText",
            defaults={**_HYBRID_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
        ),
    }
)
