"""What takes more than copying between a config.json of Gemma 4 and the facts of a ModelConfig, both ways."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bloomery.core.errors import UserError
from bloomery.facts.config import Experts, LayerSizes, ModelConfig, RopeScaling
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.family_rules import layer_types, windows_by_type
from bloomery.facts.family_rules_experts import experts_of

# transformers' config class has these where a file has none.
GEMMA4_ROPE: HfKeys = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


def windows_of_gemma4(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Full attention in each sixth layer, where the file does not say which; always in the last, as in transformers."""
    windows = windows_by_type(fields, layers, lambda n: (n + 1) % 6 != 0)
    others = windows[:-1]
    return (*others, None) if any(others) else ()


def gemma4_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """What layers with full attention have of their own, shared keys and values, and inputs of each layer."""
    refuse_unknown_layers(fields)
    scaling = {}
    if fields.get("rope_parameters") is None:
        scaling = {"rope_scaling": RopeScaling(kind="proportional", factor=1.0, turning_share=0.25)}
    num_layers = facts["num_layers"]
    shared = _count(fields, "num_kv_shared_layers", 2**12)
    width = _count(fields, "hidden_size_per_layer_input", 2**16)
    vocabulary = fields.size("vocab_size_per_layer_input", 2**24, default=facts["vocab_size"])
    if width and vocabulary != facts["vocab_size"]:
        raise fields.refuse("vocab_size_per_layer_input", f"vocab_size, {facts['vocab_size']}")
    return {
        **scaling,
        "layer_sizes": _sizes_by_layer(fields, facts, first_shared=num_layers - shared),
        "keys_are_values": fields.flag("attention_k_eq_v"),
        "num_kv_shared_layers": shared,
        "per_layer_input_size": width,
        "attention_scale": 1.0,
        "experts": _experts_beside_mlp(fields, facts) if fields.flag("enable_moe_block") else None,
        "final_softcap": fields.optional_number("final_logit_softcapping"),
    }


def fresh_gemma4(sizes: Mapping[str, Any]) -> HfKeys:
    """A new model in the proportions of E4B: wide heads in full attention, 3 of 7 layers with the keys of another.

    The published widths would be most of a small model.
    """
    layers = sizes["num_layers"]
    shared = layers * 3 // 7
    has_lenders = layers - shared >= 6  # the sixth is the first with full attention
    return {
        "global_head_dim": 2 * sizes["head_dim"],
        "hidden_size_per_layer_input": max(8, sizes["hidden_size"] // 8),
        "num_kv_shared_layers": shared if has_lenders else 0,
    }


def refuse_unknown_layers(fields: Fields) -> None:
    """Raises UserError for what transformers' Gemma 4 computes and the decoder does not."""
    choose = "choose another model"
    if fields.flag("enable_moe_block") and fields.flag("use_double_wide_mlp"):
        problem = "use_double_wide_mlp: MLPs of two widths beside experts are not supported"
        raise UserError(problem, where=fields.where, fix=choose)
    if fields.get("use_bidirectional_attention") == "all":
        problem = (
            "use_bidirectional_attention: all is not supported: tokens would see those after them"
        )
        raise UserError(problem, where=fields.where, fix=choose)
    if fields.get("rope_scaling") is not None:
        raise fields.refuse("rope_scaling", "absent: Gemma 4 reads rope_parameters alone")


def _experts_beside_mlp(fields: Fields, facts: ModelFacts) -> Experts:
    experts = experts_of(
        fields,
        width_key="moe_intermediate_size",
        per_token_key="top_k_experts",
        normalize=True,
        normed_router=True,
        shared_width=facts["intermediate_size"],
        own_norms=True,
    )
    return replace(experts, balance=0.0)


def _count(fields: Fields, key: str, largest: int) -> int:
    """A size that may be 0 or absent."""
    value = fields.get(key)
    return 0 if value in (None, 0) else fields.size(key, largest)


def _sizes_by_layer(
    fields: Fields, facts: ModelFacts, *, first_shared: int
) -> tuple[LayerSizes, ...]:
    """Files of transformers 5 state sizes of single layers, published ones those of all with full attention."""
    windows = facts["sliding_window"] or (None,) * facts["num_layers"]
    stated: dict[str, Any] | None = fields.get("per_layer_config")
    if stated is not None and not isinstance(stated, dict):
        raise fields.refuse("per_layer_config", "an object")
    wide_head = fields.size("global_head_dim", 2**14)
    # transformers reads the key/value heads of full attention only where keys are values.
    few_heads = None
    if fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
        few_heads = fields.size("num_global_key_value_heads", 2**12)
    sizes = []
    for number, window in enumerate(windows):
        head_dim = facts["head_dim"]
        kv_heads = facts["num_kv_heads"]
        if stated is not None:
            own = stated.get(str(number), {})
            if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
                expected = "made of head_dim and num_key_value_heads for each layer"
                raise fields.refuse("per_layer_config", expected)
            own_fields = Fields(own, {}, where=f"{fields.where}, per_layer_config")
            head_dim = own_fields.size("head_dim", 2**14, default=head_dim)
            kv_heads = own_fields.size("num_key_value_heads", 2**12, default=kv_heads)
        elif window is None:
            head_dim = wide_head
            kv_heads = few_heads or kv_heads
        is_wide = number >= first_shared and fields.flag("use_double_wide_mlp")
        sizes.append(
            LayerSizes(
                num_heads=facts["num_heads"],
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate_size=facts["intermediate_size"] * (2 if is_wide else 1),
            )
        )
    return tuple(sizes)


def write_gemma4(config: ModelConfig) -> HfKeys:
    """The keys of published files, which every version of transformers reads."""
    windows = layer_types(config)
    windows["sliding_window"] = windows["sliding_window"] or config.max_positions
    windowed = config.sliding_window or (None,) * config.num_layers
    full = [
        sizes for sizes, window in zip(config.layer_sizes, windowed, strict=True) if window is None
    ]
    is_wide = config.layer_sizes[-1].intermediate_size != config.intermediate_size
    return {
        **windows,
        "global_head_dim": full[0].head_dim,
        "num_global_key_value_heads": full[0].num_kv_heads if config.keys_are_values else None,
        "attention_k_eq_v": config.keys_are_values,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": config.per_layer_input_size,
        "vocab_size_per_layer_input": config.vocab_size,
        **_expert_keys(config),
        "use_bidirectional_attention": None,
        "final_logit_softcapping": config.final_softcap,
    }


def _expert_keys(config: ModelConfig) -> HfKeys:
    experts = config.experts
    if experts is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts.count,
        "top_k_experts": experts.per_token,
        "moe_intermediate_size": experts.width,
    }
