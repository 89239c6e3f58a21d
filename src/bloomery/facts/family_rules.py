"""What takes more than copying between a family's config.json and the facts of a ModelConfig, both ways.

`windows_*` read the window of each layer, `*_scale` and `rotating_layers` other facts; `write_*` undo both.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bloomery.facts.config import DeltaNet, Mixer, ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts


def layer_types(config: ModelConfig) -> HfKeys:
    kinds = [
        "full_attention" if window is None else "sliding_attention"
        for window in config.sliding_window or (None,) * config.num_layers
    ]
    return {"sliding_window": first_window(config), "layer_types": kinds}


def first_window(config: ModelConfig) -> int | None:
    return next((window for window in config.sliding_window if window is not None), None)


def windows_by_type(
    fields: Fields, layers: int, sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """From `layer_types`, or by the family's own rule in files that are older than that key."""
    if fields.get("sliding_window") is None:
        return ()
    window = fields.size("sliding_window", 2**31)
    types = fields.entries("layer_types", layers)
    unknown = set(types or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise fields.lacks("layer_types", "made of full_attention and sliding_attention")
    slides = [
        sliding(n) if types is None else types[n] == "sliding_attention" for n in range(layers)
    ]
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def windows_of_mistral(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_by_type(fields, layers, lambda _: True)


def write_mistral(config: ModelConfig) -> HfKeys:
    """Where only some layers have a window, transformers reads which from `layer_types`."""
    is_mixed = None in config.sliding_window
    return layer_types(config) if is_mixed else {"sliding_window": first_window(config)}


def windows_everywhere(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("sliding_window") is None:
        return ()
    return (fields.size("sliding_window", 2**31),) * layers


def windows_of_qwen(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window"):
        return ()
    first_windowed_layer = int(fields.number("max_window_layers", default=layers))
    return windows_by_type(fields, layers, lambda layer: layer >= first_windowed_layer)


def windows_of_gemma3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    pattern = fields.size("sliding_window_pattern", 2**12, default=6)
    return windows_by_type(fields, layers, lambda n: (n + 1) % pattern != 0)


def windows_of_smollm3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    # transformers masks by `layer_types` alone where the config states them.
    if not fields.flag("use_sliding_window") and fields.get("layer_types") is None:
        return ()
    rotating = rotating_layers(fields, layers)
    return windows_by_type(fields, layers, lambda n: not rotating[n])


def rotating_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    interval = fields.size("no_rope_layer_interval", 2**12, default=4)
    # The name misleads: 1 means that the layer rotates.
    entries = fields.entries("no_rope_layers", layers)
    if entries is not None:
        return tuple(bool(entry) for entry in entries)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def gemma_scale(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """A scale of head_dim ** -0.5 is the default, and so None; soft caps may be absent."""
    scalar = fields.number("query_pre_attn_scalar", low=1e-6)
    caps = {
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "final_softcap": fields.optional_number("final_logit_softcapping"),
    }
    return caps | {"attention_scale": None if scalar == facts["head_dim"] else scalar**-0.5}


def gemma3_scale(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """As Gemma 2, but transformers' Gemma 3 has no soft cap in attention, whatever the config says."""
    return gemma_scale(fields, facts) | {"attention_softcap": None}


def write_gemma(config: ModelConfig) -> HfKeys:
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    caps = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    # transformers' Gemma makes a mask with a window even where no layer has one.
    windows = layer_types(config)
    windows["sliding_window"] = windows["sliding_window"] or config.max_positions
    return windows | caps | {"query_pre_attn_scalar": round(scalar)}


def write_qwen(config: ModelConfig) -> HfKeys:
    kinds = layer_types(config)
    slides = config.sliding_window != ()
    return kinds | {
        "use_sliding_window": slides,
        "max_window_layers": kinds["layer_types"].count("full_attention"),
    }


def write_smollm3(config: ModelConfig) -> HfKeys:
    rotating = config.rotary_layers or (True,) * config.num_layers
    slides = {
        "use_sliding_window": config.sliding_window != (),
        "no_rope_layers": [int(turns) for turns in rotating],
    }
    return layer_types(config) | slides


# What `layer_types` of hybrid models calls our mixers; a layer with a window has attention, too.
MIXER_TYPES: Mapping[str, Mixer] = MappingProxyType(
    {
        "full_attention": "attention",
        "sliding_attention": "attention",
        "linear_attention": "delta_net",
        "conv": "short_convolution",
    }
)


def mixers_by_type(fields: Fields, layers: int, kind: Callable[[int], str]) -> tuple[Mixer, ...]:
    """From `layer_types`, or by the family's own rule in files that do not have it."""
    types = fields.entries("layer_types", layers) or [kind(number) for number in range(layers)]
    if unknown := set(types) - MIXER_TYPES.keys():
        raise fields.lacks("layer_types", f"without {sorted(map(str, unknown))[0]}")
    return tuple(MIXER_TYPES[kind] for kind in types)


def refuse_other_activation(fields: Fields) -> None:
    """In transformers the convolution before a delta net has the activation of the MLP."""
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.lacks("hidden_act", "silu in a model with delta nets")


def delta_net_of(fields: Fields) -> DeltaNet:
    def size(key: str) -> int:
        return fields.size(f"linear_{key}", 2**16)

    refuse_other_activation(fields)

    return DeltaNet(
        num_key_heads=size("num_key_heads"),
        num_value_heads=size("num_value_heads"),
        key_head_dim=size("key_head_dim"),
        value_head_dim=size("value_head_dim"),
        kernel=size("conv_kernel_dim"),
    )


def qwen3_5_mixers(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Gated delta nets, with attention in each fourth layer."""
    interval = fields.size("full_attention_interval", 2**12, default=4)
    return {
        "mixers": mixers_by_type(
            fields,
            facts["num_layers"],
            lambda n: "linear_attention" if (n + 1) % interval else "full_attention",
        ),
        "delta_net": delta_net_of(fields),
    }


def write_qwen3_5(config: ModelConfig) -> HfKeys:
    sizes = config.delta_net
    assert sizes is not None
    names: dict[Mixer, str] = {"attention": "full_attention", "delta_net": "linear_attention"}
    return {
        "layer_types": [names[mixer] for mixer in config.mixers],
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
        "linear_key_head_dim": sizes.key_head_dim,
        "linear_value_head_dim": sizes.value_head_dim,
        "linear_conv_kernel_dim": sizes.kernel,
    }


def write_phi3(config: ModelConfig) -> HfKeys:
    scaling = config.rope_scaling
    original = None if scaling is None else scaling.original_max_positions
    return {
        "sliding_window": first_window(config),
        "original_max_position_embeddings": original or config.max_positions,
    }
