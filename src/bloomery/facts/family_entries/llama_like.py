"""Families that are Llama with a few facts changed."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import BIASES, GATE_UP, QKV, Family, StoredNames
from bloomery.facts.family_rules import (
    rotating_layers,
    windows_everywhere,
    windows_of_mistral,
    windows_of_smollm3,
    write_mistral,
    write_phi3,
    write_smollm3,
)
from bloomery.facts.gguf_graphs import GgufGraph

_LLAMA_GRAPH = GgufGraph(
    "llama", free=("attention_bias", "output_bias", "mlp_bias"), interleaved=True
)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "LlamaForCausalLM",
            "Llama",
            flags={**BIASES, "mlp_bias": "mlp_bias"},
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            gguf=_LLAMA_GRAPH,
        ),
        "mistral": Family(
            "MistralForCausalLM",
            "Mistral",
            windows=windows_of_mistral,
            write=write_mistral,
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
            },
            gguf=_LLAMA_GRAPH,
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            "SmolLM3",
            flags={**BIASES, "mlp_bias": "mlp_bias"},
            windows=windows_of_smollm3,
            write=write_smollm3,
            extra=lambda fields, facts: {
                "rotary_layers": rotating_layers(fields, facts["num_layers"])
            },
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
            gguf=GgufGraph(
                "smollm3",
                free=("attention_bias", "output_bias", "mlp_bias", "rotary_layers"),
                interleaved=True,
                unrotated_period=4,
            ),
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            "OLMo 2",
            {"norm_placement": "after", "qk_norm": "full"},
            flags=BIASES,
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            gguf=GgufGraph(
                "olmo2",
                {"norm_placement": "after", "qk_norm": "full"},
                full_width=True,
                has_own_head=True,
            ),
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            "Phi-3",
            windows=windows_everywhere,
            write=write_phi3,
            reads_rotary_share=True,
            states_dropout=True,
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            stored=StoredNames(
                fused={QKV: "self_attn.qkv_proj", GATE_UP: "mlp.gate_up_proj"},
            ),
            gguf=GgufGraph(
                "phi3",
                free=("rotary_share",),
                full_width=True,
                fused={QKV: "attn_qkv", GATE_UP: "ffn_up"},
                states_no_window=True,
            ),
        ),
    }
)
