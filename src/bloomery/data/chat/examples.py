"""Examples as text and back, exactly: what is hashed, and what travels to the processes that render."""

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "completion", "pair", "kto"]


@dataclass(frozen=True)
class Message:
    """One turn. `calls` are tool calls as templates expect them: {"type": "function", "function": {...}}."""

    role: Role
    content: str
    calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    thinking: str | None = None
    call_id: str | None = None  # of a tool's result: the call that it answers
    learned: bool = True  # OpenAI's "weight" of an assistant's turn


Turns = tuple[Message, ...] | str


@dataclass(frozen=True)
class Example:
    """A prompt and its answers, and where they stood ("file.jsonl:17").

    chat: no prompt and one answer, the whole conversation; completion: one answer; pair: two, chosen and rejected;
    kto: one, which is `desirable` or not. `implicit`: the prompt is no column of its own but the beginning that whole
    texts share, which may end within an answer.
    """

    source: str
    kind: Kind
    prompt: Turns
    answers: tuple[Turns, ...]
    desirable: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    implicit: bool = False


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
