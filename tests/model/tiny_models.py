"""Tiny random models of transformers, one of each shape that parity covers, and a folder of any of them."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

torch.set_num_threads(1)  # models this small spend more time waking threads than computing
SMALL = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GPT2 = dict(
    vocab_size=131, n_embd=48, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
YARN_MSCALE = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO3_ROPE = {
    "full_attention": YARN | {"rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
OSS_ROPE = YARN | {"rope_theta": 15e4, "truncate": False}
MINISTRAL_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
HUNYUAN_ROPE = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
FULL = ["full_attention"] * 4
GRANITE = dict(
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.2,
    logits_scaling=1.7,
)
GRANITE4 = dict(
    shared_intermediate_size=64,
    num_local_experts=0,
    layer_types=["full_attention"] * 4,
    mamba_n_heads=8,
    mamba_expand=2,
)
# Layer by layer: a window or none, keys of their own or of the last layer before of the same kind.
GEMMA4 = SMALL | dict(
    num_hidden_layers=6,
    head_dim=8,
    global_head_dim=16,
    sliding_window=8,
    final_logit_softcapping=30.0,
    layer_types=["sliding_attention", "full_attention"] * 3,
)
# name -> (prefix of transformers' classes, settings of its config)
LATENT = SMALL | dict(
    num_key_value_heads=4,
    moe_intermediate_size=16,
    num_experts_per_tok=3,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=16,
)
MIXTURE = SMALL | dict(intermediate_size=24, num_experts_per_tok=2)
# Hybrids of Qwen: a delta net whose key heads serve two value heads each, and attention.
DELTA_NET = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
)
CASES: dict[str, tuple[str, dict]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        MIXTURE
        | dict(num_experts=8, moe_intermediate_size=16, norm_topk_prob=True, head_dim=16)
        | dict(mlp_only_layers=[1], intermediate_size=80),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | dict(n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1)
        | dict(rope_parameters=YARN_MSCALE, n_shared_experts=2, routed_scaling_factor=1.5),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | dict(n_routed_experts=8, n_group=4, topk_group=2, topk_method="group_limited_greedy")
        | dict(q_lora_rank=None, first_k_dense_replace=2, attention_bias=True),
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT | dict(n_routed_experts=4, v_head_dim=28, rope_interleave=False),
    ),
    "glm4-moe": (
        "Glm4Moe",
        MIXTURE
        | dict(moe_intermediate_size=16, n_routed_experts=4, head_dim=16, use_qk_norm=True)
        | dict(attention_bias=True, norm_topk_prob=False),
    ),
    "dots1": (
        "Dots1",
        MIXTURE
        | dict(moe_intermediate_size=16, n_routed_experts=6, n_shared_experts=1, head_dim=16)
        | dict(sliding_window=7, max_window_layers=2, first_k_dense_replace=1),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        MIXTURE | dict(num_local_experts=4, head_dim=16, rotary_dim=8),
    ),
    "mixtral": ("Mixtral", MIXTURE | dict(num_local_experts=4)),
    "qwen2-moe": (
        "Qwen2Moe",
        MIXTURE
        | dict(num_experts=6, moe_intermediate_size=16, shared_expert_intermediate_size=32)
        | dict(mlp_only_layers=[2], intermediate_size=80, use_sliding_window=True)
        | dict(sliding_window=8, max_window_layers=3),
    ),
    "qwen3-next": (
        "Qwen3Next",
        MIXTURE
        | DELTA_NET
        | dict(num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=24)
        | dict(mlp_only_layers=[1], intermediate_size=80),
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {key: value for key, value in MIXTURE.items() if key != "intermediate_size"}
        | DELTA_NET
        | dict(num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=24),
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        MIXTURE
        | dict(num_experts=8, moe_intermediate_size=16, num_dense_layers=1, intermediate_size=80)
        | dict(layer_types=["conv", "full_attention", "conv", "conv"], routed_scaling_factor=1.5),
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        SMALL
        | dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=2),
    ),
    "olmoe": ("Olmoe", MIXTURE | dict(num_experts=8, num_experts_per_tok=3)),
    "gpt-oss": (  # a small limit, which many numbers exceed
        "GptOss",
        MIXTURE
        | dict(num_local_experts=4, head_dim=16, sliding_window=8, rope_parameters=OSS_ROPE)
        | dict(swiglu_limit=0.4, swiglu_alpha=1.3),
    ),
    "granite-moe": (
        "GraniteMoe",
        MIXTURE | GRANITE | dict(num_local_experts=4, attention_bias=True),
    ),
    "granite4-moe": (
        "GraniteMoeHybrid",
        MIXTURE | GRANITE | GRANITE4 | dict(num_local_experts=4, position_embedding_type="rope"),
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2-erf-wide": (
        "GPT2",
        GPT2 | dict(activation_function="gelu", n_inner=100, tie_word_embeddings=False),
    ),
    "gpt2-unscaled": ("GPT2", GPT2 | dict(scale_attn_weights=False)),
    "llama2": ("Llama", SMALL | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3-gqa-tied": ("Llama", SMALL | dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama-biases-head-dim": (
        "Llama",
        SMALL | dict(attention_bias=True, mlp_bias=True, head_dim=20),
    ),
    "llama-linear": (
        "Llama",
        SMALL | dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    ),
    "llama-dynamic": (
        "Llama",
        SMALL
        | dict(
            max_position_embeddings=24,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        ),
    ),
    "llama-yarn": ("Llama", SMALL | dict(rope_parameters=YARN)),
    "llama-yarn-mscale": ("Llama", SMALL | dict(rope_parameters=YARN_MSCALE)),
    "mistral-window": ("Mistral", SMALL | dict(sliding_window=8)),
    "mistral-head-dim": ("Mistral", SMALL | dict(sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", SMALL),
    "qwen2.5-window-tied": (
        "Qwen2",
        SMALL
        | dict(
            use_sliding_window=True, sliding_window=8, max_window_layers=2, tie_word_embeddings=True
        ),
    ),
    "qwen3": ("Qwen3", SMALL | dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-bias-yarn": (
        "Qwen3",
        SMALL | dict(head_dim=16, attention_bias=True, rope_parameters=YARN),
    ),
    "qwen3.5": (
        "Qwen3_5",
        SMALL
        | dict(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            layer_types=[
                "linear_attention",
                "full_attention",
                "linear_attention",
                "linear_attention",
            ],
        ),
    ),
    "olmo3": ("Olmo3", SMALL | dict(sliding_window=8, rope_parameters=OLMO3_ROPE)),
    "olmo-hybrid": (
        "OlmoHybrid",
        SMALL
        | dict(
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
    ),
    "olmo-hybrid-rotated": (
        "OlmoHybrid",
        SMALL
        | dict(
            linear_num_key_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_allow_neg_eigval=False,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
    ),
    "olmo3-bias": (
        "Olmo3",
        SMALL
        | dict(
            attention_bias=True,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"] * 2,
        ),
    ),
    "ministral3": ("Ministral3", SMALL | dict(head_dim=16, rope_parameters=MINISTRAL_ROPE)),
    "granite": ("Granite", SMALL | GRANITE | dict(attention_bias=True)),
    "granite4": (
        "GraniteMoeHybrid",
        SMALL | GRANITE | GRANITE4 | dict(position_embedding_type="rope", tie_word_embeddings=True),
    ),
    "granite4-unrotated": ("GraniteMoeHybrid", SMALL | GRANITE | GRANITE4),
    "lfm2": ("Lfm2", SMALL | dict(layer_types=["conv", "full_attention", "conv", "conv"])),
    "lfm3": (
        "Lfm3",
        SMALL
        | dict(
            num_hidden_layers=5,
            head_dim=16,
            sliding_window=8,
            layer_types=["conv", "sliding_attention", "full_attention", "conv", "conv"],
        ),
    ),
    "lfm3-ungated": ("Lfm3", SMALL | dict(head_dim=16, use_attention_gate=False, conv_bias=True)),
    "lfm2-bias": (
        "Lfm2",
        SMALL
        | dict(
            full_attn_idxs=[1, 3],
            conv_bias=True,
            conv_L_cache=5,
            tie_word_embeddings=False,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.3,
        ),
    ),
    "gemma": ("Gemma", SMALL | dict(head_dim=20)),
    "gemma-mqa-untied": (
        "Gemma",
        SMALL | dict(head_dim=12, num_key_value_heads=1, tie_word_embeddings=False),
    ),
    "gemma2": ("Gemma2", SMALL | dict(head_dim=20, sliding_window=8, query_pre_attn_scalar=24)),
    "gemma2-uncapped": (
        "Gemma2",
        SMALL
        | dict(
            head_dim=20, sliding_window=8, attn_logit_softcapping=None, final_logit_softcapping=None
        ),
    ),
    "vaultgemma": ("VaultGemma", SMALL | dict(head_dim=20, sliding_window=8)),
    "gemma3": (
        "Gemma3",
        SMALL
        | dict(
            num_hidden_layers=7,
            head_dim=20,
            sliding_window=8,
            query_pre_attn_scalar=24,
            rope_parameters=GEMMA3_ROPE,
        ),
    ),
    "gemma4-e2b": (  # inputs of each layer, shared keys and values, wider MLPs where they are
        "Gemma4",
        GEMMA4
        | dict(
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=131,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
    ),
    "gemma4-e4b": (
        "Gemma4",
        GEMMA4
        | dict(
            hidden_size_per_layer_input=12, vocab_size_per_layer_input=131, num_kv_shared_layers=2
        ),
    ),
    "gemma4-31b": (
        "Gemma4",
        GEMMA4
        | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma4-26b-a4b": (
        "Gemma4",
        GEMMA4
        | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1)
        | dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=16),
    ),
    "gemma4-12b": (
        "Gemma4Unified",
        GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "smollm3": ("SmolLM3", SMALL | dict(num_hidden_layers=5)),
    "smollm3-window": (
        "SmolLM3",
        SMALL | dict(use_sliding_window=True, sliding_window=8, no_rope_layers=[1, 0, 1, 0]),
    ),
    "olmo2": ("Olmo2", SMALL),
    "olmo2-bias": ("Olmo2", SMALL | dict(attention_bias=True, num_key_value_heads=4)),
    "seed-oss": ("SeedOss", SMALL | dict(head_dim=16, attention_out_bias=True)),
    "apertus": ("Apertus", SMALL | dict(attention_bias=True)),
    "apertus-silu": ("Apertus", SMALL | dict(hidden_act="silu", rope_parameters=LLAMA3)),
    "arcee": ("Arcee", SMALL | dict(mlp_bias=True)),
    "starcoder2": ("Starcoder2", SMALL | dict(sliding_window=8)),
    "ernie4.5": ("Ernie4_5", SMALL | dict(head_dim=16, use_bias=True)),
    "helium": ("Helium", SMALL | dict(head_dim=12)),
    "exaone4": ("Exaone4", SMALL | dict(sliding_window=8, sliding_window_pattern=2)),
    "exaone4-full": ("Exaone4", SMALL | dict(sliding_window=None, layer_types=FULL)),
    "hunyuan": (
        "HunYuanDenseV1",
        SMALL | dict(head_dim=16, rope_parameters=HUNYUAN_ROPE, tie_word_embeddings=True),
    ),
    "cohere": ("Cohere", SMALL | dict(logit_scale=0.3)),
    "cohere2": ("Cohere2", SMALL | dict(sliding_window=8, logit_scale=0.5)),
    "glm": ("Glm", SMALL | dict(head_dim=16)),
    "glm4": ("Glm4", SMALL | dict(head_dim=16)),
    "nemotron": ("Nemotron", SMALL),
    "jais2": ("Jais2", SMALL),
    "stablelm": ("StableLm", SMALL | dict(use_qkv_bias=True, partial_rotary_factor=0.5)),
    "stablelm-parallel": (
        "StableLm",
        SMALL | dict(use_parallel_residual=True, partial_rotary_factor=0.5),
    ),
    "phi3": ("Phi3", SMALL),
    "phi3-window": ("Phi3", SMALL | dict(sliding_window=8)),
    "phi4-partial": (
        "Phi3",
        SMALL
        | dict(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        ),
    ),
    "phi3-longrope": (
        "Phi3",
        SMALL | dict(original_max_position_embeddings=16, rope_parameters=dict(LONG)),
    ),
    "phi3-longrope-short": (
        "Phi3",
        SMALL | dict(original_max_position_embeddings=48, rope_parameters=dict(LONG)),
    ),
}


# Their norms' gains are 1 plus the weight.
OFFSET_NORMS = ("Gemma", "Gemma2", "VaultGemma", "Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
OFFSET_NORMS += ("Nemotron",)


def tiny_reference(case: str) -> transformers.PreTrainedModel:
    """The same random weights at every call, large enough that every part of the model shows in the logits."""
    prefix, settings = CASES[case]
    has_parts = prefix in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    family = f"{prefix}Text" if has_parts else prefix
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation="eager")
    head = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, head)(config).eval()
    for name, parameter in model.named_parameters():
        has_offset = prefix in OFFSET_NORMS and "linear_attn" not in name
        is_gain = parameter.ndim == 1 and "norm" in name and not has_offset
        centre = 1.0 if is_gain else 0.0
        torch.nn.init.normal_(parameter, centre, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 0.8, 0.1)
        if name.endswith("expert_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
        if name.endswith("act_fn.beta"):
            torch.nn.init.normal_(buffer, 0.5, 0.1)
    return model


def saved_reference(case: str, folder: Path) -> transformers.PreTrainedModel:
    model = tiny_reference(case)
    model.save_pretrained(folder)
    return model


def tokens(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(0, 131, (rows, length), generator=torch.Generator().manual_seed(1))
