"""Qwen's families: dense ones, and hybrids of gated delta nets and attention."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import BIASES, Family
from bloomery.facts.family_rules import (
    qwen3_5_mixers,
    windows_of_qwen,
    write_qwen,
    write_qwen3_5,
)
from bloomery.facts.gguf_graphs import GgufGraph

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(
            "Qwen2ForCausalLM",
            "Qwen2",
            {"attention_bias": True},
            windows=windows_of_qwen,
            write=write_qwen,
            defaults={
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
            gguf=GgufGraph("qwen2"),
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            "Qwen3",
            {"qk_norm": "head"},
            flags=BIASES,
            windows=windows_of_qwen,
            write=write_qwen,
            defaults={
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
            gguf=GgufGraph("qwen3", {"qk_norm": "head"}),
        ),
        "qwen3_5_text": Family(
            "Qwen3_5ForCausalLM",
            "Qwen3.5",
            {"norm": "rms_unit_offset", "qk_norm": "head", "attention_gate": True},
            flags=BIASES,
            extra=qwen3_5_mixers,
            write=write_qwen3_5,
            reads_rotary_share=True,
            gguf=GgufGraph(
                "qwen35",
                {"norm": "rms_unit_offset", "qk_norm": "head", "attention_gate": True},
                free=("mixers", "rotary_share"),
                renamed={"post_attention_layernorm": "post_attention_norm"},
                has_delta_nets=True,
            ),
            classifier="Qwen3_5Text",
            defaults={
                "head_dim": 256,
                "num_key_value_heads": 4,
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
            },
        ),
    }
)
