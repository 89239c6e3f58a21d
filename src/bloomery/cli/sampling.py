"""How tokens are drawn, as flags of a verb and as `/set NAME VALUE` of a chat"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
Value = int | float | None

# name -> (what it may be, default, help)
SETTINGS: dict[str, tuple[click.ParamType[Any], Value, str | None]] = {
    "max_tokens": (click.IntRange(1), 200, None),
    "temperature": (click.FloatRange(0.0), 0.8, "0: the likeliest."),
    "top_k": (click.IntRange(1), None, "Draw from the k likeliest tokens."),
    "top_p": (click.FloatRange(0.0, 1.0, min_open=True), 0.95, None),
    "min_p": (click.FloatRange(0.0, 1.0), 0.0, None),
    "repetition_penalty": (click.FloatRange(0.01, 100.0), 1.0, None),
    "seed": (click.IntRange(0, 2**63 - 1), 0, None),
}


def drawing_options(function: F) -> F:
    """Click options for every setting, passed on by their names."""
    for name, (kind, default, told) in reversed(SETTINGS.items()):
        flag = f"--{name.replace('_', '-')}"
        function = click.option(flag, type=kind, default=default, show_default=default is not None, help=told)(function)
    return function


def finite(drawing: dict[str, Any]) -> dict[str, Any]:
    """The settings as they are. Raises UserError for one that is no number to draw with."""
    for name, value in drawing.items():
        if isinstance(value, float) and not math.isfinite(value):
            where = f"--{name.replace('_', '-')}"
            raise UserError(f"{value} is no number to draw with", where=where, fix="write a finite number", code=2)
    return drawing


def setting(words: str) -> tuple[str, Value]:
    """Name and value of "temperature 0.7", also with `=` or with a flag's name. Raises UserError."""
    name, _, text = words.replace("=", " ", 1).strip().partition(" ")
    name, text = name.lstrip("-").replace("-", "_").lower(), text.strip()
    if name not in SETTINGS:
        known = did_you_mean(name, SETTINGS, f"there are {', '.join(SETTINGS)}")
        raise UserError(f"there is no setting {name[:40]!r}", where="/set", fix=known, code=2)
    kind, default, _ = SETTINGS[name]
    if default is None and text.lower() in ("", "off", "none"):
        return name, None
    try:
        value: Value = kind.convert(text, None, None)
    except click.BadParameter as error:
        problem = f"{text[:40]!r} is no {name}: {error.message.rstrip('.')}" if text else f"{name} lacks its value"
        raise UserError(problem, where="/set", fix=f"for example: /set {name} {default or 40}", code=2) from error
    return name, finite({name: value})[name]
