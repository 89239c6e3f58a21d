"""Writes the shards of a split. After a kill they are cut back to the state in the journal."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel

from bloomery.data.shards.format import FileRecord, ShardKind, SplitName, SplitPart, SplitRecord, file_record


class SplitProgress(BaseModel):
    """The part of a split that is safely on disk. `parts`: (tokens, documents) of each source begun so far."""

    bytes: int = 0
    loss_tokens: int = 0
    parts: list[tuple[int, int]] = []

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.parts)

    @property
    def documents(self) -> int:
        return sum(documents for _, documents in self.parts)


@dataclass(frozen=True)
class Structure:
    """Loss mask and labels of conversations and pairs, next to their tokens: see SplitRecord."""

    loss_mask: np.ndarray[Any, np.dtype[np.uint8]]  # one per token
    kto_labels: np.ndarray[Any, np.dtype[np.uint8]]  # one per document, for kto


@final
class SplitWriter:
    """Appends documents to `<name>-00000.bin`, ... and their starts to `<name>-documents.bin`. Every shard but the
    last is full. Conversations and pairs also have `<name>-loss-mask-00000.bin`, ..., `<name>-first.bin` and, for kto,
    `<name>-kto-labels.bin`.
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
        self._folder, self._name, self._shard_tokens = folder, name, shard_tokens
        self._sharded = {"": np.dtype(dtype)} | ({} if kind == "text" else {"loss-mask-": np.dtype(np.uint8)})
        self._columns: dict[str, np.dtype[Any]] = {"documents": np.dtype(np.uint64)}
        if kind != "text":
            self._columns["first"] = np.dtype(np.uint32)
        if kind == "kto":
            self._columns["kto-labels"] = np.dtype(np.uint8)
        self._files: dict[Path, FileIO] = {}
        self.cut_back(progress)

    def _shard_path(self, number: int, what: str = "") -> Path:
        return self._folder / f"{self._name}-{what}{number:05d}.bin"

    def _column_path(self, column: str) -> Path:
        return self._folder / f"{self._name}-{column}.bin"

    def cut_back(self, progress: SplitProgress) -> None:
        """Remove all that was written after `progress`. Raises Lost when the disk has less than that."""
        self.close()
        self.progress = progress.model_copy(deep=True)
        self._tokens, self._documents = progress.tokens, progress.documents
        for column, dtype in self._columns.items():
            _cut(self._column_path(column), dtype.itemsize * self._documents)
        for what, dtype in self._sharded.items():
            self._cut_shards(what, dtype.itemsize)

    def _cut_shards(self, what: str, itemsize: int) -> None:
        full, rest = divmod(self._tokens, self._shard_tokens)
        for number in range(full):
            _cut(self._shard_path(number, what), self._shard_tokens * itemsize)
        _cut(self._shard_path(full, what), rest * itemsize)
        number = full + 1
        while self._shard_path(number, what).exists():
            self._shard_path(number, what).unlink()
            number += 1

    def begin_part(self) -> None:
        """Begin the next source."""
        self.progress.parts.append((0, 0))

    def add(
        self,
        ids: np.ndarray[Any, np.dtype[Any]],
        lengths: np.ndarray[Any, np.dtype[np.uint64]],
        text_bytes: int,
        structure: Structure | None = None,
    ) -> None:
        """Append documents, whose tokens follow each other in `ids`."""
        starts = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
        columns = {"documents": starts + np.uint64(self._tokens)}
        if structure is not None:
            columns |= {
                "first": first_loss_tokens(structure.loss_mask, starts, lengths),
                "kto-labels": structure.kto_labels,
            }
            self.progress.loss_tokens += int(structure.loss_mask.sum())
            self._append("loss-mask-", structure.loss_mask)
        self._append("", ids)
        for column, dtype in self._columns.items():
            self._write(self._column_path(column), columns[column].astype(dtype).tobytes())
        self._tokens, self._documents = self._tokens + len(ids), self._documents + len(lengths)
        tokens, documents = self.progress.parts[-1]
        self.progress.parts[-1] = (tokens + len(ids), documents + len(lengths))
        self.progress.bytes += text_bytes

    def _append(self, what: str, values: np.ndarray[Any, np.dtype[Any]]) -> None:
        values, done = np.ascontiguousarray(values, dtype=self._sharded[what]), 0
        while done < len(values):
            shard, offset = divmod(self._tokens + done, self._shard_tokens)
            count = min(len(values) - done, self._shard_tokens - offset)
            self._write(self._shard_path(shard, what), values[done : done + count].tobytes())
            done += count

    def _write(self, path: Path, content: bytes) -> None:
        if path not in self._files:
            self._files[path] = open_to_append(path)
        left = memoryview(content)
        while left:
            left = left[self._files[path].write(left) :]

    def sync(self) -> SplitProgress:
        """Flush everything added so far to disk."""
        for file in self._files.values():
            os.fsync(file.fileno())
        full = self._tokens // self._shard_tokens
        for path in [self._shard_path(number, what) for number in range(full) for what in self._sharded]:
            if path in self._files:
                self._files.pop(path).close()
        return self.progress.model_copy(deep=True)

    def close(self) -> None:
        """Close without flushing to disk."""
        while self._files:
            self._files.popitem()[1].close()

    def finish(self, weights: list[float], plain: Collection[int] = ()) -> SplitRecord:
        """Write where the last document ends; return the split's record with the checksum of every file. `plain`:
        numbers of the sources that are plain text next to conversations.
        """
        self._write(self._column_path("documents"), np.uint64(self._tokens).tobytes())
        self.sync()
        self.close()
        paths = {name: self._column_path(name) for name in self._columns}  # a column of no document has no file
        columns = {name: file_record(path) for name, path in paths.items() if path.exists()}
        shards = {what: self._finish_shards(what) for what in self._sharded}
        begun = enumerate(zip(self.progress.parts, weights, strict=True))
        parts = [SplitPart(tokens=t, documents=d, weight=w, plain=number in plain) for number, ((t, d), w) in begun]
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
        )

    def _finish_shards(self, what: str) -> tuple[FileRecord, ...]:
        paths = [self._shard_path(number, what) for number in range(-(-self._tokens // self._shard_tokens))]
        spare = self._shard_path(len(paths), what)
        if spare.exists():
            spare.unlink()
        return tuple(file_record(path) for path in paths)


def first_loss_tokens(
    loss_mask: np.ndarray[Any, np.dtype[np.uint8]],
    starts: np.ndarray[Any, np.dtype[np.uint64]],
    lengths: np.ndarray[Any, np.dtype[np.uint64]],
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The place in each document of its first loss token; the document's length where it has none. The first token of a
    document is not a label.
    """
    places = np.flatnonzero(loss_mask).astype(np.int64)
    begins, sizes = starts.astype(np.int64), lengths.astype(np.int64)
    index = np.searchsorted(places, begins + 1)
    after = np.append(places, np.iinfo(np.int64).max // 2)[index] - begins
    first: np.ndarray[Any, np.dtype[np.uint32]] = np.minimum(after, sizes).astype(np.uint32)
    return first


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
