"""Rows as OpenAI, ShareGPT, Alpaca, TRL and KTO write them, to examples."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from bloomery.core.text import did_you_mean
from bloomery.core.units import MIB, format_bytes
from bloomery.data.chat.examples import Example, Message, Role, Turns
from bloomery.data.sources.streams import Flaw, text_of

MAX_CONVERSATION = 2 * MIB  # of text: half a million tokens, which take half a gigabyte to encode
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
_CALLING = ("function_call", "tool_call")  # ShareGPT: the whole turn is a call
_ROLE_KEYS, _TEXT_KEYS = ("role", "from"), ("content", "value")
_THINKING = ("reasoning_content", "thinking", "reasoning")  # transformers takes the same three
_CALL_SIGNS = ("tool_call", "functioncall", "function_call")  # calls that stand in the text itself
_KINDS = {"NoneType": "null", "int": "a number", "float": "a number", "bool": "true or false", "dict": "an object",
          "list": "a list", "str": "a text"}  # fmt: skip
Row = Mapping[str, Any]


class Wrong(Exception):
    """Carries a Flaw out of a row."""

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.flaw = Flaw(where, problem, remedy) if remedy else Flaw(where, problem)


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def text(value: object, where: str) -> str:
    """A text that can be written as UTF-8. Raises Wrong."""
    if not isinstance(value, str):
        raise Wrong(where, f"is {kind_of(value)}, not a text")
    checked = text_of(value, where)
    if isinstance(checked, Flaw):
        raise Wrong(checked.where, checked.problem, checked.remedy)
    return checked


def plain_json(value: object, where: str) -> Any:
    """A value as JSON can hold it: no NaN, no endless number, no half character. Raises Wrong."""
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise Wrong(where, "holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise Wrong(where, "is nested too deeply") from error
    except TypeError as error:
        raise Wrong(where, f"holds what JSON cannot: {error}") from error
    except ValueError as error:
        raise Wrong(where, "holds a number that is none (NaN) or has no end") from error
    return json.loads(written)


def read_turns(value: object, where: str, *, columns: Mapping[str, str]) -> tuple[Message, ...]:
    """Messages of a list of turns; `columns` may rename "role" and "content". Raises Wrong."""
    if not isinstance(value, list):
        raise Wrong(where, f"is {kind_of(value)}, not a list of messages")
    if not value:
        raise Wrong(where, "holds no message")
    role_keys = (columns["role"],) if "role" in columns else _ROLE_KEYS
    text_keys = (columns["content"],) if "content" in columns else _TEXT_KEYS
    messages, size = [], 0
    for index, turn in enumerate(value):
        message = _message(turn, f"{where}[{index}]", role_keys, text_keys)
        size += len(message.content)
        messages.append(message)
    refuse_size(size, where)
    return tuple(messages)


def refuse_size(size: int, where: str) -> None:
    """Raises Wrong for a conversation that no model could read."""
    if size > MAX_CONVERSATION:
        raise Wrong(
            where, f"is a conversation of {format_bytes(size)}, and {format_bytes(MAX_CONVERSATION)} is the limit",
            "cut it into several conversations, or set data.on_error to skip",
        )  # fmt: skip


def _message(turn: object, where: str, role_keys: Sequence[str], text_keys: Sequence[str]) -> Message:
    if not isinstance(turn, dict):
        raise Wrong(where, f"is {kind_of(turn)}, not a message with a role and a content")
    role_key = next((key for key in role_keys if turn.get(key) is not None), None)
    if role_key is None:
        raise Wrong(where, f"has no {' or '.join(role_keys)}; it has: {_names(turn)}")
    said = text(turn[role_key], f"{where}.{role_key}").strip().lower()
    role = _role(said, f"{where}.{role_key}")
    text_key = next((key for key in text_keys if key in turn), text_keys[0])
    calls = _calls(turn.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else ()
    content = _content(turn.get(text_key), f"{where}.{text_key}", absent=bool(calls), missing=text_key not in turn)
    if said in _CALLING:
        calls, content = _spelt_calls(content, f"{where}.{text_key}"), ""
    thinking = next((turn[key] for key in _THINKING if turn.get(key)), None)
    name, call_id, weight = turn.get("name"), turn.get("tool_call_id"), turn.get("weight")
    return Message(
        role, content, calls, None if name is None else text(name, f"{where}.name"),
        None if thinking is None else text(thinking, f"{where}.thinking"),
        None if call_id is None else text(call_id, f"{where}.tool_call_id"),
        learned=_weight(weight, f"{where}.weight"),
    )  # fmt: skip


def _names(turn: Row) -> str:
    return ", ".join(str(key)[:40] for key in list(turn)[:8]) or "nothing"


def _role(said: str, where: str) -> Role:
    if said in ROLES:
        return ROLES[said]
    known = did_you_mean(said, ROLES, "known are system, user, assistant and tool")
    raise Wrong(where, f"is an unknown role, {said[:40]!r}; {known}")


def _weight(weight: object, where: str) -> bool:
    if weight is None:
        return True
    if type(weight) in (int, float, bool) and weight in (0, 1):
        return bool(weight)
    raise Wrong(where, "is neither 0 (not learned) nor 1", "write 0 or 1, or remove it")


def _content(value: object, where: str, *, absent: bool, missing: bool) -> str:
    if value is None and absent:
        return ""
    if missing:
        raise Wrong(where, "is missing")
    if isinstance(value, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))
    return text(value, where)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return text(part, where)
    if not isinstance(part, dict):
        raise Wrong(where, f"is {kind_of(part)}, not a part with a type and a text")
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise Wrong(
            where, f"is a part of type {str(part.get('type'))[:40]!r}, and only text is learned",
            "leave such conversations out, or set data.on_error to skip",
        )  # fmt: skip
    return text(part["text"], where)


def _calls(value: object, where: str) -> tuple[dict[str, Any], ...]:
    value = _unpacked(value)
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise Wrong(where, f"is {kind_of(value)}, not a list of calls")
    return tuple(_call(call, f"{where}[{index}]") for index, call in enumerate(value))


def _call(call: object, where: str) -> dict[str, Any]:
    """One call with its arguments as an object, which is what templates print; OpenAI writes them as a text of JSON."""
    said = plain_json(call, where)
    function = said.get("function", said) if isinstance(said, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Wrong(where, "is no call: a call names a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # JSON in JSON: what it must not hold was out of sight so far
        arguments = plain_json(_unpacked(arguments), f"{where}.arguments")
    kept = {"id": said["id"]} if isinstance(said.get("id"), str) else {}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def _unpacked(value: object) -> Any:
    """A text that holds a JSON object or list becomes that; data sets store nested values so."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # then it is a text, which templates print as it is
        return value


def _spelt_calls(content: str, where: str) -> tuple[dict[str, Any], ...]:
    found = _unpacked(content)
    if not isinstance(found, dict | list):
        raise Wrong(where, "is no call: a function_call holds JSON with a name and arguments")
    return _calls(found if isinstance(found, list) else [found], where)


def read_tools(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """Tools that a row offers, as a list or a text of JSON. Raises Wrong."""
    value = _unpacked(value)
    if value is None or value == "" or value == []:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Wrong(where, "is no list of tools, each an object")
    return tuple(cast(list[dict[str, Any]], plain_json(value, where)))


def check_turns(messages: Sequence[Message], where: str, *, start: int = 0, answers: bool = True) -> None:
    """What no conversation may do. `start`: where these messages stand in their list; `answers`: an answer must end
    them. Raises Wrong.
    """
    for index, message in enumerate(messages):
        place = f"{where}[{start + index}]"
        if not message.content.strip() and not message.calls and not message.thinking and message.role != "tool":
            raise Wrong(place, f"is an empty turn of the {message.role}",
                        "remove it or fill it, or set data.on_error to skip")  # fmt: skip
        if message.role == "system" and index:
            again = any(earlier.role == "system" for earlier in messages[:index])
            problem = "is a second system message" if again else "is a system message after the first turn"
            raise Wrong(place, problem, "join system messages into one, at the beginning")
        if message.role == "tool":
            _check_result(messages[:index], message, place)
    if answers:
        _check_end(messages, where)


def _check_end(messages: Sequence[Message], where: str) -> None:
    if not any(message.role == "assistant" for message in messages):
        raise Wrong(where, "has no turn of the assistant, so there is nothing to learn",
                    "add the answer, or set data.on_error to skip")  # fmt: skip
    if messages[-1].role != "assistant":
        raise Wrong(where, f"ends on a turn of the {messages[-1].role}, which nothing answers",
                    "add the answer or remove the turn, or set data.on_error to skip")  # fmt: skip


def _check_result(before: Sequence[Message], result: Message, where: str) -> None:
    """A tool's result follows the call that it answers, perhaps behind results of other calls."""
    caller = next((message for message in reversed(before) if message.role != "tool"), None)
    signs = caller is not None and any(sign in caller.content.lower() for sign in _CALL_SIGNS)
    if caller is None or caller.role != "assistant" or not (caller.calls or signs):
        raise Wrong(where, "is a tool's result without a call before it",
                    "put the assistant's tool_calls before it, or remove it")  # fmt: skip
    ids = [call["id"] for call in caller.calls if "id" in call]
    if result.call_id is not None and ids and result.call_id not in ids:
        made = ", ".join(ids)[:80]
        raise Wrong(where, f"answers a call {result.call_id[:40]!r} that was not made; made are: {made}",
                    "mend tool_call_id")  # fmt: skip


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
