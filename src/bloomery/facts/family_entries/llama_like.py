"""Families that are Llama with a few facts changed."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import BIASES, GATE_UP, LLAMA_KEYS, QKV, Family, StoredNames
from bloomery.facts.family_rules import (
    rotating_layers,
    windows_everywhere,
    windows_of_mistral,
    windows_of_smollm3,
    write_mistral,
    write_phi3,
    write_smollm3,
)
from bloomery.facts.family_rules_dense import (
    exaone4_rotation,
    hunyuan_rotation,
    seed_oss_dropout,
    stablelm_facts,
    windows_but_each,
    write_rotation_in_windows,
    write_seed_oss,
    write_stablelm,
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
        "seed_oss": Family(
            "SeedOssForCausalLM",
            "Seed-OSS",
            flags={
                "attention_bias": "attention_bias",
                "output_bias": "attention_out_bias",
                "mlp_bias": "mlp_bias",
            },
            extra=seed_oss_dropout,
            write=write_seed_oss,
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 524288,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "attention_bias": True,
                "attention_dropout": 0.1,
                "residual_dropout": 0.1,
            },
            gguf=GgufGraph("seed_oss", renamed={"post_attention_layernorm": "post_attention_norm"}),
        ),
        "exaone4": Family(
            "Exaone4ForCausalLM",
            "EXAONE 4",
            {"norm_placement": "after", "qk_norm": "head"},
            windows=windows_but_each,
            extra=exaone4_rotation,
            write=write_rotation_in_windows,
            gguf=GgufGraph(
                "exaone4",
                {"norm_placement": "after", "qk_norm": "head"},
                free=("rotary_layers",),
                window_layers=64,
                window_period=4,
                unrotated_period=4,
            ),
            defaults={
                "num_key_value_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
            },
        ),
        "hunyuan_v1_dense": Family(
            "HunYuanDenseV1ForCausalLM",
            "Hunyuan",
            {"qk_norm": "rotated_head"},
            flags=BIASES,
            extra=hunyuan_rotation,
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            stored=StoredNames(
                renamed={
                    "self_attn.q_norm": "self_attn.query_layernorm",
                    "self_attn.k_norm": "self_attn.key_layernorm",
                }
            ),
            gguf=GgufGraph("hunyuan-dense", {"qk_norm": "rotated_head"}, free=()),
        ),
        "stablelm": Family(
            "StableLmForCausalLM",
            "StableLM",
            {"norm": "layer"},
            keys={key: name for key, name in LLAMA_KEYS.items() if key != "head_dim"}
            | {"norm_eps": "layer_norm_eps"},
            flags={"attention_bias": "use_qkv_bias"},
            extra=stablelm_facts,
            write=write_stablelm,
            reads_rotary_share=True,
            defaults={
                "num_key_value_heads": 32,
                "max_position_embeddings": 4096,
                "layer_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
            by_transformers=("qk_layernorm",),
            gguf=GgufGraph(
                "stablelm",
                {"norm": "layer"},
                free=("attention_bias", "rotary_share", "norm_placement"),
            ),
        ),
    }
)
