"""Processes that are told apart for certain, and children that never outlive their parent. No torch."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def host_name() -> str:
    return platform.node() or "localhost"


def start_mark(pid: int) -> str | None:
    """A text that tells this process from any later one of the same number; None when it is dead."""
    if not sys.platform.startswith("linux"):
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return told.stdout.strip() or None
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    state, started = after_name[0], after_name[19]  # fields 3 and 22 of proc(5)
    return None if state in "ZX" else f"{boot} {started}"


def die_with_parent(parent: int) -> None:
    """From now on this process ends, whatever it does, when `parent` does; its standard input is a pipe from there."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
    threading.Thread(target=_watch_pipe, name="parent", daemon=True).start()


def _watch_pipe() -> None:
    os.read(0, 1)  # returns when the other end is closed: the parent is gone
    os._exit(1)
