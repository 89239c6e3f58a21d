"""Writes a split's shards so that they can be cut back to what the journal vouches for."""

import hashlib
import os
from io import FileIO
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel

from bloomery.data.shards import FileRecord, Name, Part, SplitRecord


class Progress(BaseModel):
    """What of a split is safely on disk; `parts` are (tokens, documents) of each source begun so far."""

    bytes: int = 0
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
    last is full.
    """

    def __init__(self, folder: Path, name: Name, dtype: str, shard_tokens: int, progress: Progress) -> None:
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, np.dtype(dtype), shard_tokens
        self._files: dict[Path, FileIO] = {}
        self.cut_back(progress)

    def _shard_path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:05d}.bin"

    @property
    def _bounds_path(self) -> Path:
        return self._folder / f"{self._name}-documents.bin"

    def cut_back(self, progress: Progress) -> None:
        """Forgets what was written after `progress`. Raises Lost when the disk holds less than that."""
        self.close()
        self.progress = progress.model_copy(deep=True)
        self._tokens, self._documents = progress.tokens, progress.documents
        _cut(self._bounds_path, 8 * self._documents)
        full, rest = divmod(self._tokens, self._shard_tokens)
        for number in range(full):
            _cut(self._shard_path(number), self._shard_tokens * self._dtype.itemsize)
        _cut(self._shard_path(full), rest * self._dtype.itemsize)
        number = full + 1
        while self._shard_path(number).exists():
            self._shard_path(number).unlink()
            number += 1

    def begin_part(self) -> None:
        """What follows comes from the next source."""
        self.progress.parts.append((0, 0))

    def add(
        self, ids: np.ndarray[Any, np.dtype[Any]], lengths: np.ndarray[Any, np.dtype[np.uint64]], text_bytes: int
    ) -> None:
        """Documents one after the other in `ids`."""
        starts = np.cumsum(lengths, dtype=np.uint64) - lengths + np.uint64(self._tokens)
        self._write(self._bounds_path, starts.astype(np.uint64).tobytes())
        ids, done = np.ascontiguousarray(ids, dtype=self._dtype), 0
        while done < len(ids):
            shard, offset = divmod(self._tokens + done, self._shard_tokens)
            count = min(len(ids) - done, self._shard_tokens - offset)
            self._write(self._shard_path(shard), ids[done : done + count].tobytes())
            done += count
        self._tokens, self._documents = self._tokens + len(ids), self._documents + len(lengths)
        tokens, documents = self.progress.parts[-1]
        self.progress.parts[-1] = (tokens + len(ids), documents + len(lengths))
        self.progress.bytes += text_bytes

    def _write(self, path: Path, content: bytes) -> None:
        if path not in self._files:
            self._files[path] = open_to_append(path)
        left = memoryview(content)
        while left:
            left = left[self._files[path].write(left) :]

    def sync(self) -> Progress:
        """Everything added so far is on disk afterwards."""
        for file in self._files.values():
            os.fsync(file.fileno())
        full = self._tokens // self._shard_tokens
        for path in [self._shard_path(number) for number in range(full)]:
            if path in self._files:
                self._files.pop(path).close()
        return self.progress.model_copy(deep=True)

    def close(self) -> None:
        """Closes without a promise that what was added is on disk."""
        while self._files:
            self._files.popitem()[1].close()

    def finish(self, weights: list[float]) -> SplitRecord:
        """Writes where the last document ends, and returns the split's record with the checksum of every file."""
        self._write(self._bounds_path, np.uint64(self._tokens).tobytes())
        self.sync()
        self.close()
        shards = [self._shard_path(number) for number in range(-(-self._tokens // self._shard_tokens))]
        spare = self._shard_path(len(shards))
        if spare.exists():
            spare.unlink()
        parts = [Part(tokens=t, documents=d, weight=w) for (t, d), w in zip(self.progress.parts, weights, strict=True)]
        return SplitRecord(
            tokens=self._tokens,
            documents=self._documents,
            bytes=self.progress.bytes,
            parts=tuple(parts),
            shards=tuple(file_record(path) for path in shards),
            bounds=file_record(self._bounds_path),
        )


def open_to_append(path: Path) -> FileIO:
    """Unbuffered: what `write` returned from is with the kernel, and closing after a full disk has nothing to write."""
    return path.open("ab", buffering=0)


class Lost(Exception):
    """A file is shorter than the journal says."""


def _cut(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise Lost(path)
    if size == 0:
        path.unlink(missing_ok=True)
    elif found > size:
        os.truncate(path, size)


def file_record(path: Path) -> FileRecord:
    """Name, size and sha256 of a file."""
    with path.open("rb") as file:
        return FileRecord(
            name=path.name, bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )
