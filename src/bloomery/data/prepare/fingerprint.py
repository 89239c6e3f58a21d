"""What the source files were when they were read, so that shards made of others are noticed."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import open_input
from bloomery.data.shards.format import SourceRecord
from bloomery.data.sources.documents import Corpus
from bloomery.data.sources.files import SourceFile
from bloomery.data.tokenizer.tokenizer import write_file

SNAPSHOT = "sources.jsonl"


@dataclass(frozen=True)
class Seen:
    """One file. A touched file has another time and the same sha256 ("" until it is known)."""

    source: int
    name: str
    bytes: int
    mtime_ns: int
    sha256: str = ""


def look(corpora: list[Corpus]) -> list[Seen]:
    """Every file of every source, by its size and time alone."""
    return [_seen(source, file) for source, corpus in enumerate(corpora) for file in corpus.files]


def _seen(source: int, file: SourceFile) -> Seen:
    try:
        status = file.path.stat()
    except OSError as error:
        remedy = "check its owner, its permissions and the disk"
        raise UserError(f"cannot be read: {error.strerror}", where=str(file.path), remedy=remedy) from error
    return Seen(source, file.name, status.st_size, status.st_mtime_ns)


def digest(seen: list[Seen]) -> str:
    return hashlib.sha256("\n".join(json.dumps(asdict(file)) for file in seen).encode()).hexdigest()


def record(
    corpora: list[Corpus], seen: list[Seen], folder: Path, report: Callable[[float, float], None]
) -> tuple[SourceRecord, ...]:
    """Reads every file once more for its checksum, writes SNAPSHOT, and raises UserError when a file changed since
    `seen`.
    """
    files = [file for corpus in corpora for file in corpus.files]
    total, done, sums = sum(entry.bytes for entry in seen), 0, []
    with ThreadPoolExecutor(4) as threads:
        for entry, value in zip(seen, threads.map(_sha256, files), strict=True):
            sums.append(Seen(entry.source, entry.name, entry.bytes, entry.mtime_ns, value))
            done += entry.bytes
            report(done, total)
    now = look(corpora)
    if digest(now) != digest(seen):
        raise UserError(
            "the text changed while it was read",
            where=_first_change(seen, now),
            remedy="run the same command again once nothing writes there",
        )
    write_file(folder / SNAPSHOT, "".join(json.dumps(asdict(entry)) + "\n" for entry in sums).encode())
    return tuple(
        _source(corpus, [entry for entry in sums if entry.source == index]) for index, corpus in enumerate(corpora)
    )


def _source(corpus: Corpus, files: list[Seen]) -> SourceRecord:
    lines = "".join(f"{file.name} {file.bytes} {file.sha256}\n" for file in files)
    return SourceRecord(
        path=corpus.path,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        sha256=hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest(),
    )


def _sha256(file: SourceFile) -> str:
    with open_input(file.path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_change(before: list[Seen], after: list[Seen]) -> str:
    changed = {entry.name for entry in set(before) ^ set(after)}
    return sorted(changed)[0] if changed else "data"


def stale(folder: Path, corpora: list[Corpus]) -> str | None:
    """The first file that is not what the shards were made of, None when all are. A file with another time is read
    for its checksum.
    """
    try:
        lines = (folder / SNAPSHOT).read_text(encoding="utf-8").splitlines()
        before = [Seen(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            "is missing or damaged", where=str(folder / SNAPSHOT), remedy=f"delete {folder} and prepare again"
        ) from error
    known = {(entry.source, entry.name): entry for entry in before}
    now = look(corpora)
    files = [file for corpus in corpora for file in corpus.files]
    for entry, file in zip(now, files, strict=True):
        old = known.pop((entry.source, entry.name), None)
        if old is None or old.bytes != entry.bytes or (old.mtime_ns != entry.mtime_ns and old.sha256 != _sha256(file)):
            return str(file.path)
    return next(iter(known))[1] if known else None
