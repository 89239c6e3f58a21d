"""Conversations, prompts with responses, and pairs; their JSON, which is hashed and sent to workers; BadRow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from bloomery.core.errors import UserError
from bloomery.core.units import MIB, format_bytes

MAX_BYTES = 64 * MIB  # of one document, line or field
JSON_KINDS = {
    "NoneType": "null",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "dict": "an object",
    "list": "a list",
    "str": "a text",
}
# First words of reasons whose subject is their place.
_PREDICATES = ("is ", "has ", "holds ", "begins ", "ends ", "names ", "marks ")
_CALL_SIGNS = ("tool_call", "functioncall", "function_call")  # calls in the text itself
PICTURE = "\ufffc"  # Unicode's mark of an object inside a text: where a picture is in a content
Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "completion", "pair", "kto", "prompt"]


class BadRow(UserError):
    """Why a row cannot be read: an error with data.on_error stop, a count with skip. The subject of a `reason` that has
    none ("is missing") is the innermost part of its place.
    """

    def __init__(
        self, where: str, reason: str, fix: str = "correct it, or set data.on_error=skip"
    ) -> None:
        subject = (
            Path(where.rpartition(", ")[2]).name + " " if reason.startswith(_PREDICATES) else ""
        )
        super().__init__(subject + reason, where=where, fix=fix)
        self.reason = reason


def kind_of(value: object) -> str:
    """The name of a JSON value's type."""
    return JSON_KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def text_of(value: object, where: str) -> str:
    """A text that UTF-8 can encode: JSON may escape half of a surrogate pair. Raises BadRow."""
    if not isinstance(value, str):
        raise BadRow(where, f"is {kind_of(value)}, not a text")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise BadRow(
            where, f"holds half of a surrogate pair, {half}, which is no character"
        ) from error
    if size > MAX_BYTES:
        raise too_long(where, "the text")
    return value


def too_long(where: str, kind: str) -> BadRow:
    problem = f"{kind} is longer than {format_bytes(MAX_BYTES)}, which is no document"
    return BadRow(where, problem, "cut it into smaller documents")


@dataclass(frozen=True)
class Message:
    """One turn. `calls` are tool calls as templates expect them: {"type": "function", "function": {...}}.

    `pictures`: references to those whose places in the content PICTURE marks; "" of one that is in a column.
    """

    role: Role
    content: str
    calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    thinking: str | None = None
    call_id: str | None = None  # of a tool's result: the call that it answers
    trained_on: bool = True  # "weight" of an assistant turn in the OpenAI format
    pictures: tuple[str, ...] = ()


Turns = tuple[Message, ...] | str


@dataclass(frozen=True)
class Example:
    """A prompt, its responses and their place in the dataset ("file.jsonl:17").

    chat: no prompt and one response, the whole conversation; completion: one response; pair: two, chosen and rejected;
    kto: one, which is `desirable` or not; prompt: none, and the row's other `columns`, which are JSON, for rewards.
    `implicit`: the row has no column for the prompt. The prompt is the beginning that both texts share, and may end
    inside a response.
    """

    source: str
    kind: Kind
    prompt: Turns
    responses: tuple[Turns, ...]
    desirable: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    implicit: bool = False
    columns: dict[str, Any] = field(default_factory=dict, hash=False)


def to_wire(example: Example) -> str:
    """JSON of all fields except the source. Equal examples have equal JSON."""
    responses = [_turns(response) for response in example.responses]
    # Fields at their defaults are left out, as in the JSON of versions that did not have them.
    later_fields: list[object] = [True] if example.implicit else []
    if example.columns:
        later_fields = [example.implicit, example.columns]
    parts = [
        example.kind,
        _turns(example.prompt),
        responses,
        example.desirable,
        example.tools,
        *later_fields,
    ]
    return json.dumps(parts, separators=(",", ":"))


def from_wire(wire: str, source: str) -> Example:
    kind, prompt, responses, desirable, tools, *later_fields = json.loads(wire)
    response_turns = tuple(_read(response) for response in responses)
    return Example(
        source, kind, _read(prompt), response_turns, desirable, tuple(tools), *later_fields
    )


# These keys are hashed: never change one.
_KEYS = {field.name: field.name for field in fields(Message)} | {"trained_on": "learned"}


def _turns(turns: Turns) -> str | list[dict[str, Any]]:
    if isinstance(turns, str):
        return turns
    message_fields = fields(Message)
    return [
        {
            _KEYS[f.name]: value
            for f in message_fields
            if (value := getattr(turn, f.name)) != f.default
        }
        for turn in turns
    ]


def _read(turns: str | list[dict[str, Any]]) -> Turns:
    if isinstance(turns, str):
        return turns
    messages = ({name: turn[key] for name, key in _KEYS.items() if key in turn} for turn in turns)
    return tuple(
        Message(
            **{
                **turn,
                "calls": tuple(turn.get("calls", ())),
                "pictures": tuple(turn.get("pictures", ())),
            }
        )
        for turn in messages
    )


def pictures_of(turns: Turns) -> list[str]:
    """The references of a side, in order."""
    if isinstance(turns, str):
        return []
    return [reference for message in turns for reference in message.pictures]


def with_pictures_before(message: Message, references: Sequence[str]) -> Message:
    """The message with pictures before its text, in which the letter of their places is none."""
    if not references:
        return message
    text = PICTURE * len(references) + message.content.replace(PICTURE, "")
    return replace(message, content=text, pictures=tuple(references))


def num_pictures(example: Example) -> int:
    return sum(len(pictures_of(side)) for side in (example.prompt, *example.responses))


def texts_of(example: Example) -> list[str]:
    """The texts of all turns, without roles and template."""
    sides = (example.prompt, *example.responses)
    return [
        text
        for side in sides
        for text in ([side] if isinstance(side, str) else [turn.content for turn in side])
    ]


def num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (index for index, (first_item, second_item) in pairs if first_item != second_item),
        min(len(first), len(second)),
    )


def check_turns(
    messages: Sequence[Message], where: str, *, start: int = 0, responses: bool = True
) -> None:
    """Raises BadRow for an invalid conversation. `start`: the place of these messages in their list; `responses`: the
    last turn must be the assistant's.
    """
    for index, message in enumerate(messages):
        location = f"{where}[{start + index}]"
        if (
            not message.content.strip()
            and not message.calls
            and not message.thinking
            and message.role != "tool"
        ):
            fix = "remove it or fill it, or set data.on_error=skip"
            raise BadRow(location, f"is an empty turn of the {message.role}", fix)
        if message.role == "system" and index:
            is_repeated = any(earlier.role == "system" for earlier in messages[:index])
            problem = (
                "is a second system message"
                if is_repeated
                else "is a system message after the first turn"
            )
            raise BadRow(location, problem, "join system messages into one, at the beginning")
        if message.role == "tool":  # it follows its call, or results of other calls of that turn
            caller = next(
                (turn for turn in reversed(messages[:index]) if turn.role != "tool"), None
            )
            signs = caller is not None and any(
                sign in caller.content.lower() for sign in _CALL_SIGNS
            )
            if caller is None or caller.role != "assistant" or not (caller.calls or signs):
                fix = "put the assistant's tool_calls before it, or remove it"
                raise BadRow(location, "is a tool result without a call before it", fix)
            ids = [call["id"] for call in caller.calls if "id" in call]
            if message.call_id is not None and ids and message.call_id not in ids:
                calls = ", ".join(ids)[:80]
                problem = f"is the result of an unknown call {message.call_id[:40]!r}; the calls are: {calls}"
                raise BadRow(location, problem, "set tool_call_id to the id of a call")
    if not responses:
        return
    if not any(message.role == "assistant" for message in messages):
        fix = "add an assistant turn, or set data.on_error=skip"
        raise BadRow(where, "has no assistant turn to train on", fix)
    if messages[-1].role != "assistant":
        fix = "add the response or remove the turn, or set data.on_error=skip"
        raise BadRow(where, f"ends with a turn of the {messages[-1].role}, without a response", fix)
