"""What the C library does with memory that a process frees: mallopt(3) of glibc. Elsewhere nothing happens."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
RETURNED_BYTES = 65536
# Any of them has the last word.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")


def return_freed_memory() -> None:
    """From here on each freed tensor goes back to the system: FSDP2 frees between layers what others need.

    Fresh memory costs a page fault every 4 KiB, a quarter of a step: a run without shards keeps what it frees.
    """
    _set({M_MMAP_THRESHOLD: RETURNED_BYTES})


def keep_freed_memory() -> bool:
    """From here on freed tensors stay with the process: the next step takes what the last one freed. Returns whether.

    By default each tensor above 32 MiB is a mapping of its own, and what is free at the end of a step goes back. The
    process does not shrink between its largest moments, which are no larger.
    """
    return _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def _set(options: dict[int, int]) -> bool:
    if sys.platform != "linux" or any(name in os.environ for name in VARIABLES):
        return False
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "mallopt"):  # musl has none
        return False
    for option, value in options.items():
        c_library.mallopt(option, value)
    return True
