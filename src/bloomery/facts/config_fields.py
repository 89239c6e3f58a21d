"""A config.json read key by key, every value checked, and its settings of rotary positions, both ways."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig, RopeKind, RopeScaling

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


class NotNative(UserError):
    """A setting that the native decoder does not compute; transformers may."""


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
        """What to raise for a value that makes no sense."""
        return UserError(self._problem(key, expected), where=self.where, fix=FIX)

    def lacks(self, key: str, expected: str) -> NotNative:
        """What to raise for a value that may make sense elsewhere."""
        return NotNative(self._problem(key, expected), where=self.where, fix=FIX)

    def _problem(self, key: str, expected: str) -> str:
        text = repr(self.get(key))
        if len(text) > 60:
            text = text[:57] + "..."
        return f"{key} is {text}; it must be {expected}"

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

    def choice(self, key: str, native_values: Mapping[str, str]) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in native_values:
            raise self.lacks(key, "one of " + ", ".join(sorted(native_values)))
        return native_values[value]

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


ModelFacts = dict[str, Any]  # fields of a ModelConfig by name
HfKeys = dict[str, Any]  # values of a config.json by key


def rope_facts(
    fields: Fields,
    *,
    max_positions: int,
    head_dim: int,
    reads_rotary_share: bool,
    has_local_rope: bool,
) -> ModelFacts:
    """`rope_theta`, `rope_scaling`, `rotary_share` and `local_rope_theta` of a ModelConfig.

    The last two arguments are facts of the family. Raises UserError for settings that transformers' layers of it
    cannot follow either.
    """
    # transformers 5 has one object for everything rotary, per kind of layer where a model has two kinds. The older
    # rope_scaling replaces it, or the part of it that full attention reads.
    rope_fields = fields.inside("rope_parameters") or Fields({}, {}, where=fields.where)
    local_fields = None
    nested_fields = rope_fields.inside("full_attention") or rope_fields.inside("sliding_attention")
    if nested_fields is not None and not has_local_rope:
        raise fields.lacks("rope_parameters", "one object: all layers of this family rotate alike")
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
    if _rope_kind(rope_fields) == "proportional":
        share = 1.0  # whole heads turn, most of their numbers by frequencies of 0
    is_scaled = _rope_kind(rope_fields) != "default"
    if share != 1.0 and not reads_rotary_share and is_scaled:
        raise fields.lacks("partial_rotary_factor", "1: this family rotates whole heads")
    if not reads_rotary_share:
        share = 1.0
    width = int(head_dim * share)
    if width < 2 or width % 2:
        problem = f"{share:g} (partial_rotary_factor) of head_dim {head_dim} is not even"
        raise UserError(problem, where=fields.where, fix="choose an even head_dim")

    local_theta = None
    if has_local_rope:
        local_fields = local_fields or Fields({}, {}, where=fields.where)
        if _rope_kind(local_fields) != "default":
            raise fields.lacks("rope_parameters", "without scaling for sliding_attention")
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


def stated_theta(fields: Fields) -> Any:
    """The base that a config states, where one object holds for all layers; a null inside of it wins."""
    rope_fields = fields.inside("rope_scaling") or fields.inside("rope_parameters")
    if rope_fields is not None and "rope_theta" in rope_fields.values:
        return rope_fields.values["rope_theta"]
    return fields.get("rope_theta")


def _rope_kind(rope_fields: Fields) -> Any:
    return rope_fields.get("rope_type") or rope_fields.get("type") or "default"


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
    if kind == "proportional":
        share = model_fields.number("partial_rotary_factor", high=1.0, default=1.0)
        return RopeScaling(
            kind=kind,
            factor=scaling_fields.number("factor", low=1e-6, default=1.0),
            turning_share=scaling_fields.number("partial_rotary_factor", high=1.0, default=share),
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
    shared: ModelFacts = {"kind": kind, "factor": factor, "original_max_positions": original}
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


def rope_keys(config: ModelConfig, *, default_share: float = 1.0) -> HfKeys:
    """The settings under their new and their old names, so that old and new versions of transformers agree.

    `default_share`: the part of each head that rotates where a config.json of the family names none.
    """
    scaling = config.rope_scaling
    keys = {"rope_theta": config.rope_theta}
    is_default = config.rotary_share == 1.0 == default_share
    share = {} if is_default else {"partial_rotary_factor": config.rotary_share}
    stretched: HfKeys = {"rope_type": "default"} if scaling is None else _scaling_keys(scaling)
    flat = {"rope_theta": config.rope_theta, **share, **stretched}
    hf_keys: HfKeys = {
        **keys,
        **share,
        "rope_scaling": None if scaling is None else {**flat, **stretched},
    }
    if config.local_rope_theta is None:
        return hf_keys | {"rope_parameters": flat}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    nested = {"full_attention": flat, "sliding_attention": local}
    return hf_keys | {"rope_parameters": nested, "rope_local_base_freq": config.local_rope_theta}


def _scaling_keys(scaling: RopeScaling) -> HfKeys:
    hf_keys: HfKeys = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_max_positions is not None:
        hf_keys["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.mscale_all_dim is not None:
        hf_keys["mscale_all_dim"] = scaling.mscale_all_dim
    if scaling.attention_factor is not None:
        hf_keys["attention_factor"] = scaling.attention_factor
    if scaling.kind == "proportional":
        hf_keys["partial_rotary_factor"] = scaling.turning_share
    elif scaling.kind == "llama3":
        hf_keys |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    elif scaling.kind == "yarn":
        hf_keys |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    elif scaling.kind == "longrope":
        hf_keys |= {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    return hf_keys
