"""Datasets that a page is given: uploaded, dropped or pasted, each a file or folder of the working folder. No torch."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

from bloomery.core.errors import UserError, of_the_system
from bloomery.data.sources.files import CODE, DATA, TABLES, TEXT, suffix_of

MOST_BYTES = 2**31  # of an upload: larger files are better copied
MOST_FILES = 1000  # of an upload, as the server reads forms


def free_path(name: str) -> Path:
    """A file of the working folder that does not exist yet, called as `name` where that is free. Raises UserError for
    what is no dataset."""
    plain = _plain(name)
    if suffix_of(Path(plain)) not in {*DATA, *TABLES, *TEXT}:
        suffixes = ", ".join((*DATA, *TABLES, *TEXT))
        fix = f"upload one of {suffixes}"
        raise UserError("not a file of rows or text", where=name[:120], fix=fix)
    return _free(plain)


def _plain(name: str) -> str:
    """The last part of a path, as it is written without quotes."""
    return re.sub(r"[^\w.-]+", "-", Path(name.replace("\\", "/")).name).strip(".-")[-120:]


def _free(plain: str) -> Path:
    stem, dot, suffixes = plain.partition(".")
    for number in range(1, 1000):
        path = Path(plain if number == 1 else f"{stem}-{number}{dot}{suffixes}")
        if not path.exists():
            return path
    raise UserError("too many files of this name", where=plain, fix="rename it")


def places_of(names: Sequence[str]) -> tuple[Path, list[Path | None]]:
    """The dataset that an upload becomes, and where each of its files goes; None for those that are no rows, text or
    code. One file is a file of the working folder; several are a new folder, with the folders that they came in. Raises
    UserError where nothing is left.
    """
    if len(names) == 1 and "/" not in names[0]:
        path = free_path(names[0])
        return path, [path]
    data_suffixes = {*DATA, *TABLES, *TEXT, *CODE}
    parts = [
        [plain for part in name.replace("\\", "/").split("/") if (plain := _plain(part))]
        for name in names
    ]
    is_data = [
        bool(inner)
        and not name.rpartition("/")[2].startswith(".")
        and suffix_of(Path(inner[-1])) in data_suffixes
        for name, inner in zip(names, parts, strict=True)
    ]
    if not any(is_data):
        raise UserError(
            "none of the files has rows or text",
            where=names[0][:120],
            fix="choose files with rows (.jsonl, .json, .csv, .parquet), text (.md, .txt) or code",
        )
    # A folder keeps its name.
    tops = {inner[0] if len(inner) > 1 else "" for inner in parts}
    top = next(iter(tops)) if len(tops) == 1 else ""
    folder = _free(top or "uploaded")
    inside = [inner[1:] if top else inner for inner in parts]
    return folder, [
        folder.joinpath(*inner) if has_data else None
        for inner, has_data in zip(inside, is_data, strict=True)
    ]


def suffix_of_text(text: str) -> str:
    """That of the format that a pasted text has."""
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(_is_object(line) for line in lines):
        return ".jsonl"
    try:
        if isinstance(json.loads(text), list | dict):
            return ".json"
    except (ValueError, RecursionError):
        pass
    for delimiter, suffix in ((",", ".csv"), ("\t", ".tsv")):
        try:
            widths = {len(row) for row in csv.reader(lines, delimiter=delimiter, strict=True)}
        except csv.Error:
            continue
        if len(lines) > 1 and len(widths) == 1 and widths != {1}:
            return suffix
    return ".txt"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def save_pasted(text: str) -> Path:
    """Writes it into the working folder. Raises UserError."""
    if not text.strip():
        raise UserError("nothing was pasted", where="the text", fix="paste rows or a text")
    path = free_path(f"pasted{suffix_of_text(text)}")
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text if text.endswith("\n") else f"{text}\n")
    except OSError as error:
        worded = of_the_system(error)
        fix = worded.fix if worded else "start studio in another folder"
        problem = f"cannot be written: {error.strerror}"
        raise UserError(problem, where=str(path), fix=fix) from error
    return path
