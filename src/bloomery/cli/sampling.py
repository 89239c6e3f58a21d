"""The sampling settings of the commands that generate: options, and `/set NAME VALUE` in a chat. No torch"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bloomery.cli.common import flag_of
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.runs.chosen_model import model_path

F = TypeVar("F", bound=Callable[..., Any])
Value = int | float | None

# name -> (type, default, help)
SETTINGS: dict[str, tuple[click.ParamType[Any], Value, str | None]] = {
    "max_new_tokens": (click.IntRange(1), 200, "Generate at most N tokens."),
    "temperature": (click.FloatRange(0.0), 0.8, "Set the sampling temperature; 0 is greedy."),
    "top_k": (click.IntRange(1), None, "Sample from the K most likely tokens."),
    "top_p": (
        click.FloatRange(0.0, 1.0, min_open=True),
        0.95,
        "Sample from this probability mass.",
    ),
    "min_p": (click.FloatRange(0.0, 1.0), 0.0, "Drop tokens below P times the most likely."),
    "repetition_penalty": (
        click.FloatRange(0.01, 100.0),
        1.0,
        "Divide the logits of repeated tokens by P.",
    ),
    "seed": (click.IntRange(0, 2**63 - 1), 0, "Seed the random generator."),
}


def sampling_options(function: F) -> F:
    """Click options for every setting, passed on by their names."""
    for name, (value_type, default, help_text) in reversed(SETTINGS.items()):
        option = click.option(
            flag_of(name),
            type=value_type,
            default=default,
            show_default=default is not None,
            help=help_text,
        )
        function = option(function)
    return function


def default_options(function: F) -> F:
    """Click options for the defaults of requests that leave a setting out: those of `sampling_options` without
    `max_new_tokens`, and None where an option is not given.
    """
    for name, (value_type, _, help_text) in reversed(SETTINGS.items()):
        if name != "max_new_tokens":
            function = click.option(flag_of(name), type=value_type, help=help_text)(function)
    return function


def speculation_options(function: F) -> F:
    """The click options `prompt_lookup: int | None` and `draft: str | None`."""
    function = click.option(
        "--draft", metavar="MODEL", help="Speculate with this smaller model of the same vocabulary."
    )(function)
    line = "Speculate with N tokens that followed the same words."
    return click.option("--prompt-lookup", type=click.IntRange(1, 31), metavar="N", help=line)(
        function
    )


def draft_folder(prompt_lookup: int | None, draft: str | None) -> Path | None:
    """The folder of `--draft`. Raises UserError where it is not a model, or with `--prompt-lookup`."""
    if prompt_lookup is not None and draft is not None:
        problem = "prompt lookup and a draft model exclude each other"
        raise UserError(problem, where="--draft", fix="remove --prompt-lookup or --draft", code=2)
    return None if draft is None else model_path(draft)


def finite(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings unchanged. Raises UserError for NaN and infinity."""
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            problem = f"not a finite number: {value}"
            raise UserError(problem, where=flag_of(name), fix="use a finite number", code=2)
    return settings


def setting(text: str) -> tuple[str, Value]:
    """Name and value of "temperature 0.7", also with `=` or with an option's name. Raises UserError."""
    typed_name, _, typed_value = text.replace("=", " ", 1).strip().partition(" ")
    typed_value = typed_value.strip()
    name = typed_name.lstrip("-").replace("-", "_").lower()
    if name not in SETTINGS:
        fix = did_you_mean(name, SETTINGS, f"settings: {', '.join(SETTINGS)}")
        raise UserError(f"no such setting: {name[:40]!r}", where="/set", fix=fix, code=2)

    # Only settings that are off by default can be switched off.
    value_type, default, _ = SETTINGS[name]
    if default is None and typed_value.lower() in ("", "off", "none"):
        return name, None
    try:
        value: Value = value_type.convert(typed_value, None, None)
    except click.BadParameter as error:
        problem = f"missing value of {name}"
        if typed_value:
            problem = f"invalid {name}: {error.message.rstrip('.')}"
        fix = f"for example: /set {name} {default or 40}"
        raise UserError(problem, where="/set", fix=fix, code=2) from error
    return name, finite({name: value})[name]
