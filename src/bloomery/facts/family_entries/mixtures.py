"""Mixtures of experts whose attention is a dense family's: Qwen 3, Mixtral, OLMoE."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import BIASES, Family, StoredExperts, StoredNames
from bloomery.facts.family_rules import windows_everywhere
from bloomery.facts.family_rules_experts import (
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
    windows_of_qwen3_moe,
    write_mixtral_experts,
    write_olmoe_experts,
    write_qwen3_moe,
)
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            "Qwen3 MoE",
            {"qk_norm": "head"},
            flags=BIASES,
            windows=windows_of_qwen3_moe,
            extra=qwen_experts,
            write=write_qwen3_moe,
            gguf=GgufGraph(
                "qwen3moe", {"qk_norm": "head"}, experts=GgufExperts(("softmax_of_chosen",))
            ),
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "router_aux_loss_coef": 0.001,
            },
        ),
        "mixtral": Family(
            "MixtralForCausalLM",
            "Mixtral",
            windows=windows_everywhere,
            extra=mixtral_experts,
            write=write_mixtral_experts,
            by_transformers=("router_jitter_noise",),
            gguf=GgufGraph(
                "llama",
                interleaved=True,
                experts=GgufExperts(("softmax_of_chosen",), width_is_mlp=True),
            ),
            stored=StoredNames(
                renamed={"mlp.gate": "block_sparse_moe.gate"},
                experts=StoredExperts(
                    prefix="block_sparse_moe.experts",
                    modules={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
                ),
                in_memory={"block_sparse_moe.gate": "mlp.gate"},
            ),
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e6,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
        ),
        "olmoe": Family(
            "OlmoeForCausalLM",
            "OLMoE",
            {"qk_norm": "full"},
            flags=BIASES,
            extra=olmoe_experts,
            write=write_olmoe_experts,
            by_transformers=("clip_qkv",),
            gguf=GgufGraph(
                "olmoe",
                {"qk_norm": "full"},
                free=(),
                full_width=True,
                has_own_head=True,
                own_keys=True,
                experts=GgufExperts(("softmax",), width_is_mlp=True),
            ),
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "router_aux_loss_coef": 0.01,
            },
        ),
    }
)
