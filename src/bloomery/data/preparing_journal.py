"""How far an unfinished `prepare` is, and whose folder it works in."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from bloomery.data import snapshot
from bloomery.data.shard_writer import Progress
from bloomery.data.shards import JOURNAL, MANIFEST
from bloomery.data.tokenizer import write_file
from bloomery.errors import UserError


class Journal(BaseModel):
    """How far an unfinished `prepare` is: `read` documents of source `source` went into the splits."""

    identity: str
    sources: str
    source: int = 0
    read: int = 0
    empty: int = 0
    held_back: int = 0
    failed: int = 0  # examples that could not be rendered
    first_failed: str = ""
    train: Progress = Progress()
    validation: Progress = Progress()


def open_journal(folder: Path, *, identity: str, sources: str) -> Journal:
    """The journal that stands there when it is about the same recipe and files, else a fresh one in a cleared
    folder. A finished folder has none and gets none. Raises UserError for a folder that holds something else.
    """
    fresh = Journal(identity=identity, sources=sources)
    path = folder / JOURNAL
    if (folder / MANIFEST).is_file():
        return fresh
    if path.is_file():
        try:
            found = Journal.model_validate_json(path.read_bytes())
        except ValidationError:
            found = None
        if found and (found.identity, found.sources) == (fresh.identity, fresh.sources):
            return found
        _clear(folder)
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if foreign:
        raise UserError(
            f"holds files that no `prepare` wrote, such as {foreign[0]}",
            where=str(folder),
            remedy="set data.prepared to an empty or a new folder",
        )
    write_file(path, fresh.model_dump_json().encode())
    return fresh


def _clear(folder: Path) -> None:
    """Removes an unfinished attempt; the journal goes last, as it says whose files these are."""
    patterns = [
        "train-*.bin",
        "validation-*.bin",
        "tokenizer*",
        snapshot.SNAPSHOT,
        "special_tokens_map.json",
        JOURNAL,
    ]
    for path in [path for pattern in patterns for path in sorted(folder.glob(pattern))]:
        path.unlink()
