"""Every key of a config.json that could change what a native family computes: transformers' logits, or a refusal."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import SMALL as SIZES
from tiny_models import tokens
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.facts.families import FAMILIES
from bloomery.facts.hf_config import unread_keys
from bloomery.model.io.weights import load_decoder, model_state, write_model

SMALL = {name: dict(SIZES) for name in FAMILIES}
SMALL["gpt2"] = dict(vocab_size=131, n_embd=48, n_layer=3, n_head=4, n_positions=64)
for name in (
    "qwen3",
    "gemma",
    "gemma2",
    "vaultgemma",
    "gemma3_text",
    "ernie4_5",
    "glm",
    "glm4",
    "seed_oss",
):
    SMALL[name]["head_dim"] = 16
for name in ("helium", "hunyuan_v1_dense"):
    SMALL[name]["head_dim"] = 12
SMALL["granitemoehybrid"] |= dict(
    num_local_experts=0,
    shared_intermediate_size=80,
    layer_types=["full_attention"] * 4,
    position_embedding_type="rope",
    mamba_n_heads=8,
)
SMALL["lfm3"] |= dict(head_dim=16, sliding_window=8)
SMALL["olmo_hybrid"] |= dict(linear_num_key_heads=4, linear_key_head_dim=9)
SMALL["stablelm"]["partial_rotary_factor"] = 0.5
for name in (
    "gemma2",
    "vaultgemma",
    "gemma3_text",
    "mistral",
    "phi3",
    "starcoder2",
    "exaone4",
    "cohere2",
):
    SMALL[name]["sliding_window"] = 8
for name in ("gemma4_text", "gemma4_unified_text"):
    SMALL[name] |= dict(head_dim=16, global_head_dim=8, sliding_window=8)
for name in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe"):
    SMALL[name] |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
for name in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
    SMALL[name]["shared_expert_intermediate_size"] = 24
for name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
    SMALL[name]["head_dim"] = 16
for name in ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"):
    SMALL[name] |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
    SMALL[name] |= dict(linear_key_head_dim=8, linear_value_head_dim=12)
SMALL["lfm2_moe"]["layer_types"] = ["conv", "full_attention", "conv", "full_attention"]
SMALL["ernie4_5_moe"] |= dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=16)
for name in ("mixtral", "olmoe"):
    SMALL[name] |= dict(num_experts=8, num_local_experts=8, intermediate_size=16)
SMALL["gemma4_text"] |= dict(hidden_size_per_layer_input=12, vocab_size_per_layer_input=131)


def rope(**changes):
    return {"rope_theta": 10000.0, "rope_type": "default"} | changes


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL = ["full_attention"] * 4
SLIDING = ["sliding_attention"] * 4
MIXED = ["sliding_attention", "full_attention"] * 2
# Changes of config.json, each of which some family of transformers reads. `ABSENT` takes a key away.
ABSENT = object()
CHANGES = [
    *({"attention_bias": value} for value in (True, False)),
    {"mlp_bias": True},
    {"qkv_bias": False},
    {"attention_dropout": 0.3},
    {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    {"pretraining_tp": 2},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.5, "rope_parameters": ABSENT},
    {"partial_rotary_factor": None},
    {"partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_parameters": ABSENT},
    {"rope_theta": None},
    {"rope_theta": 3e4, "rope_parameters": LINEAR},
    {"rope_theta": 3e4, "rope_parameters": rope(rope_theta=5e5), "rope_scaling": LINEAR},
    {"rope_local_base_freq": 5e3},
    {"rope_local_base_freq": 5e3, "rope_parameters": ABSENT},
    *(
        {"rope_parameters": value}
        for value in (
            None,
            {},
            {"rope_theta": 5e5},
            rope(rope_theta=5e5),
            rope(partial_rotary_factor=0.5),
            LINEAR,
            {"type": "linear", "factor": 2.0},
            rope(rope_type="dynamic", factor=2.0),
            rope(**YARN),
            rope(**LLAMA3),
            rope(rope_type="proportional", factor=2.0),
            {"full_attention": rope(rope_theta=5e5), "sliding_attention": rope(rope_theta=3e3)},
            {"full_attention": rope(), "sliding_attention": rope(**LINEAR)},
            {"full_attention": rope(**LINEAR)},
            {"full_attention": rope(partial_rotary_factor=0.5), "sliding_attention": rope()},
        )
    ),
    *({"rope_scaling": value} for value in (None, {}, LINEAR, YARN)),
    *({"rope_scaling": value, "rope_parameters": ABSENT} for value in (LINEAR, YARN)),
    {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
    *({"sliding_window": value} for value in (6, 1, None, ABSENT)),
    *({"layer_types": types, "sliding_window": 8} for types in (FULL, SLIDING, MIXED, None)),
    *(
        {"layer_types": types, "sliding_window": 8, "use_sliding_window": True}
        for types in (SLIDING, MIXED, ABSENT)
    ),
    {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ABSENT,
        "max_window_layers": 1,
    },
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": ABSENT},
    *({"sliding_window_pattern": value, "layer_types": ABSENT} for value in (2, 1)),
    {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8},
    *(
        {"hidden_act": value}
        for value in ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "relu2")
    ),
    *({"hidden_activation": value} for value in ("gelu", "relu", "silu")),
    {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    *({"activation_function": value} for value in ("gelu", "relu", "silu", "gelu_fast")),
    *({key: 1e-2} for key in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")),
    *({"tie_word_embeddings": value} for value in (True, False, ABSENT)),
    *({"head_dim": value} for value in (8, 24, ABSENT)),
    *({"num_key_value_heads": value} for value in (1, 4, None, ABSENT)),
    {"query_pre_attn_scalar": 24},
    *({"attn_logit_softcapping": value} for value in (5.0, None)),
    *({"final_logit_softcapping": value} for value in (3.0, None)),
    {"use_bidirectional_attention": True},
    {"is_causal": False},
    *({"no_rope_layers": value} for value in ([1, 0, 1, 0], ABSENT)),
    {"no_rope_layer_interval": 2, "no_rope_layers": ABSENT},
    {"original_max_position_embeddings": 16},
    {"original_max_position_embeddings": 16, "rope_parameters": rope(**YARN)},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"n_inner": 100},
    # Keys of neighbors of these families, which their layers ignore.
    {"logit_scale": 0.5, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "scale_embedding": False},
    *({key: True} for key in ("qk_layernorm", "use_qk_norm", "use_parallel_residual")),
    {"clip_qkv": 0.1},
    *({"use_bias": value} for value in (True, False)),
    {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    {"hidden_dropout": 0.3},
    {"rotary_dim": 4, "rotary_pct": 0.5, "rope_interleaved": True, "no_rope": True},
    {"attention_out_bias": True, "o_bias": True, "use_qkv_bias": True},
    # Of mixtures of experts.
    *({"norm_topk_prob": value} for value in (True, False, ABSENT)),
    *({"mlp_only_layers": value} for value in ([1, 3], None)),
    *({"decoder_sparse_step": value} for value in (2, ABSENT)),
    *({"num_dense_layers": value} for value in (0, 3, ABSENT)),
    *({"use_expert_bias": value} for value in (False, ABSENT)),
    *({"routed_scaling_factor": value} for value in (2.5, ABSENT)),
    *({key: ABSENT} for key in ("shared_expert_intermediate_size", "moe_num_shared_experts")),
    *({"moe_num_shared_experts": value} for value in (0, 1)),
    {"moe_layer_start_index": 0, "moe_layer_end_index": 2},
    {"moe_layer_interval": 2},
    {"moe_layer_start_index": ABSENT, "moe_layer_end_index": ABSENT},
    *({"moe_norm_min": value} for value in (0.5, ABSENT)),
    {"moe_k": ABSENT, "num_experts_per_tok": 3},
    *({key: 3} for key in ("num_experts_per_tok", "moe_k", "top_k_experts")),
    {"num_experts": ABSENT, "num_local_experts": 4},
    {"num_local_experts": ABSENT, "num_experts": 4},
    {"moe_num_experts": ABSENT, "num_experts": 4},
    {"full_attention_interval": 2, "layer_types": ABSENT},
    {"tie_embedding": False},
    {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    {"attn_temperature_tuning": True, "use_mrope": True, "cache_implementation": "hybrid"},
]


def description(change):
    return ", ".join(
        f"{key}={'absent' if value is ABSENT else value}" for key, value in change.items()
    )


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def expected_logits(folder, family, change):
    """Saves a random model of the changed config.json; its logits, or None where transformers refuses it."""
    config_json = AutoConfig.for_model(family, **SMALL[family]).to_dict()
    config_json |= {"architectures": [FAMILIES[family].architecture], **change}
    config_json = {key: value for key, value in config_json.items() if value is not ABSENT}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    try:
        config = AutoConfig.from_pretrained(folder)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        numbers = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                std = 0.15 if parameter.ndim > 1 else 0.2
                # The norm of a delta net raises the rounding of what is read of few tokens.
                if family.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" in name:
                    std = 0.05
                parameter += torch.empty_like(parameter).normal_(0, std, generator=numbers)
                # Gemma 4 does not scale scores, its norms of queries do: float32 would lose digits of wide heads.
                if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                    parameter *= len(parameter) ** -0.5
        unique = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}
        tensors = {name: model.state_dict()[name].contiguous() for name in unique.values()}
        if family == "olmo_hybrid":
            tensors = with_three_convolutions(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with torch.no_grad():
            return model.eval()(tokens()).logits
    except Exception:  # whatever its config classes or layers say: there is nothing to agree with
        return None


def with_three_convolutions(tensors):
    """As files have those of OLMo-Hybrid, which are one in memory."""
    whole = {name: tensor for name, tensor in tensors.items() if "linear_attn.conv1d" in name}
    key_width = 4 * 9
    parts = {}
    for name, tensor in whole.items():
        widths = (key_width, key_width, len(tensor) - 2 * key_width)
        for letter, part in zip("qkv", tensor.split(widths), strict=True):
            parts[name.replace("conv1d", f"{letter}_conv1d")] = part.contiguous()
    return {name: tensor for name, tensor in tensors.items() if name not in whole} | parts


@pytest.mark.sampled(40)  # a hundred models each
@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_transformers_reads_is_read_or_refused(family, tmp_path):
    outcomes = {"equal": 0, "refused": 0, "no oracle": 0}
    written_configs = set()
    for number, change in enumerate(CHANGES):
        folder = tmp_path / str(number)
        expected = expected_logits(folder, family, change)
        if expected is None:
            outcomes["no oracle"] += 1
            continue
        try:
            decoder = load_decoder(folder)
        except UserError as error:
            assert error.fix, description(change)
            outcomes["refused"] += 1
            continue
        with torch.no_grad():
            logits = decoder(tokens()).head
        limit = 2e-5 * max(5.0, float(expected.abs().max()))
        assert_close(
            logits,
            expected,
            atol=limit,
            rtol=0,
            msg=lambda text, c=change: f"{description(c)}: {text}",
        )
        outcomes["equal"] += 1

        # What is read is also written: transformers computes the same from our folder.
        if decoder.config in written_configs:
            continue
        written_configs.add(decoder.config)
        written_folder = tmp_path / f"{number}-out"
        written_folder.mkdir()
        write_model(model_state(decoder), decoder.config, written_folder)
        reloaded_model = AutoModelForCausalLM.from_pretrained(
            written_folder, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            assert_close(
                reloaded_model(tokens()).logits,
                expected,
                atol=limit,
                rtol=0,
                msg=lambda text, c=change: f"written: {description(c)}: {text}",
            )
    # Most changes are read or ignored, as in transformers; few are refused.
    assert outcomes["equal"] > 3 * outcomes["refused"], outcomes
    assert outcomes["equal"] > 50, outcomes


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, ["partial_rotary_factor (0.5)"]),
        (
            {"model_type": "qwen2", "rope_parameters": {"partial_rotary_factor": 0.25}},
            ["partial_rotary_factor (0.25)"],
        ),
        ({"model_type": "llama", "partial_rotary_factor": 1.0}, []),
        ({"model_type": "phi3", "partial_rotary_factor": 0.5}, []),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            ["attn_logit_softcapping (50.0)"],
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, []),
    ],
)
def test_a_key_that_transformers_ignores_is_named(config_json, expected):
    assert unread_keys(config_json) == expected
