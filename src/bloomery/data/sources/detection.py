"""The format of a row, by the names and the content of its columns."""

from collections.abc import Collection, Mapping
from typing import Any

from bloomery.data.sources.formats import ALL_ROLES, PROMPTS, RequiredFormat
from bloomery.data.sources.picture_columns import picture_column
from bloomery.data.sources.rows import Columns, cells_of, list_column
from bloomery.data.sources.turns import ROLES, parsed
from bloomery.facts.columns import (
    COLUMN_NAMES,
    LISTS,
    MEDIA,
    ROLE_KEYS,
    SAME_ROLE,
    first_name,
    is_boolean,
    is_empty,
    known_columns,
    named_column,
)


def detect_format(cells: Mapping[str, Any], columns: Columns | None = None) -> str | None:
    """The format of a row by its columns, or None: it is plain text or tokens.

    Never that of prompts, whose column other rows have too: only an objective that generates completions reads them.
    """
    choice = _recognized(cells, columns or {}, reads_responses=False)
    return None if choice is None else choice[0]


def _recognized(
    cells: Mapping[str, Any], named: Columns, *, reads_responses: bool
) -> tuple[str, dict[str, str]] | None:
    """The format of a row and the columns of its roles, where these have other names; None for text and tokens.

    Columns that data.columns names come first, then those of the roles' names, then usual names. `reads_responses`: the
    objective trains on responses, so that a conversation next to a rejected response is read as a conversation.
    """
    exact = {role: named_column(role, named) or role for role in ALL_ROLES}
    listed = list_column(cells, named)
    conversation = None if listed is None else _conversation(cells, listed, named)

    # Pairs: a rejected response next to a chosen one, to a response, or to a conversation that ends with it.
    pair = {role: _find(role, cells, named) for role in ("chosen", "rejected")}
    if pair["rejected"] is not None:
        if pair["chosen"] is None and not reads_responses:
            if conversation is not None and _ends_with_response(cells[listed or ""]):
                return "preference", _other_names(cells, named, ("rejected",), conversation[1])
            pair["chosen"] = _find("completion", cells, named)
        if pair["chosen"] is not None:
            roles = ("prompt", "chosen", "rejected")
            taken = {role: column for role, column in pair.items() if column is not None}
            return "preference", _other_names(cells, named, roles, taken, listed=listed)

    # Labels of KTO, next to a prompt and its completion, or to a conversation.
    has_completion = exact["prompt"] in cells and exact["completion"] in cells
    if has_completion and exact["label"] in cells:
        return "kto", dict(named) or _other_names(
            cells, named, ("prompt", "completion", "label"), {}
        )
    label = _find("label", cells, named)
    if label is not None and is_boolean(cells[label]):
        if conversation is not None and _ends_with_response(cells[listed or ""]):
            return "kto", _other_names(cells, named, ("label",), conversation[1])
        if _find("prompt", cells, named) and _find("completion", cells, named):
            return "kto", _other_names(cells, named, ("prompt", "completion", "label"), {})

    if has_completion:
        return "completion", _other_names(cells, named, ("prompt", "completion"), {})
    if exact["instruction"] in cells and exact["output"] in cells:
        return "alpaca", _other_names(cells, named, ("instruction", "output"), {})
    return conversation or _captioned(cells, named)


def _captioned(cells: Mapping[str, Any], named: Columns) -> tuple[str, dict[str, str]] | None:
    """The format of a row with a picture and a text that describes it, and with no question and answer."""
    pictures = picture_column(cells, named)
    if pictures is None:
        return None
    texts = {name: value for name, value in cells.items() if isinstance(value, str | list)}
    caption = named_column("caption", named) or first_name(COLUMN_NAMES["caption"], texts)
    if caption is None or caption not in cells:
        return None
    # A link beside a text is what pages of the web have, and no picture of that text.
    if caption.lower() == "text" and "://" in str(cells[pictures])[:40]:
        return None
    sides = (*COLUMN_NAMES["instruction"], *COLUMN_NAMES["output"])
    if not named and first_name(sides, texts) is not None:
        return None
    return "captions", dict(named)


def _conversation(
    cells: Mapping[str, Any], column: str, named: Columns
) -> tuple[str, dict[str, str]]:
    """The format of a list of turns, by its content, as both formats use the same columns."""
    is_sharegpt = "from" in cells[column][0] or named.get("conversations") == column
    roles = {} if column in LISTS or column in named.values() else {"messages": column}
    system = {} if named else optional_names(cells, {column})
    return ("sharegpt" if is_sharegpt and not roles else "messages"), dict(named) or {
        **roles,
        **system,
    }


def _ends_with_response(turns: Any) -> bool:
    """Whether the last turn of a list is the assistant's; a turn of ms-swift may have both sides."""
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict):
        return False
    role = next((last[key] for key in ROLE_KEYS if isinstance(last.get(key), str)), "assistant")
    return ROLES.get(role.strip().lower()) == "assistant"


def _find(role: str, cells: Mapping[str, Any], named: Columns) -> str | None:
    """The column of a role that a row must have: texts, messages and true or false."""
    if named:
        column = named_column(role, named) or role
        return column if column in cells else None
    if role in cells and not is_empty(cells[role]):
        return role
    sides = {
        name: value
        for name, value in cells.items()
        if isinstance(value, str | list | dict) or role == "label"
    }
    name = first_name(COLUMN_NAMES[SAME_ROLE.get(role, role)], sides)
    return None if name is None or is_empty(cells[name]) else name


def _other_names(
    cells: Mapping[str, Any],
    named: Columns,
    roles: tuple[str, ...],
    taken: Mapping[str, str],
    *,
    listed: str | None = None,
) -> dict[str, str]:
    """The columns of roles whose name is another one. data.columns is never added to. `taken`: roles already found;
    `listed`: the conversation, which is the prompt where no column is called that.
    """
    if named:
        return dict(named)
    found = dict(taken)
    for role in roles:
        if role in found:
            continue
        others = {name: value for name, value in cells.items() if name not in found.values()}
        column = _find(role, others, named)
        if column is not None and not (role == "prompt" and column != role and listed is not None):
            found[role] = column
    found |= optional_names(cells, set(found.values()))
    return {role: column for role, column in found.items() if role != column}


def optional_names(cells: Mapping[str, Any], taken: Collection[str]) -> dict[str, str]:
    """The columns of roles that no row must have, of texts alone, where their name is another one. Later rows may have
    a text where this one has none.
    """
    texts = {
        name: value
        for name, value in cells.items()
        if (isinstance(value, str) or value is None) and name not in taken
    }
    found = {role: first_name(COLUMN_NAMES[role], texts) for role in ("input", "system")}
    return {role: column for role, column in found.items() if column is not None and column != role}


def columns_of_examples(columns: dict[str, str], present: dict[str, str]) -> list[str] | None:
    """The columns of a file that an example may use; None without any."""
    used_columns = {*columns.values(), *ALL_ROLES}
    known = known_columns()
    nested = [name for name, kind in present.items() if kind.startswith(_NESTED)]
    used = [
        name
        for name in present
        if name in used_columns or name.lower() in known or (name in nested and not columns)
    ]
    return used or None


_NESTED = ("list<", "large_list<", "struct<")  # a conversation may be in a column of any name


def like_examples(columns: Collection[str]) -> bool:
    """Whether names of columns are those of conversations, of prompts and responses, or of pairs."""
    usual_names = {*known_columns(), *ALL_ROLES} - {*MEDIA, *COLUMN_NAMES["caption"]}
    return any(name.lower() in usual_names for name in columns)


def format_of_row(
    row: dict[str, Any],
    columns: dict[str, str],
    *,
    required_format: RequiredFormat | None,
    plain: bool,
) -> tuple[str, dict[str, str]] | None:
    """The format of the examples in rows such as this one, and their columns; None when rows are read as text. `plain`:
    it has a usual text column. Columns not in data.columns are found by their usual names. `required_format` None: the
    rows decide the objective.
    """
    if required_format == "text" or (required_format == "any" and plain):
        return None
    cells = cells_of(row)
    if required_format == "prompts":
        return _prompts_of_row(cells, columns)
    choice = _recognized(cells, columns, reads_responses=required_format in ("sft", "any"))
    if choice is not None:
        return choice
    if columns or plain:
        return None
    texts = {
        str(name).lower(): str(name) for name, value in cells.items() if isinstance(value, str)
    }
    answers = next((name for name in cells if str(name).lower() == "answers"), None)
    if answers is not None and _are_calls(parsed(cells[answers])):
        texts["output"] = texts.get("output", answers)
    roles: dict[str, str] = {}
    for role in ("instruction", "output"):
        names = COLUMN_NAMES[role]
        column = next(
            (texts[name] for name in names if name in texts and texts[name] not in roles.values()),
            None,
        )
        if column is None:
            return None
        roles[role] = column
    roles |= optional_names(cells, set(roles.values()))
    return "alpaca", {role: column for role, column in roles.items() if role != column}


def _are_calls(value: Any) -> bool:
    """xLAM's answers: a list of calls."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(call, dict) and "name" in call and "arguments" in call for call in value)
    )


def _prompts_of_row(
    cells: dict[str, Any], columns: dict[str, str]
) -> tuple[str, dict[str, str]] | None:
    """The column of the prompt, else one of a usual name, else a conversation; None without any."""
    if columns:
        return (PROMPTS, columns) if columns.get("prompt", "prompt") in cells else None
    column = _find("prompt", cells, {})
    if column is None:
        column = list_column(cells, {})
    if column is None and "prompt" in cells:
        column = "prompt"
    if column is None:
        return None
    found = {"prompt": column, **optional_names(cells, {column})}
    return PROMPTS, {role: name for role, name in found.items() if role != name}
