"""A process that gives up the network, for code that a model chooses the arguments of. Does not import torch."""

import ctypes
import os
import sys
from pathlib import Path

_NEW_NETWORK = 0x40000000  # linux/sched.h
_NEW_USER = 0x10000000


def leave_network() -> str | None:
    """This process, which has one thread, and those that it starts reach no other machine. Else why not."""
    if not sys.platform.startswith("linux"):
        return "only Linux gives a process no network"
    user = os.geteuid()
    group = os.getegid()
    flags = _NEW_NETWORK | (0 if user == 0 else _NEW_USER)
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return f"the system refuses it: {os.strerror(ctypes.get_errno())}"
    if user != 0:  # files keep their owner
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            try:
                Path("/proc/self", name).write_text(text)
            except OSError as error:
                return f"the system refuses it: {error.strerror}"
    return None
