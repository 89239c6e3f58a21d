"""Examples as text and back, exactly: what is hashed, and what travels to the processes that render."""

import json
from dataclasses import fields
from typing import Any

from bloomery.data.examples import Example, Message, Turns


def to_wire(example: Example) -> str:
    """JSON of everything but the source, one spelling for one example."""
    return json.dumps(
        [
            example.kind,
            _turns(example.prompt),
            [_turns(answer) for answer in example.answers],
            example.desirable,
            example.tools,
            *([True] if example.implicit else []),
        ],
        separators=(",", ":"),
    )


def from_wire(wire: str, source: str) -> Example:
    kind, prompt, answers, desirable, tools, *implicit = json.loads(wire)
    said = tuple(_read(answer) for answer in answers)
    return Example(source, kind, _read(prompt), said, desirable, tuple(tools), bool(implicit))


def _turns(turns: Turns) -> str | list[dict[str, Any]]:
    if isinstance(turns, str):
        return turns
    return [{field.name: value for field in _FIELDS if (value := getattr(turn, field.name)) != field.default}
            for turn in turns]  # fmt: skip


_FIELDS = fields(Message)


def _read(turns: str | list[dict[str, Any]]) -> Turns:
    if isinstance(turns, str):
        return turns
    return tuple(Message(**{**turn, "calls": tuple(turn.get("calls", ()))}) for turn in turns)


def texts_of(example: Example) -> list[str]:
    """What its turns say, without roles and templates."""
    sides = (example.prompt, *example.answers)
    return [text for side in sides for text in ([side] if isinstance(side, str) else [turn.content for turn in side])]
