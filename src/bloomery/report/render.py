"""Jinja templates. Every text is cleaned of secrets and escaped."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from bloomery.core.text import redact_secrets

TITLE = " · Bloomery"  # ends the title of every page


def render(template: str, **values: Any) -> str:
    """The whole document."""
    return _environment().get_template(template).render(title=TITLE, **values)


def part(macro: str, **values: Any) -> Markup:
    """The markup of a macro of parts.html."""
    drawn: Markup = getattr(_environment().get_template("parts.html").module, macro)(**values)
    return drawn


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("bloomery.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["prose"] = prose
    return made


def _clean(value: Any) -> Any:
    """Removes secrets and the path of the home folder before escaping; None becomes an empty text."""
    if hasattr(value, "__html__"):
        return value
    home, text = str(Path.home()), "" if value is None else redact_secrets(str(value))
    return text.replace(home + "/", "~/") if len(home) > 1 else text


def prose(text: str) -> Markup:
    """A sentence with `code` between backticks."""
    parts = [escape(_clean(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:  # an unpaired backtick: plain text
        return escape(_clean(text))
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts))
