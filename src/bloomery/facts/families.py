"""The table of the model families. One entry, and one case of the parity test, is all that is known of a family.

The entries are in `family_entries`, one file for those that resemble each other. `family.Family` says what each field
means; `hf_config` reads a config.json by it and writes one. Defaults of absent keys are those of transformers' config
classes.
"""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import HfKeys
from bloomery.facts.family import Family
from bloomery.facts.family_entries import (
    apertus,
    gemma,
    gemma4,
    gpt2,
    gpt_oss,
    granite,
    latent,
    lfm,
    llama_like,
    ministral,
    mixtures,
    neighbor_rotation,
    olmo3,
    olmo_hybrid,
    plain_mlp,
    qwen,
    qwen_mixtures,
)
from bloomery.facts.table import OpenTable

FAMILIES: OpenTable[Family] = OpenTable(
    {
        **llama_like.FAMILIES,
        **qwen.FAMILIES,
        **gemma.FAMILIES,
        **gemma4.FAMILIES,
        **gpt2.FAMILIES,
        **lfm.FAMILIES,
        **olmo3.FAMILIES,
        **olmo_hybrid.FAMILIES,
        **ministral.FAMILIES,
        **neighbor_rotation.FAMILIES,
        **plain_mlp.FAMILIES,
        **apertus.FAMILIES,
        **granite.FAMILIES,
        **mixtures.FAMILIES,
        **latent.FAMILIES,
        **gpt_oss.FAMILIES,
        **qwen_mixtures.FAMILIES,
    }
)


# The model_type of a multimodal model, and of its language model.
MULTIMODAL: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "lfm2_vl": "lfm2",
        "lfm3_vl": "lfm3",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "internvl": "qwen2",
        "mistral3": "mistral",
        "qwen2_5_vl": "qwen2",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "qwen3_vl": "qwen3",
        "qwen3_vl_moe": "qwen3_moe",
        "smolvlm": "llama",
    }
)
# Of language models that are another family's: what their own config class has where a file lacks a key, and what their
# layers do whatever a file says. Of text alone the three kinds of positions are equal, and turn heads as one does.
TEXT_DEFAULTS: Mapping[str, HfKeys] = MappingProxyType(
    {
        "qwen3_vl": {"num_key_value_heads": 32, "max_position_embeddings": 128000}
        | {"rope_theta": 5e5, "head_dim": 128},
        "qwen3_vl_moe": {"num_key_value_heads": 16, "max_position_embeddings": 128000}
        | {"rope_theta": 5e5, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    }
)
TEXT_FIXED: Mapping[str, HfKeys] = MappingProxyType(
    {
        "qwen3_vl": {"use_sliding_window": False},
        "qwen3_vl_moe": {"use_sliding_window": False, "norm_topk_prob": True},
    }
)


def family_label(config: ModelConfig) -> str:
    """How people write the name of the config's architecture."""
    if config.transformers_backend is not None:
        return architecture_of(config).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return FAMILIES[config.family].label


def architecture_of(config: ModelConfig) -> str:
    """The name of its class in transformers."""
    if config.transformers_backend is not None:
        return config.transformers_backend.architecture or config.family
    return FAMILIES[config.family].architecture


def known_family(name: str) -> Family:
    """Raises UserError for a name that is none."""
    if name not in FAMILIES:
        raise UserError(
            f"{name!r} is not a supported family",
            where="model.family",
            fix=f"known: {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]
