"""Processor, memory and disk as this process may use them: the machine's, or its control group's share."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bloomery.hardware.detect_gpus import display_devices
from bloomery.hardware.detect_system import read_driver, read_surroundings
from bloomery.hardware.kfd import number_of, text_of
from bloomery.hardware.machine import Access, Host

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16", "sve")
MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size where there is no limit


def read_host(root: Path, folder: Path, access: Access) -> Host:
    """The host below `root`; `folder` is where runs will be written."""
    name, flags = _cpu(root / "proc/cpuinfo")
    total, free = _memory(root)
    return Host(
        system=platform.system(),
        cpu_name=name,
        cpu_cores=_cores(root),
        cpu_flags=flags,
        memory_bytes=total,
        memory_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(_existing(folder)).free,
        compiler=_compiler(),
        processor=platform.machine(),
        distribution=_distribution(root),
        displays=display_devices(root),
        driver=read_driver(root),
        access=access,
        around=read_surroundings(root),
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _cpu(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Name of the processor and those of its flags that decide a precision."""
    text = text_of(cpuinfo)
    name = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    fallback = platform.processor() or platform.machine()
    return (name[1].strip() if name else fallback), tuple(flag for flag in CPU_FLAGS if flag in present)


def _cores(root: Path) -> int:
    """Cores that this process may use: its affinity, and the cgroup's quota rounded down, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    for folder in _cgroups(root, "cpu"):
        v2, quota, period = folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        words = text_of(v2).split() if v2.is_file() else [text_of(quota), text_of(period)]
        share, whole = (number_of(word) for word in (words if len(words) == 2 else ("", "")))
        if share > 0 and whole > 0:  # "max" and -1: no limit
            yield share / whole


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's control groups for `controller`, each with its parents, of both versions of the interface."""
    base, table = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    rows = (line.split(":", 2) for line in text_of(table).splitlines())
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        here = mount / path.lstrip("/")
        # A container without its own cgroup namespace sees the host's path but mounts only its own group.
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _memory(root: Path) -> tuple[int, int]:
    """(total, free) bytes: the machine's, or the smallest control group's around this process."""
    found = re.findall(r"^(\w+):\s+(\d{1,20}) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    kib = {key: int(value) * 1024 for key, value in found}
    total, free = kib.get("MemTotal", 0), kib.get("MemAvailable", kib.get("MemFree", 0))
    for limit, used in _memory_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    for folder in _cgroups(root, "memory"):
        for limit_name, used_name in MEMORY_FILES:
            limit, used = _integer(folder / limit_name), _integer(folder / used_name)
            if limit is not None and limit < UNLIMITED:
                yield limit, max(0, (used or 0) - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel drops when memory is asked for: counted as used, but free."""
    stat = text_of(folder / "memory.stat")
    found = re.search(r"^(?:total_)?inactive_file (\d{1,20})$", stat, re.MULTILINE)
    return int(found[1]) if found else 0


def _integer(path: Path) -> int | None:
    """None where the file is missing or says "max"."""
    found = number_of(text_of(path), default=-1)
    return found if found >= 0 else None


def _compiler() -> str | None:
    """torch.compile takes $CXX, else g++; any other compiler works once CXX names it."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _distribution(root: Path) -> str:
    """ "debian 12", "arch"; empty where no os-release says it."""
    values = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', text_of(root / "etc/os-release"), re.MULTILINE))
    return " ".join(filter(None, (values.get("ID"), values.get("VERSION_ID"))))
