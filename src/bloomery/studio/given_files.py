"""Datasets that a page is given: uploaded or pasted, each a file of the working folder. Does not import torch."""

import csv
import json
import re
from pathlib import Path

from bloomery.core.errors import UserError, of_the_system
from bloomery.data.sources.files import DATA, TABLES, TEXT, suffix_of

MOST_BYTES = 2**31  # of an upload: larger files are better copied


def free_path(name: str) -> Path:
    """A file of the working folder that does not exist yet, called as `name` where that is free. Raises UserError for
    what is no dataset."""
    plain = re.sub(r"[^\w.-]+", "-", Path(name.replace("\\", "/")).name).strip(".-")[-120:]
    if suffix_of(Path(plain)) not in {*DATA, *TABLES, *TEXT}:
        suffixes = ", ".join((*DATA, *TABLES, *TEXT))
        fix = f"upload one of {suffixes}"
        raise UserError("not a file of rows or text", where=name[:120], fix=fix)
    stem, dot, suffixes = plain.partition(".")
    for number in range(1, 1000):
        path = Path(plain if number == 1 else f"{stem}-{number}{dot}{suffixes}")
        if not path.exists():
            return path
    raise UserError("too many files of this name", where=plain, fix="rename it")


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
