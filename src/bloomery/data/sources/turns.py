"""Turns of a conversation, as OpenAI, ShareGPT and others write them, as messages: texts, calls, what masks them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.core.text import did_you_mean
from bloomery.core.units import MIB, format_bytes
from bloomery.data.examples import PICTURE, BadRow, Message, Role, kind_of, text_of
from bloomery.data.pictures.references import (
    PART_KEYS,
    PICTURE_PARTS,
    reference_in_part,
    references_of,
)
from bloomery.facts.columns import (
    DETAIL_KEYS,
    MARKERS,
    MASKED_KEYS,
    PICTURES,
    ROLE_KEYS,
    SIDES_OF_TURNS,
    TEXT_KEYS,
    THINKING_KEYS,
    TRAINED_KEYS,
    UNREAD_MEDIA,
    ColumnUse,
    is_empty,
)

MAX_CONVERSATION = 2 * MIB  # of text: half a million tokens, which take half a gigabyte to encode
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_PLAIN_TURNS = (({"role", "content"}, "content"), ({"from", "value"}, "value"))
_TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are of OpenAI's Responses API
_FRAMES = ("video", "frames", "fps", "nframes")  # of a video that is a list of pictures
_CALLING = ("function_call", "tool_call")  # ShareGPT: the whole turn is a call
_SOUND = "sound and video are not supported"
_LEAVE_OUT = "leave such rows out with data.on_error=skip"


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


def parsed(value: object) -> Any:
    """A text with a JSON object or list becomes that; datasets store nested values as text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # then it is a text
        return value


def without_nulls(value: Any) -> Any:
    """An object without its keys that are null, at any depth: Parquet and Arrow give each row the keys of all rows, as
    TRL's `remove_none_values` says.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def refuse_size(size: int, where: str) -> None:
    """Raises BadRow for a conversation above the size limit."""
    if size > MAX_CONVERSATION:
        raise BadRow(
            where,
            f"is a conversation of {format_bytes(size)}; the limit is {format_bytes(MAX_CONVERSATION)}",
            "cut it into several conversations, or set data.on_error=skip",
        )


def refuse_media(cells: Mapping[str, Any], where: str) -> None:
    """Raises BadRow for sound or video in a column, or in a key of a turn."""
    media = next(
        (
            name
            for name, value in cells.items()
            if isinstance(name, str) and name.lower() in UNREAD_MEDIA and not is_empty(value)
        ),
        None,
    )
    if media is not None:
        frames = "; frames of a video can be pictures: name them in 'images'" * ("video" in media)
        fix = f"{_LEAVE_OUT}, or remove {media!r} to train on the text alone{frames}"
        raise BadRow(where, f"has {media!r}, and {_SOUND}", fix)


def refuse_markers(text: str, where: str) -> None:
    """Raises BadRow for a text that begins with the mark of a picture, sound or video, or has one on a line of its own.
    A tag of HTML that is closed is no such mark, nor is a word to fill in, as in `docker run <image>`.

    Of a picture only where the row has none: marks of those that it has are replaced before.
    """
    if not any(marker in text for marker in MARKERS):
        return
    for marker in MARKERS:
        is_mark = re.search(rf"\A\s*{marker}|^\s*({marker}\s*)+$", text, re.MULTILINE)
        if is_mark is not None and marker.replace("<", "</") not in text:
            fix = f"{_LEAVE_OUT}, or remove {marker} to train on the text alone"
            missing = "the row has no pictures" if marker == MARKERS[0] else _SOUND
            raise BadRow(where, f"holds {marker}, and {missing}", fix)


def read_turns(
    value: object, where: str, named: Mapping[str, str], use: ColumnUse
) -> tuple[Message, ...]:
    """Messages of a list of turns, or of one turn; `named` may rename their "role" and "content". Keys that are not
    read go to `use`. Raises BadRow.
    """
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(where, f"is {kind_of(value)}, not a list of messages")
    if not value:
        raise BadRow(where, "has no messages")
    role_keys = (named["role"],) if "role" in named else ROLE_KEYS
    text_keys = (named["content"],) if "content" in named else TEXT_KEYS
    messages = list[Message]()
    for index, turn in enumerate(_single_turns(value, named)):
        location = f"{where}[{index}]"
        if not isinstance(turn, dict):
            raise BadRow(location, f"is {kind_of(turn)}, not a message with a role and a content")
        messages.append(_message(turn, location, role_keys, text_keys, use))
    refuse_size(sum(len(message.content) for message in messages), where)
    return tuple(messages)


def _single_turns(turns: list[Any], named: Mapping[str, str]) -> list[Any]:
    """Turns with a prompt and its response, such as {"human": ..., "assistant": ...}, as two turns each."""
    names = next(
        (
            names
            for names in SIDES_OF_TURNS
            if all(isinstance(turn, dict) and set(names) <= turn.keys() for turn in turns)
        ),
        None,
    )
    if names is None or "role" in named or "content" in named:
        return turns
    single = list[Any]()
    for turn in turns:
        rest = {key: value for key, value in turn.items() if key not in names}
        single.append({"role": "user", "content": turn[names[0]]})
        single.append({"role": "assistant", "content": turn[names[1]], **rest})
    return single


def _message(
    turn: dict[str, Any],
    where: str,
    role_keys: Sequence[str],
    text_keys: Sequence[str],
    use: ColumnUse,
) -> Message:
    role_name = _role_name(turn, where, role_keys)
    role = ROLES[role_name]
    # Most turns have a role and a text alone: nothing else can mask them or is left unread.
    for keys, text_key in _PLAIN_TURNS:
        if turn.keys() == keys and text_key in text_keys and role_name not in _CALLING:
            content, shown = _content(turn[text_key], f"{where}.{text_key}", use)
            return Message(role, content, pictures=shown)
    refuse_media(turn, where)
    read_keys = {*TRAINED_KEYS, *MASKED_KEYS, *PICTURES}
    # Other roles keep no calls: what a user writes there is not a call of the model.
    calls: tuple[dict[str, Any], ...] = ()
    if role == "assistant":
        read_keys |= {"tool_calls", "function_call"}
        calls = _calls(parsed(turn.get("tool_calls")), f"{where}.tool_calls", use)
        # OpenAI's older form has one call, whose arguments are JSON text.
        if not calls and not is_empty(older_call := parsed(turn.get("function_call"))):
            calls = _calls([older_call], f"{where}.function_call", use)
    # A turn that only calls may have no content, or null. Arrow gives turns the keys of both forms: the filled one
    # counts.
    content = ""
    pictures: tuple[str, ...] = ()
    filled_keys = [key for key in text_keys if not is_empty(turn.get(key))]
    present_keys = [key for key in text_keys if turn.get(key) is not None]
    text_key = next(
        iter([*filled_keys, *present_keys, *(key for key in text_keys if key in turn)]),
        text_keys[0],
    )
    read_keys.add(text_key)
    location = f"{where}.{text_key}"
    if turn.get(text_key) is not None or not calls:
        if text_key not in turn:
            fix = (
                "correct it, name its key: data.columns={content: NAME}, or set data.on_error=skip"
            )
            raise BadRow(location, "is missing", fix)
        content, pictures = _content(turn[text_key], location, use)
    # In ShareGPT the role says that the content itself is the call.
    if role_name in _CALLING and not calls:
        call = parsed(content)
        if not isinstance(call, dict | list):
            raise BadRow(
                location, "is not a call: a function_call is JSON with a name and arguments"
            )
        calls = _calls(call if isinstance(call, list) else [call], location, use)
        content = ""
    # Ollama and ms-swift have pictures in a key of the turn: they come before its text, unless that marks their places.
    own_key = next((key for key in PICTURES if not is_empty(turn.get(key))), None)
    if own_key is not None:
        own = references_of(turn[own_key], f"{where}.{own_key}")
        if content.count(MARKERS[0]) == len(own):
            content = content.replace(MARKERS[0], PICTURE)
        else:
            content = PICTURE * len(own) + content
        pictures = (*own, *pictures)
    thinking_key = next((key for key in THINKING_KEYS if turn.get(key)), None)
    thinking = None if thinking_key is None else turn[thinking_key]
    _note_unread(turn, read_keys, role_keys, text_key, thinking_key, use)
    return Message(
        role,
        content,
        calls,
        name=_optional_text(turn.get("name"), f"{where}.name"),
        thinking=_optional_text(thinking, f"{where}.thinking"),
        call_id=_optional_text(turn.get("tool_call_id"), f"{where}.tool_call_id"),
        trained_on=_is_trained_on(turn, role, where),
        pictures=pictures,
    )


def _note_unread(
    turn: dict[str, Any],
    read_keys: set[str],
    role_keys: Sequence[str],
    text_key: str,
    thinking_key: str | None,
    use: ColumnUse,
) -> None:
    """Adds the keys that hold something else than what was read."""
    read_keys |= {"name", "tool_call_id"}
    role_values = [turn.get(key) for key in role_keys if turn.get(key) is not None]
    for key, value in turn.items():
        if key in read_keys or is_empty(value):
            continue
        # The role in two keys, or the text, is one fact as long as both say the same.
        if key in role_keys and ROLES.get(str(value).strip().lower()) == ROLES.get(
            str(role_values[0]).strip().lower()
        ):
            continue
        if value == turn.get(text_key) and key in TEXT_KEYS:
            continue
        if key in THINKING_KEYS and thinking_key is not None and value == turn[thinking_key]:
            continue
        use.unread_turn_keys[str(key)] = None


def _role_name(turn: dict[str, Any], where: str, role_keys: Sequence[str]) -> str:
    """The key of ROLES that a message names. Raises BadRow."""
    role_key = next((key for key in role_keys if turn.get(key) is not None), None)
    if role_key is None:
        present_keys = ", ".join(str(key)[:40] for key in list(turn)[:8]) or "nothing"
        fix = "name both keys: data.columns={role: NAME, content: NAME}, or set data.on_error=skip"
        raise BadRow(where, f"has no {' or '.join(role_keys)}; it has: {present_keys}", fix)
    location = f"{where}.{role_key}"
    role_name = text_of(turn[role_key], location).strip().lower()
    if role_name not in ROLES:
        suggestion = did_you_mean(role_name, ROLES, "known are system, user, assistant and tool")
        raise BadRow(location, f"is an unknown role, {role_name[:40]!r}; {suggestion}")
    return role_name


def _optional_text(value: object, where: str) -> str | None:
    return None if value is None else text_of(value, where)


def _is_trained_on(turn: dict[str, Any], role: Role, where: str) -> bool:
    """By the keys of a turn that mask it, such as OpenAI's `weight` 0; one that masks it is enough. Raises BadRow for
    marks of parts of a turn, for other numbers, and for a turn of another role that its own key says to train on.
    """
    detail = next((key for key in DETAIL_KEYS if not is_empty(turn.get(key))), None)
    if detail is not None:
        problem = "marks parts of a turn, which is not supported: a turn is trained on as a whole"
        raise BadRow(
            f"{where}.{detail}", problem, 'remove it, or mask the whole turn with "train": false'
        )
    is_trained_on = True
    for key in (*TRAINED_KEYS, *MASKED_KEYS):
        flag = turn.get(key)
        if flag is None:
            continue
        if type(flag) not in (int, float, bool) or flag not in (0, 1):
            masked, trained = (1, 0) if key in MASKED_KEYS else (0, 1)
            problem = f"is neither {masked} (masked) nor {trained} (trained on)"
            raise BadRow(f"{where}.{key}", problem, "write 0 or 1, or remove it")
        is_trained_on = is_trained_on and bool(flag) != (key in MASKED_KEYS)
        if role != "assistant" and key in ("train", "training") and flag:
            problem = f"says to train on a turn of the {role}, which no turn alone can"
            fix = "remove it, or set data.chat.train_on=all to train on every turn"
            raise BadRow(f"{where}.{key}", problem, fix)
    return is_trained_on


def _content(value: object, where: str, use: ColumnUse) -> tuple[str, tuple[str, ...]]:
    """A text, or the texts of a list of parts, with PICTURE for each picture and where these are."""
    if not isinstance(value, list):
        return text_of(value, where), ()
    texts = list[str]()
    pictures = list[str]()
    for index, part in enumerate(value):
        location = f"{where}[{index}]"
        if not isinstance(part, str | dict):
            raise BadRow(location, f"is {kind_of(part)}, not a part with a type and a text")
        if isinstance(part, dict):
            kind = _kind_of_part(part)
            references = _references_in_part(part, kind, location)
            if references is not None:
                pictures += references
                texts.append(PICTURE * len(references))
                read_keys = {"type", "index", "detail", *PART_KEYS, *_FRAMES}
            elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                read_keys = {"type", "text"}
            else:
                raise _refused_part(kind, location)
            for key, item in part.items():
                if key not in read_keys and not is_empty(item):
                    use.unread_turn_keys[f"content.{key}"] = None
            if references is not None:
                continue
            part = part["text"]
        texts.append(text_of(part, location))
    return "".join(texts), tuple(pictures)


def _kind_of_part(part: Mapping[str, Any]) -> str:
    """The type of a part; by its keys where it has none, as in Qwen's and Gemini's conversations."""
    stated = part.get("type")
    if stated is not None:
        return str(stated)
    if isinstance(part.get("text"), str):
        return "text"
    keys = ("image" if key in PART_KEYS else key for key in part if not is_empty(part[key]))
    return next(keys, "None")


def _references_in_part(part: Mapping[str, Any], kind: str, where: str) -> list[str] | None:
    """Of a picture one reference, "" of a bare mark; of a video those of its frames, where it is a list of pictures;
    None of other parts. Raises BadRow.
    """
    if kind in PICTURE_PARTS:
        return [reference_in_part(part, where) or ""]
    frames = part.get("video") or part.get("frames")
    if kind == "video" and isinstance(frames, list) and frames:
        return references_of(frames, f"{where}.video")
    return None


def _refused_part(kind: str, where: str) -> BadRow:
    problem = f"is a part of type {kind[:40]!r}, and only texts and pictures are supported"
    fix = "leave such conversations out, or set data.on_error=skip"
    if "video" in kind:
        fix = 'give its frames as pictures, {"video": [PATH, ...]}, or set data.on_error=skip'
    return BadRow(where, problem, fix)


def _calls(value: object, where: str, use: ColumnUse) -> tuple[dict[str, Any], ...]:
    """Calls with their arguments as objects, as templates expect; in the OpenAI format they are JSON text."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise BadRow(where, f"is {kind_of(value)}, not a list of calls")
    calls = list[dict[str, Any]]()
    for index, call in enumerate(value):
        location = f"{where}[{index}]"
        checked = without_nulls(plain_json(call, location))
        function = checked.get("function", checked) if isinstance(checked, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(location, "is not a call: a call names a function")
        # Llama 3 calls the arguments parameters.
        arguments_key = "parameters" if "arguments" not in function else "arguments"
        arguments = function.get(arguments_key, {})
        if isinstance(arguments, str):  # JSON in JSON, not checked so far
            arguments = plain_json(parsed(arguments), f"{location}.arguments")
        identity = {"id": checked["id"]} if isinstance(checked.get("id"), str) else {}
        calls.append(
            {
                "type": "function",
                **identity,
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
        read_keys = {"name", arguments_key, "id", "type"}
        outer_keys = {"id", "type", "function"} if function is not checked else read_keys
        for key in [*(checked.keys() - outer_keys), *(function.keys() - read_keys)]:
            use.unread_turn_keys[f"tool_calls.{key}"] = None
    return tuple(calls)
