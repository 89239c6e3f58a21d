"""A prepared dataset on disk: a manifest, memory-mapped token files that read as one array, and their writer."""

import os
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel

from bloomery.core.errors import UserError
from bloomery.core.files import (
    Blocks,
    added_to,
    changed,
    check_file,
    digest_of,
    digests_of_file,
    stamp_of,
    stamped,
    unstamped,
    write_durably,
)

FORMAT = 3
MANIFEST = "manifest.json"
JOURNAL = "preparing.json"  # of an unfinished `prepare`; a kill may leave it next to the manifest
SplitName = Literal["train", "validation"]
ShardKind = Literal["text", "chat", "pairs", "kto", "prompts"]
# Whether rows have texts, and which: prompt and response, or whole texts of pairs.
Texts = Literal["none", "prompts", "whole"]
# Documents of one unit: a pair is two.
DOCUMENTS_PER_UNIT: dict[ShardKind, int] = {
    "text": 1,
    "chat": 1,
    "pairs": 2,
    "kto": 2,
    "prompts": 1,
}
# Documents with a loss mask. Of plain text every token is trained on, of prompts none.
MASKED_KINDS: tuple[ShardKind, ...] = ("chat", "pairs", "kto")
_PICTURE_COLUMNS = ("picture-ends", "picture-documents")
Ids = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, np.dtype[Any]]


class ManifestRecord(BaseModel, frozen=True, extra="forbid"):
    """Part of a manifest."""


class FileRecord(ManifestRecord):
    """`blocks`: the digest of each `files.BLOCK` of it."""

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
    document, the place of its first loss token (its length: none); for kto `kto_labels`, one byte per document. Prompts
    have `rows`, one JSON text after the other, and `row_starts`, uint64 [documents + 1].

    Where documents have pictures, `pictures` holds their files one after the other; `picture_ends`, uint64, where each
    ends; `picture_documents`, uint64, the document of each.
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
    rows: FileRecord | None = None
    row_starts: FileRecord | None = None
    pictures: FileRecord | None = None
    picture_ends: FileRecord | None = None
    picture_documents: FileRecord | None = None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        of_kind = (self.first, self.kto_labels, self.rows, self.row_starts)
        of_pictures = (self.pictures, self.picture_ends, self.picture_documents)
        return (
            *self.shards,
            self.bounds,
            *self.loss_mask,
            *(file for file in (*of_kind, *of_pictures) if file is not None),
        )


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
    # The files that the rows held back came from, each with its number.
    held_files: tuple[tuple[str, int], ...] = ()
    kind: ShardKind = "text"
    formats: tuple[str, ...] = ()  # of the rows of conversations and pairs
    # Columns that hold something and are not read, and keys of turns.
    unread_columns: tuple[str, ...] = ()
    unread_turn_keys: tuple[str, ...] = ()
    # Of each kind of part of conversations: how many the chat template leaves out, and of how many.
    template_parts: tuple[tuple[str, tuple[int, int]], ...] = ()
    # Padding left out of pre-tokenized documents; None: an older version kept it.
    padding: int | None = None
    turns: bool = False  # formatted with a chat template
    template: str = ""  # the name of that template
    texts: Texts = "none"
    # Sizes and checksums of the source files, for the next `prepare`.
    snapshot: FileRecord | None = None
    files: tuple[FileRecord, ...] = ()  # every other file: the tokenizer's
    sha256: str = ""  # of this manifest

    def split(self, name: SplitName) -> SplitRecord:
        return self.train if name == "train" else self.validation

    def kind_of(self, part: SplitPart) -> ShardKind:
        return "text" if part.plain else self.kind

    @property
    def tokens_digest(self) -> str:
        """The digest of all that training reads. The date and the place of the source files do not change it."""
        records = [*self.train.files, *self.validation.files, *self.files]
        return digest_of("".join(record.model_dump_json() for record in records).encode())

    @property
    def has_pictures(self) -> bool:
        return self.train.pictures is not None or self.validation.pictures is not None

    @property
    def mixed(self) -> bool:
        """Whether plain text is next to conversations."""
        return any(part.plain for part in self.train.parts)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """List every file of the folder. `read_manifest` refuses a file that is added later."""
    listed_names = {record.name for record in (*manifest.train.files, *manifest.validation.files)}
    listed_names |= {MANIFEST, JOURNAL}
    if manifest.snapshot is not None:
        listed_names.add(manifest.snapshot.name)
    # What is left is the tokenizer's, whose files differ from one tokenizer to the next.
    other_files = list[FileRecord]()
    while (path := added_to(folder, listed_names)) is not None:
        other_files.append(file_record(path))
        listed_names.add(path.name)
    complete = manifest.model_copy(update={"files": tuple(other_files)})
    body = complete.model_dump(mode="json", exclude={"sha256"})
    write_durably(folder / MANIFEST, stamped(body))
    return complete.model_copy(update={"sha256": stamp_of(body)})


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when the folder is not prepared, a file is missing, short or added, or one other than the
    shards has changed. Shards are checked block by block as they are read.
    """
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        raise UserError(
            "the folder has no prepared dataset",
            where=str(folder),
            fix="run: bloomery prepare RECIPE",
        )
    try:
        manifest = Manifest.model_validate(unstamped(manifest_path))
    except (OSError, ValueError) as error:
        problem = "the manifest is damaged, or another version wrote it"
        raise UserError(problem, where=str(manifest_path), fix=prepare_again(folder)) from error
    # Shards may be terabytes: only their sizes are compared here. The tokenizer is small, and is
    # read whole.
    split_records = [*manifest.train.files, *manifest.validation.files]
    for record in split_records:
        _check_size(folder, record)
    for record in manifest.files:
        check_record(folder, record)
    # A file that somebody added may be a shard of another dataset, or a tokenizer that is read
    # instead of this one.
    listed_names = {record.name for record in (*split_records, *manifest.files)}
    if manifest.snapshot is not None:
        listed_names.add(manifest.snapshot.name)
    added_file = added_to(folder, {MANIFEST, JOURNAL, *listed_names})
    if added_file is not None:
        fix = f"move it elsewhere, or {prepare_again(folder)}"
        raise UserError("the file was added to a prepared folder", where=str(added_file), fix=fix)
    return manifest


def _check_size(folder: Path, record: FileRecord) -> None:
    """Raises UserError for a file that is missing, of another size, or outside the folder."""
    path = folder / record.name
    where = str(path)
    is_inside = Path(record.name).name == record.name
    if not path.is_file() or not is_inside:
        raise UserError("file is missing", where=where, fix=prepare_again(folder))
    size = path.stat().st_size
    if size != record.bytes:
        problem = f"file has {size:,} bytes instead of the {record.bytes:,} in the manifest"
        raise UserError(problem, where=where, fix=prepare_again(folder))


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
    records = [*manifest.train.files, *manifest.validation.files]
    total = sum(record.bytes for record in records)
    bytes_done = 0

    def count(new_bytes: int) -> None:
        nonlocal bytes_done
        bytes_done += new_bytes
        report(bytes_done, total)

    for record in records:
        if digests_of_file(folder / record.name, count) != record.blocks:
            raise changed(folder / record.name, fix=prepare_again(folder))


@final
class Tokens:
    """The ids of a split as one array, read by slice. Only the slice is in memory.

    Raises UserError for a slice of a damaged block.
    """

    def __init__(
        self,
        folder: Path,
        files: tuple[FileRecord, ...],
        dtype: str,
        shard_tokens: int,
        length: int,
    ) -> None:
        self._maps = [np.memmap(folder / file.name, dtype=dtype, mode="r") for file in files]
        self._blocks = [
            Blocks(content.data, file.blocks, folder / file.name, fix=prepare_again(folder))
            for content, file in zip(self._maps, files, strict=True)
        ]
        self._shard_tokens = shard_tokens
        self._length = length
        self._itemsize = np.dtype(dtype).itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, token_range: slice) -> Ids:
        """int64 [stop - start]."""
        start, stop, step = token_range.indices(self._length)
        assert step == 1, "tokens are read in order"
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            count = min(stop - start, self._shard_tokens - offset)
            self._blocks[shard].check(offset * self._itemsize, (offset + count) * self._itemsize)
            parts.append(self._maps[shard][offset : offset + count])
            start += count
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _column(folder: Path, file: FileRecord, dtype: str) -> Array:
    """A file that is small compared with the shards, checked whole. An empty one cannot be memory-mapped."""
    check_record(folder, file)
    path = folder / file.name
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@final
class Rows:
    """The JSON text of each prompt's row, read by number. Raises UserError for a row in a damaged block."""

    def __init__(self, folder: Path, file: FileRecord, starts: Array) -> None:
        self._map = np.memmap(folder / file.name, dtype="uint8", mode="r")
        self._blocks = Blocks(
            self._map.data, file.blocks, folder / file.name, fix=prepare_again(folder)
        )
        self._starts = starts

    def __getitem__(self, index: int) -> bytes:
        start = int(self._starts[index])
        stop = int(self._starts[index + 1])
        self._blocks.check(start, stop)
        return bytes(self._map[start:stop])


@final
class StoredPictures:
    """The pictures of a split, read by number: their files. Raises UserError for one in a damaged block."""

    def __init__(self, folder: Path, file: FileRecord, ends: Array, documents: Array) -> None:
        starts = np.concatenate([np.zeros(1, np.uint64), np.asarray(ends)])
        self._contents = Rows(folder, file, starts)
        self._documents = documents

    def __getitem__(self, index: int) -> bytes:
        return self._contents[index]

    def __len__(self) -> int:
        return len(self._documents)

    def of_document(self, document: int) -> range:
        """The numbers of its pictures, in the order of its tokens."""
        first, last = np.searchsorted(self._documents, [document, document + 1])
        return range(int(first), int(last))

    def some_documents(self, most: int) -> list[int]:
        """Documents that have pictures: at most so many, spread evenly."""
        documents = np.unique(np.asarray(self._documents))
        if len(documents) > most:
            documents = documents[np.arange(most) * len(documents) // most]
        return [int(document) for document in documents]

    def are_in(self, first: int, last: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Of the documents from `first` to before `last`, whether each has a picture."""
        has_pictures = np.zeros(last - first, np.bool_)
        begin, end = np.searchsorted(self._documents, [first, last])
        has_pictures[np.asarray(self._documents[begin:end]).astype(np.int64) - first] = True
        return has_pictures


@final
class Split:
    """Documents of a split. `bounds`, uint64 [documents + 1]: where each begins, and where the last ends.

    `loss_mask`, `first_loss_tokens` (`first` of SplitRecord), `kto_labels` and `rows`: see SplitRecord; None
    where the split has none.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: SplitName) -> None:
        record = manifest.split(name)
        self.record = record
        self.kind = manifest.kind

        def shards(files: tuple[FileRecord, ...], dtype: str) -> Tokens:
            return Tokens(folder, files, dtype, manifest.shard_tokens, record.tokens)

        def column(file: FileRecord | None, dtype: str) -> Array | None:
            return None if file is None else _column(folder, file, dtype)

        self.tokens = shards(record.shards, manifest.dtype)
        self.bounds = _column(folder, record.bounds, "uint64")
        self.loss_mask = shards(record.loss_mask, "uint8") if record.loss_mask else None
        self.first_loss_tokens = column(record.first, "uint32")
        self.kto_labels = column(record.kto_labels, "uint8")
        row_starts = column(record.row_starts, "uint64")
        self.rows: Rows | None = None
        if record.rows is not None and row_starts is not None:
            self.rows = Rows(folder, record.rows, row_starts)
        ends = column(record.picture_ends, "uint64")
        documents = column(record.picture_documents, "uint64")
        self.pictures: StoredPictures | None = None
        if record.pictures is not None and ends is not None and documents is not None:
            self.pictures = StoredPictures(folder, record.pictures, ends, documents)

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
        return any(index in documents for documents in self._plain_documents)

    @cached_property
    def _plain_documents(self) -> list[range]:
        """The documents of each source of plain text next to conversations."""
        first_documents = [document for _, document in self.part_starts]
        return [
            range(first_documents[number], first_documents[number + 1])
            for number, part in enumerate(self.record.parts)
            if part.plain
        ]

    def document(self, index: int) -> Ids:
        """int64 ids of one document."""
        return self.tokens[int(self.bounds[index]) : int(self.bounds[index + 1])]


def open_split(folder: Path, name: SplitName, manifest: Manifest | None = None) -> Split:
    """Raises UserError as `read_manifest` does."""
    return Split(folder, manifest or read_manifest(folder), name)


class SplitProgress(BaseModel):
    """The part of a split that is safely on disk. `parts`: (tokens, documents) of each source begun so far.
    `row_bytes`: of the rows of prompts.
    """

    bytes: int = 0
    row_bytes: int = 0
    pictures: int = 0
    picture_bytes: int = 0
    loss_tokens: int = 0
    parts: list[tuple[int, int]] = []

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.parts)

    @property
    def documents(self) -> int:
        return sum(documents for _, documents in self.parts)


@final
class SplitWriter:
    """Appends documents to `<name>-00000.bin`, ... and their starts to `<name>-documents.bin`. Every shard but the
    last is full. Conversations and pairs also have `<name>-loss-mask-00000.bin`, ..., `<name>-first.bin` and, for kto,
    `<name>-kto-labels.bin`; prompts `<name>-rows.bin` and `<name>-row-starts.bin`; those with pictures
    `<name>-pictures.bin`, `<name>-picture-ends.bin` and `<name>-picture-documents.bin`. Opens with the state of
    `progress`: after a kill, with that of the journal.
    """

    def __init__(
        self,
        folder: Path,
        name: SplitName,
        dtype: str,
        shard_tokens: int,
        progress: SplitProgress,
        kind: ShardKind = "text",
    ) -> None:
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._sharded: dict[str, np.dtype[Any]] = {"": np.dtype(dtype)}
        self._columns: dict[str, np.dtype[Any]] = {"documents": np.dtype(np.uint64)}
        if kind in MASKED_KINDS:
            self._sharded["loss-mask-"] = np.dtype(np.uint8)
            self._columns["first"] = np.dtype(np.uint32)
        if kind == "kto":
            self._columns["kto-labels"] = np.dtype(np.uint8)
        if kind == "prompts":
            self._columns["row-starts"] = np.dtype(np.uint64)
        self._files: dict[Path, FileIO] = {}
        self.cut_back(progress)

    def _path(self, column: str, shard: int | None = None) -> Path:
        return self._folder / f"{self._name}-{column}{'' if shard is None else f'{shard:05d}'}.bin"

    def cut_back(self, progress: SplitProgress) -> None:
        """Remove all that was written after `progress`. Raises Lost when the disk has less than that."""
        self.close()
        self.progress = progress.model_copy(deep=True)
        self._tokens = progress.tokens
        self._documents = progress.documents
        # A column is one file with an entry per document.
        for column, dtype in self._columns.items():
            _cut(self._path(column), dtype.itemsize * self._documents)
        _cut(self._path("rows"), progress.row_bytes)
        _cut(self._path("pictures"), progress.picture_bytes)
        for column in _PICTURE_COLUMNS:
            _cut(self._path(column), progress.pictures * np.dtype(np.uint64).itemsize)
        # Tokens fill shards: some are full, one is begun, and those after it are removed.
        num_full, rest = divmod(self._tokens, self._shard_tokens)
        for stored_column, dtype in self._sharded.items():
            for number in range(num_full):
                _cut(self._path(stored_column, number), self._shard_tokens * dtype.itemsize)
            _cut(self._path(stored_column, num_full), rest * dtype.itemsize)
            number = num_full + 1
            while self._path(stored_column, number).exists():
                self._path(stored_column, number).unlink()
                number += 1

    def begin_part(self) -> None:
        """Begin the next source."""
        self.progress.parts.append((0, 0))

    def add(
        self,
        ids: Array,
        lengths: np.ndarray[Any, np.dtype[np.uint64]],
        text_bytes: int,
        loss_mask: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
        kto_labels: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
        rows: list[bytes] | None = None,
        pictures: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Append documents, whose tokens follow each other in `ids`. `loss_mask` (one per token), `kto_labels`, `rows`
        (one per document) and `pictures` (those of each document): see SplitRecord.
        """
        starts = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
        columns: dict[str, Array | None] = {
            "documents": starts + np.uint64(self._tokens),
            "kto-labels": kto_labels,
        }
        # Shards first: `_append` places the tokens after those that are counted so far.
        if loss_mask is not None:
            columns["first"] = first_loss_tokens(loss_mask, starts, lengths)
            self.progress.loss_tokens += int(loss_mask.sum())
            self._append("loss-mask-", loss_mask)
        if rows is not None:
            row_ends = self.progress.row_bytes + np.cumsum([len(row) for row in rows])
            columns["row-starts"] = np.concatenate([[self.progress.row_bytes], row_ends[:-1]])
            self._write(self._path("rows"), b"".join(rows))
            self.progress.row_bytes = int(row_ends[-1])
        self._append_pictures(pictures)
        self._append("", ids)
        for column, dtype in self._columns.items():
            values = columns[column]
            assert values is not None
            self._write(self._path(column), values.astype(dtype).tobytes())
        self._tokens += len(ids)
        self._documents += len(lengths)
        tokens, documents = self.progress.parts[-1]
        self.progress.parts[-1] = (tokens + len(ids), documents + len(lengths))
        self.progress.bytes += text_bytes

    def _append_pictures(self, pictures: Sequence[Sequence[bytes]]) -> None:
        contents = [content for of_one in pictures for content in of_one]
        if not contents:
            return
        ends = self.progress.picture_bytes + np.cumsum([len(content) for content in contents])
        documents = self._documents + np.repeat(
            np.arange(len(pictures)), [len(of_one) for of_one in pictures]
        )
        self._write(self._path("pictures"), b"".join(contents))
        for column, values in zip(_PICTURE_COLUMNS, (ends, documents), strict=True):
            self._write(self._path(column), values.astype(np.uint64).tobytes())
        self.progress.pictures += len(contents)
        self.progress.picture_bytes = int(ends[-1])

    def _append(self, column: str, values: Array) -> None:
        """Into as many shards as the values reach; each is full before the next one begins."""
        values = np.ascontiguousarray(values, dtype=self._sharded[column])
        num_written = 0
        while num_written < len(values):
            shard, offset = divmod(self._tokens + num_written, self._shard_tokens)
            count = min(len(values) - num_written, self._shard_tokens - offset)
            of_shard = values[num_written : num_written + count]
            self._write(self._path(column, shard), of_shard.tobytes())
            num_written += count

    def _write(self, path: Path, content: bytes) -> None:
        if path not in self._files:
            self._files[path] = open_to_append(path)
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[self._files[path].write(unwritten) :]

    def sync(self) -> SplitProgress:
        """Flush everything added so far to disk."""
        for file in self._files.values():
            os.fsync(file.fileno())
        # A full shard gets nothing more: open files stay few, however many shards there are.
        for number in range(self._tokens // self._shard_tokens):
            for column in self._sharded:
                full_shard = self._files.pop(self._path(column, number), None)
                if full_shard is not None:
                    full_shard.close()
        return self.progress.model_copy(deep=True)

    def close(self) -> None:
        """Close without flushing to disk."""
        while self._files:
            self._files.popitem()[1].close()

    def finish(self, weights: list[float], plain: Collection[int] = ()) -> SplitRecord:
        """Write where the last document and its row end; return the split's record with the checksum of every file.

        `plain`: numbers of the sources that are plain text next to conversations.
        """
        self._write(self._path("documents"), np.uint64(self._tokens).tobytes())
        if self.progress.row_bytes:
            self._write(self._path("row-starts"), np.uint64(self.progress.row_bytes).tobytes())
        self.sync()
        self.close()
        # A column of no document has no file.
        optional = ("rows", "pictures", *_PICTURE_COLUMNS)
        paths = {name: self._path(name) for name in (*self._columns, *optional)}
        columns = {name: file_record(path) for name, path in paths.items() if path.exists()}
        # A shard that was begun and got no token is no part of the split.
        num_shards = -(-self._tokens // self._shard_tokens)
        shards = dict[str, tuple[FileRecord, ...]]()
        for column in self._sharded:
            self._path(column, num_shards).unlink(missing_ok=True)
            paths_of_shards = [self._path(column, number) for number in range(num_shards)]
            shards[column] = tuple(file_record(path) for path in paths_of_shards)
        parts = list[SplitPart]()
        for (tokens, documents), weight in zip(self.progress.parts, weights, strict=True):
            is_plain = len(parts) in plain
            parts.append(
                SplitPart(tokens=tokens, documents=documents, weight=weight, plain=is_plain)
            )
        return SplitRecord(
            tokens=self._tokens,
            documents=self._documents,
            bytes=self.progress.bytes,
            parts=tuple(parts),
            shards=shards[""],
            bounds=columns["documents"],
            loss_tokens=self.progress.loss_tokens if "loss-mask-" in shards else None,
            loss_mask=shards.get("loss-mask-", ()),
            first=columns.get("first"),
            kto_labels=columns.get("kto-labels"),
            rows=columns.get("rows"),
            row_starts=columns.get("row-starts"),
            pictures=columns.get("pictures"),
            picture_ends=columns.get("picture-ends"),
            picture_documents=columns.get("picture-documents"),
        )


def first_loss_tokens(
    loss_mask: np.ndarray[Any, np.dtype[np.uint8]],
    starts: np.ndarray[Any, np.dtype[np.uint64]],
    lengths: np.ndarray[Any, np.dtype[np.uint64]],
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The place in each document of its first loss token; the document's length where it has none. The first token of a
    document is not a label.
    """
    positions = np.flatnonzero(loss_mask).astype(np.int64)
    document_starts = starts.astype(np.int64)
    sizes = lengths.astype(np.int64)
    index = np.searchsorted(positions, document_starts + 1)
    distance = np.append(positions, np.iinfo(np.int64).max // 2)[index] - document_starts
    first_positions: Ids = np.minimum(distance, sizes)
    return first_positions.astype(np.uint32)


def open_to_append(path: Path) -> FileIO:
    """Unbuffered: after `write` the kernel has the bytes, and closing after a full disk has nothing left to write."""
    return path.open("ab", buffering=0)


class Lost(Exception):
    """A file is shorter than in the journal."""


def _cut(path: Path, size: int) -> None:
    present = path.stat().st_size if path.exists() else 0
    if present < size:
        raise Lost(path)
    if size == 0:
        path.unlink(missing_ok=True)
    elif present > size:
        os.truncate(path, size)
