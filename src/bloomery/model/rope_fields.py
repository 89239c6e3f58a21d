"""Rotary settings as config files spell them: `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling`."""

import math
from typing import Any, get_args

from bloomery.errors import UserError
from bloomery.model.config import ModelConfig, RopeKind, RopeScaling
from bloomery.model.fields import MEND, Fields

Facts = dict[str, Any]


def rope_facts(fields: Fields, *, max_positions: int, head_dim: int) -> Facts:
    """`rope_theta`, `rope_scaling`, `rotary_share` and `local_rope_theta` of a ModelConfig."""
    stated = fields.inside("rope_parameters") or Fields({}, {}, where=fields.where)
    local = stated.inside("sliding_attention")
    stated = stated.inside("full_attention") or stated
    scaling = fields.inside("rope_scaling") or stated
    share = fields.number("partial_rotary_factor", high=1.0, default=1.0)
    share = stated.number("partial_rotary_factor", high=1.0, default=share)
    local_theta = fields.optional_number("rope_local_base_freq")
    width = int(head_dim * share)
    if width < 2 or width % 2:
        problem = f"{share:g} (partial_rotary_factor) of head_dim {head_dim} is not even"
        raise UserError(problem, where=fields.where, remedy="choose an even head_dim")
    return {
        "rope_theta": stated.number("rope_theta", low=1e-6, default=fields.number("rope_theta", low=1e-6)),
        "rope_scaling": _scaling(scaling, fields, max_positions=max_positions, width=width),
        "rotary_share": share,
        "local_rope_theta": local.number("rope_theta", low=1e-6, default=local_theta) if local else local_theta,
    }


def _scaling(stated: Fields, outer: Fields, *, max_positions: int, width: int) -> RopeScaling | None:
    kind: Any = stated.get("rope_type") or stated.get("type") or "default"
    if kind == "default":
        return None
    kind = "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in stated.values) else kind
    if kind not in get_args(RopeKind):
        raise UserError(
            f"rope type {str(kind)[:40]!r} is not known; these are: {', '.join(get_args(RopeKind))}",
            where=f"{outer.where}, rope_scaling",
            remedy=MEND,
        )
    if kind == "linear" or kind == "dynamic":
        return RopeScaling(kind=kind, factor=stated.number("factor", low=1e-6))
    nearest = stated if stated.get("original_max_position_embeddings") is not None else outer
    outermost = outer if outer.get("original_max_position_embeddings") is not None else nearest
    original = outermost.size("original_max_position_embeddings", 2**31, default=max_positions)
    factor = stated.number("factor", low=1e-6, default=max_positions / original)
    shared: Facts = {"kind": kind, "factor": factor, "original_max_positions": original}
    if kind == "llama3":
        low, high = stated.number("low_freq_factor", low=1e-6), stated.number("high_freq_factor", low=1e-6)
        return RopeScaling(**shared, low_freq_factor=low, high_freq_factor=high)
    shared["attention_factor"] = stated.optional_number("attention_factor")
    if kind == "longrope":
        short, long = stated.numbers("short_factor", width // 2), stated.numbers("long_factor", width // 2)
        return RopeScaling(**shared, short_factor=short, long_factor=long)
    if shared["attention_factor"] is None:
        shared["attention_factor"] = _yarn_temperature(stated, factor)
    fast, slow = stated.optional_number("beta_fast") or 32.0, stated.optional_number("beta_slow") or 1.0
    return RopeScaling(**shared, beta_fast=fast, beta_slow=slow, truncate=stated.get("truncate") is not False)


def _yarn_temperature(stated: Fields, factor: float) -> float | None:
    """DeepSeek states the attention factor as a ratio of two `mscale`; None: YaRN's own formula."""
    above, below = stated.optional_number("mscale"), stated.optional_number("mscale_all_dim")
    if not above or not below or factor <= 1:
        return None
    return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)


def rope_keys(config: ModelConfig) -> Facts:
    """The settings under their new and their old names, so that old and new versions of transformers agree."""
    scaling, keys = config.rope_scaling, {"rope_theta": config.rope_theta}
    share = {} if config.rotary_share == 1.0 else {"partial_rotary_factor": config.rotary_share}
    stretched: Facts = {"rope_type": "default"} if scaling is None else _stated(scaling)
    flat = {"rope_theta": config.rope_theta, **share, **stretched}
    facts: Facts = {**keys, **share, "rope_scaling": None if scaling is None else {**flat, **stretched}}
    if config.local_rope_theta is None:
        return facts | {"rope_parameters": flat}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    nested = {"full_attention": flat, "sliding_attention": local}
    return facts | {"rope_parameters": nested, "rope_local_base_freq": config.local_rope_theta}


def _stated(scaling: RopeScaling) -> Facts:
    facts: Facts = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_max_positions is not None:
        facts["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.attention_factor is not None:
        facts["attention_factor"] = scaling.attention_factor
    if scaling.kind == "llama3":
        facts |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    elif scaling.kind == "yarn":
        facts |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    elif scaling.kind == "longrope":
        facts |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    return facts
