"""Which rows an objective learns from, and rows of every file format as examples."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Example
from bloomery.data.chat.formats import (
    COLUMNS,
    LISTS,
    USUAL_NAMES,
    detect_format,
    guess_columns,
    guess_prompt,
    read_example,
)
from bloomery.data.sources.files import CHAT
from bloomery.data.sources.readers import Value
from bloomery.data.sources.streams import Flaw
from bloomery.recipe.schema import Recipe, Source

# text: nothing else. any: text where there is some, else examples. sft: conversations and completions, or text.
Wants = Literal["text", "any", "sft", "pairs", "kto"]
ROWS: tuple[Wants, ...] = ("sft", "pairs", "kto")  # that look for rows first, and for text where there are none
_TEXT_ROLES = ("text", "tokens")
NAMES = {"chat": "conversations", "completion": "completions", "pair": "preference pairs", "kto": "marked answers"}
_NEEDS = {
    "sft": ("conversations, completions or text", "sft"),
    "pairs": ("pairs of a chosen and a rejected answer", "dpo"),
    "kto": ("answers that are marked as desirable or not", "kto"),
}
_LEARNED_BY = {"chat": "sft", "completion": "sft", "pair": "dpo", "kto": "kto"}


def wants_of(recipe: Recipe) -> Wants:
    """What the recipe's objective learns from."""
    return recipe.objective.spec.data_kind


def refuse_unknown_roles(source: Source) -> None:
    """Raises UserError for a role in `columns` that the format does not have."""
    if source.format in CHAT:
        known: tuple[str, ...] = COLUMNS[source.format]
    else:
        known = tuple(dict.fromkeys((*_TEXT_ROLES, *(role for roles in COLUMNS.values() for role in roles))))
    unknown = sorted(set(source.columns) - set(known))
    if unknown:
        raise UserError(
            f"no such role: {unknown[0]}; there are {', '.join(known)}",
            where="data.columns",
            remedy=f"write {{{known[0]}: NAME}}",
        )


def columns_of_examples(columns: dict[str, str], present: dict[str, str]) -> list[str] | None:
    """Of a file's columns those that an example may be made of, None without any."""
    used = {*columns.values(), *LISTS, *(role for roles in COLUMNS.values() for role in roles)}
    return [name for name in present if name in used or name.lower() in USUAL_NAMES] or None


def format_of_row(
    row: dict[str, Any], columns: dict[str, str], *, wants: Wants, plain: bool
) -> tuple[str, dict[str, str]] | None:
    """The format of the examples in rows such as this one, and their columns; None when they are read as text.
    `plain`: it has a column that is usually the text. Columns that nobody named are found by their usual names.
    """
    if wants == "text" or (wants == "any" and plain):
        return None
    row = _unpacked(row)
    format = detect_format(row, columns)
    if format == "preference" and not columns and "prompt" not in row and (prompt := guess_prompt(row)) is not None:
        return format, {"prompt": prompt}
    if format is not None:
        return format, columns
    guessed = None if columns or plain else guess_columns(row)
    return None if guessed is None else ("alpaca", {role: name for role, name in guessed.items() if role != name})


def row_to_example(value: Value, format: str, columns: dict[str, str]) -> Example | Flaw:
    """The example in a row."""
    row = _unpacked(value.content) if isinstance(value.content, dict) else value.content
    label = columns.get("label", "label")
    if format == "kto" and isinstance(row, dict) and isinstance(row.get(label), str):  # tables know text alone
        said = {"true": True, "1": True, "false": False, "0": False}.get(row[label].strip().lower())
        row = {**row, label: row[label] if said is None else said}
    return read_example(row, format=format, columns=columns, where=value.where)


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    """A column of text that holds a list of turns as JSON becomes that list: tables cannot hold it otherwise."""
    packed = [name for name, value in row.items() if isinstance(value, str) and value.lstrip()[:1] == "["]
    turns = {name: found for name in packed if (found := _turns(row[name])) is not None}
    return {**row, **turns} if turns else row


def _turns(text: str) -> list[dict[str, Any]] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # a text that begins with a bracket
        return None
    if not isinstance(found, list) or not found or not all(isinstance(turn, dict) for turn in found):
        return None
    return found if all("role" in turn or "from" in turn for turn in found) else None


def documents_wanted(example: Example, wants: Wants) -> Iterator[Example]:
    """What an objective learns of an example: kto takes a pair as two marked answers. Raises UserError for a kind that
    it does not learn from.
    """
    if example.kind == "pair" and wants == "kto":
        for answer, desirable in zip(example.answers, (True, False), strict=True):
            yield replace(example, kind="kto", answers=(answer,), desirable=desirable)
        return
    fits = {"any": True, "sft": example.kind in ("chat", "completion"), "pairs": example.kind == "pair",
            "kto": example.kind == "kto", "text": False}  # fmt: skip
    if not fits[wants]:
        needed, _ = _NEEDS[wants]
        raise UserError(
            f"its rows are {NAMES[example.kind]}, and the objective learns from {needed}",
            where=example.source,
            remedy=f"set objective.kind={_LEARNED_BY[example.kind]}, or name other data",
        )
    yield example


def refuse_text(wants: Wants, where: str) -> UserError:
    """For plain text where answers are judged."""
    needed, _ = _NEEDS[wants]
    return UserError(
        f"the data is plain text, and the objective learns from {needed}",
        where=where,
        remedy="set objective.kind=sft, name other data, or say which columns hold what: data.columns={chosen: NAME}",
    )
