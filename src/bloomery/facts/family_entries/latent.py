"""DeepSeek's mixtures with latent attention, and the mixtures that route as theirs do."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bloomery.facts.family import BIASES, LLAMA_KEYS, Family, StoredExperts, StoredNames
from bloomery.facts.family_rules import layer_types, windows_by_type
from bloomery.facts.family_rules_experts import (
    deepseek_v2_facts,
    deepseek_v3_facts,
    dots1_facts,
    fresh_latent,
    glm4_moe_facts,
    minimax_m2_facts,
    write_deepseek_experts,
    write_deepseek_v2,
    write_deepseek_v3,
    write_glm4_moe,
    write_minimax_m2,
)
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

SHARED = StoredNames(renamed={"mlp.shared_expert": "mlp.shared_experts"})
_DEEPSEEK_EXPERTS = GgufExperts(
    ("normalized_sigmoid", "sigmoid"),
    states_weights=True,
    states_scale=True,
    choice_bias=(True, False),
    shared=("plain",),
    counts_shared=True,
    leading_mlps=True,
)
_DEEPSEEK_GRAPH = GgufGraph(
    "deepseek2",
    {"rope_interleave": True},
    free=("latent_attention", "attention_scale"),
    unadapted=tuple(
        f"self_attn.{name}"
        for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ),
    experts=_DEEPSEEK_EXPERTS,
)
# Of every head, what rotates alone is stated; `latent_facts` makes the width of heads.
LATENT_KEYS = MappingProxyType({**LLAMA_KEYS, "head_dim": "qk_rope_head_dim"})
LATENT = MappingProxyType(
    {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v3": Family(
            "DeepseekV3ForCausalLM",
            "DeepSeek-V3",
            keys=LATENT_KEYS,
            flags={"attention_bias": "attention_bias", "rope_interleave": "rope_interleave"},
            extra=deepseek_v3_facts,
            write=write_deepseek_v3,
            fresh=fresh_latent,
            unwritten=("mlp_layer_types",),
            stored=SHARED,
            gguf=_DEEPSEEK_GRAPH,
            defaults={
                **LATENT,
                "max_position_embeddings": 4096,
                "rope_interleave": True,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "n_shared_experts": 1,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
                "first_k_dense_replace": 3,
                "norm_topk_prob": True,
                "moe_intermediate_size": 2048,
            },
        ),
        "deepseek_v2": Family(
            "DeepseekV2ForCausalLM",
            "DeepSeek-V2",
            keys=LATENT_KEYS,
            flags={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
            extra=deepseek_v2_facts,
            write=write_deepseek_v2,
            fresh=lambda _sizes: {"num_experts_per_tok": 6},  # its class has no default
            unwritten=("mlp_layer_types", "rope_interleave"),
            ignored=("norm_topk_prob",),
            stored=SHARED,
            gguf=replace(
                _DEEPSEEK_GRAPH,
                experts=replace(_DEEPSEEK_EXPERTS, weights=("softmax",), choice_bias=(False,)),
            ),
            defaults={
                **LATENT,
                "max_position_embeddings": 2048,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "routed_scaling_factor": 1.0,
                "topk_method": "greedy",
                "moe_intermediate_size": 1407,
            },
        ),
        "glm4_moe_lite": Family(
            "Glm4MoeLiteForCausalLM",
            "GLM-4.7 Flash",
            keys=LATENT_KEYS,
            flags={"attention_bias": "attention_bias", "rope_interleave": "rope_interleave"},
            extra=deepseek_v3_facts,
            write=write_deepseek_v3,
            unwritten=("first_k_dense_replace",),
            stored=SHARED,
            gguf=_DEEPSEEK_GRAPH,
            defaults={
                **LATENT,
                "q_lora_rank": 768,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 202752,
                "rope_interleave": True,
                "n_routed_experts": 64,
                "num_experts_per_tok": 4,
                "n_shared_experts": 1,
                "routed_scaling_factor": 1.8,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "moe_intermediate_size": 1536,
            },
        ),
        "glm4_moe": Family(
            "Glm4MoeForCausalLM",
            "GLM-4.5",
            flags={"attention_bias": "attention_bias"},
            extra=glm4_moe_facts,
            write=write_glm4_moe,
            unwritten=("mlp_layer_types",),
            reads_rotary_share=True,
            stored=SHARED,
            gguf=GgufGraph(
                "glm4moe",
                free=("attention_bias", "qk_norm", "rotary_share"),
                renamed={"post_attention_layernorm": "post_attention_norm"},
                experts=replace(_DEEPSEEK_EXPERTS, choice_bias=(True,)),
            ),
            defaults={
                "num_key_value_heads": 8,
                "partial_rotary_factor": 0.5,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "n_routed_experts": 128,
                "num_experts_per_tok": 8,
                "n_shared_experts": 1,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "moe_intermediate_size": 1408,
            },
        ),
        "dots1": Family(
            "Dots1ForCausalLM",
            "dots.llm1",
            {"qk_norm": "head"},
            flags=BIASES,
            windows=lambda fields, layers: windows_by_type(
                fields, layers, lambda n: n >= fields.size("max_window_layers", 2**12)
            ),
            extra=dots1_facts,
            write=lambda config: write_deepseek_experts(config) | layer_types(config),
            unwritten=("mlp_layer_types",),
            stored=SHARED,
            gguf=GgufGraph(
                "dots1",
                {"qk_norm": "head"},
                free=(),
                has_own_head=True,
                own_keys=True,
                experts=_DEEPSEEK_EXPERTS,
            ),
            defaults={
                "sliding_window": 4096,
                "max_window_layers": 62,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 1408,
            },
        ),
        "minimax_m2": Family(
            "MiniMaxM2ForCausalLM",
            "MiniMax-M2",
            {"qk_norm": "full"},
            extra=minimax_m2_facts,
            write=write_minimax_m2,
            by_transformers=("router_jitter_noise",),
            reads_rotary_share=True,
            stored=StoredNames(
                renamed={
                    "mlp.gate.e_score_correction_bias": (
                        "block_sparse_moe.e_score_correction_bias"
                    ),
                    "mlp.gate": "block_sparse_moe.gate",
                },
                experts=StoredExperts(
                    prefix="block_sparse_moe.experts",
                    modules={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
                ),
            ),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 196608,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 5e6,
                "num_local_experts": 256,
                "num_experts_per_tok": 8,
                "router_aux_loss_coef": 0.001,
            },
        ),
    }
)
