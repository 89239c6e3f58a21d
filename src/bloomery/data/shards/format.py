"""A prepared dataset on disk: a manifest and memory-mapped token files that read as one array."""

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

FORMAT = 3
MANIFEST = "manifest.json"
JOURNAL = "preparing.json"  # of an unfinished `prepare`; a kill may leave it next to the manifest
SplitName = Literal["train", "validation"]
ShardKind = Literal["text", "chat", "pairs", "kto"]
Texts = Literal["none", "prompts", "whole"]  # the rows have texts: prompt and response, or whole texts of pairs
DOCUMENTS_PER_UNIT: dict[ShardKind, int] = {
    "text": 1,
    "chat": 1,
    "pairs": 2,
    "kto": 2,
}  # a pair is two
Ids = np.ndarray[Any, np.dtype[np.int64]]


class ManifestRecord(BaseModel, frozen=True, extra="forbid"):
    """Part of a manifest."""


class FileRecord(ManifestRecord):
    """`blocks`: the digest of each `seals.BLOCK` of it."""

    name: str
    bytes: int
    blocks: tuple[str, ...]


class SplitPart(ManifestRecord):
    """The tokens of one source in a split. Parts are in the order of the recipe's sources."""

    tokens: int
    documents: int
    weight: float = 1.0
    plain: bool = False  # plain text next to conversations: every token is trained on


class SplitRecord(ManifestRecord):
    """`bytes`: UTF-8 bytes of the text; 0 for pre-tokenized documents.

    Conversations and pairs also have `loss_mask`, one byte per token, in shards like the tokens; `first`, a uint32 per
    document, the place of its first loss token (its length: none); for kto `kto_labels`, one byte per document.
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
    """A source at the time it was read. `sha256` covers names, sizes and contents of its files."""

    path: str
    files: int
    bytes: int
    sha256: str


class Manifest(ManifestRecord):
    """The contents of a prepared folder, written last. `identity`: the hash of the recipe keys that decide the tokens.

    `kind` pairs: documents 2i and 2i + 1 are the chosen and the rejected response. kto: document 2i is the example,
    2i + 1 the same prompt with the response of another example, for the KL term.
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
    held_back: int = 0  # train documents left out, as they are also in the validation set
    kind: ShardKind = "text"
    formats: tuple[str, ...] = ()  # of the rows of conversations and pairs
    padding: int | None = None  # padding left out of pre-tokenized documents; None: an older version kept it
    turns: bool = False  # formatted with a chat template
    template: str = ""  # the name of that template
    texts: Texts = "none"
    snapshot: FileRecord | None = None  # sizes and checksums of the source files, for the next `prepare`
    files: tuple[FileRecord, ...] = ()  # every other file: the tokenizer's
    sha256: str = ""  # of this manifest

    def split(self, name: SplitName) -> SplitRecord:
        return self.train if name == "train" else self.validation

    def kind_of(self, part: SplitPart) -> ShardKind:
        return "text" if part.plain else self.kind

    @property
    def tokens_digest(self) -> str:
        """The digest of all that training reads. The date and the place of the source files do not change it."""
        records = [record for split in (self.train, self.validation) for record in split.files] + [*self.files]
        return digest_of("".join(record.model_dump_json() for record in records).encode())

    @property
    def mixed(self) -> bool:
        """Whether plain text is next to conversations."""
        return any(part.plain for part in self.train.parts)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """List every file of the folder. `read_manifest` refuses a file that is added later."""
    listed = {record.name for split in (manifest.train, manifest.validation) for record in split.files}
    listed |= {MANIFEST, JOURNAL, *([manifest.snapshot.name] if manifest.snapshot else [])}
    files = list[FileRecord]()
    while (path := added_to(folder, listed)) is not None:
        files.append(file_record(path))
        listed.add(path.name)
    manifest = manifest.model_copy(update={"files": tuple(files)})
    body = manifest.model_dump(mode="json", exclude={"sha256"})
    write_durably(folder / MANIFEST, stamped(body))
    return manifest.model_copy(update={"sha256": stamp_of(body)})


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when the folder is not prepared, a file is missing, short or added, or one other than the
    shards has changed. Shards are checked block by block as they are read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError("the folder has no prepared dataset", where=str(folder), fix="run: bloomery prepare RECIPE")
    try:
        manifest = Manifest.model_validate(unstamped(path))
    except (OSError, ValueError) as error:
        problem = "the manifest is damaged, or another version wrote it"
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
        raise UserError("the file was added to a prepared folder", where=str(stray), fix=fix)
    return manifest


def prepare_again(folder: Path) -> str:
    """The fix for a prepared dataset that changed after it was written."""
    return f"delete {folder} and prepare again"


def file_record(path: Path) -> FileRecord:
    """Name, size and digests of a file."""
    return FileRecord(name=path.name, bytes=path.stat().st_size, blocks=digests_of_file(path))


def check_record(folder: Path, record: FileRecord) -> None:
    """Raises UserError when a file changed after it was written."""
    check_file(folder / record.name, record.bytes, record.blocks, fix=prepare_again(folder))


def check_shards(folder: Path, manifest: Manifest, report: Callable[[float, float], None]) -> None:
    """Check all shards at once, which reading checks block by block. `report`: bytes done, total. Raises UserError."""
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
        problem = f"has {size:,} bytes instead of the {record.bytes:,} in the manifest" if size >= 0 else "is missing"
        raise UserError(f"file {problem}", where=str(path), fix=prepare_again(folder))


@final
class Tokens:
    """The ids of a split as one array, read by slice. Only the slice is in memory.

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
    """A file that is small compared with the shards, checked whole. An empty one cannot be memory-mapped."""
    check_record(folder, file)
    path = folder / file.name
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@final
class Split:
    """Documents of a split. `bounds`, uint64 [documents + 1]: where each begins, and where the last ends.

    `loss_mask`, `first` and `kto_labels`: see SplitRecord; None where it has none.
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
        """Whether a document is plain text next to conversations."""
        return any(first <= index < last for first, last in self._plain)

    @cached_property
    def _plain(self) -> list[tuple[int, int]]:
        """Documents [first, last) of each such source."""
        ends = zip(self.record.parts, self.part_starts, self.part_starts[1:], strict=False)
        return [(first, last) for part, (_, first), (_, last) in ends if part.plain]

    def document(self, index: int) -> Ids:
        """int64 ids of one document."""
        return self.tokens[int(self.bounds[index]) : int(self.bounds[index + 1])]


def open_split(folder: Path, name: SplitName, manifest: Manifest | None = None) -> Split:
    """Raises UserError as `read_manifest` does."""
    return Split(folder, manifest or read_manifest(folder), name)
