"""How much of a download is there, by what its folder holds: whichever library and protocol brings it. No torch."""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.files import size_of
from bloomery.core.progress import is_heard, progress
from bloomery.core.units import MIB

LOOK_SECONDS = 0.5


@contextmanager
def told_growth(folder: Path, num_bytes: int) -> Iterator[None]:
    """Inside the block `progress` tells how many of `num_bytes` have come into `folder`, which need not exist yet."""
    if not is_heard():
        yield
        return
    at_first = _held(folder)
    has_ended = threading.Event()

    def tell() -> None:
        while not has_ended.wait(LOOK_SECONDS):
            come = min(max(_held(folder) - at_first, 0), num_bytes)
            progress(f"{come / MIB:,.0f} of {num_bytes / MIB:,.0f} MiB")

    # The listener is one of this thread's context.
    watching = threading.Thread(
        target=contextvars.copy_context().run, args=(tell,), name="growth", daemon=True
    )
    watching.start()
    try:
        yield
    finally:
        has_ended.set()
        watching.join()


def _held(folder: Path) -> int:
    return size_of(folder) if folder.exists() else 0
