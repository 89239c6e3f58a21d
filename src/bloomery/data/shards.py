"""Tokens on disk: a manifest, and memory-mapped files of ids that read as one array."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel, ValidationError

from bloomery.data.tokenizer import load_tokenizer
from bloomery.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
Name = Literal["train", "validation"]
ShardKind = Literal["text", "chat", "pairs", "kto"]
Texts = Literal["none", "prompts", "whole"]  # what texts rows hold: a prompt's and an answer's, or whole ones of pairs
ANSWERS: dict[ShardKind, int] = {"text": 1, "chat": 1, "pairs": 2, "kto": 2}  # documents that belong together
Ids = np.ndarray[Any, np.dtype[np.int64]]


class Record(BaseModel, frozen=True, extra="forbid"):
    """Part of a manifest."""


class FileRecord(Record):
    name: str
    bytes: int
    sha256: str


class Part(Record):
    """What one source gave to a split; parts follow each other in the order of the recipe's sources."""

    tokens: int
    documents: int
    weight: float = 1.0
    plain: bool = False  # text beside conversations: every token of it is learned


class SplitRecord(Record):
    """`bytes` counts the text (UTF-8); pre-tokenised documents have none.

    Of structured text also: `learned`, a byte a token, in shards as the tokens; `first`, uint32 a document, the place
    of its first learned token (its length: none is); `marks`, a byte a document, of kto alone.
    """

    tokens: int
    documents: int
    bytes: int
    shards: tuple[FileRecord, ...]
    bounds: FileRecord
    parts: tuple[Part, ...]
    learned_tokens: int | None = None
    learned: tuple[FileRecord, ...] = ()
    first: FileRecord | None = None
    marks: FileRecord | None = None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return (*self.shards, self.bounds, *self.learned, *(file for file in (self.first, self.marks) if file))


class SourceRecord(Record):
    """A source as it was read: `sha256` covers names, sizes and contents of its files."""

    path: str
    files: int
    bytes: int
    sha256: str


class Manifest(Record):
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

    def split(self, name: Name) -> SplitRecord:
        return self.train if name == "train" else self.validation

    def kind_of(self, part: Part) -> ShardKind:
        return "text" if part.plain else self.kind

    @property
    def mixed(self) -> bool:
        """Whether text stands beside conversations."""
        return any(part.plain for part in self.train.parts)


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when the folder is not prepared, its files are missing or short, or its tokenizer is not the
    shards' own.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError("holds no prepared text", where=str(folder), remedy="run: bloomery prepare RECIPE")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(
            "is damaged, or was written by another version",
            where=str(path),
            remedy=f"delete {folder} and prepare again",
        ) from error
    for split in (manifest.train, manifest.validation):
        for record in split.files:
            _check_file(folder, record)
    tokenizer = load_tokenizer(folder)
    if tokenizer.hash != manifest.tokenizer_hash:
        raise UserError("the tokenizer beside the shards is not the one that made them", where=str(folder),
                        remedy=f"put the right one back, or delete {folder} and prepare again")  # fmt: skip
    return manifest


def _check_file(folder: Path, record: FileRecord) -> None:
    path = folder / record.name
    size = path.stat().st_size if path.is_file() and Path(record.name).name == record.name else -1
    if size != record.bytes:
        problem = "is missing" if size < 0 else f"has {size:,} bytes where the manifest says {record.bytes:,}"
        raise UserError(problem, where=str(path), remedy=f"delete {folder} and prepare again")


@final
class Tokens:
    """The ids of a split as one array, read by slice; nothing but the slice is held in memory."""

    def __init__(self, files: list[Path], dtype: str, shard_tokens: int, length: int) -> None:
        self._maps = [np.memmap(path, dtype=dtype, mode="r") for path in files]
        self._shard_tokens, self._length = shard_tokens, length

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
            parts.append(self._maps[shard][offset : offset + count])
            start += count
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _mapped(path: Path, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """An empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@final
class Split:
    """Documents of a split. `bounds` is uint64 [documents + 1]: where each begins, and where the last ends.

    `learned`, `first` and `marks` are those of SplitRecord, None where it has none.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: Name) -> None:
        record = manifest.split(name)
        self.record, self.kind = record, manifest.kind

        def shards(files: tuple[FileRecord, ...], dtype: str) -> Tokens:
            return Tokens([folder / file.name for file in files], dtype, manifest.shard_tokens, record.tokens)

        def column(file: FileRecord | None, dtype: str) -> np.ndarray[Any, np.dtype[Any]] | None:
            return None if file is None else _mapped(folder / file.name, dtype)

        self.tokens = shards(record.shards, manifest.dtype)
        self.bounds = _mapped(folder / record.bounds.name, "uint64")
        self.learned = shards(record.learned, "uint8") if record.learned else None
        self.first, self.marks = column(record.first, "uint32"), column(record.marks, "uint8")

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


def open_split(folder: Path, name: Name, manifest: Manifest | None = None) -> Split:
    """Raises UserError as `read_manifest` does."""
    return Split(folder, manifest or read_manifest(folder), name)
