"""Rows of turns, as OpenAI and ShareGPT write them, to messages, and what no conversation may do."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from bloomery.data.examples import Message, Role
from bloomery.data.streams import Flaw, text_of
from bloomery.units import MIB, format_bytes

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
    near = difflib.get_close_matches(said, ROLES, n=1)
    known = f"did you mean {near[0]}?" if near else "known are system, user, assistant and tool"
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
