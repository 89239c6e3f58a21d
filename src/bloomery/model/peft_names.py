"""PEFT's other methods by name, and what they change where a recipe does not say. No PEFT, no torch."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from bloomery.errors import UserError
from bloomery.model.adapter_names import ALL_LINEAR, unknown_module
from bloomery.model.config import ModelConfig
from bloomery.model.counting import matrices, parameter_shapes
from bloomery.recipe.schema import Peft

# The tuners of PEFT 0.21 that change matrices of a model and that Bloomery has not of its own.
METHODS = frozenset({
    "ADALORA", "ADAMSS", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA",
    "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA",
    "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT",
})  # fmt: skip
NATIVE = {
    "LORA": "set adapter.kind=lora, which is Bloomery's own",
    "TRAINABLE_TOKENS": "set adapter.kind=lora adapter.train_also=[embed_tokens, lm_head]",
}
# These change the input or the past of transformers' own forward, not the matrices of a model.
PROMPTS = frozenset({
    "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING", "PROMPT_TUNING",
    "P_TUNING", "SHADOW", "XLORA",
})  # fmt: skip
# What methods that are not about attention's matrices change; of the others PEFT's usual q_proj and v_proj.
TARGETS: dict[str, str | list[str]] = {"LN_TUNING": ".*norm", "IA3": ["k_proj", "v_proj", "down_proj"]}


def named(method: str) -> str:
    """As PEFT writes it. Raises UserError for what is no method of PEFT's that trains here."""
    name = method.upper().replace("-", "_")
    if name in NATIVE:
        raise UserError(f"{method} is not PEFT's here", where="adapter.method", remedy=NATIVE[name], code=2)
    if name in PROMPTS:
        problem = f"{method} changes the input of transformers' own forward, which this decoder does not have"
        raise UserError(problem, where="adapter.method", remedy="set adapter.kind=lora", code=2)
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=1)
        known = "PEFT has: " + ", ".join(sorted(METHODS)).lower()
        remedy = f"did you mean adapter.method={near[0].lower()}?" if near else known
        raise UserError(f"PEFT has no method {method!r}", where="adapter.method", remedy=remedy, code=2)
    return name


def unknown_key(method: str, name: str, known: Iterable[str]) -> UserError:
    near = get_close_matches(name, sorted(known), n=1)
    remedy = f"did you mean {near[0]}?" if near else f"its keys are those of PEFT's {method}"
    return UserError(f"{method} has no key {name}", where=f"adapter.{name}", remedy=remedy, code=2)


def targets_of(adapter: Peft, config: ModelConfig) -> str | list[str]:
    """`target_modules` as PEFT takes them: names or their ends from a dot on, or a regular expression over full names.

    Raises UserError for what matches no module.
    """
    where, said = "adapter.target_modules", (adapter.model_extra or {}).get("target_modules")
    asked = said or TARGETS.get(named(adapter.method), ["q_proj", "v_proj"])
    if asked in (ALL_LINEAR, [ALL_LINEAR]):  # which PEFT knows of transformers' own models alone
        return sorted({name for name, *_ in matrices(config)})
    known = list(dict.fromkeys(name.rpartition(".")[0] for name in _parameters(config)))
    if not isinstance(asked, str | list):
        problem = f"target_modules is {str(asked)[:40]}, no list of names"
        raise UserError(problem, where=where, remedy="name modules: adapter.target_modules=[q_proj]", code=2)
    if isinstance(asked, str):
        if not _read(asked, where, known):
            raise unknown_module(asked, known, where, f"{ALL_LINEAR}; a text alone is a pattern over full names")
        return asked
    for wanted in asked:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in known):
            raise unknown_module(str(wanted), known, where, ALL_LINEAR)
    return list(asked)


def _parameters(config: ModelConfig) -> list[str]:
    """By the names that files have; of a foreign architecture those in its layers, as the rest has two owners."""
    if config.foreign is None:
        return list(parameter_shapes(config))
    return [theirs for ours, theirs, _ in config.foreign.parameters if ours.startswith("model.layers.")]


def _read(pattern: str, where: str, names: list[str]) -> bool:
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        problem = f"{pattern[:80]!r} is no pattern: {error}"
        raise UserError(problem, where=where, remedy="name modules: adapter.target_modules=[q_proj]", code=2) from error
