"""Tokens on disk: a manifest, and memory-mapped files of ids that read as one array."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.seals import (
    Blocks,
    added_to,
    changed,
    check_file,
    digest_of,
    digests_of_file,
    stamp_of,
    stamped,
    unstamped,
)

FORMAT = 2
MANIFEST = "manifest.json"
JOURNAL = "preparing.json"  # of an unfinished `prepare`; a kill may leave it beside the manifest
SplitName = Literal["train", "validation"]
ShardKind = Literal["text", "chat", "pairs", "kto"]
Texts = Literal["none", "prompts", "whole"]  # what texts rows hold: a prompt's and an answer's, or whole ones of pairs
DOCUMENTS_PER_UNIT: dict[ShardKind, int] = {
    "text": 1,
    "chat": 1,
    "pairs": 2,
    "kto": 2,
}  # documents that belong together
Ids = np.ndarray[Any, np.dtype[np.int64]]


class ManifestRecord(BaseModel, frozen=True, extra="forbid"):
    """Part of a manifest."""


class FileRecord(ManifestRecord):
    """`blocks`: the digest of each `seals.BLOCK` of it."""

    name: str
    bytes: int
    blocks: tuple[str, ...]


class SplitPart(ManifestRecord):
    """What one source gave to a split; parts follow each other in the order of the recipe's sources."""

    tokens: int
    documents: int
    weight: float = 1.0
    plain: bool = False  # text beside conversations: every token of it is learned


class SplitRecord(ManifestRecord):
    """`bytes` counts the text (UTF-8); pre-tokenised documents have none.

    Of structured text also: `loss_mask`, a byte a token, in shards as the tokens; `first`, uint32 a document, the place
    of its first learned token (its length: none is); `kto_labels`, a byte a document, of kto alone.
    """

    tokens: int
    documents: int
    bytes: int
    shards: tuple[FileRecord, ...]
    bounds: FileRecord
    parts: tuple[SplitPart, ...]
    loss_tokens: int | None = None
    loss_mask: tuple[FileRecord, ...] = ()
    first: FileRecord | None = None
    kto_labels: FileRecord | None = None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return (*self.shards, self.bounds, *self.loss_mask, *(file for file in (self.first, self.kto_labels) if file))


class SourceRecord(ManifestRecord):
    """A source as it was read: `sha256` covers names, sizes and contents of its files."""

    path: str
    files: int
    bytes: int
    sha256: str


class Manifest(ManifestRecord):
    """What `prepare` made, written last. `identity` is the hash of the recipe's part that decides the tokens.

    `kind` pairs: documents 2i and 2i + 1 are the chosen and the rejected answer. kto: document 2i is the example and
    2i + 1 the same prompt with the answer of another example.
    """

    format: int = FORMAT
    recipe: str
    identity: str
    tokenizer_hash: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    dtype: Literal["uint16", "uint32"]
    shard_tokens: int
    train: SplitRecord
    validation: SplitRecord
    sources: tuple[SourceRecord, ...]
    skipped: int = 0
    first_skipped: str = ""
    empty: int = 0
    held_back: int = 0  # train documents left out because the validation source holds them too
    kind: ShardKind = "text"
    formats: tuple[str, ...] = ()  # of structured text: what its rows were read as
    padding: int | None = None  # tokens of others that were padding and left out; None: an older version kept them
    turns: bool = False  # a chat template wrote it, from turns; else it is text as it stands
    template: str = ""  # that template, in words
    texts: Texts = "none"
    snapshot: FileRecord | None = None  # what the sources were, for the next `prepare`
    files: tuple[FileRecord, ...] = ()  # every other file: the tokenizer's
    sha256: str = ""  # of this manifest

    def split(self, name: SplitName) -> SplitRecord:
        return self.train if name == "train" else self.validation

    def kind_of(self, part: SplitPart) -> ShardKind:
        return "text" if part.plain else self.kind

    @property
    def tokens_digest(self) -> str:
        """Of all that training reads, whenever and from whichever place the text was read."""
        records = [record for split in (self.train, self.validation) for record in split.files] + [*self.files]
        return digest_of("".join(record.model_dump_json() for record in records).encode())

    @property
    def mixed(self) -> bool:
        """Whether text stands beside conversations."""
        return any(part.plain for part in self.train.parts)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Seals the folder: files that it holds now are listed, and one that is added later is refused."""
    listed = {record.name for split in (manifest.train, manifest.validation) for record in split.files}
    listed |= {MANIFEST, JOURNAL, *([manifest.snapshot.name] if manifest.snapshot else [])}
    found = []
    while (path := added_to(folder, listed)) is not None:
        found.append(file_record(path))
        listed.add(path.name)
    manifest = manifest.model_copy(update={"files": tuple(found)})
    body = manifest.model_dump(mode="json", exclude={"sha256"})
    write_durably(folder / MANIFEST, stamped(body))
    return manifest.model_copy(update={"sha256": stamp_of(body)})


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when the folder is not prepared, a file is missing, short or added, or one other than the
    shards has changed. Shards are checked block by block as they are read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError("holds no prepared text", where=str(folder), fix="run: bloomery prepare RECIPE")
    try:
        manifest = Manifest.model_validate(unstamped(path))
    except (OSError, ValueError) as error:
        problem = "is damaged, or was written by another version"
        raise UserError(problem, where=str(path), fix=prepare_again(folder)) from error
    records = [record for split in (manifest.train, manifest.validation) for record in split.files]
    listed = [*records, *manifest.files, *([manifest.snapshot] if manifest.snapshot else [])]
    for record in records:
        _check_size(folder, record)
    for record in manifest.files:
        check_file(folder / record.name, record.bytes, record.blocks, fix=prepare_again(folder))
    stray = added_to(folder, {MANIFEST, JOURNAL, *(record.name for record in listed)})
    if stray is not None:
        fix = f"move it elsewhere, or {prepare_again(folder)}"
        raise UserError("the file was added to a prepared folder, and might be read", where=str(stray), fix=fix)
    return manifest


def prepare_again(folder: Path) -> str:
    """The remedy for prepared text that is not as it was written."""
    return f"delete {folder} and prepare again"


def file_record(path: Path) -> FileRecord:
    """Name, size and digests of a file."""
    return FileRecord(name=path.name, bytes=path.stat().st_size, blocks=digests_of_file(path))


def check_record(folder: Path, record: FileRecord) -> None:
    """Raises UserError when a file is not as it was written."""
    check_file(folder / record.name, record.bytes, record.blocks, fix=prepare_again(folder))


def check_shards(folder: Path, manifest: Manifest, report: Callable[[float, float], None]) -> None:
    """All of what is else checked as it is read. `report`: bytes done and in all. Raises UserError."""
    records = [record for split in (manifest.train, manifest.validation) for record in split.files]
    total, done = sum(record.bytes for record in records), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        report(done, total)

    for record in records:
        if digests_of_file(folder / record.name, count) != record.blocks:
            raise changed(folder / record.name, fix=prepare_again(folder))


def _check_size(folder: Path, record: FileRecord) -> None:
    path = folder / record.name
    size = path.stat().st_size if path.is_file() and Path(record.name).name == record.name else -1
    if size != record.bytes:
        problem = "is missing" if size < 0 else f"has {size:,} bytes where the manifest says {record.bytes:,}"
        raise UserError(problem, where=str(path), fix=prepare_again(folder))


@final
class Tokens:
    """The ids of a split as one array, read by slice; nothing but the slice is held in memory.

    Raises UserError for a slice of a damaged block.
    """

    def __init__(self, folder: Path, files: tuple[FileRecord, ...], dtype: str, shard_tokens: int, length: int) -> None:
        self._maps = [np.memmap(folder / file.name, dtype=dtype, mode="r") for file in files]
        self._blocks = [
            Blocks(content.data, file.blocks, folder / file.name, fix=prepare_again(folder))
            for content, file in zip(self._maps, files, strict=True)
        ]
        self._shard_tokens, self._length, self._itemsize = shard_tokens, length, np.dtype(dtype).itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice) -> Ids:
        """int64 [stop - start]."""
        start, stop, step = place.indices(self._length)
        assert step == 1, "tokens are read in order"
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            count = min(stop - start, self._shard_tokens - offset)
            self._blocks[shard].check(offset * self._itemsize, (offset + count) * self._itemsize)
            parts.append(self._maps[shard][offset : offset + count])
            start += count
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _column(folder: Path, file: FileRecord, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """A file that is small beside the shards, checked whole. An empty one cannot be mapped."""
    check_record(folder, file)
    path = folder / file.name
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@final
class Split:
    """Documents of a split. `bounds` is uint64 [documents + 1]: where each begins, and where the last ends.

    `loss_mask`, `first` and `kto_labels` are those of SplitRecord, None where it has none.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: SplitName) -> None:
        record = manifest.split(name)
        self.record, self.kind = record, manifest.kind

        def shards(files: tuple[FileRecord, ...], dtype: str) -> Tokens:
            return Tokens(folder, files, dtype, manifest.shard_tokens, record.tokens)

        def column(file: FileRecord | None, dtype: str) -> np.ndarray[Any, np.dtype[Any]] | None:
            return None if file is None else _column(folder, file, dtype)

        self.tokens = shards(record.shards, manifest.dtype)
        self.bounds = _column(folder, record.bounds, "uint64")
        self.loss_mask = shards(record.loss_mask, "uint8") if record.loss_mask else None
        self.first, self.kto_labels = column(record.first, "uint32"), column(record.kto_labels, "uint8")

    def __len__(self) -> int:
        return self.record.documents

    @cached_property
    def part_starts(self) -> list[tuple[int, int]]:
        """(first token, first document) of each source, and one pair past the last."""
        starts = [(0, 0)]
        for part in self.record.parts:
            starts.append((starts[-1][0] + part.tokens, starts[-1][1] + part.documents))
        return starts

    def is_plain(self, index: int) -> bool:
        """Whether a document is text beside conversations."""
        return any(first <= index < last for first, last in self._plain)

    @cached_property
    def _plain(self) -> list[tuple[int, int]]:
        """Documents [first, last) of each source that is."""
        ends = zip(self.record.parts, self.part_starts, self.part_starts[1:], strict=False)
        return [(first, last) for part, (_, first), (_, last) in ends if part.plain]

    def document(self, index: int) -> Ids:
        """int64 ids of one document."""
        return self.tokens[int(self.bounds[index]) : int(self.bounds[index + 1])]


def open_split(folder: Path, name: SplitName, manifest: Manifest | None = None) -> Split:
    """Raises UserError as `read_manifest` does."""
    return Split(folder, manifest or read_manifest(folder), name)
