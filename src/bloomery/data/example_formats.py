"""Rows as OpenAI, ShareGPT, Alpaca, TRL and KTO write them, to examples."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bloomery.data.example_turns import (
    Row,
    Wrong,
    check_turns,
    kind_of,
    read_tools,
    read_turns,
    refuse_size,
    text,
)
from bloomery.data.examples import Example, Message, Turns
from bloomery.data.streams import Flaw

# Roles that data.columns may map to columns, by format. "role" and "content" name keys inside each message.
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "tools", "role", "content"),
    "sharegpt": ("conversations", "system", "tools", "role", "content"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "completion": ("prompt", "completion", "tools", "role", "content"),
    "preference": ("prompt", "chosen", "rejected", "tools", "role", "content"),
    "kto": ("prompt", "completion", "label", "tools", "role", "content"),
}
_NEEDED = {
    "preference": ("chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}  # in the order in which they are looked for
LISTS = ("messages", "conversations", "conversation")
# Other usual names, in any case, for what alpaca calls instruction, output, input and system; the first that is there.
_USUAL: dict[str, tuple[str, ...]] = {
    "instruction": ("instruction", "question", "query", "prompt", "input", "human", "user", "problem", "task"),
    "output": ("output", "response", "answer", "completion", "assistant", "target", "reply", "solution", "bot", "gpt"),
    "input": ("input", "context", "passage"),
    "system": ("system", "system_prompt"),
}  # fmt: skip
USUAL_NAMES = frozenset(name for names in _USUAL.values() for name in names)
_PAIR_REMEDY = "remove the pair, or set data.on_error to skip"


def detect_format(row: Row, columns: Mapping[str, str] | None = None) -> str | None:
    """The format of a row by its columns, or None: it is plain text or tokens."""
    named = columns or {}
    for format, needed in _NEEDED.items():
        if all(named.get(role, role) in row for role in needed):
            return _list_format(row, named) if format in ("messages", "sharegpt") else format
    return _list_format(row, named)


def guess_columns(row: Row) -> dict[str, str] | None:
    """Columns of a question and its answer by their usual names, as roles of alpaca; None where either is not there."""
    texts = {str(name).lower(): str(name) for name, value in row.items() if isinstance(value, str)}
    found: dict[str, str] = {}
    for role, names in _USUAL.items():
        name = next((texts[name] for name in names if name in texts and texts[name] not in found.values()), None)
        if name is not None:
            found[role] = name
    return found if {"instruction", "output"} <= found.keys() else None


def guess_prompt(row: Row) -> str | None:
    """The column that holds the prompt of rows with a chosen and a rejected answer."""
    texts = {str(name).lower(): str(name) for name, value in row.items() if isinstance(value, str | list)}
    return next((texts[name] for name in _USUAL["instruction"] if name in texts), None)


def _list_format(row: Row, columns: Mapping[str, str]) -> str | None:
    for name in (columns.get("messages"), columns.get("conversations"), *LISTS):
        value = row.get(name) if name else None
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "sharegpt" if "from" in value[0] or columns.get("conversations") == name else "messages"
    return None


def read_example(row: object, *, format: str, columns: Mapping[str, str], where: str) -> Example | Flaw:
    """The example in a row. `columns` maps roles to columns of other names (COLUMNS)."""
    try:
        if not isinstance(row, dict):
            raise Wrong(where, f"is {kind_of(row)}, not an object with columns")
        return _READERS[format](row, columns, where)
    except Wrong as wrong:
        return wrong.flaw


def _column(row: Row, role: str, columns: Mapping[str, str], where: str) -> tuple[Any, str]:
    """What a row holds for a role, and where. Raises Wrong when it has no such column."""
    name = columns.get(role, role)
    if name not in row:
        present = ", ".join(str(key)[:40] for key in list(row)[:12]) or "nothing"
        remedy = "set data.columns={}: it maps other data" if role in row else f"name it: data.columns={{{role}: NAME}}"
        raise Wrong(where, f"has no column {name!r}; it has: {present}", remedy)
    return row[name], f"{where}, {name}"


def _optional(row: Row, role: str, columns: Mapping[str, str], where: str) -> tuple[Any, str]:
    if role in columns:
        return _column(row, role, columns, where)
    return row.get(role), f"{where}, {role}"


def _tools(row: Row, columns: Mapping[str, str], where: str) -> tuple[dict[str, Any], ...]:
    return read_tools(*_optional(row, "tools", columns, where))


def _chat(row: Row, columns: Mapping[str, str], where: str) -> Example:
    """OpenAI's and ShareGPT's lists of turns; "system" may stand in a column of its own."""
    given = [role for role in ("messages", "conversations") if role in columns]
    role = given[0] if given else next((name for name in LISTS if name in row), LISTS[0])
    value, place = _column(row, role, columns, where)
    messages = read_turns(value, place, columns=columns)
    system, system_place = _optional(row, "system", columns, where)
    if system is not None and text(system, system_place).strip():
        messages = (Message("system", system), *messages)
    check_turns(messages, place, start=len(value) - len(messages))
    return Example(where, "chat", (), (messages,), tools=_tools(row, columns, where))


def _alpaca(row: Row, columns: Mapping[str, str], where: str) -> Example:
    """One question and its answer: the input follows the instruction on a line of its own. Columns "system" and
    "history" (pairs of earlier questions and answers) are LLaMA-Factory's.
    """
    said = {role: text(*_column(row, role, columns, where)) for role in ("instruction", "output")}
    extra = {}
    asked = columns.get("instruction", "instruction")
    for role in ("input", "system"):
        value, place = (None, where) if asked == role else _optional(row, role, columns, where)
        extra[role] = "" if value is None else text(value, place)
    history, place = _optional(row, "history", columns, where)
    turns = [Message("system", extra["system"])] if extra["system"].strip() else []
    turns += _history(history, place)
    question = "\n".join(part for part in (said["instruction"], extra["input"]) if part.strip())
    turns += [Message("user", question), Message("assistant", said["output"])]
    for role, value in (("instruction", question), ("output", said["output"])):
        if not value.strip():
            raise Wrong(f"{where}, {columns.get(role, role)}", "is empty")
    refuse_size(sum(len(turn.content) for turn in turns), where)
    return Example(where, "chat", (), (tuple(turns),))


def _history(value: object, where: str) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Wrong(where, "is no list of pairs of a question and its answer")
    said = [text(part, f"{where}[{index}]") for index, pair in enumerate(value) for part in pair]
    turns = [Message("assistant" if index % 2 else "user", part) for index, part in enumerate(said)]
    check_turns(turns, where, answers=False)
    return turns


def _side(row: Row, role: str, columns: Mapping[str, str], where: str) -> tuple[Turns, str]:
    """A text or messages."""
    value, place = _column(row, role, columns, where)
    if isinstance(value, list):
        return read_turns(value, place, columns=columns), place
    said = text(value, place)
    refuse_size(len(said), place)
    return said, place


def _completion(row: Row, columns: Mapping[str, str], where: str) -> Example:
    prompt, prompt_place = _side(row, "prompt", columns, where)
    answer, place = _side(row, "completion", columns, where)
    prompt, (answer,) = _joined(prompt, prompt_place, ((answer, place),))
    return Example(where, "completion", prompt, (answer,), tools=_tools(row, columns, where))


def _kto(row: Row, columns: Mapping[str, str], where: str) -> Example:
    example = _completion(row, columns, where)
    label, place = _column(row, "label", columns, where)
    if isinstance(label, float) and math.isnan(label):
        raise Wrong(place, "is NaN, not true or false")
    if label not in (0, 1) or type(label) not in (bool, int):
        raise Wrong(place, f"is {kind_of(label)}, not true (desirable) or false")
    return Example(where, "kto", example.prompt, example.answers, bool(label), example.tools)


def _preference(row: Row, columns: Mapping[str, str], where: str) -> Example:
    chosen, rejected = (_side(row, role, columns, where) for role in ("chosen", "rejected"))
    if chosen[0] == rejected[0]:
        raise Wrong(where, "prefers an answer to itself: chosen and rejected are equal", _PAIR_REMEDY)
    if "prompt" in columns or row.get("prompt") is not None:
        prompt, place = _side(row, "prompt", columns, where)
    else:
        prompt, place = "", f"{where}, prompt"
    if isinstance(chosen[0], str) != isinstance(rejected[0], str):
        raise Wrong(where, "has one side as a text and one as messages", "write both sides in one way")
    implicit = isinstance(chosen[0], str) and not prompt
    if not prompt or _repeats(prompt, chosen[0]):
        prompt, chosen, rejected = _shared(chosen, rejected, where)
    prompt, answers = _joined(prompt, place, (chosen, rejected))
    return Example(where, "pair", prompt, answers, tools=_tools(row, columns, where), implicit=implicit)


def _repeats(prompt: Turns, side: Turns) -> bool:
    """Whether the sides are whole conversations that begin with the prompt."""
    if isinstance(side, str):
        return False
    turns = [turn for turn in side if turn.role != "system"]
    if isinstance(prompt, str):
        return len(turns) > 1 and turns[0].role == "user" and turns[0].content.strip() == prompt.strip()
    return len(side) > len(prompt) and side[: len(prompt)] == prompt


def _shared(
    chosen: tuple[Turns, str], rejected: tuple[Turns, str], where: str
) -> tuple[Turns, tuple[Turns, str], tuple[Turns, str]]:
    """The beginning that both sides share, which is the prompt, and what is left of them."""
    length = _common(chosen[0], rejected[0])
    prompt = chosen[0][:length]
    if not prompt:
        raise Wrong(where, "has no prompt, and chosen and rejected share no beginning",
                    "name the prompt's column: data.columns={prompt: NAME}")  # fmt: skip
    rest = tuple((side[length:], place) for side, place in (chosen, rejected))
    if not all(side for side, _ in rest):
        raise Wrong(where, "has a side that is only the beginning of the other", _PAIR_REMEDY)
    return prompt, rest[0], rest[1]


def _common(one: Turns, other: Turns) -> int:
    """Turns that are the same, or characters up to the last white space among them, so that no word is cut."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    if isinstance(one, str):
        while shared and not one[shared - 1].isspace():
            shared -= 1
        while shared and one[shared - 1] == " ":
            shared -= 1  # a space begins a token with the word behind it
    return shared


def _joined(
    prompt: Turns, prompt_place: str, answers: tuple[tuple[Turns, str], ...]
) -> tuple[Turns, tuple[Turns, ...]]:
    """Prompt and answers both as texts or both as messages, checked together. Raises Wrong."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer, _ in answers):
        for side, place in ((prompt, prompt_place), *answers):
            if not side:
                raise Wrong(place, "is empty")
        return prompt, tuple(answer for answer, _ in answers)
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    said = tuple((Message("assistant", side),) if isinstance(side, str) else side for side, _ in answers)
    check_turns(turns, prompt_place, answers=False)
    for side, (_, place) in zip(said, answers, strict=True):
        check_turns((*turns, *side), place, start=-len(turns))
        if not any(message.role == "assistant" for message in side):
            raise Wrong(place, "has no turn of the assistant, so there is nothing to learn")
        refuse_size(sum(len(message.content) for message in (*turns, *side)), place)
    return turns, said


_READERS: dict[str, Callable[[Row, Mapping[str, str], str], Example]] = {
    "messages": _chat, "sharegpt": _chat, "alpaca": _alpaca,
    "completion": _completion, "preference": _preference, "kto": _kto,
}  # fmt: skip
