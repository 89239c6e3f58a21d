"""Processes that are told apart for certain. No torch."""

import platform
import subprocess
import sys
from pathlib import Path


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
