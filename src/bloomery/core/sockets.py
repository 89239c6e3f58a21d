"""Paths of Unix sockets, which the system keeps short. Does not import torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.errors import UserError

PATH_BYTES = 100  # a Unix socket has a path of at most 104 bytes on macOS, 108 on Linux


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path to bind or to connect to inside the block: a long one is named through its open folder.

    Batch systems give each job a TMPDIR of its own, which may be longer than a socket's path. Raises OSError where the
    folder is missing, UserError where this system cannot name it.
    """
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield str(path)
        return
    if sys.platform != "linux":
        fix = "set TMPDIR to a shorter path, such as /tmp"
        raise UserError("the path of a Unix socket is too long", where=str(path), fix=fix)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
