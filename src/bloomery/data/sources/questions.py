"""Rows whose meaning no column states: what they look like, and the line of a recipe that says what is meant."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.core.errors import UserError
from bloomery.data.examples import kind_of
from bloomery.facts.columns import COLUMN_NAMES, LISTS, is_empty, known_columns

# Columns that describe a row, and are neither a prompt nor a response.
_DESCRIPTIONS = re.compile(
    r"(.*_)?(id|ids|uuid|index|url|uri|link|date|time|timestamp|created(_at)?|lang|language|source|dataset|category|"
    r"topic|type|name|author|user_?name|email|split|license|hash|model|status|version|rating|score|stars|priority|tags?|"
    r"no|nr|number|when|day)"
)
# Parts of names of responses.
_RESPONSES = re.compile(
    r"answer|response|reply|output|target|completion|agent|assistant|bot|summary|translation|label|solution"
)
# Parts of names of the better and the worse one of two responses.
_BETTER = re.compile(r"chosen|accepted|good|better|best|prefer|positive|right|correct|winn")
_WORSE = re.compile(
    r"reject|bad|worse|worst|dispref|non_?pref|unpref|negative|wrong|incorrect|los(er|ing)"
)
_TRANSCRIPT = re.compile(
    r"^\s*(SYSTEM|USER|HUMAN|Human|User|ASSISTANT|Assistant|###)\b.{0,40}?:", re.M
)
_SEVERAL = ("completions", "responses", "answers", "generations", "candidates", "outputs")
_TWO_RESPONSES = (
    ("response_a", "response_b"),
    ("response_0", "response_1"),
    ("response_1", "response_2"),
    ("response1", "response2"),
    ("answer_a", "answer_b"),
    ("output_1", "output_2"),
    ("conversation_a", "conversation_b"),
)


def likely_sides(names: Sequence[str], row: Mapping[str, Any]) -> tuple[str, str]:
    """Of two or more text columns, none of a usual name: the likeliest prompt, and the likeliest response to it. `row`:
    a text of each.
    """
    # The longest texts are likeliest, unless the name says that they describe the row.
    candidates = [name for name in names if not describes_row(name)]
    if len(candidates) < 2:
        candidates = list(names)
    # A response that is named as the worse one of two is none to learn.
    candidates = [name for name in candidates if not _WORSE.search(name.lower())] or candidates
    longest = sorted(candidates, key=lambda name: -len(str(row.get(name, ""))))
    instructions = [name for name in candidates if name.lower() in COLUMN_NAMES["instruction"]]
    if instructions and len(candidates) > 1:
        return instructions[0], next(name for name in longest if name != instructions[0])
    first, second = (name for name in names if name in (longest[:2] if longest[1:] else names[:2]))
    if _RESPONSES.search(first.lower()) and not _RESPONSES.search(second.lower()):
        return second, first
    return first, second


def describes_row(name: str) -> bool:
    """Whether a column's name says that it is neither a prompt nor a response: an id, a date, a rating."""
    plain = re.sub(r"\W+", "_", name.strip().lower())
    return _DESCRIPTIONS.fullmatch(plain) is not None


def likely_pair(names: Sequence[str], row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Of three or more text columns the likeliest prompt, better response and worse response, by their names; None
    where no name says which response is worse.
    """
    worse = next((name for name in names if _WORSE.search(name.lower())), None)
    other_names = [name for name in names if name != worse]
    better = next((name for name in other_names if _BETTER.search(name.lower())), None)
    if worse is None or better is None or len(other_names) < 2:
        return None
    other_texts = [name for name in other_names if name != better and not describes_row(name)]
    prompts = other_texts or other_names
    instructions = [name for name in prompts if name.lower() in COLUMN_NAMES["instruction"]]
    prompt = max(instructions[:1] or prompts, key=lambda name: len(str(row.get(name, ""))))
    return None if prompt == better else (prompt, better, worse)


def two_texts_fix(names: Sequence[str], row: Mapping[str, Any], *, pretrains: bool) -> str:
    """The fix for a table with several text columns, none of a usual name: the line that trains on the responses of one
    to the prompts of the other, and the line that trains on every token of one.
    """
    first, second = likely_sides(names, row)
    columns = shlex.quote(f"{{instruction: {first}, output: {second}}}")
    text_columns = shlex.quote(f"{{text: {second}}}")
    answers = f"data.format=alpaca data.columns={columns} trains on the responses in {second!r}"
    texts = f"data.columns={text_columns} trains on every token of it"
    return f"{texts}; {answers}" if pretrains else f"{answers}; {texts}"


def holds_turns(row: Mapping[str, Any], text: str) -> bool:
    """Whether a row says more in a list than in its only `text`: objects, or texts that are longer."""
    size = len(str(row.get(text, "")))
    for value in row.values():
        if not isinstance(value, list) or not value:
            continue
        if all(isinstance(item, dict) for item in value):
            return True
        if all(isinstance(item, str) for item in value) and sum(map(len, value)) > size:
            return True
    return False


def refuse_known_rows(row: Mapping[str, Any], where: str, *, has_text: bool) -> UserError | None:
    """The error for rows of a known kind that are no examples as they are, with the form to write them in; None for
    others. `has_text`: they have a usual text column, which is trained on as it is.
    """
    names = {str(name).lower(): str(name) for name in row}

    # OASST1 and other trees of messages have a turn in each row.
    parent = next(
        (names[name] for name in ("parent_id", "parent_message_id") if name in names), None
    )
    if parent is not None and "role" in names:
        return UserError(
            f"each row is one turn of a tree of messages, by {parent!r}, not a conversation",
            where=where,
            fix='write each path of the tree as {"messages": [...]}, or set data.columns={text: text}'
            " to train on every token of each turn",
        )

    if has_text:
        return None

    # Axolotl's input_output has texts with a mask of their own.
    segments = row.get(names.get("segments", ""))
    if isinstance(segments, list) and segments and isinstance(segments[0], dict):
        return UserError(
            f"column {names['segments']!r} has segments of a text, each with a mask: only prompt and response are read",
            where=where,
            fix='write {"prompt": ..., "completion": ...}: the completion is trained on; or {"messages": [...]}',
        )

    # SQuAD has the answers to a question in an object.
    answers = row.get(names.get("answers", ""))
    if isinstance(answers, dict) and "text" in answers and "question" in names:
        return UserError(
            f"the answers are in an object, {names['answers']!r}, with a list of texts",
            where=where,
            fix='write the first one as a column: {"question": ..., "context": ..., "answer": ...}',
        )

    # Two responses, and which one is better in a third column.
    pair = next((pair for pair in _TWO_RESPONSES if set(pair) <= names.keys()), None)
    if pair is not None:
        first, second = (names[name] for name in pair)
        return UserError(
            f"each row has two responses, {first!r} and {second!r}: which one is better is not read",
            where=where,
            fix='write the better one as "chosen" and the other one as "rejected", next to "prompt"',
        )

    # Several responses, with or without scores, as UltraFeedback and Nectar have them.
    asked = next((names[name] for name in COLUMN_NAMES["instruction"] if name in names), None)
    several = next((names[name] for name in _SEVERAL if name in names), None)
    responses = row.get(several or "")
    if asked is not None and isinstance(responses, list) and len(responses) > 1:
        return UserError(
            f"column {several!r} has several responses to {asked!r}: which ones are meant is not read",
            where=where,
            fix='write the best one as "chosen" and another one as "rejected", or one as "response"',
        )

    # A response that is no text: a number, or a list.
    answer = next((names[name] for name in COLUMN_NAMES["output"] if name in names), None)
    value = row.get(answer or "")
    is_text = isinstance(value, str | dict) or is_empty(value)
    if asked is not None and isinstance(row[asked], str) and not is_text:
        return UserError(
            f"column {answer!r}, the response to {asked!r}, is {kind_of(value)}, not a text",
            where=where,
            fix=f"write it as one text, or set data.columns={{text: {asked}}} to train on {asked!r} alone",
        )

    # A whole conversation in one text, as glaive's function calling has it.
    for name, value in row.items():
        is_transcript = isinstance(value, str) and len(_TRANSCRIPT.findall(value)) >= 2
        if is_transcript and str(name).lower() in LISTS:
            return UserError(
                f"column {name!r} has whole conversations as one text",
                where=where,
                fix='write the turns as {"messages": [...]}, or set '
                f"data.columns={{text: {name}}} to train on every token",
            )

    # A list of texts under the name of a conversation has no roles.
    for name, value in row.items():
        is_conversation = str(name).lower() in (*LISTS, "data")
        if is_conversation and isinstance(value, list) and len(value) > 1:
            if not all(isinstance(text, str) for text in value):
                continue
            return UserError(
                f"column {name!r} is a list of texts without roles",
                where=where,
                fix='write each text as a turn: {"role": "user", "content": ...}',
            )
    return None


def refuse_columns(row: Mapping[str, Any], where: str) -> UserError | None:
    """The error for one object that holds a whole table, as pandas' to_json writes it; None for others."""
    values = list(row.values())
    if not values:
        return None
    sizes = {len(value) for value in values if isinstance(value, list | dict)}
    if not all(isinstance(value, list | dict) for value in values) or len(sizes) != 1:
        return None
    # One message is an object, too.
    if any(isinstance(value, dict) and {"role", "from"} & value.keys() for value in values):
        return None
    fix = (
        "write a row per line: python -c \"import pandas, sys; pandas.read_json(sys.argv[1], orient='ORIENT')"
        ".to_json('rows.jsonl', orient='records', lines=True)\" FILE"
    )
    # {"question": {"0": ...}, "answer": ...}, {"question": [...], "answer": [...]}, or {"0": {"question": ...}}
    if {"columns", "data"} <= row.keys():
        form, orient = "the columns and the rows of a table apart", "split"
    elif all(isinstance(value, list) for value in values):
        scalars = all(not isinstance(item, list | dict) for value in values for item in value)
        if not scalars or any(isinstance(item, int | float) for value in values for item in value):
            return None
        form, orient = "the columns of a whole table", "columns"
    else:
        numbered = all(str(name).isdigit() for name in row)
        form, orient = "rows by number", "index"
        if not numbered:
            keys = [set(map(str, value)) for value in values if isinstance(value, dict)]
            if len(keys) != len(values) or any(key != keys[0] for key in keys):
                return None
            columns_by_number = all(key.isdigit() for key in keys[0])
            if not columns_by_number and (len(values) < 2 or known_columns() & row.keys()):
                return None
            form = (
                "the columns of a whole table, by number" if columns_by_number else "rows by name"
            )
            orient = "columns" if columns_by_number else "index"
    return UserError(
        f"the object has {form}, and a row is an object of its own",
        where=where,
        fix=fix.replace("ORIENT", orient),
    )
