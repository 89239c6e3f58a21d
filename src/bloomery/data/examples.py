"""What is learned from besides plain text: conversations, completions, preference pairs and labelled answers."""

from dataclasses import dataclass
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
