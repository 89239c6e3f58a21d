"""Pictures of a row: those of its columns take the places that its turns mark, as TRL, LLaVA and LLaMA-Factory do."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.core.units import counted
from bloomery.data.examples import PICTURE, BadRow, Example, Message, Turns, num_pictures
from bloomery.data.pictures.references import located, references_of
from bloomery.data.sources.rows import Columns, Row
from bloomery.data.sources.turns import parsed
from bloomery.facts.columns import PICTURE_FILES, PICTURE_SUFFIXES, PICTURES, is_empty

MARK = "<image>"  # in texts of LLaVA, LLaMA-Factory and ms-swift
_PLACE = re.compile(f"{PICTURE}|{re.escape(MARK)}")


def with_pictures(example: Example, row: Row) -> Example:
    """The example with a reference at each of its places, which PICTURE marks.

    The pictures of a row whose turns mark no place come before its first user turn, as in TRL. Raises BadRow where
    places and pictures do not go together.
    """
    column = picture_column(row.cells, row.named)
    references = list[str]()
    if column is not None:
        row.taken["images"] = column
        references = references_of(parsed(row.cells[column]), f"{row.where}, {column}")
    sides = [example.prompt, *example.responses]
    if not references and not any(_has_places(side) for side in sides):
        return example

    # A prompt that is a text becomes a turn, which has a place.
    if references and isinstance(example.prompt, str) and all(isinstance(s, str) for s in sides):
        answers = [(Message("assistant", str(text)),) for text in example.responses]
        sides = [(Message("user", example.prompt),), *answers]
    placed = [_marked(side, row.where, has_pictures=bool(references)) for side in sides]
    num_open = sum(_num_open(side) for side in placed)
    if references and num_open == 0:
        placed = _in_front(placed, len(references), row.where)
        num_open = len(references)
    if num_open != len(references):
        raise _unequal(num_open, len(references), column, row.where)
    remaining = iter(references)
    prompt, *responses = [_filled(side, remaining) for side in placed]
    return replace(example, prompt=prompt, responses=tuple(responses))


def _unequal(num_places: int, num_pictures: int, column: str | None, where: str) -> BadRow:
    places = counted(num_places, "places")
    if column is None:
        return BadRow(
            where,
            f"marks {places} of pictures, and names no picture",
            'name it in the part: {"type": "image", "image": PATH}; or in a column: "images": [PATH]',
        )
    return BadRow(
        where,
        f"marks {places} of pictures, and has {counted(num_pictures, 'pictures')} in {column!r}",
        f"write one {MARK} or one image part for each picture of the column",
    )


def picture_column(cells: Mapping[str, Any], columns: Columns) -> str | None:
    """The column with the pictures of a row: that of data.columns, else one of a usual name that holds something."""
    named = columns.get("images")
    if named is not None:
        return None if is_empty(cells.get(named)) else named
    names = {str(column).lower(): str(column) for column in cells}
    found = (names.get(name) for name in PICTURES)
    column = next((name for name in found if name and not is_empty(cells[name])), None)
    if column is not None:
        return column
    return next((name for name in PICTURE_FILES if _names_files(cells.get(name))), None)


def _names_files(value: object) -> bool:
    """Whether a cell has names of pictures, by their suffixes."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(
        isinstance(name, str) and name.lower().endswith(PICTURE_SUFFIXES) for name in names
    )


def holds_pictures(example: Example) -> bool:
    return num_pictures(example) > 0


def with_located(example: Example, folders: Sequence[Path]) -> Example:
    """The example with paths that any process finds. Raises BadRow."""

    def of_side(side: Turns) -> Turns:
        if isinstance(side, str):
            return side
        return tuple(
            replace(
                message,
                pictures=tuple(located(each, folders, example.source) for each in message.pictures),
            )
            for message in side
        )

    responses = tuple(of_side(side) for side in example.responses)
    return replace(example, prompt=of_side(example.prompt), responses=responses)


def _has_places(side: Turns) -> bool:
    return not isinstance(side, str) and any(
        message.pictures or MARK in message.content for message in side
    )


def _marked(side: Turns, where: str, *, has_pictures: bool) -> Turns:
    """With PICTURE for each MARK, whose pictures are in the column."""
    if isinstance(side, str):
        return side
    return tuple(_marked_turn(message, where, has_pictures=has_pictures) for message in side)


def _marked_turn(message: Message, where: str, *, has_pictures: bool) -> Message:
    if message.content.count(PICTURE) != len(message.pictures):
        raise BadRow(
            where,
            "holds U+FFFC, the mark of an object in a text, beside pictures",
            "remove that character from the text",
        )
    if MARK not in message.content or not has_pictures:
        return message
    own = iter(message.pictures)
    pictures = [
        next(own) if place[0] == PICTURE else "" for place in _PLACE.finditer(message.content)
    ]
    content = message.content.replace(MARK, PICTURE)
    return replace(message, content=content, pictures=tuple(pictures))


def _num_open(side: Turns) -> int:
    return 0 if isinstance(side, str) else sum(message.pictures.count("") for message in side)


def _in_front(sides: list[Turns], count: int, where: str) -> list[Turns]:
    """With `count` open places before the content of the first user turn. Raises BadRow without one."""
    for number, side in enumerate(sides):
        if isinstance(side, str):
            continue
        for index, message in enumerate(side):
            if message.role != "user":
                continue
            changed = replace(
                message,
                content=PICTURE * count + message.content,
                pictures=("",) * count + message.pictures,
            )
            turns = (*side[:index], changed, *side[index + 1 :])
            return [*sides[:number], turns, *sides[number + 1 :]]
    raise BadRow(
        where,
        "has pictures and no user turn that could show them",
        f"write {MARK} where each picture belongs",
    )


def _filled(side: Turns, remaining: Iterator[str]) -> Turns:
    if isinstance(side, str):
        return side
    return tuple(
        replace(message, pictures=tuple(each or next(remaining) for each in message.pictures))
        for message in side
    )
