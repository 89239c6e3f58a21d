"""OLMo 3: OLMo 2 with windows, whose layers rotate without the scaling of the others."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts, rope_facts
from bloomery.facts.family import BIASES, Family
from bloomery.facts.family_rules import layer_types, windows_by_type
from bloomery.facts.gguf_graphs import GgufGraph


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_by_type(fields, layers, lambda n: (n + 1) % 4 != 0)


def _write(config: ModelConfig) -> HfKeys:
    """transformers makes a mask with a window even where no layer has one."""
    kinds = layer_types(config)
    return kinds | {"sliding_window": kinds["sliding_window"] or config.max_positions}


def _rotation(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """By kind of layer: settings for all layers, and Gemma's key, transformers leaves unread."""
    unread = ["rope_local_base_freq"]
    stated = fields.inside("rope_parameters")
    if stated is not None and not {"full_attention", "sliding_attention"} & stated.values.keys():
        unread.append("rope_parameters")
    values = {key: value for key, value in fields.values.items() if key not in unread}
    return rope_facts(
        Fields(values, fields.defaults, where=fields.where),
        max_positions=facts["max_positions"],
        head_dim=facts["head_dim"],
        reads_rotary_share=False,
        has_local_rope=True,
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "olmo3": Family(
            "Olmo3ForCausalLM",
            "OLMo 3",
            {"norm_placement": "after", "qk_norm": "full"},
            flags=BIASES,
            windows=_windows,
            extra=_rotation,
            unwritten=("rope_local_base_freq",),
            write=_write,
            has_local_rope=True,
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 5e5,
                # Of an older file transformers gives `rope_theta` to the layers without a window alone.
                "rope_local_base_freq": 5e5,
                "sliding_window": 4096,
            },
            gguf=GgufGraph(
                "olmo2",
                {"norm_placement": "after", "qk_norm": "full"},
                free=("attention_bias", "local_rope_theta"),
                full_width=True,
                has_own_head=True,
                window_period=4,
                plain_window_rotation=True,
            ),
        ),
    }
)
