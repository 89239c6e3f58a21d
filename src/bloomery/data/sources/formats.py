"""Rows in the formats of OpenAI, ShareGPT, Alpaca, TRL and KTO as examples, and the formats of each objective."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.examples import (
    BadRow,
    Example,
    Message,
    Turns,
    check_turns,
    kind_of,
    num_equal,
    text_of,
)
from bloomery.data.sources.picture_columns import picture_column, with_pictures
from bloomery.data.sources.rows import MEDIA_ROLES, Columns, Row, cells_of, list_column
from bloomery.data.sources.turns import parsed, plain_json, refuse_markers, refuse_size
from bloomery.facts.columns import (
    COLUMN_NAMES,
    MARKERS,
    ColumnUse,
    is_boolean,
    named_column,
    truth,
)
from bloomery.recipe.schema import Source

_PAIR_FIX = "remove the pair, or set data.on_error=skip"


def _chat(row: Row) -> Example:
    """Lists of turns in the formats of OpenAI and ShareGPT; "system" may be a separate column."""
    turns, location = row.list_of_turns()
    messages = row.with_system(turns)
    _refuse_undesirable(row)
    check_turns(messages, location, start=len(turns) - len(messages))
    return Example(row.where, "chat", (), (messages,), tools=row.tools())


def _refuse_undesirable(row: Row) -> None:
    """Raises BadRow for a response that its row labels as undesirable: only KTO trains on those.

    A `label` that is the number 0 may be that of a class, and is noted as not read.
    """
    for column, value in row.cells.items():
        name = str(column).lower()
        if column != row.named.get("label") and name not in COLUMN_NAMES["label"]:
            continue
        is_false = value is False or (isinstance(value, str) and value.strip().lower() == "false")
        is_zero = name != "label" and is_boolean(value) and not truth(value)
        if is_false or is_zero:
            raise BadRow(
                f"{row.where}, {column}",
                "is false: the response is labeled undesirable",
                "set objective.kind=kto, remove the row, or set data.on_error=skip",
            )


def _alpaca(row: Row) -> Example:
    """One prompt and response: the input follows the instruction on a new line. Columns "system" and "history" (earlier
    prompts and responses) are from LLaMA-Factory.
    """
    instruction = text_of(*row.cell("instruction"))
    calls = _answer_calls(row)
    output = "" if calls else _answer(row)
    _refuse_undesirable(row)
    extra = row.text("input")
    turns = [*row.with_system(()), *row.history()]
    prompt = "\n".join(part for part in (instruction, extra) if part.strip())
    turns += [Message("user", prompt), Message("assistant", output, calls)]
    for role, value in (("instruction", prompt), ("output", output or str(calls or ""))):
        if not value.strip():
            raise BadRow(f"{row.where}, {row.named.get(role, role)}", "is empty")
    refuse_size(sum(len(turn.content) for turn in turns), row.where)
    return Example(row.where, "chat", (), (tuple(turns),), tools=row.tools())


def _answer(row: Row) -> str:
    value, location = row.cell("output")
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        fix = "write one response, or the better one as `chosen` and the other one as `rejected`"
        raise BadRow(location, f"is a list of {counted(len(value), 'texts')}, not one text", fix)
    return text_of(value, location)


def _answer_calls(row: Row) -> tuple[dict[str, Any], ...]:
    """The calls of a column "answers" beside tools, as in xLAM's function calling."""
    column = row.column("output")
    if column is None or column.lower() != "answers" or column not in row.cells:
        return ()
    calls = parsed(row.cells[column])
    if not isinstance(calls, list) or not calls:
        return ()
    row.taken["output"] = column
    turn = {"role": "assistant", "tool_calls": calls}
    (message,) = row.turns([turn], f"{row.where}, {column}")
    return message.calls


def _captions(row: Row) -> Example:
    """A picture and what describes it: a turn with the picture alone, and the text as its answer."""
    value, location = row.cell("caption")
    texts = parsed(value)
    if isinstance(texts, list) and len(texts) > 1:
        fix = "write a row for each, or set data.on_error=skip"
        raise BadRow(location, f"has {len(texts)} texts for one picture", fix)
    caption = text_of(texts[0] if isinstance(texts, list) and texts else value, location)
    if not caption.strip():
        raise BadRow(location, "is empty")
    if picture_column(row.cells, row.named) is None:
        raise BadRow(row.where, "has a caption and no picture")
    turns = (Message("user", row.text("prompt")), Message("assistant", caption))
    return Example(row.where, "chat", (), (row.with_system(turns),))


def _completion(row: Row) -> Example:
    example = _prompt_and_completion(row)
    _refuse_undesirable(row)
    return example


def _prompt_and_completion(row: Row) -> Example:
    prompt, responses = _joined(row.prompt(), row.side("completion"))
    return Example(row.where, "completion", prompt, responses, tools=row.tools())


def _prompts(row: Row) -> Example:
    """A prompt for the model to complete; every other column is kept for the rewards."""
    prompt, location = row.prompt()
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
        if name not in (row.column("prompt"), picture_column(row.cells, row.named))
    }
    return Example(row.where, "prompt", prompt, (), tools=row.tools(), columns=columns)


def _kto(row: Row) -> Example:
    """A prompt and a completion, or a conversation whose last response is labeled."""
    value, location = row.cell("label")
    has_sides = all(
        (named_column(role, row.named) or role) in row.cells for role in ("prompt", "completion")
    )
    if has_sides or list_column(row.cells, row.named) is None:
        example = _prompt_and_completion(row)
    else:
        turns, place = row.list_of_turns()
        prompt, response = _last_response(row.with_system(turns), place)
        example = Example(row.where, "completion", prompt, (response,), tools=row.tools())
    label = truth(value)
    if isinstance(label, float) and math.isnan(label):
        raise BadRow(location, "is NaN, not true or false")
    if type(label) not in (bool, int, float) or label not in (0, 1):
        fix = "correct it, set data.on_error=skip, or data.format where this column is no label of KTO"
        raise BadRow(location, f"is {kind_of(label)}, not true (desirable) or false", fix)
    return replace(example, kind="kto", desirable=bool(label))


def _last_response(
    turns: tuple[Message, ...], where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A conversation up to the last turn of the user, and what follows it: the response. Raises BadRow."""
    check_turns(turns, where)
    length = max((index + 1 for index, turn in enumerate(turns) if turn.role == "user"), default=0)
    if not length:
        raise BadRow(where, "has no turn of the user before the response")
    return turns[:length], turns[length:]


def _preference(row: Row) -> Example:
    """Without a column for the prompt, and for whole conversations, both sides begin with it."""
    if "chosen" in row.named or row.has("chosen") or not row.has("rejected"):
        (chosen_side, chosen_place) = row.side("chosen")
        (rejected_side, rejected_place) = row.side("rejected")
    else:
        (rejected_side, rejected_place) = row.side("rejected")
        chosen_side, chosen_place, rejected_side = _chosen_of_conversation(row, rejected_side)
    if chosen_side == rejected_side:
        raise BadRow(row.where, "has equal chosen and rejected responses", _PAIR_FIX)
    prompt, prompt_place = _prompt_of_pair(row, chosen_side)
    if isinstance(chosen_side, str) != isinstance(rejected_side, str):
        raise BadRow(
            row.where, "has one side as text and one as messages", "use one format for both sides"
        )
    # A prompt found in texts is not known to be a turn, so that no template may format it.
    implicit = isinstance(chosen_side, str) and not prompt
    if implicit and row.text("system").strip():
        problem = "has a system message and no prompt: its turns are not known"
        raise BadRow(row.where, problem, "name the prompt's column: data.columns={prompt: NAME}")
    if not prompt or _begins_with_prompt(chosen_side, prompt):
        stated_prompt = prompt
        prompt, chosen_side, rejected_side = _without_common(chosen_side, rejected_side, row.where)
        if not isinstance(prompt, str):
            prompt = _with_system_of(stated_prompt, row.with_system(prompt))
    prompt, responses = _joined(
        (prompt, prompt_place), (chosen_side, chosen_place), (rejected_side, rejected_place)
    )
    return Example(row.where, "pair", prompt, responses, tools=row.tools(), implicit=implicit)


def _chosen_of_conversation(row: Row, rejected_side: Turns) -> tuple[Turns, str, Turns]:
    """The chosen side of a row that has only a rejected one: the response next to it, or the conversation, whose last
    response it replaces, as in ms-swift. With its place, and the rejected side in the same form.
    """
    if list_column(row.cells, row.named) is None:
        row.taken["chosen"] = row.column("completion") or "chosen"
        chosen_side, place = row.side("chosen")
        return chosen_side, place, rejected_side
    turns, place = row.list_of_turns()
    prompt, _ = _last_response(turns, place)
    rejected = (
        (Message("assistant", rejected_side),) if isinstance(rejected_side, str) else rejected_side
    )
    begins_alike = rejected[0].role != "assistant" or len(turns) == len(rejected)
    return turns, place, rejected if begins_alike else (*prompt, *rejected)


def _prompt_of_pair(row: Row, chosen: Turns) -> tuple[Turns, str]:
    """The prompt of its column, else the conversation before the responses, and its place; "" without any."""
    column = row.column("prompt")
    if named_column("prompt", row.named) or (
        column is not None and row.cells.get(column) is not None
    ):
        return row.prompt()
    listed = list_column(row.cells, row.named)
    is_conversation = not isinstance(chosen, str) and chosen[0].role != "assistant"
    if listed is None or listed in row.taken.values() or is_conversation:
        return "", f"{row.where}, prompt"
    turns, location = row.list_of_turns()
    # Some sets repeat the chosen response at the end of the conversation.
    answer = (Message("assistant", chosen),) if isinstance(chosen, str) else chosen
    if turns[-len(answer) :] == answer:
        turns = turns[: -len(answer)]
    if turns[-1:] and turns[-1].role == "assistant":
        fix = "remove that turn, or set data.on_error=skip"
        raise BadRow(location, "ends with a turn of the assistant, and chosen answers it", fix)
    return row.with_system((*turns,)), location


def _begins_with_prompt(side: Turns, prompt: Turns) -> bool:
    """Whether a side of messages is a whole conversation, which repeats the prompt of its column."""
    if isinstance(side, str):
        return False
    turns = _without_system(side)
    if not isinstance(prompt, str):
        prompt_turns = _without_system(prompt)
        return len(turns) > len(prompt_turns) and turns[: len(prompt_turns)] == prompt_turns
    if len(turns) < 2 or turns[0].role != "user":
        return False
    return turns[0].content.strip() == prompt.strip()


def _without_system(turns: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(turn for turn in turns if turn.role != "system")


def _with_system_of(stated: Turns, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns, after the system message of a prompt that has one where they have none."""
    if isinstance(stated, str) or stated[0].role != "system" or turns[0].role == "system":
        return turns
    return (stated[0], *turns)


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


_AROUND = ("system", "input", "history")  # what belongs to a prompt next to its column
_TURNS = ("tools", "role", "content", *MEDIA_ROLES)
PROMPTS = "prompts"
FORMATS = {
    "messages": Format(_chat, ("messages",), ("messages", "system", "label", *_TURNS)),
    "sharegpt": Format(_chat, ("conversations",), ("conversations", "system", "label", *_TURNS)),
    "alpaca": Format(
        _alpaca,
        ("instruction", "output"),
        ("instruction", "input", "output", "system", "history", "label", "tools", *MEDIA_ROLES),
    ),
    "captions": Format(_captions, ("caption",), ("caption", "prompt", "system", *MEDIA_ROLES)),
    "completion": Format(
        _completion,
        ("prompt", "completion"),
        ("prompt", "completion", *_AROUND, "label", *_TURNS),
    ),
    "kto": Format(
        _kto,
        ("prompt", "completion", "label"),
        ("prompt", "completion", "label", "messages", *_AROUND, *_TURNS),
    ),
    "preference": Format(
        _preference,
        ("chosen", "rejected"),
        ("prompt", "chosen", "rejected", "messages", *_AROUND, *_TURNS),
    ),
    PROMPTS: Format(_prompts, ("prompt",), ("prompt", *_AROUND, *_TURNS)),
}
ALL_ROLES = tuple(dict.fromkeys(role for format in FORMATS.values() for role in format.roles))


def read_example(
    row: object,
    *,
    format: str,
    columns: Columns,
    where: str,
    use: ColumnUse | None = None,
    guesses: bool = False,
) -> Example:
    """The example in a row. `columns` maps roles to columns of other names (FORMATS); with `guesses`, the format was
    named without columns, so that usual names count for every role. What becomes of each column is added to `use`.
    Raises BadRow.
    """
    if not isinstance(row, dict):
        raise BadRow(where, f"is {kind_of(row)}, not an object with columns")
    parts = Row(
        cells_of(row),
        columns,
        where,
        row,
        ColumnUse() if use is None else use,
        format != PROMPTS,
        guesses,
    )
    parts.refuse_media()
    example = with_pictures(FORMATS[format].reader(parts), parts)
    for side in (example.prompt, *example.responses):
        _refuse_marks(side, where)
    parts.note_use(keeps_columns=format == PROMPTS)  # rewards are given every column
    return example


def _refuse_marks(side: Turns, where: str) -> None:
    """Raises BadRow for marks of pictures that the row does not have, and of sound and video, where a user asks."""
    if isinstance(side, str):
        refuse_markers(side, f"{where}, prompt")
        return
    for index, message in enumerate(side):
        if message.role == "user" or message.content.lstrip().startswith(MARKERS):
            refuse_markers(message.content, f"{where}, turn {index + 1}")


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
        FORMATS[source.format].roles if source.format in FORMATS else ("text", "tokens", *ALL_ROLES)
    )
    unknown = sorted(set(source.columns) - set(known_roles))
    if unknown:
        problem = f"unknown role: {unknown[0]}; the roles are {', '.join(known_roles)}"
        raise UserError(
            problem, where="data.columns", fix=f"set data.columns={{{known_roles[0]}: NAME}}"
        )


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
        if example.kind == "kto" and required_format == "sft":
            fix += "; to train on the desirable responses alone, remove the others and their labels"
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
