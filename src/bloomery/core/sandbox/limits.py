"""A process that cannot raise its own limits, for code that a model chooses the arguments of. Does not import torch."""

import ctypes
import struct
import sys
from contextlib import suppress

_PR_CAPBSET_DROP = 24  # linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
_CAP_SYS_RESOURCE = 24  # linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522


def limit_memory_for_good(num_bytes: int) -> None:
    """Beyond this an allocation raises MemoryError, in this process and those that it starts, where the system supports
    it. On Linux none of them can raise the limit, also as root: they give up the right to.
    """
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if sys.platform.startswith("linux"):
        _drop_resource_capability()


def _drop_resource_capability() -> None:
    """Out of this process, and out of what a program that it executes may get. Without the capability, or the right to
    drop it, nothing changes: then the limits hold anyway.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    # Effective, permitted and inheritable capabilities, 32 of each, and then the higher ones.
    words = (ctypes.c_uint32 * 6)()
    if libc.capget(header, words) == 0:
        for index in range(3):
            words[index] &= ~(1 << _CAP_SYS_RESOURCE)
        libc.capset(header, words)
