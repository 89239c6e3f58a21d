"""Rows in the formats of OpenAI, ShareGPT, Alpaca, TRL and KTO as examples, and the formats of each objective."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.core.units import MIB, format_bytes
from bloomery.data.examples import (
    BadRow,
    Example,
    Message,
    Role,
    Turns,
    check_turns,
    kind_of,
    num_equal,
    text_of,
)
from bloomery.recipe.schema import Source

MAX_CONVERSATION = 2 * MIB  # of text: half a million tokens, which take half a gigabyte to encode
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLING = ("function_call", "tool_call")  # ShareGPT: the whole turn is a call
_ROLE_KEYS = ("role", "from")
_TEXT_KEYS = ("content", "value")
_THINKING = ("reasoning_content", "thinking", "reasoning")  # transformers takes the same three
Columns = Mapping[str, str]  # roles to columns of other names


def plain_json(value: object, where: str) -> Any:
    """A value that JSON can encode: no NaN, no infinity, no half of a surrogate pair. Raises BadRow."""
    try:
        json_text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        json_text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(where, "holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise BadRow(where, "is nested too deeply") from error
    except TypeError as error:
        raise BadRow(where, f"is not valid JSON: {error}") from error
    except ValueError as error:
        raise BadRow(where, "holds NaN or infinity") from error
    return json.loads(json_text)


def _parsed(value: object) -> Any:
    """A text with a JSON object or list becomes that; datasets store nested values as text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # then it is a text
        return value


def refuse_size(size: int, where: str) -> None:
    """Raises BadRow for a conversation above the size limit."""
    if size > MAX_CONVERSATION:
        raise BadRow(
            where,
            f"is a conversation of {format_bytes(size)}; the limit is {format_bytes(MAX_CONVERSATION)}",
            "cut it into several conversations, or set data.on_error=skip",
        )


def _message(
    turn: object, where: str, role_keys: Sequence[str], text_keys: Sequence[str]
) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(where, f"is {kind_of(turn)}, not a message with a role and a content")
    role_name = _role_name(turn, where, role_keys)
    role = ROLES[role_name]
    # Other roles keep no calls: what a user writes there is not a call of the model.
    calls: tuple[dict[str, Any], ...] = ()
    if role == "assistant":
        calls = _calls(_parsed(turn.get("tool_calls")), f"{where}.tool_calls")
    # A turn that only calls may have no content, or null.
    content = ""
    text_key = next((key for key in text_keys if key in turn), text_keys[0])
    location = f"{where}.{text_key}"
    if turn.get(text_key) is not None or not calls:
        if text_key not in turn:
            raise BadRow(location, "is missing")
        content = _content(turn[text_key], location)
    # In ShareGPT the role says that the content itself is the call.
    if role_name in _CALLING:
        parsed = _parsed(content)
        if not isinstance(parsed, dict | list):
            raise BadRow(
                location, "is not a call: a function_call is JSON with a name and arguments"
            )
        calls = _calls(parsed if isinstance(parsed, list) else [parsed], location)
        content = ""
    thinking = next((turn[key] for key in _THINKING if turn.get(key)), None)
    return Message(
        role,
        content,
        calls,
        name=_optional_text(turn.get("name"), f"{where}.name"),
        thinking=_optional_text(thinking, f"{where}.thinking"),
        call_id=_optional_text(turn.get("tool_call_id"), f"{where}.tool_call_id"),
        trained_on=_is_trained_on(turn.get("weight"), f"{where}.weight"),
    )


def _role_name(turn: dict[str, Any], where: str, role_keys: Sequence[str]) -> str:
    """The key of ROLES that a message names. Raises BadRow."""
    role_key = next((key for key in role_keys if turn.get(key) is not None), None)
    if role_key is None:
        present_keys = ", ".join(str(key)[:40] for key in list(turn)[:8]) or "nothing"
        raise BadRow(where, f"has no {' or '.join(role_keys)}; it has: {present_keys}")
    location = f"{where}.{role_key}"
    role_name = text_of(turn[role_key], location).strip().lower()
    if role_name not in ROLES:
        suggestion = did_you_mean(role_name, ROLES, "known are system, user, assistant and tool")
        raise BadRow(location, f"is an unknown role, {role_name[:40]!r}; {suggestion}")
    return role_name


def _optional_text(value: object, where: str) -> str | None:
    return None if value is None else text_of(value, where)


def _is_trained_on(weight: object, where: str) -> bool:
    """OpenAI's weight of a message: 0 masks it. Raises BadRow for any other number."""
    if weight is None:
        return True
    if type(weight) not in (int, float, bool) or weight not in (0, 1):
        problem = "is neither 0 (masked) nor 1 (trained on)"
        raise BadRow(where, problem, "write 0 or 1, or remove it")
    return bool(weight)


def _content(value: object, where: str) -> str:
    """A text, or the texts of a list of parts."""
    if not isinstance(value, list):
        return text_of(value, where)
    texts = list[str]()
    for index, part in enumerate(value):
        location = f"{where}[{index}]"
        if not isinstance(part, str | dict):
            raise BadRow(location, f"is {kind_of(part)}, not a part with a type and a text")
        if isinstance(part, dict):
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                problem = (
                    f"is a part of type {str(part.get('type'))[:40]!r}, and only text is supported"
                )
                raise BadRow(
                    location, problem, "leave such conversations out, or set data.on_error=skip"
                )
            part = part["text"]
        texts.append(text_of(part, location))
    return "".join(texts)


def _calls(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """Calls with their arguments as objects, as templates expect; in the OpenAI format they are JSON text."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise BadRow(where, f"is {kind_of(value)}, not a list of calls")
    calls = list[dict[str, Any]]()
    for index, call in enumerate(value):
        location = f"{where}[{index}]"
        checked = plain_json(call, location)
        function = checked.get("function", checked) if isinstance(checked, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(location, "is not a call: a call names a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # JSON in JSON, not checked so far
            arguments = plain_json(_parsed(arguments), f"{location}.arguments")
        identity = {"id": checked["id"]} if isinstance(checked.get("id"), str) else {}
        calls.append(
            {
                "type": "function",
                **identity,
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return tuple(calls)


LISTS = ("messages", "conversations", "conversation")
# Other usual names, in any case, of alpaca's instruction, output, input and system. The first present one counts.
_USUAL: dict[str, tuple[str, ...]] = {
    "instruction": (
        "instruction",
        "question",
        "query",
        "prompt",
        "input",
        "human",
        "user",
        "problem",
        "task",
    ),
    "output": (
        "output",
        "response",
        "answer",
        "completion",
        "assistant",
        "target",
        "reply",
        "solution",
        "bot",
        "gpt",
    ),
    "input": ("input", "context", "passage"),
    "system": ("system", "system_prompt"),
}
_PAIR_FIX = "remove the pair, or set data.on_error=skip"


@dataclass(frozen=True)
class Row:
    """A row, its place, and `named`: the roles of data.columns, with the columns of other names. `unparsed`: its cells
    as they were read, where JSON in texts stays text.
    """

    cells: Mapping[str, Any]
    named: Columns
    where: str
    unparsed: Mapping[str, Any]

    def cell(self, role: str, *, required: bool = True) -> tuple[Any, str]:
        """The value for a role, and its place. Raises BadRow without that column, if it is `required` or in `named`."""
        name = self.named.get(role, role)
        if name in self.cells or not (required or role in self.named):
            return self.cells.get(name), f"{self.where}, {name}"
        present = ", ".join(str(key)[:40] for key in list(self.cells)[:12]) or "nothing"
        mapped = "set data.columns={}: it maps another dataset"
        fix = mapped if role in self.cells else f"name it: data.columns={{{role}: NAME}}"
        raise BadRow(self.where, f"has no column {name!r}; it has: {present}", fix)

    def turns(self, value: object, where: str) -> tuple[Message, ...]:
        """Messages of a list of turns; `named` may rename their "role" and "content". Raises BadRow."""
        if not isinstance(value, list):
            raise BadRow(where, f"is {kind_of(value)}, not a list of messages")
        if not value:
            raise BadRow(where, "has no messages")
        role_keys = (self.named["role"],) if "role" in self.named else _ROLE_KEYS
        text_keys = (self.named["content"],) if "content" in self.named else _TEXT_KEYS
        messages = tuple(
            _message(turn, f"{where}[{index}]", role_keys, text_keys)
            for index, turn in enumerate(value)
        )
        refuse_size(sum(len(message.content) for message in messages), where)
        return messages

    def side(self, role: str) -> tuple[Turns, str]:
        """A text or messages, and their place."""
        value, location = self.cell(role)
        if isinstance(value, list):
            return self.turns(value, location), location
        text = text_of(value, location)
        refuse_size(len(text), location)
        return text, location

    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools, which are a list or JSON text. Raises BadRow."""
        value, location = self.cell("tools", required=False)
        value = _parsed(value)
        if value is None or value == "" or value == []:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise BadRow(location, "is not a list of tools, each an object")
        return tuple(cast(list[dict[str, Any]], plain_json(value, location)))


def _chat(row: Row) -> Example:
    """Lists of turns in the formats of OpenAI and ShareGPT; "system" may be a separate column."""
    # data.columns comes first, then the first usual name; the error names the most usual one.
    named_roles = [role for role in ("messages", "conversations") if role in row.named]
    present_lists = [name for name in LISTS if name in row.cells]
    value, location = row.cell([*named_roles, *present_lists, LISTS[0]][0])
    messages = row.turns(value, location)
    system, system_place = row.cell("system", required=False)
    if system is not None and text_of(system, system_place).strip():
        messages = (Message("system", system), *messages)
    check_turns(messages, location, start=len(value) - len(messages))
    return Example(row.where, "chat", (), (messages,), tools=row.tools())


def _alpaca(row: Row) -> Example:
    """One prompt and response: the input follows the instruction on a new line. Columns "system" and "history" (earlier
    prompts and responses) are from LLaMA-Factory.
    """
    texts = {role: text_of(*row.cell(role)) for role in ("instruction", "output")}
    for role in ("input", "system"):
        is_instruction = row.named.get("instruction", "instruction") == role
        value, location = (None, "") if is_instruction else row.cell(role, required=False)
        texts[role] = "" if value is None else text_of(value, location)
    turns = [Message("system", texts["system"])] if texts["system"].strip() else []
    history, location = row.cell("history", required=False)
    if history is not None:
        if not isinstance(history, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in history
        ):
            raise BadRow(location, "is not a list of pairs of a prompt and its response")
        parts = [
            text_of(part, f"{location}[{index}]")
            for index, pair in enumerate(history)
            for part in pair
        ]
        earlier_turns = [
            Message("assistant" if index % 2 else "user", part) for index, part in enumerate(parts)
        ]
        check_turns(earlier_turns, location, responses=False)
        turns += earlier_turns
    prompt = "\n".join(part for part in (texts["instruction"], texts["input"]) if part.strip())
    turns += [Message("user", prompt), Message("assistant", texts["output"])]
    for role, value in (("instruction", prompt), ("output", texts["output"])):
        if not value.strip():
            raise BadRow(f"{row.where}, {row.named.get(role, role)}", "is empty")
    refuse_size(sum(len(turn.content) for turn in turns), row.where)
    return Example(row.where, "chat", (), (tuple(turns),))


def _completion(row: Row) -> Example:
    prompt, responses = _joined(row.side("prompt"), row.side("completion"))
    return Example(row.where, "completion", prompt, responses, tools=row.tools())


def _prompts(row: Row) -> Example:
    """A prompt for the model to complete; every other column is kept for the rewards."""
    prompt, location = row.side("prompt")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRow(location, "is empty")
    else:
        check_turns(prompt, location, responses=False)
        if prompt[-1].role == "assistant":
            fix = "remove that turn, or set data.on_error=skip"
            raise BadRow(location, "ends with a turn of the assistant, with nothing to answer", fix)
    columns = {
        name: plain_json(value, f"{row.where}, {name}")
        for name, value in row.unparsed.items()
        if name != row.named.get("prompt", "prompt")
    }
    return Example(row.where, "prompt", prompt, (), tools=row.tools(), columns=columns)


def _kto(row: Row) -> Example:
    example = _completion(row)
    label, location = row.cell("label")
    if isinstance(label, str):  # tables have only text
        label = {"true": True, "1": True, "false": False, "0": False}.get(
            label.strip().lower(), label
        )
    if isinstance(label, float) and math.isnan(label):
        raise BadRow(location, "is NaN, not true or false")
    if label not in (0, 1) or type(label) not in (bool, int):
        raise BadRow(location, f"is {kind_of(label)}, not true (desirable) or false")
    return replace(example, kind="kto", desirable=bool(label))


def _preference(row: Row) -> Example:
    """Without a column for the prompt, and for whole conversations, both sides begin with it."""
    (chosen_side, chosen_place) = row.side("chosen")
    (rejected_side, rejected_place) = row.side("rejected")
    if chosen_side == rejected_side:
        raise BadRow(row.where, "has equal chosen and rejected responses", _PAIR_FIX)
    prompt = cast(Turns, "")
    prompt_place = f"{row.where}, prompt"
    if "prompt" in row.named or row.cells.get("prompt") is not None:
        prompt, prompt_place = row.side("prompt")
    if isinstance(chosen_side, str) != isinstance(rejected_side, str):
        raise BadRow(
            row.where, "has one side as text and one as messages", "use one format for both sides"
        )
    # A prompt found in texts is not known to be a turn, so that no template may format it.
    implicit = isinstance(chosen_side, str) and not prompt
    if not prompt or _begins_with_prompt(chosen_side, prompt):
        prompt, chosen_side, rejected_side = _without_common(chosen_side, rejected_side, row.where)
    prompt, responses = _joined(
        (prompt, prompt_place), (chosen_side, chosen_place), (rejected_side, rejected_place)
    )
    return Example(row.where, "pair", prompt, responses, tools=row.tools(), implicit=implicit)


def _begins_with_prompt(side: Turns, prompt: Turns) -> bool:
    """Whether a side of messages is a whole conversation, which repeats the prompt of its column."""
    if isinstance(side, str):
        return False
    if not isinstance(prompt, str):
        return len(side) > len(prompt) and side[: len(prompt)] == prompt
    turns = [turn for turn in side if turn.role != "system"]
    if len(turns) < 2 or turns[0].role != "user":
        return False
    return turns[0].content.strip() == prompt.strip()


def _without_common(chosen: Turns, rejected: Turns, where: str) -> tuple[Turns, Turns, Turns]:
    """The common beginning of both sides as their prompt, and what follows it in each. Raises BadRow."""
    length = _common(chosen, rejected)
    if not length:
        problem = "has no prompt: chosen and rejected have no common beginning"
        raise BadRow(where, problem, "name the prompt's column: data.columns={prompt: NAME}")
    chosen_response = chosen[length:]
    rejected_response = rejected[length:]
    if not chosen_response or not rejected_response:
        raise BadRow(where, "has a side that is the beginning of the other", _PAIR_FIX)
    return chosen[:length], chosen_response, rejected_response


def _common(first: Turns, second: Turns) -> int:
    """The number of equal first turns, or of equal first characters up to white space, so that no word is cut."""
    shared = num_equal(first, second)
    if isinstance(first, str):
        while shared and not first[shared - 1].isspace():
            shared -= 1
        shared = len(first[:shared].rstrip(" "))  # a space is in one token with the next word
    return shared


def _joined(
    prompt: tuple[Turns, str], *responses: tuple[Turns, str]
) -> tuple[Turns, tuple[Turns, ...]]:
    """Prompt and responses, all as texts or all as messages, checked together; each comes with its place. Raises
    BadRow.
    """
    sides = [side for side, _ in (prompt, *responses)]
    if all(isinstance(side, str) for side in sides):
        for side, location in (prompt, *responses):
            if not side:
                raise BadRow(location, "is empty")
        return sides[0], tuple(sides[1:])
    turns, *answers = (
        (Message("assistant" if index else "user", side),) if isinstance(side, str) else side
        for index, side in enumerate(sides)
    )
    check_turns(turns, prompt[1], responses=False)
    for answer, (_, location) in zip(answers, responses, strict=True):
        check_turns((*turns, *answer), location, start=-len(turns))
        if not any(message.role == "assistant" for message in answer):
            raise BadRow(location, "has no assistant turn to train on")
        refuse_size(sum(len(message.content) for message in (*turns, *answer)), location)
    return turns, tuple(answers)


@dataclass(frozen=True)
class Format:
    """`required_roles`: those that a row must have; `roles`: all that data.columns can map to columns. "role" and
    "content" are keys of each message.
    """

    reader: Callable[[Row], Example]
    required_roles: tuple[str, ...]
    roles: tuple[str, ...]


_TURNS = ("tools", "role", "content")
PROMPTS = "prompts"
FORMATS = {  # `detect_format`: a row has the last format of which it has all columns
    "messages": Format(_chat, ("messages",), ("messages", *_TURNS)),
    "sharegpt": Format(_chat, ("conversations",), ("conversations", "system", *_TURNS)),
    "alpaca": Format(
        _alpaca, ("instruction", "output"), ("instruction", "input", "output", "system", "history")
    ),
    "completion": Format(_completion, ("prompt", "completion"), ("prompt", "completion", *_TURNS)),
    "kto": Format(
        _kto, ("prompt", "completion", "label"), ("prompt", "completion", "label", *_TURNS)
    ),
    "preference": Format(
        _preference, ("chosen", "rejected"), ("prompt", "chosen", "rejected", *_TURNS)
    ),
    PROMPTS: Format(_prompts, ("prompt",), ("prompt", *_TURNS)),
}
_ALL_ROLES = tuple(dict.fromkeys(role for format in FORMATS.values() for role in format.roles))


def detect_format(cells: Mapping[str, Any], columns: Columns | None = None) -> str | None:
    """The format of a row by its columns, or None: it is plain text or tokens.

    Never that of prompts, whose column other rows have too: only an objective that generates completions reads them.
    """
    roles = columns or {}
    for name, format in reversed(FORMATS.items()):
        required_columns = [roles.get(role, role) for role in format.required_roles]
        is_sought = format.reader not in (_chat, _prompts)
        if is_sought and all(column in cells for column in required_columns):
            return name
    # A list of turns is known by its content, as both formats use the same columns.
    for column in (roles.get("messages"), roles.get("conversations"), *LISTS):
        value = cells.get(column) if column else None
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            continue
        if "from" in value[0] or roles.get("conversations") == column:
            return "sharegpt"
        return "messages"
    return None


def read_example(row: object, *, format: str, columns: Columns, where: str) -> Example:
    """The example in a row. `columns` maps roles to columns of other names (FORMATS). Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow(where, f"is {kind_of(row)}, not an object with columns")
    return FORMATS[format].reader(Row(_with_turns(row), columns, where, row))


def _with_turns(cells: dict[str, Any]) -> dict[str, Any]:
    """Parse text columns with a list of turns as JSON, as in CSV files."""
    turns = {}
    for name, value in cells.items():
        parsed = _parsed(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else None
        roles = (
            isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in parsed or ()
        )
        if isinstance(parsed, list) and parsed and all(roles):
            turns[name] = parsed
    return {**cells, **turns} if turns else cells


# "text": plain text alone. "any": text, else examples. "sft": conversations and completions, or
# text.
RequiredFormat = Literal["text", "any", "sft", "pairs", "kto", "prompts"]
# Those that prefer rows to plain text, and of them those that take no plain text.
ROW_FORMATS: tuple[RequiredFormat, ...] = ("sft", "pairs", "kto", "prompts")
ROWS_ALONE: tuple[RequiredFormat, ...] = ("pairs", "kto", "prompts")
NAMES = {
    "chat": "conversations",
    "completion": "completions",
    "pair": "preference pairs",
    "kto": "responses with KTO labels",
    "prompt": "prompts without responses",
}
_TRAINABLE = {
    "sft": "conversations, completions or text",
    "pairs": "pairs of a chosen and a rejected response",
    "kto": "responses labeled desirable or not",
    "prompts": "prompts",
    "any": "text, conversations or pairs",
}
_ROWS = {
    "sft": '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
    "pairs": '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}',
    "kto": '{"prompt": "2 + 2?", "completion": "4", "label": true}',
    "prompts": '{"prompt": "2 + 2?", "answer": "4"}',
}
_PAGE = "docs/reference/dataset-formats.md"
_OBJECTIVES = {
    "chat": "sft",
    "completion": "sft",
    "pair": "dpo",
    "kto": "kto",
    "prompt": "grpo",
}


def refuse_unknown_roles(source: Source) -> None:
    """Raises UserError for a role in `columns` that the format does not have."""
    known_roles = (
        FORMATS[source.format].roles
        if source.format in FORMATS
        else ("text", "tokens", *_ALL_ROLES)
    )
    unknown = sorted(set(source.columns) - set(known_roles))
    if unknown:
        problem = f"unknown role: {unknown[0]}; the roles are {', '.join(known_roles)}"
        raise UserError(
            problem, where="data.columns", fix=f"set data.columns={{{known_roles[0]}: NAME}}"
        )


def columns_of_examples(columns: dict[str, str], present: dict[str, str]) -> list[str] | None:
    """The columns of a file that an example may use; None without any."""
    used_columns = {*columns.values(), *LISTS, *_ALL_ROLES}
    usual_names = {name for names in _USUAL.values() for name in names}
    return [name for name in present if name in used_columns or name.lower() in usual_names] or None


def like_examples(columns: Collection[str]) -> bool:
    """Whether names of columns are those of conversations, of prompts and responses, or of pairs."""
    usual_names = {*LISTS, *_ALL_ROLES, *(name for names in _USUAL.values() for name in names)}
    return any(name.lower() in usual_names for name in columns)


def format_of_row(
    cells: dict[str, Any], columns: dict[str, str], *, required_format: RequiredFormat, plain: bool
) -> tuple[str, dict[str, str]] | None:
    """The format of the examples in rows such as this one, and their columns; None when rows are read as text. `plain`:
    it has a usual text column. Columns not in data.columns are found by their usual names.
    """
    if required_format == "text" or (required_format == "any" and plain):
        return None
    cells = _with_turns(cells)
    if required_format == "prompts":
        return _prompts_of_row(cells, columns)
    format = detect_format(cells, columns)
    if format == "preference" and not columns and "prompt" not in cells:
        sides = {
            str(name).lower(): str(name)
            for name, value in cells.items()
            if isinstance(value, str | list)
        }
        prompt = next((sides[name] for name in _USUAL["instruction"] if name in sides), None)
        return format, {} if prompt is None else {"prompt": prompt}
    if format is not None:
        return format, columns
    if columns or plain:
        return None
    texts = {
        str(name).lower(): str(name) for name, value in cells.items() if isinstance(value, str)
    }
    roles: dict[str, str] = {}
    for role, names in _USUAL.items():
        column = next(
            (texts[name] for name in names if name in texts and texts[name] not in roles.values()),
            None,
        )
        if column is not None:
            roles[role] = column
    guessed = {role: column for role, column in roles.items() if role != column}
    return ("alpaca", guessed) if {"instruction", "output"} <= roles.keys() else None


def _prompts_of_row(
    cells: dict[str, Any], columns: dict[str, str]
) -> tuple[str, dict[str, str]] | None:
    """The column of the prompt, else one of a usual name; None without any.

    An instruction next to a column of its input is no whole prompt: which one is meant, data.columns says.
    """
    if columns.get("prompt", "prompt") in cells:
        return PROMPTS, columns
    if columns:
        return None
    sides = {
        str(name).lower(): str(name)
        for name, value in cells.items()
        if isinstance(value, str | list)
    }
    usual_names = [name for name in _USUAL["instruction"] if name in sides]
    has_input = any(name in sides for name in _USUAL["input"] if name not in usual_names[:1])
    if not usual_names or has_input:
        return None
    return PROMPTS, {"prompt": sides[usual_names[0]]}


def documents_of(example: Example, required_format: RequiredFormat) -> Iterator[Example]:
    """The examples that an objective trains on: for KTO a pair is two labeled responses. Raises UserError for a kind
    that it does not support.
    """
    if example.kind == "pair" and required_format == "kto":
        for response, desirable in zip(example.responses, (True, False), strict=True):
            yield replace(example, kind="kto", responses=(response,), desirable=desirable)
        return
    fits = {
        "any": example.kind != "prompt",
        "sft": example.kind in ("chat", "completion"),
        "pairs": example.kind == "pair",
        "kto": example.kind == "kto",
        "prompts": example.kind == "prompt",
        "text": False,
    }
    if not fits[required_format]:
        problem = (
            f"the rows are {NAMES[example.kind]}; the objective needs {_TRAINABLE[required_format]}"
        )
        row = (
            f" with rows such as {_ROWS[required_format]} ({_PAGE})"
            if required_format in _ROWS
            else ""
        )
        fix = (
            f"set objective.kind={_OBJECTIVES[example.kind]}, or data.path to another dataset{row}"
        )
        raise UserError(problem, where=example.source, fix=fix)
    yield example


def refuse_text(required_format: RequiredFormat, where: str) -> UserError:
    """The error for plain text with an objective that needs pairs, labels or prompts."""
    role = "prompt" if required_format == "prompts" else "chosen"
    return UserError(
        f"the dataset is plain text; the objective needs {_TRAINABLE[required_format]}",
        where=where,
        fix=f"set objective.kind=sft, data.columns={{{role}: NAME}}, or data.path to another dataset with rows such as "
        f"{_ROWS[required_format]} ({_PAGE})",
    )
