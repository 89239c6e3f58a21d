"""Conversations, prompts with responses, and pairs; and their JSON, which is hashed and sent to worker processes."""

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
    trained_on: bool = True  # "weight" of an assistant turn in the OpenAI format


Turns = tuple[Message, ...] | str


@dataclass(frozen=True)
class Example:
    """A prompt, its responses and their place in the dataset ("file.jsonl:17").

    chat: no prompt and one response, the whole conversation; completion: one response; pair: two, chosen and rejected;
    kto: one, which is `desirable` or not. `implicit`: the row has no column for the prompt. The prompt is the beginning
    that both texts share, and may end inside a response.
    """

    source: str
    kind: Kind
    prompt: Turns
    responses: tuple[Turns, ...]
    desirable: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    implicit: bool = False


def to_wire(example: Example) -> str:
    """JSON of all fields except the source. Equal examples have equal JSON."""
    responses = [_turns(response) for response in example.responses]
    implicit = [True] if example.implicit else []
    parts = [example.kind, _turns(example.prompt), responses, example.desirable, example.tools, *implicit]
    return json.dumps(parts, separators=(",", ":"))


def from_wire(wire: str, source: str) -> Example:
    kind, prompt, responses, desirable, tools, *implicit = json.loads(wire)
    read = tuple(_read(response) for response in responses)
    return Example(source, kind, _read(prompt), read, desirable, tuple(tools), bool(implicit))


_KEYS = {field.name: field.name for field in fields(Message)} | {"trained_on": "learned"}  # hashed: never change one


def _turns(turns: Turns) -> str | list[dict[str, Any]]:
    if isinstance(turns, str):
        return turns
    named = fields(Message)
    return [{_KEYS[f.name]: value for f in named if (value := getattr(turn, f.name)) != f.default} for turn in turns]


def _read(turns: str | list[dict[str, Any]]) -> Turns:
    if isinstance(turns, str):
        return turns
    named = ({name: turn[key] for name, key in _KEYS.items() if key in turn} for turn in turns)
    return tuple(Message(**{**turn, "calls": tuple(turn.get("calls", ()))}) for turn in named)


def texts_of(example: Example) -> list[str]:
    """The texts of all turns, without roles and template."""
    sides = (example.prompt, *example.responses)
    return [text for side in sides for text in ([side] if isinstance(side, str) else [turn.content for turn in side])]
