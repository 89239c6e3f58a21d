"""Who holds memory on the GPUs of this machine: AMD's from the kernel's own files, NVIDIA's from nvidia-smi."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.core.child import output_of
from bloomery.core.units import MIB

PATIENCE_SECONDS = 5.0
QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


@final
@dataclass(frozen=True)
class Tenant:
    """A process with memory on any GPU here; `name` is its command's."""

    pid: int
    name: str
    bytes: int


def tenants(root: Path = Path("/sys"), proc: Path = Path("/proc")) -> tuple[Tenant, ...]:
    """Other processes with memory on a GPU, the largest first; what this user may not see is missing."""
    held: dict[int, int] = {}
    for pid, size in (*_of_kfd(root), *_of_nvidia(output_of(QUERY, seconds=PATIENCE_SECONDS) or "")):
        held[pid] = held.get(pid, 0) + size
    others = [Tenant(pid, _name(proc, pid), size) for pid, size in held.items() if size and pid != os.getpid()]
    return tuple(sorted(others, key=lambda tenant: -tenant.bytes))


def _of_kfd(root: Path) -> Iterator[tuple[int, int]]:
    """`vram_<gpu id>` of each process: drivers/gpu/drm/amd/amdkfd/kfd_process.c, `kfd_procfs_show`."""
    for path in (root / "class/kfd/kfd/proc").glob("[0-9]*/vram_*"):
        try:
            yield int(path.parent.name), int(path.read_text())
        except (OSError, ValueError):  # it has just ended, or is somebody else's
            continue


def _of_nvidia(answer: str) -> Iterator[tuple[int, int]]:
    for line in answer.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():  # "[N/A]" under WSL
            yield int(pid), int(mebibytes) * MIB


def _name(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"
