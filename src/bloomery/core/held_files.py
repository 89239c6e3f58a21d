"""Files that are read while another process would delete them: shared locks of their readers, which it asks first.

The kernel releases a lock when its process ends, however that ends, and keeps it through a rename of the file's folder.
On a file system without locks every file counts as locked by its reader and as free for whoever deletes it.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, final

from bloomery.core.errors import UserError
from bloomery.core.files import in_place, open_regular, try_lock, unlock

# A claim lasts as long as a rename takes.
PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.02


@final
class HeldFiles:
    """Shared locks on files, until the context ends. Mutable."""

    def __init__(self) -> None:
        self._descriptors = dict[Path, int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            unlock(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    def take(self, path: Path) -> bool:
        """Locks the file; whether it is the one at `path` from now on: False where it was deleted before.

        A file that this process cannot open is not locked; reading it raises the error.
        """
        path = path.absolute()
        if path in self._descriptors:
            return in_place(path, self._descriptors[path])
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            return False
        except (OSError, UserError):
            return True
        is_taken = False
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not try_lock(descriptor, shared=True):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_PAUSE_SECONDS)
            # Whoever claimed it may have deleted it, or put another file in its place, while this process waited.
            is_taken = in_place(path, descriptor)
            return is_taken
        finally:
            if is_taken:
                self._descriptors[path] = descriptor
            else:
                os.close(descriptor)

    def lost(self) -> Path | None:
        """A file that is no longer at its path; None while all are: where locks work, nobody else deletes them."""
        for path, descriptor in self._descriptors.items():
            if not in_place(path, descriptor):
                return path
        return None


@contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[Path | None]:
    """Yields a file that somebody holds; None where nobody holds any, and nobody can before the block ends.

    Files that do not exist, and files that cannot be opened, are held by nobody.
    """
    with ExitStack() as stack:
        for path in paths:
            descriptor = _opened_to_claim(path)
            if descriptor is None:
                continue
            stack.callback(os.close, descriptor)
            if not try_lock(descriptor):
                yield path
                return
        yield None


def _opened_to_claim(path: Path) -> int | None:
    # NFS gives an exclusive lock only to a file that is open for writing; elsewhere reading is enough.
    for mode in (os.O_RDWR, os.O_RDONLY):
        try:
            return open_regular(path, mode)
        except (OSError, UserError):
            continue
    return None
