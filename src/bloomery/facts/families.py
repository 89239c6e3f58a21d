"""The model families: what a Hugging Face config.json of each means as architectural facts, both ways.

A family is one entry of `FAMILIES` here, one of `io/stored.STORAGE` if its weights are stored differently, and one
parameter of the parity test. Defaults of absent keys are those of transformers' config classes.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, cast, get_args

from bloomery.core.errors import UserError
from bloomery.facts.config import Activation, ModelConfig, RopeKind, RopeScaling, checked
from bloomery.facts.table import Table

FIX = "fix that value; download a published model again"
LARGEST = {
    "vocab_size": 2**24,
    "max_positions": 2**31,
    "num_layers": 2**12,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "hidden_size": 2**18,
    "intermediate_size": 2**21,
    "head_dim": 2**14,
}


@dataclass(frozen=True)
class Fields:
    """A JSON object read key by key. Whatever is never asked for is dropped: `auto_map` and the like do nothing."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value, the family's default where the key is absent; None where neither exists, or null is written."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def refuse(self, key: str, expected: str) -> UserError:
        text = repr(self.get(key))
        if len(text) > 60:
            text = text[:57] + "..."
        return UserError(f"{key} is {text}; it must be {expected}", where=self.where, fix=FIX)

    def size(self, key: str, largest: int, *, default: int | None = None) -> int:
        """A positive whole number of at most `largest`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UserError(f"{key} is missing", where=self.where, fix=FIX)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= largest:
            raise self.refuse(key, f"a whole number from 1 to {largest:,}")
        return value

    def number(
        self, key: str, *, low: float = 0.0, high: float = 1e12, default: float | None = None
    ) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{key} is missing", where=self.where, fix=FIX)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key, low=1e-12, high=1e12)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.refuse(key, "true or false")
        return bool(value)

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id; of several (some families list their end tokens) the first."""
        value = self.get(key)
        value = value[0] if isinstance(value, list) and value else value
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_number or value >= 2**31):
            raise self.refuse(key, f"a token id below {vocab_size:,}")
        return value if is_number and 0 <= value < vocab_size else None

    def choice(self, key: str, native_names: Mapping[str, str]) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in native_names:
            raise self.refuse(key, "one of " + ", ".join(sorted(native_names)))
        return native_names[value]

    def entries(self, key: str, length: int) -> list[Any] | None:
        """A list with an entry per layer (more are dropped, as in transformers)."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) < length):
            raise self.refuse(key, f"a list of {length} entries, one per layer")
        return None if value is None else value[:length]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self.get(key)
        fits = isinstance(value, list) and len(value) == length
        if not fits or not all(isinstance(x, int | float) and 0 < x < 1e12 for x in value):
            raise self.refuse(key, f"a list of {length} positive numbers")
        return tuple(float(x) for x in value)

    def inside(self, key: str) -> "Fields | None":
        """A nested object, or None where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return None if not value else Fields(value, {}, where=f"{self.where}, {key}")


ConfigFields = dict[str, Any]


def rope_facts(
    fields: Fields, family: "Family", *, max_positions: int, head_dim: int
) -> ConfigFields:
    """`rope_theta`, `rope_scaling`, `rotary_share` and `local_rope_theta` of a ModelConfig.

    Raises UserError for settings that transformers' layers of the family cannot follow either.
    """
    # transformers 5 has one object for everything rotary, per kind of layer where a model has two kinds. The older
    # rope_scaling replaces it, or the part of it that full attention reads.
    rope_fields = fields.inside("rope_parameters") or Fields({}, {}, where=fields.where)
    local_fields = None
    nested_fields = rope_fields.inside("full_attention") or rope_fields.inside("sliding_attention")
    if nested_fields is not None and not family.has_local_rope:
        raise fields.refuse("rope_parameters", "one object: all layers of this family rotate alike")
    if nested_fields is not None:
        local_fields = rope_fields.inside("sliding_attention")
        rope_fields = rope_fields.inside("full_attention") or Fields({}, {}, where=fields.where)
    old_fields = fields.inside("rope_scaling")
    if old_fields is not None:
        values = {**rope_fields.values, **old_fields.values} if nested_fields else old_fields.values
        rope_fields = Fields(values, {}, where=f"{fields.where}, rope_scaling")

    # The part of a head that rotates: most families of transformers rotate all of it, whatever the config says.
    share = fields.number("partial_rotary_factor", high=1.0, default=1.0)
    share = rope_fields.number("partial_rotary_factor", high=1.0, default=share)
    is_scaled = _rope_kind(rope_fields) != "default"
    if share != 1.0 and not family.reads_rotary_share and is_scaled:
        raise fields.refuse("partial_rotary_factor", "1: this family rotates whole heads")
    if not family.reads_rotary_share:
        share = 1.0
    width = int(head_dim * share)
    if width < 2 or width % 2:
        problem = f"{share:g} (partial_rotary_factor) of head_dim {head_dim} is not even"
        raise UserError(problem, where=fields.where, fix="choose an even head_dim")

    local_theta = None
    if family.has_local_rope:
        local_fields = local_fields or Fields({}, {}, where=fields.where)
        if _rope_kind(local_fields) != "default":
            raise fields.refuse("rope_parameters", "without scaling for sliding_attention")
        local_theta = _theta(local_fields, fields, "rope_local_base_freq")
    return {
        "rope_theta": _theta(rope_fields, fields, "rope_theta"),
        "rope_scaling": _scaling(rope_fields, fields, max_positions=max_positions, width=width),
        "rotary_share": share,
        "local_rope_theta": local_theta,
    }


def _theta(rope_fields: Fields, fields: Fields, key: str) -> float:
    """The base of the frequencies: that of the rope object, else the config's own under `key`, else the family's."""
    if rope_fields.get("rope_theta") is not None:
        return rope_fields.number("rope_theta", low=1e-6)
    return fields.number(key, low=1e-6)


def _rope_kind(rope_fields: Fields) -> Any:
    return rope_fields.get("rope_type") or rope_fields.get("type") or "default"


def unread_keys(hf: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that transformers' layers of its family ignore, though other programs may read them."""
    hf = text_part(hf)
    name = str(hf.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        return []
    rope = hf.get("rope_parameters")
    inner_share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    values = {}
    if not family.reads_rotary_share:
        values["partial_rotary_factor"] = inner_share or hf.get("partial_rotary_factor")
    if name == "gemma3_text":
        values["attn_logit_softcapping"] = hf.get("attn_logit_softcapping")
    return [f"{key} ({str(value)[:20]})" for key, value in values.items() if value not in (None, 1)]


def _scaling(
    scaling_fields: Fields, model_fields: Fields, *, max_positions: int, width: int
) -> RopeScaling | None:
    kind = _rope_kind(scaling_fields)
    if kind == "default":
        return None
    # Both names were given to LongRoPE before it had its own.
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling_fields.values):
        kind = "longrope"
    if kind not in get_args(RopeKind):
        raise UserError(
            f"rope type {str(kind)[:40]!r} is not known; these are: {', '.join(get_args(RopeKind))}",
            where=f"{model_fields.where}, rope_scaling",
            fix=FIX,
        )
    if kind == "linear" or kind == "dynamic":
        return RopeScaling(kind=kind, factor=scaling_fields.number("factor", low=1e-6))
    nearest = (
        scaling_fields
        if scaling_fields.get("original_max_position_embeddings") is not None
        else model_fields
    )
    outermost = (
        model_fields
        if model_fields.get("original_max_position_embeddings") is not None
        else nearest
    )
    original = outermost.size("original_max_position_embeddings", 2**31, default=max_positions)
    factor = scaling_fields.number("factor", low=1e-6, default=max_positions / original)
    shared: ConfigFields = {"kind": kind, "factor": factor, "original_max_positions": original}
    if kind == "llama3":
        return RopeScaling(
            **shared,
            low_freq_factor=scaling_fields.number("low_freq_factor", low=1e-6),
            high_freq_factor=scaling_fields.number("high_freq_factor", low=1e-6),
        )
    shared["attention_factor"] = scaling_fields.optional_number("attention_factor")
    if kind == "longrope":
        return RopeScaling(
            **shared,
            short_factor=scaling_fields.numbers("short_factor", width // 2),
            long_factor=scaling_fields.numbers("long_factor", width // 2),
        )

    # YaRN. DeepSeek states its attention factor as a ratio of two `mscale`; None: YaRN's own formula.
    if shared["attention_factor"] is None:
        mscale = scaling_fields.optional_number("mscale")
        mscale_all_dim = scaling_fields.optional_number("mscale_all_dim")
        if mscale and mscale_all_dim and factor > 1:
            log = math.log(factor)  # in this order of products: they round
            numerator = 0.1 * mscale * log + 1.0
            shared["attention_factor"] = numerator / (0.1 * mscale_all_dim * log + 1.0)
    fast = scaling_fields.optional_number("beta_fast") or 32.0
    slow = scaling_fields.optional_number("beta_slow") or 1.0
    return RopeScaling(
        **shared,
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling_fields.get("truncate") is not False,
    )


def rope_keys(config: ModelConfig) -> ConfigFields:
    """The settings under their new and their old names, so that old and new versions of transformers agree."""
    scaling = config.rope_scaling
    keys = {"rope_theta": config.rope_theta}
    share = {} if config.rotary_share == 1.0 else {"partial_rotary_factor": config.rotary_share}
    stretched: ConfigFields = (
        {"rope_type": "default"} if scaling is None else _scaling_keys(scaling)
    )
    flat = {"rope_theta": config.rope_theta, **share, **stretched}
    facts: ConfigFields = {
        **keys,
        **share,
        "rope_scaling": None if scaling is None else {**flat, **stretched},
    }
    if config.local_rope_theta is None:
        return facts | {"rope_parameters": flat}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    nested = {"full_attention": flat, "sliding_attention": local}
    return facts | {"rope_parameters": nested, "rope_local_base_freq": config.local_rope_theta}


def _scaling_keys(scaling: RopeScaling) -> ConfigFields:
    facts: ConfigFields = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_max_positions is not None:
        facts["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.attention_factor is not None:
        facts["attention_factor"] = scaling.attention_factor
    if scaling.kind == "llama3":
        facts |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    elif scaling.kind == "yarn":
        facts |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    elif scaling.kind == "longrope":
        facts |= {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    return facts


LLAMA_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attention_dropout": "attention_dropout",
    }
)
GPT2_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "attention_dropout": "attn_pdrop",
    }
)
GEMMA_FACTS: ConfigFields = {"norm": "rms_unit_offset", "scale_embeddings": True}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch": "gelu",
    "relu": "relu",
}


@dataclass(frozen=True)
class Family:
    """`facts` hold for each of its models; `keys` (native_name -> theirs) and `flags` differ between models.

    `windows` reads the window of each layer, `extra` the facts that take more than copying; `write` undoes both.
    `refused` are keys that change the mathematics in a way that the decoder does not follow. `reads_rotary_share`: a
    part of each head may rotate. `has_local_rope`: layers with a window rotate by a base of their own. `classifier`:
    the stem of transformers' reward model, where it is not the architecture's; `gelu_tanh`: how the family calls that
    activation; `states_dropout`: its config class has a dropout that is not 0 by default.
    """

    architecture: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    flags: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda _fields, _layers: ()
    extra: Callable[[Fields, ConfigFields], ConfigFields] = lambda _fields, _facts: {}
    write: Callable[[ModelConfig], ConfigFields] = lambda _config: {}
    refused: tuple[str, ...] = ("use_bidirectional_attention",)
    reads_rotary_share: bool = False
    has_local_rope: bool = False
    classifier: str = ""
    gelu_tanh: str = "gelu_pytorch_tanh"
    states_dropout: bool = False


def _layer_types(config: ModelConfig) -> ConfigFields:
    kinds = [
        "full_attention" if config.window(n) is None else "sliding_attention"
        for n in range(config.num_layers)
    ]
    return {"sliding_window": _window(config), "layer_types": kinds}


def _window(config: ModelConfig) -> int | None:
    return next((window for window in config.sliding_window if window is not None), None)


def _windows_by_type(
    fields: Fields, layers: int, sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """From `layer_types`, or by the family's own rule in files that are older than that key."""
    if fields.get("sliding_window") is None:
        return ()
    window = fields.size("sliding_window", 2**31)
    types = fields.entries("layer_types", layers)
    unknown = set(types or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise fields.refuse("layer_types", "made of full_attention and sliding_attention")
    slides = [
        sliding(n) if types is None else types[n] == "sliding_attention" for n in range(layers)
    ]
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def _windows_mistral(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return _windows_by_type(fields, layers, lambda _: True)


def _write_mistral(config: ModelConfig) -> ConfigFields:
    """Where only some layers have a window, transformers reads which from `layer_types`."""
    is_mixed = None in config.sliding_window
    return _layer_types(config) if is_mixed else {"sliding_window": _window(config)}


def _windows_everywhere(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("sliding_window") is None:
        return ()
    return (fields.size("sliding_window", 2**31),) * layers


def _windows_qwen(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window"):
        return ()
    first_windowed_layer = int(fields.number("max_window_layers", default=layers))
    return _windows_by_type(fields, layers, lambda layer: layer >= first_windowed_layer)


def _windows_gemma3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    pattern = fields.size("sliding_window_pattern", 2**12, default=6)
    return _windows_by_type(fields, layers, lambda n: (n + 1) % pattern != 0)


def _windows_smollm3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    # transformers masks by `layer_types` alone where the config states them.
    if not fields.flag("use_sliding_window") and fields.get("layer_types") is None:
        return ()
    rotating = _rotating(fields, layers)
    return _windows_by_type(fields, layers, lambda n: not rotating[n])


def _rotating(fields: Fields, layers: int) -> tuple[bool, ...]:
    interval = fields.size("no_rope_layer_interval", 2**12, default=4)
    # The name misleads: 1 means that the layer rotates.
    entries = fields.entries("no_rope_layers", layers)
    if entries is not None:
        return tuple(bool(entry) for entry in entries)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _gemma_scale(fields: Fields, facts: ConfigFields) -> ConfigFields:
    """A scale of head_dim ** -0.5 is the default, and so None; soft caps may be absent."""
    scalar = fields.number("query_pre_attn_scalar", low=1e-6)
    caps = {
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "final_softcap": fields.optional_number("final_logit_softcapping"),
    }
    return caps | {"attention_scale": None if scalar == facts["head_dim"] else scalar**-0.5}


def _gemma3_scale(fields: Fields, facts: ConfigFields) -> ConfigFields:
    """As Gemma 2, but transformers' Gemma 3 has no soft cap in attention, whatever the config says."""
    return _gemma_scale(fields, facts) | {"attention_softcap": None}


def _write_gemma(config: ModelConfig) -> ConfigFields:
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    caps = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    # transformers' Gemma makes a mask with a window even where no layer has one.
    windows = _layer_types(config)
    windows["sliding_window"] = windows["sliding_window"] or config.max_positions
    return windows | caps | {"query_pre_attn_scalar": round(scalar)}


def _write_qwen(config: ModelConfig) -> ConfigFields:
    kinds = _layer_types(config)
    slides = config.sliding_window != ()
    return kinds | {
        "use_sliding_window": slides,
        "max_window_layers": kinds["layer_types"].count("full_attention"),
    }


def _write_smollm3(config: ModelConfig) -> ConfigFields:
    rotating = config.rotary_layers or (True,) * config.num_layers
    slides = {
        "use_sliding_window": config.sliding_window != (),
        "no_rope_layers": [int(turns) for turns in rotating],
    }
    return _layer_types(config) | slides


def _write_phi3(config: ModelConfig) -> ConfigFields:
    scaling = config.rope_scaling
    original = None if scaling is None else scaling.original_max_positions
    return {
        "sliding_window": _window(config),
        "original_max_position_embeddings": original or config.max_positions,
    }


FAMILIES: Table[Family] = Table(
    {
        "llama": Family(
            "LlamaForCausalLM",
            flags=BIASES | {"mlp_bias": "mlp_bias"},
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
        ),
        "mistral": Family(
            "MistralForCausalLM",
            windows=_windows_mistral,
            write=_write_mistral,
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
            },
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            {"attention_bias": True},
            windows=_windows_qwen,
            write=_write_qwen,
            defaults={
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            {"qk_norm": "head"},
            flags=BIASES,
            windows=_windows_qwen,
            write=_write_qwen,
            defaults={
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
        ),
        "gemma": Family(
            "GemmaForCausalLM",
            GEMMA_FACTS,
            flags=BIASES,
            activations=ACTIVATIONS | {"gelu": "gelu_tanh"},
            defaults={
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "num_key_value_heads": 16,
            },
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            {**GEMMA_FACTS, "norm_placement": "both"},
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=lambda fields, layers: _windows_by_type(fields, layers, lambda n: n % 2 == 0),
            extra=_gemma_scale,
            write=_write_gemma,
            defaults={
                "head_dim": 256,
                "num_key_value_heads": 4,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "hidden_activation": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            {**GEMMA_FACTS, "norm_placement": "both", "qk_norm": "head"},
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=_windows_gemma3,
            extra=_gemma3_scale,
            write=_write_gemma,
            has_local_rope=True,
            classifier="Gemma3Text",
            defaults={
                "vocab_size": 262208,
                "head_dim": 256,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "hidden_activation": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
            },
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            flags=BIASES | {"mlp_bias": "mlp_bias"},
            windows=_windows_smollm3,
            write=_write_smollm3,
            extra=lambda fields, facts: {"rotary_layers": _rotating(fields, facts["num_layers"])},
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            {"norm_placement": "after", "qk_norm": "full"},
            flags=BIASES,
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            windows=_windows_everywhere,
            write=_write_phi3,
            reads_rotary_share=True,
            states_dropout=True,
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
        ),
        "gpt2": Family(
            "GPT2LMHeadModel",
            {
                "norm": "layer",
                "gated_mlp": False,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
                "positions": "learned",
            },
            keys=GPT2_KEYS,
            gelu_tanh="gelu_new",
            states_dropout=True,
            extra=lambda fields, _: {
                "attention_scale": 1.0 if fields.get("scale_attn_weights") is False else None
            },
            write=lambda config: {"scale_attn_weights": config.attention_scale is None},
            defaults={
                "n_positions": 1024,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "tie_word_embeddings": True,
            },
            refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
        ),
    }
)


# The model_type of a multimodal model, and of its language model.
MULTIMODAL: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral"})


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of a multimodal model's language model, with what only the whole states of it; any other as it
    is.
    """
    kind = hf.get("model_type")
    text = hf.get("text_config")
    if not isinstance(kind, str) or kind not in MULTIMODAL or not isinstance(text, dict):
        return hf
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    outer = {key: hf[key] for key in shared if key in hf}
    return {**outer, **text, "model_type": MULTIMODAL[kind]}


def family_of(hf: Mapping[str, Any], *, where: str = "config.json") -> str:
    """The key of FAMILIES, from `model_type` or `architectures`. Raises UserError for an unknown architecture."""
    kind = hf.get("model_type")
    architectures = hf.get("architectures")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    architecture = architectures[0] if isinstance(architectures, list) and architectures else kind
    for name, family in FAMILIES.items():
        if architecture == family.architecture:
            return name
    raise UserError(
        f"{str(architecture)[:60]!r} is not a supported architecture",
        where=where,
        fix=f"supported: {', '.join(FAMILIES)}",
    )


def config_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """The facts in a config.json. Raises UserError naming the field that is missing or makes no sense."""
    hf = text_part(hf)
    name = family_of(hf, where=where)
    family = FAMILIES[name]
    fields = Fields(hf, family.defaults, where=where)
    for key in family.refused:
        if fields.flag(key):
            raise UserError(f"{key} is not supported", where=where, fix="choose another model")
    if fields.get("is_causal") is False:
        problem = "is_causal: false is not supported: tokens would see those after them"
        raise UserError(problem, where=where, fix="choose another model")
    facts: ConfigFields = {"family": name, **family.facts, **_sizes(fields, family)}
    facts["embedding_dropout"] = fields.number("embd_pdrop", high=0.999, default=0.0)
    facts["residual_dropout"] = fields.number("resid_pdrop", high=0.999, default=0.0)
    facts["initializer_range"] = fields.number("initializer_range", high=1e3, default=0.02)
    facts |= {native_name: fields.flag(hf_name) for native_name, hf_name in family.flags.items()}
    facts["norm_eps"] = fields.number(family.keys["norm_eps"], high=1.0)
    facts["activation"] = fields.choice(family.keys["activation"], family.activations)
    facts["attention_dropout"] = fields.number(
        family.keys["attention_dropout"], high=0.999, default=0.0
    )
    facts["tie_embeddings"] = fields.flag("tie_word_embeddings")
    facts["sliding_window"] = family.windows(fields, facts["num_layers"])
    if facts.get("positions") != "learned":
        facts |= rope_facts(
            fields, family, max_positions=facts["max_positions"], head_dim=facts["head_dim"]
        )
    facts |= family.extra(fields, facts)
    if _gives_values(hf, where):
        facts["head"] = "values"
    facts |= {
        key: fields.token(key, facts["vocab_size"])
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return checked(ModelConfig(**facts), where=where)


def _gives_values(hf: Mapping[str, Any], where: str) -> bool:
    """Whether it is a reward model: transformers' classifier of a text with a single label. UserError for several."""
    architectures = hf.get("architectures")
    labels = hf.get("id2label")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else ""
    if not str(architecture).endswith("ForSequenceClassification"):
        return False
    # transformers' default is 2
    count = len(labels) if isinstance(labels, dict) else hf.get("num_labels", 2)
    if count != 1:
        problem = f"a classifier of {str(count)[:20]} labels gives no single value"
        raise UserError(
            problem, where=where, fix="choose a reward model, or the model that it was made from"
        )
    return True


def _sizes(fields: Fields, family: Family) -> dict[str, int]:
    def size(native_name: str, default: int | None = None) -> int:
        hf_name = family.keys.get(native_name)
        if hf_name is None and default:
            return default
        return fields.size(hf_name or native_name, LARGEST[native_name], default=default)

    width = size("hidden_size")
    heads = size("num_heads")
    per_head = width // heads
    divides = width % heads == 0 or fields.get(family.keys.get("head_dim", "")) is not None
    if not divides:
        raise fields.refuse(family.keys["hidden_size"], f"a multiple of the {heads} heads")
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": width,
        "num_layers": size("num_layers"),
        "num_heads": heads,
        "intermediate_size": size(
            "intermediate_size", None if family.facts.get("gated_mlp", True) else 4 * width
        ),
        "num_kv_heads": size("num_kv_heads", heads),
        "head_dim": size("head_dim", per_head or None),
        "max_positions": size("max_positions"),
    }


def config_to_hf(config: ModelConfig) -> ConfigFields:
    """A config.json for the config's family. Raises UserError when that family cannot hold these facts."""
    if config.transformers_backend is not None:
        return cast(ConfigFields, json.loads(config.transformers_backend.raw_config))
    family = FAMILIES[config.family]
    raw_config: ConfigFields = {"architectures": [family.architecture], "model_type": config.family}
    raw_config |= {
        hf_name: getattr(config, native_name)
        for native_name, hf_name in family.keys.items()
        if native_name != "activation"
    }
    raw_config |= {
        hf_name: getattr(config, native_name) for native_name, hf_name in family.flags.items()
    }
    raw_config[family.keys["activation"]] = (
        family.gelu_tanh if config.activation == "gelu_tanh" else config.activation
    )
    raw_config |= {
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }
    raw_config |= {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    raw_config |= {"pad_token_id": config.pad_token_id, "use_cache": True}
    if family.states_dropout or config.residual_dropout or config.embedding_dropout:
        raw_config |= {
            "resid_pdrop": config.residual_dropout,
            "embd_pdrop": config.embedding_dropout,
        }
    if config.positions == "rotary":
        raw_config |= rope_keys(config)
    if config.head == "values":  # transformers' names for a model with one value per text
        stem = family.classifier or family.architecture.removesuffix("ForCausalLM").removesuffix(
            "LMHeadModel"
        )
        raw_config |= {"architectures": [f"{stem}ForSequenceClassification"]}
        raw_config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    raw_config |= family.write(config)
    read_back = config_from_hf(raw_config, where="model")
    lost = [f.name for f in fields(config) if getattr(read_back, f.name) != getattr(config, f.name)]
    if lost:
        listed = ", ".join(f"{name} {getattr(config, name)!r}" for name in lost)
        raise UserError(
            f"a {config.family} model cannot have {listed}",
            where="model.family",
            fix=f"choose another family ({', '.join(FAMILIES)}) or leave these settings out",
        )
    return raw_config


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


def fresh_config(name: str, sizes: Mapping[str, Any], *, window: int | None = None) -> ModelConfig:
    """A new model of a family, without dropout: `sizes` are facts that the family stores under a key of its own."""
    keys = known_family(name).keys
    hf_sizes: ConfigFields = {
        keys[native_name]: size for native_name, size in sizes.items() if native_name in keys
    }
    if window is not None:
        hf_sizes |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    config = config_from_hf({"model_type": name, **hf_sizes}, where="model")
    if window is not None and not config.sliding_window:
        fix = "leave it out, or choose mistral"
        raise UserError(
            f"a {name} model has no sliding window", where="model.sliding_window", fix=fix
        )
    return replace(config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0)
