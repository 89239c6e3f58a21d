"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped activation."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.family import BIASES, Family, StoredExperts, StoredNames
from bloomery.facts.family_rules import layer_types, windows_by_type
from bloomery.facts.family_rules_experts import expert_keys, experts_of
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_by_type(fields, layers, lambda n: n % 2 == 0)


def _experts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    experts = experts_of(
        fields,
        width_key="intermediate_size",
        softmax_of_chosen=True,
        bias=True,
        clamp=fields.number("swiglu_limit", low=1e-6),
        slope=fields.number("swiglu_alpha"),
    )
    return {"experts": experts}


def _write(config: ModelConfig) -> HfKeys:
    """transformers makes a mask with a window even where no layer has one."""
    experts = config.experts
    assert experts is not None
    kinds = layer_types(config)
    return {
        **kinds,
        "sliding_window": kinds["sliding_window"] or config.max_positions,
        **expert_keys(config, count_key="num_local_experts", width_key="intermediate_size"),
        "swiglu_limit": experts.clamp,
        "swiglu_alpha": experts.slope,
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt_oss": Family(
            "GptOssForCausalLM",
            "GPT-OSS",
            {"attention_sinks": True},
            flags=BIASES,
            windows=_windows,
            extra=_experts,
            write=_write,
            gguf=GgufGraph(
                "gpt-oss",
                {"attention_sinks": True, "attention_bias": True, "output_bias": True},
                free=(),
                renamed={"post_attention_layernorm": "post_attention_norm"},
                has_own_head=True,
                window_period=2,
                default_window=128,
                rounds_yarn=True,
                experts=GgufExperts(
                    ("softmax_of_chosen",), bias=True, clamp=(7.0, 1.702), width_is_mlp=True
                ),
            ),
            stored=StoredNames(
                renamed={"mlp.gate": "mlp.router"},
                experts=StoredExperts(
                    stacks={stack: f"mlp.experts.{stack}" for stack in _STACKS},
                    transposed=True,
                    interleaved=True,
                ),
            ),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "attention_bias": True,
                "sliding_window": 128,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "router_aux_loss_coef": 0.001,
            },
        ),
    }
)
