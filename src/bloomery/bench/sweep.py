"""What a sweep measures: every combination of the values that were asked for, or a few settings that often pay."""

import itertools
from collections.abc import Sequence

from bloomery.core.errors import UserError
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.model.attention.support import SHORT, supports
from bloomery.plan.types import Plan

MOST_POINTS = 64


def points(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """`["train.micro_batch=8,16", "train.compile=true,false"]` as four lists of overrides. Raises UserError."""
    axes = [axis(sweep) for sweep in sweeps]
    keys = [words[0].partition("=")[0] for words in axes]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        remedy = f"put all values into one: --sweep {twice}=a,b,c"
        raise UserError(f"{twice} is swept twice", where="--sweep", remedy=remedy, code=2)
    found = list(itertools.product(*axes))
    if len(found) > MOST_POINTS:
        problem = f"that makes {len(found)} combinations; each is a run of its own"
        raise UserError(problem, where="--sweep", remedy=f"ask for at most {MOST_POINTS} at once", code=2)
    return found


def axis(sweep: str) -> list[str]:
    """`key=v1,v2` as overrides, one a value. Commas inside brackets and quotes belong to a value. Raises UserError."""
    key, equals, text = sweep.partition("=")
    values = [value for value in split(text) if value]
    if not equals or "." not in key or not values:
        remedy = "write --sweep train.micro_batch=8,16,32"
        raise UserError(f"{sweep!r} is no sweep", where="--sweep", remedy=remedy, code=2)
    return [f"{key}={value}" for value in values]


def split(text: str) -> list[str]:
    """At commas that stand outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def usual_points(plan: Plan, machine: Machine, *, largest: int) -> list[tuple[str, ...]]:
    """The recipe as planned first, then what most often changes speed or memory: one thing at a time."""
    found: list[tuple[str, ...]] = [()]
    if largest > plan.train.micro_batch:
        found.append((f"train.micro_batch={largest}",))
    other = "full" if plan.train.activation_checkpointing == "none" else "none"
    found.append((f"train.activation_checkpointing={other}",))
    if plan.train.compile:
        found.append(("train.compile=false",))
    elif build_profile(machine).compile.value:
        found.append(("train.compile=true",))
    attention = other_attention(plan)
    if attention is not None:
        found.append((f"train.attention={attention}",))
    return found


def other_attention(plan: Plan) -> str | None:
    """The next best backend that computes the same here; None: there is no other worth a trial."""
    config, length = plan.model.config, plan.data.sequence_length
    if plan.train.device == "cuda" and plan.model.attention == "blockwise":
        return None  # no fused kernel is made for it: one that was built for another chip may hang the driver
    for backend in ("varlen", "flex", "per_document", "mask", "blockwise"):
        too_wide = backend == "mask" and length > 4 * SHORT  # a mask of length x length
        if backend == plan.model.attention or too_wide:
            continue
        unfit = supports(
            backend,
            device_type=plan.train.device,
            packed=plan.data.layout == "packed",
            window=any(window is not None and window < length for window in config.sliding_window),
            softcap=config.attention_softcap is not None,
            dropout=config.attention_dropout > 0,
            float32=plan.train.precision == "float32",
            torch=plan.torch or None,
        )
        if unfit is None:
            return backend
    return None
