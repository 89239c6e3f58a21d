"""Templates of prompts in a recipe: a text with {prompt} and {COLUMN}. No torch."""

from collections.abc import Mapping
from string import Formatter

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean


def template_fields(template: str, *, where: str) -> list[str]:
    """The names in braces; `{{` and `}}` are braces.

    Raises UserError for a brace that is alone, and for what is no plain name: templates compute nothing.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"the template has a brace alone: {error}",
            where=where,
            fix="write {COLUMN} for a column of the row, and {{ and }} for braces",
            code=2,
        ) from error
    fields = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise UserError(
                f"{{{shown}}} is no name of a column",
                where=where,
                fix="write {COLUMN} for a column of the row, and {{ and }} for braces",
                code=2,
            )
        fields.append(name)
    return fields


def filled(template: str, values: Mapping[str, str], *, where: str) -> str:
    """The template with its fields. Raises UserError for a field without a value."""
    missing = next(
        (name for name in template_fields(template, where=where) if name not in values), None
    )
    if missing is not None:
        raise UserError(
            f"a row has no {missing}; it has {', '.join(sorted(values))}",
            where=where,
            fix=did_you_mean(missing, values, "name a column that every row has", shown="{{{}}}"),
        )
    return "".join(
        text + ("" if name is None else values[name])
        for text, name, _, _ in Formatter().parse(template)
    )
