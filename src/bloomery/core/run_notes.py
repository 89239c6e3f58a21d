"""What people write about a run: tags and a note, in notes.json of its folder. No torch."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably
from bloomery.core.text import harmless

NOTES_FILE = "notes.json"
MOST_TAGS = 20
MOST_CHARACTERS = 10_000  # of a note
_TAG = re.compile(r"[^\W_][\w.:+-]{0,39}")


@final
@dataclass(frozen=True)
class RunNotes:
    """`tags`: in alphabetical order. `problem`: why the file cannot be read; "": it can, or there is none."""

    tags: tuple[str, ...] = ()
    note: str = ""
    problem: str = ""


def read_notes(folder: Path) -> RunNotes:
    """The notes of a run. What another program has written is shown without control characters."""
    path = folder / NOTES_FILE
    try:
        document = json.loads(read_whole(path))
    except FileNotFoundError:
        return RunNotes()
    except (UserError, OSError, ValueError, RecursionError):
        return RunNotes(problem=f"{NOTES_FILE} cannot be read")
    if not isinstance(document, dict):
        return RunNotes(problem=f"{NOTES_FILE} cannot be read")
    tags = document.get("tags", [])
    note = document.get("note", "")
    if not isinstance(tags, list) or not isinstance(note, str):
        return RunNotes(problem=f"{NOTES_FILE} cannot be read")
    known = {tag for tag in tags if isinstance(tag, str) and _TAG.fullmatch(tag)}
    return RunNotes(tuple(sorted(known))[:MOST_TAGS], harmless(note[:MOST_CHARACTERS]))


def change_notes(
    folder: Path,
    *,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    note: str | None = None,
) -> RunNotes:
    """Adds and removes tags, and replaces the note where one is given; returns what the run has now.

    Raises UserError for a tag that is none, a note that is too long, and a file that is another program's.
    """
    notes = read_notes(folder)
    path = folder / NOTES_FILE
    if notes.problem:
        raise UserError(notes.problem, where=str(path), fix="correct it or delete the file")
    added = list(add)
    for tag in added:
        if not _TAG.fullmatch(tag):
            fix = "use letters, digits and . : + - _, at most 40, as in `baseline` or `lr:1e-4`"
            raise UserError(f"not a tag: {harmless(tag)[:80]!r}", where=str(path), fix=fix)
    tags = tuple(sorted({*notes.tags, *added} - set(remove)))
    text = notes.note if note is None else harmless(note).strip()
    if len(tags) > MOST_TAGS:
        raise UserError(f"more than {MOST_TAGS} tags", where=str(path), fix="remove some first")
    if len(text) > MOST_CHARACTERS:
        problem = f"the note has more than {MOST_CHARACTERS:,} characters"
        raise UserError(problem, where=str(path), fix="shorten it, or name a file in it")
    changed = RunNotes(tags, text)
    if changed != notes:
        write_durably(path, json.dumps({"tags": tags, "note": text}, ensure_ascii=False) + "\n")
    return changed
