"""Ministral 3: Mistral whose queries grow with their position."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config import ModelConfig, QueryScale
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts, rope_keys
from bloomery.facts.family import Family
from bloomery.facts.family_rules import first_window, windows_everywhere
from bloomery.facts.gguf_graphs import GgufGraph

_BETA = "llama_4_scaling_beta"


def _query_scale(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    """Both numbers stand among the settings of the rotation."""
    rope_fields = fields.inside("rope_scaling") or fields.inside("rope_parameters")
    if rope_fields is None or not rope_fields.number(_BETA, default=0.0):
        return {}
    # As for the rotation, a value outside its settings wins.
    is_outside = fields.get("original_max_position_embeddings") is not None
    holder = fields if is_outside else rope_fields
    every = holder.size("original_max_position_embeddings", 2**31)
    return {"query_scale": QueryScale(beta=rope_fields.number(_BETA), every=every)}


def _write(config: ModelConfig) -> HfKeys:
    """transformers has no layers of the family without the two numbers: 0 says that queries do not grow."""
    scale = config.query_scale or QueryScale(beta=0.0, every=config.max_positions)
    keys = rope_keys(config)
    numbers = {_BETA: scale.beta, "original_max_position_embeddings": scale.every}
    return {
        "sliding_window": first_window(config),
        "rope_parameters": keys["rope_parameters"] | numbers,
        "rope_scaling": keys["rope_scaling"] and keys["rope_scaling"] | numbers,
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ministral3": Family(
            "Ministral3ForCausalLM",
            "Ministral 3",
            windows=windows_everywhere,
            extra=_query_scale,
            write=_write,
            # A new model reads no longer texts than those that it is trained on.
            fresh=lambda _sizes: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e6,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    _BETA: 0.1,
                },
            },
            gguf=GgufGraph("mistral3", free=("query_scale",), interleaved=True),
        ),
    }
)
