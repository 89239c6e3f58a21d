"""Digests of files, to detect damage and mix-ups. Does not import torch.

A small file is checked as a whole. A large file has a digest per BLOCK, which is checked when the block is first used.
Digests do not protect against an attacker, who can change them as well.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole

BLOCK = 2**20  # bytes: a random sequence takes 1 ms more if its block is new; 35 bytes per block in the manifest
_TASK = 16 * BLOCK  # bytes that a thread hashes at once
_THREADS = min(8, os.cpu_count() or 1)
_STAMP = "sha256"


def digest_of(content: bytes | memoryview) -> str:
    """32 hexadecimal digits of BLAKE2b, which is as fast as a disk even on CPUs without SHA instructions."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digests_of_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> tuple[str, ...]:
    """The digest of each BLOCK of a file, by several threads. `on_bytes` is called with the number of new bytes."""
    with path.open("rb", buffering=0) as file:
        size, descriptor = os.fstat(file.fileno()).st_size, file.fileno()

        def hashed(start: int) -> list[str]:
            content = memoryview(_read_at(descriptor, start, min(_TASK, size - start)))
            return [digest_of(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]

        digests = []
        if size <= BLOCK:
            digests += [hashed(0)] if size else []
            on_bytes(size)
        else:
            with ThreadPoolExecutor(_THREADS) as threads:
                try:
                    for start, part in zip(range(0, size, _TASK), _a_few_ahead(threads, hashed, size), strict=True):
                        digests.append(part)
                        on_bytes(min(_TASK, size - start))
                finally:
                    threads.shutdown(cancel_futures=True)
    return tuple(digest for part in digests for digest in part)


def _a_few_ahead(threads: ThreadPoolExecutor, hashed: Callable[[int], list[str]], size: int) -> Iterator[list[str]]:
    """Results in order; few tasks run at a time, so that Ctrl+C works and memory stays small."""
    starts = iter(range(0, size, _TASK))
    waiting = [threads.submit(hashed, start) for start in islice(starts, 2 * _THREADS)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [threads.submit(hashed, start) for start in islice(starts, 1)]


def _read_at(descriptor: int, start: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(descriptor, count, start)
        if not part:
            break  # truncated meanwhile: the digest does not match
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return b"".join(parts)


@final
class Blocks:
    """The memory-mapped content of a file; each block is checked once."""

    def __init__(self, content: memoryview, digests: tuple[str, ...], path: Path, *, fix: str) -> None:
        """Raises UserError if the number of blocks differs."""
        self._content, self._digests, self._path, self._fix = content.cast("B"), digests, path, fix
        if -(-len(self._content) // BLOCK) != len(digests):
            raise changed(path, fix=fix)
        self._checked = bytearray(len(digests))

    def check(self, start: int, stop: int) -> None:
        """Raises UserError if bytes [start, stop) have changed."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if 0 in self._checked[first:last]:
            self.check_blocks(range(first, last))

    def check_blocks(self, numbers: Iterable[int]) -> None:
        """Raises UserError if one of these blocks has changed."""
        for number in numbers:
            if not self._checked[number]:
                if digest_of(self._content[number * BLOCK : (number + 1) * BLOCK]) != self._digests[number]:
                    raise changed(self._path, fix=self._fix)
                self._checked[number] = 1


def changed(path: Path, *, fix: str) -> UserError:
    return UserError("file is damaged: its content has changed", where=str(path), fix=fix)


def check_file(path: Path, size: int, digests: tuple[str, ...], *, fix: str) -> None:
    """Raises UserError if the file is missing, or its size or content has changed."""
    if not path.is_file() or (current := path.stat().st_size) != size:
        problem = f"file has {current:,} bytes instead of {size:,}" if path.is_file() else "file is missing"
        raise UserError(problem, where=str(path), fix=fix)
    if digests_of_file(path) != digests:
        raise changed(path, fix=fix)


def added_to(folder: Path, listed: Iterable[str]) -> Path | None:
    """The first entry of a folder that is not `listed`; None without any. Hidden files and Markdown do not count."""
    names = set(listed)
    entries = sorted(folder.iterdir())
    return next((e for e in entries if e.name not in names and not e.name.startswith(".") and e.suffix != ".md"), None)


def stamped(body: Mapping[str, Any]) -> str:
    """JSON with its own digest as the last entry."""
    return json.dumps({**body, _STAMP: stamp_of(body)}, indent=1)


def stamp_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def unstamped(path: Path) -> dict[str, Any]:
    """Reads the JSON of `stamped`. Raises FileNotFoundError, otherwise ValueError with the reason."""
    try:
        body: Any = json.loads(read_whole(path))
    except FileNotFoundError:
        raise
    except UserError as error:
        raise ValueError(error.problem) from error
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(body, dict) or body.get(_STAMP) != stamp_of({k: v for k, v in body.items() if k != _STAMP}):
        raise ValueError("its content has changed")
    return body
