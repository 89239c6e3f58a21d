"""Rows in the formats of OpenAI, ShareGPT, Alpaca, TRL and KTO as examples, and the formats of each objective."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.core.units import MIB, format_bytes
from bloomery.data.chat.examples import Example, Message, Role, Turns
from bloomery.data.sources.readers import JSON_KINDS, BadRow, Value, text_of
from bloomery.recipe.schema import Recipe, Source

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
_CALL_SIGNS = ("tool_call", "functioncall", "function_call")  # calls in the text itself
Row = Mapping[str, Any]
Columns = Mapping[str, str]  # roles to columns of other names


class RowError(Exception):
    """Carries a BadRow out of the reader of a row."""

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        super().__init__(problem)
        self.bad_row = BadRow(where, problem, fix) if fix else BadRow(where, problem)


def kind_of(value: object) -> str:
    """The name of a JSON value's type."""
    return JSON_KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def text(value: object, where: str) -> str:
    """A text that UTF-8 can encode. Raises RowError."""
    if not isinstance(value, str):
        raise RowError(where, f"is {kind_of(value)}, not a text")
    checked = text_of(value, where)
    if isinstance(checked, BadRow):
        raise RowError(checked.where, checked.problem, checked.fix)
    return checked


def plain_json(value: object, where: str) -> Any:
    """A value that JSON can encode: no NaN, no infinity, no half of a surrogate pair. Raises RowError."""
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise RowError(where, "holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise RowError(where, "is nested too deeply") from error
    except TypeError as error:
        raise RowError(where, f"is not valid JSON: {error}") from error
    except ValueError as error:
        raise RowError(where, "holds NaN or infinity") from error
    return json.loads(written)


def read_turns(value: object, where: str, *, columns: Columns) -> tuple[Message, ...]:
    """Messages of a list of turns; `columns` may rename "role" and "content". Raises RowError."""
    if not isinstance(value, list):
        raise RowError(where, f"is {kind_of(value)}, not a list of messages")
    if not value:
        raise RowError(where, "has no messages")
    role_keys = (columns["role"],) if "role" in columns else _ROLE_KEYS
    text_keys = (columns["content"],) if "content" in columns else _TEXT_KEYS
    messages = tuple(_message(turn, f"{where}[{index}]", role_keys, text_keys) for index, turn in enumerate(value))
    refuse_size(sum(len(message.content) for message in messages), where)
    return messages


def refuse_size(size: int, where: str) -> None:
    """Raises RowError for a conversation above the size limit."""
    if size > MAX_CONVERSATION:
        raise RowError(
            where, f"is a conversation of {format_bytes(size)}; the limit is {format_bytes(MAX_CONVERSATION)}",
            "cut it into several conversations, or set data.on_error to skip",
        )  # fmt: skip


def _message(turn: object, where: str, role_keys: Sequence[str], text_keys: Sequence[str]) -> Message:
    if not isinstance(turn, dict):
        raise RowError(where, f"is {kind_of(turn)}, not a message with a role and a content")
    role_key = next((key for key in role_keys if turn.get(key) is not None), None)
    if role_key is None:
        names = ", ".join(str(key)[:40] for key in list(turn)[:8]) or "nothing"
        raise RowError(where, f"has no {' or '.join(role_keys)}; it has: {names}")
    name = text(turn[role_key], f"{where}.{role_key}").strip().lower()
    if name not in ROLES:
        known = did_you_mean(name, ROLES, "known are system, user, assistant and tool")
        raise RowError(f"{where}.{role_key}", f"is an unknown role, {name[:40]!r}; {known}")
    role = ROLES[name]
    text_key = next((key for key in text_keys if key in turn), text_keys[0])
    calls = _calls(_parsed(turn.get("tool_calls")), f"{where}.tool_calls") if role == "assistant" else ()
    content, place = "", f"{where}.{text_key}"
    if turn.get(text_key) is not None or not calls:
        if text_key not in turn:
            raise RowError(place, "is missing")
        content = _content(turn[text_key], place)
    if name in _CALLING:
        parsed = _parsed(content)
        if not isinstance(parsed, dict | list):
            raise RowError(place, "is not a call: a function_call is JSON with a name and arguments")
        calls, content = _calls(parsed if isinstance(parsed, list) else [parsed], place), ""
    thinking = next((turn[key] for key in _THINKING if turn.get(key)), None)
    optional = {"name": turn.get("name"), "thinking": thinking, "tool_call_id": turn.get("tool_call_id")}
    speaker, thought, call_id = (
        None if value is None else text(value, f"{where}.{key}") for key, value in optional.items()
    )
    weight = turn.get("weight")
    if weight is not None and (type(weight) not in (int, float, bool) or weight not in (0, 1)):
        raise RowError(f"{where}.weight", "is neither 0 (masked) nor 1 (trained on)", "write 0 or 1, or remove it")
    return Message(role, content, calls, speaker, thought, call_id, trained_on=weight is None or bool(weight))


def _content(value: object, where: str) -> str:
    """A text, or the texts of a list of parts."""
    if not isinstance(value, list):
        return text(value, where)
    texts = list[str]()
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, str | dict):
            raise RowError(place, f"is {kind_of(part)}, not a part with a type and a text")
        if isinstance(part, dict):
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise RowError(
                    place, f"is a part of type {str(part.get('type'))[:40]!r}, and only text is supported",
                    "leave such conversations out, or set data.on_error to skip",
                )  # fmt: skip
            part = part["text"]
        texts.append(text(part, place))
    return "".join(texts)


def _calls(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """Calls with their arguments as objects, as templates expect; in the OpenAI format they are JSON text."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise RowError(where, f"is {kind_of(value)}, not a list of calls")
    calls = list[dict[str, Any]]()
    for index, call in enumerate(value):
        place = f"{where}[{index}]"
        checked = plain_json(call, place)
        function = checked.get("function", checked) if isinstance(checked, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(place, "is not a call: a call names a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # JSON in JSON, not checked so far
            arguments = plain_json(_parsed(arguments), f"{place}.arguments")
        kept = {"id": checked["id"]} if isinstance(checked.get("id"), str) else {}
        calls.append({"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}})
    return tuple(calls)


def _parsed(value: object) -> Any:
    """A text with a JSON object or list becomes that; datasets store nested values as text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # then it is a text
        return value


def read_tools(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a row, as a list or as JSON text. Raises RowError."""
    value = _parsed(value)
    if value is None or value == "" or value == []:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(where, "is not a list of tools, each an object")
    return tuple(cast(list[dict[str, Any]], plain_json(value, where)))


def check_turns(messages: Sequence[Message], where: str, *, start: int = 0, responses: bool = True) -> None:
    """Raises RowError for an invalid conversation. `start`: the place of these messages in their list; `responses`: the
    last turn must be the assistant's.
    """
    for index, message in enumerate(messages):
        place = f"{where}[{start + index}]"
        if not message.content.strip() and not message.calls and not message.thinking and message.role != "tool":
            fix = "remove it or fill it, or set data.on_error to skip"
            raise RowError(place, f"is an empty turn of the {message.role}", fix)
        if message.role == "system" and index:
            again = any(earlier.role == "system" for earlier in messages[:index])
            problem = "is a second system message" if again else "is a system message after the first turn"
            raise RowError(place, problem, "join system messages into one, at the beginning")
        if message.role == "tool":  # it follows its call, or results of other calls of that turn
            caller = next((turn for turn in reversed(messages[:index]) if turn.role != "tool"), None)
            signs = caller is not None and any(sign in caller.content.lower() for sign in _CALL_SIGNS)
            if caller is None or caller.role != "assistant" or not (caller.calls or signs):
                fix = "put the assistant's tool_calls before it, or remove it"
                raise RowError(place, "is a tool result without a call before it", fix)
            ids = [call["id"] for call in caller.calls if "id" in call]
            if message.call_id is not None and ids and message.call_id not in ids:
                problem = (
                    f"is the result of an unknown call {message.call_id[:40]!r}; the calls are: {', '.join(ids)[:80]}"
                )
                raise RowError(place, problem, "set tool_call_id to the id of a call")
    if not responses:
        return
    if not any(message.role == "assistant" for message in messages):
        fix = "add an assistant turn, or set data.on_error to skip"
        raise RowError(where, "has no assistant turn to train on", fix)
    if messages[-1].role != "assistant":
        fix = "add the response or remove the turn, or set data.on_error to skip"
        raise RowError(where, f"ends with a turn of the {messages[-1].role}, without a response", fix)


LISTS = ("messages", "conversations", "conversation")
# Other usual names, in any case, of alpaca's instruction, output, input and system. The first present one counts.
_USUAL: dict[str, tuple[str, ...]] = {
    "instruction": ("instruction", "question", "query", "prompt", "input", "human", "user", "problem", "task"),
    "output": ("output", "response", "answer", "completion", "assistant", "target", "reply", "solution", "bot", "gpt"),
    "input": ("input", "context", "passage"),
    "system": ("system", "system_prompt"),
}  # fmt: skip
USUAL_NAMES = frozenset(name for names in _USUAL.values() for name in names)
_PAIR_FIX = "remove the pair, or set data.on_error to skip"


def detect_format(row: Row, columns: Columns | None = None) -> str | None:
    """The format of a row by its columns, or None: it is plain text or tokens."""
    named = columns or {}
    for name, format in reversed(FORMATS.items()):
        if format.read is not _chat and all(named.get(role, role) in row for role in format.needed):
            return name
    for column in (named.get("messages"), named.get("conversations"), *LISTS):
        value = row.get(column) if column else None
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "sharegpt" if "from" in value[0] or named.get("conversations") == column else "messages"
    return None


def guess_columns(row: Row) -> dict[str, str] | None:
    """Columns of a prompt and its response by their usual names, as roles of alpaca; None when one is missing."""
    texts = {str(name).lower(): str(name) for name, value in row.items() if isinstance(value, str)}
    found: dict[str, str] = {}
    for role, names in _USUAL.items():
        name = next((texts[name] for name in names if name in texts and texts[name] not in found.values()), None)
        if name is not None:
            found[role] = name
    return found if {"instruction", "output"} <= found.keys() else None


def read_example(row: object, *, format: str, columns: Columns, where: str) -> Example | BadRow:
    """The example in a row. `columns` maps roles to columns of other names (FORMATS)."""
    try:
        if not isinstance(row, dict):
            raise RowError(where, f"is {kind_of(row)}, not an object with columns")
        return FORMATS[format].read(row, columns, where)
    except RowError as refused:
        return refused.bad_row


def _column(row: Row, role: str, columns: Columns, where: str) -> tuple[Any, str]:
    """The value of a row for a role, and its place. Raises RowError when it has no such column."""
    name = columns.get(role, role)
    if name not in row:
        present = ", ".join(str(key)[:40] for key in list(row)[:12]) or "nothing"
        fix = (
            "set data.columns={}: it maps another dataset" if role in row else f"name it: data.columns={{{role}: NAME}}"
        )
        raise RowError(where, f"has no column {name!r}; it has: {present}", fix)
    return row[name], f"{where}, {name}"


def _optional(row: Row, role: str, columns: Columns, where: str) -> tuple[Any, str]:
    return _column(row, role, columns, where) if role in columns else (row.get(role), f"{where}, {role}")


def _chat(row: Row, columns: Columns, where: str) -> Example:
    """Lists of turns in the formats of OpenAI and ShareGPT; "system" may be a separate column."""
    given = [role for role in ("messages", "conversations") if role in columns]
    role = given[0] if given else next((name for name in LISTS if name in row), LISTS[0])
    value, place = _column(row, role, columns, where)
    messages = read_turns(value, place, columns=columns)
    system, system_place = _optional(row, "system", columns, where)
    if system is not None and text(system, system_place).strip():
        messages = (Message("system", system), *messages)
    check_turns(messages, place, start=len(value) - len(messages))
    return Example(where, "chat", (), (messages,), tools=read_tools(*_optional(row, "tools", columns, where)))


def _alpaca(row: Row, columns: Columns, where: str) -> Example:
    """One prompt and response: the input follows the instruction on a new line. Columns "system" and "history" (earlier
    prompts and responses) are from LLaMA-Factory.
    """
    texts = {role: text(*_column(row, role, columns, where)) for role in ("instruction", "output")}
    for role in ("input", "system"):
        taken = columns.get("instruction", "instruction") == role
        value, place = (None, where) if taken else _optional(row, role, columns, where)
        texts[role] = "" if value is None else text(value, place)
    turns = [Message("system", texts["system"])] if texts["system"].strip() else []
    history, place = _optional(row, "history", columns, where)
    if history is not None:
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise RowError(place, "is not a list of pairs of a prompt and its response")
        parts = [text(part, f"{place}[{index}]") for index, pair in enumerate(history) for part in pair]
        before = [Message("assistant" if index % 2 else "user", part) for index, part in enumerate(parts)]
        check_turns(before, place, responses=False)
        turns += before
    prompt = "\n".join(part for part in (texts["instruction"], texts["input"]) if part.strip())
    turns += [Message("user", prompt), Message("assistant", texts["output"])]
    for role, value in (("instruction", prompt), ("output", texts["output"])):
        if not value.strip():
            raise RowError(f"{where}, {columns.get(role, role)}", "is empty")
    refuse_size(sum(len(turn.content) for turn in turns), where)
    return Example(where, "chat", (), (tuple(turns),))


def _side(row: Row, role: str, columns: Columns, where: str) -> tuple[Turns, str]:
    """A text or messages."""
    value, place = _column(row, role, columns, where)
    if isinstance(value, list):
        return read_turns(value, place, columns=columns), place
    written = text(value, place)
    refuse_size(len(written), place)
    return written, place


def _completion(row: Row, columns: Columns, where: str) -> Example:
    prompt, prompt_place = _side(row, "prompt", columns, where)
    prompt, (response,) = _joined(prompt, prompt_place, (_side(row, "completion", columns, where),))
    tools = read_tools(*_optional(row, "tools", columns, where))
    return Example(where, "completion", prompt, (response,), tools=tools)


def _kto(row: Row, columns: Columns, where: str) -> Example:
    example = _completion(row, columns, where)
    label, place = _column(row, "label", columns, where)
    if isinstance(label, float) and math.isnan(label):
        raise RowError(place, "is NaN, not true or false")
    if label not in (0, 1) or type(label) not in (bool, int):
        raise RowError(place, f"is {kind_of(label)}, not true (desirable) or false")
    return replace(example, kind="kto", desirable=bool(label))


def _preference(row: Row, columns: Columns, where: str) -> Example:
    """Without a column for the prompt, and for whole conversations, both sides begin with it."""
    (chosen, chosen_place), (rejected, rejected_place) = (
        _side(row, role, columns, where) for role in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise RowError(where, "has equal chosen and rejected responses", _PAIR_FIX)
    prompt, place = cast(Turns, ""), f"{where}, prompt"
    if "prompt" in columns or row.get("prompt") is not None:
        prompt, place = _side(row, "prompt", columns, where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError(where, "has one side as text and one as messages", "use one format for both sides")
    implicit = isinstance(chosen, str) and not prompt
    repeats = False
    if prompt and not isinstance(chosen, str):
        turns = [turn for turn in chosen if turn.role != "system"]
        if isinstance(prompt, str):
            repeats = len(turns) > 1 and turns[0].role == "user" and turns[0].content.strip() == prompt.strip()
        else:
            repeats = len(chosen) > len(prompt) and chosen[: len(prompt)] == prompt
    if not prompt or repeats:
        length = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        if not prompt:
            fix = "name the prompt's column: data.columns={prompt: NAME}"
            raise RowError(where, "has no prompt: chosen and rejected have no common beginning", fix)
        if not chosen or not rejected:
            raise RowError(where, "has a side that is the beginning of the other", _PAIR_FIX)
    prompt, responses = _joined(prompt, place, ((chosen, chosen_place), (rejected, rejected_place)))
    tools = read_tools(*_optional(row, "tools", columns, where))
    return Example(where, "pair", prompt, responses, tools=tools, implicit=implicit)


def _common(one: Turns, other: Turns) -> int:
    """The number of equal first turns, or of equal first characters up to white space, so that no word is cut."""
    pairs = enumerate(zip(one, other, strict=False))
    shared = next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
    if isinstance(one, str):
        while shared and not one[shared - 1].isspace():
            shared -= 1
        while shared and one[shared - 1] == " ":
            shared -= 1  # a space is in one token with the next word
    return shared


def _joined(
    prompt: Turns, prompt_place: str, responses: tuple[tuple[Turns, str], ...]
) -> tuple[Turns, tuple[Turns, ...]]:
    """Prompt and responses, all as texts or all as messages, checked together. Raises RowError."""
    if isinstance(prompt, str) and all(isinstance(response, str) for response, _ in responses):
        for side, place in ((prompt, prompt_place), *responses):
            if not side:
                raise RowError(place, "is empty")
        return prompt, tuple(response for response, _ in responses)
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    sides = tuple((Message("assistant", side),) if isinstance(side, str) else side for side, _ in responses)
    check_turns(turns, prompt_place, responses=False)
    for side, (_, place) in zip(sides, responses, strict=True):
        check_turns((*turns, *side), place, start=-len(turns))
        if not any(message.role == "assistant" for message in side):
            raise RowError(place, "has no assistant turn to train on")
        refuse_size(sum(len(message.content) for message in (*turns, *side)), place)
    return turns, sides


@dataclass(frozen=True)
class Format:
    """Roles that data.columns can map to columns, those that a row must have, and its reader. "role" and "content" are
    keys of each message.
    """

    roles: tuple[str, ...]
    needed: tuple[str, ...]
    read: Callable[[Row, Columns, str], Example]


FORMATS = {  # a row has the last format of which it has all columns
    "messages": Format(("messages", "tools", "role", "content"), ("messages",), _chat),
    "sharegpt": Format(("conversations", "system", "tools", "role", "content"), ("conversations",), _chat),
    "alpaca": Format(("instruction", "input", "output", "system", "history"), ("instruction", "output"), _alpaca),
    "completion": Format(("prompt", "completion", "tools", "role", "content"), ("prompt", "completion"), _completion),
    "kto": Format(
        ("prompt", "completion", "label", "tools", "role", "content"), ("prompt", "completion", "label"), _kto
    ),
    "preference": Format(
        ("prompt", "chosen", "rejected", "tools", "role", "content"), ("chosen", "rejected"), _preference
    ),
}


# text: plain text alone. any: text, else examples. sft: conversations and completions, or text.
RequiredFormat = Literal["text", "any", "sft", "pairs", "kto"]
ROW_FORMATS: tuple[RequiredFormat, ...] = (
    "sft",
    "pairs",
    "kto",
)  # that prefer rows to plain text
NAMES = {
    "chat": "conversations",
    "completion": "completions",
    "pair": "preference pairs",
    "kto": "responses with KTO labels",
}
_TRAINABLE = {
    "sft": "conversations, completions or text",
    "pairs": "pairs of a chosen and a rejected response",
    "kto": "responses labeled desirable or not",
}
_OBJECTIVES = {"chat": "sft", "completion": "sft", "pair": "dpo", "kto": "kto"}


def required_format_of(recipe: Recipe) -> RequiredFormat:
    """The format of examples that the recipe's objective needs."""
    return recipe.objective.spec.data_kind


def refuse_unknown_roles(source: Source) -> None:
    """Raises UserError for a role in `columns` that the format does not have."""
    known = FORMATS[source.format].roles if source.format in FORMATS else ("text", "tokens", *_all_roles())
    unknown = sorted(set(source.columns) - set(known))
    if unknown:
        problem = f"unknown role: {unknown[0]}; the roles are {', '.join(known)}"
        raise UserError(problem, where="data.columns", fix=f"set data.columns={{{known[0]}: NAME}}")


def _all_roles() -> tuple[str, ...]:
    return tuple(dict.fromkeys(role for format in FORMATS.values() for role in format.roles))


def columns_of_examples(columns: dict[str, str], present: dict[str, str]) -> list[str] | None:
    """The columns of a file that an example may use; None without any."""
    used = {*columns.values(), *LISTS, *_all_roles()}
    return [name for name in present if name in used or name.lower() in USUAL_NAMES] or None


def format_of_row(
    row: dict[str, Any], columns: dict[str, str], *, required_format: RequiredFormat, plain: bool
) -> tuple[str, dict[str, str]] | None:
    """The format of the examples in rows such as this one, and their columns; None when rows are read as text. `plain`:
    it has a usual text column. Columns not in data.columns are found by their usual names.
    """
    if required_format == "text" or (required_format == "any" and plain):
        return None
    row = _with_turns(row)
    format = detect_format(row, columns)
    if format == "preference" and not columns and "prompt" not in row:
        texts = {str(name).lower(): str(name) for name, value in row.items() if isinstance(value, str | list)}
        prompt = next((texts[name] for name in _USUAL["instruction"] if name in texts), None)
        return format, {} if prompt is None else {"prompt": prompt}
    if format is not None:
        return format, columns
    guessed = None if columns or plain else guess_columns(row)
    return None if guessed is None else ("alpaca", {role: name for role, name in guessed.items() if role != name})


def row_to_example(value: Value, format: str, columns: dict[str, str]) -> Example | BadRow:
    """The example in a row."""
    row = _with_turns(value.content) if isinstance(value.content, dict) else value.content
    label = columns.get("label", "label")
    if format == "kto" and isinstance(row, dict) and isinstance(row.get(label), str):  # tables have only text
        flag = {"true": True, "1": True, "false": False, "0": False}.get(row[label].strip().lower())
        row = {**row, label: row[label] if flag is None else flag}
    return read_example(row, format=format, columns=columns, where=value.where)


def _with_turns(row: dict[str, Any]) -> dict[str, Any]:
    """Parse text columns with a list of turns as JSON, as in CSV files."""
    turns = {}
    for name, value in row.items():
        parsed = _parsed(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else None
        roles = (isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in parsed or ())
        if isinstance(parsed, list) and parsed and all(roles):
            turns[name] = parsed
    return {**row, **turns} if turns else row


def documents_of(example: Example, required_format: RequiredFormat) -> Iterator[Example]:
    """The examples that an objective trains on: for KTO a pair is two labeled responses. Raises UserError for a kind
    that it does not support.
    """
    if example.kind == "pair" and required_format == "kto":
        for response, desirable in zip(example.responses, (True, False), strict=True):
            yield replace(example, kind="kto", responses=(response,), desirable=desirable)
        return
    fits = {"any": True, "sft": example.kind in ("chat", "completion"), "pairs": example.kind == "pair",
            "kto": example.kind == "kto", "text": False}  # fmt: skip
    if not fits[required_format]:
        problem = f"the rows are {NAMES[example.kind]}; the objective needs {_TRAINABLE[required_format]}"
        fix = f"set objective.kind={_OBJECTIVES[example.kind]}, or data.path to another dataset"
        raise UserError(problem, where=example.source, fix=fix)
    yield example


def refuse_text(required_format: RequiredFormat, where: str) -> UserError:
    """The error for plain text with an objective that needs pairs or labels."""
    return UserError(
        f"the dataset is plain text; the objective needs {_TRAINABLE[required_format]}", where=where,
        fix="set objective.kind=sft, data.path to another dataset, or data.columns={chosen: NAME}",
    )  # fmt: skip
