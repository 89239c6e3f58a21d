"""Kernel drivers, accessible devices, container and cluster of this process, and the processes on the GPUs."""

import errno
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.core.child import output_of
from bloomery.core.units import MIB
from bloomery.hardware.detect.kfd import masked_gpus, number_of, text_of
from bloomery.hardware.machine import Access, Driver, Opening, Surroundings
from bloomery.hardware.specs.wheels import detect_site

OPEN_SECONDS = 5
OPENING: dict[int, Opening] = {0: "open", errno.ENOENT: "absent", errno.ENXIO: "absent", errno.ENODEV: "absent"}
# Opens the devices, because permission bits do not include SELinux and device control groups; in a child process,
# because open() never returns if the driver hangs.
OPENER = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        print(0)
    except OSError as error:
        print(error.errno)
"""
MODPROBE_FOLDERS = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d")
BLACKLISTED = re.compile(r"^\s*(?:blacklist\s+amdgpu\s*$|install\s+amdgpu\s+\S*/(?:true|false))", re.MULTILINE)
BOOT_WORDS = re.compile(
    r"(?:^|\s)((?:iommu|amd_iommu|intel_iommu|pcie_acs_override|modprobe\.blacklist|module_blacklist)=\S+|nomodeset"
    r"|amdgpu\.\S+)"
)
LIBRARY_FOLDERS = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib")  # of the ROCm packages of distributions
SLURM = (
    "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_JOB_END_TIME",
)  # fmt: skip


def read_access(root: Path) -> tuple[Access, dict[str, Opening]]:
    """(access to /dev/kfd and groups, access to each render node)."""
    if os.name == "nt":
        return Access(), {}
    kfd, renders = root / "dev/kfd", sorted((root / "dev/dri").glob("renderD*"))
    answers = openings([path for path in (kfd, *renders) if path.exists()])
    names = {int(number): name for name, _, number, _ in _group_rows(root)}
    gid, render_gid = (
        path.stat().st_gid if path and path.exists() else None for path in (kfd, next(iter(renders), None))
    )
    # The groups of the user after the next login.
    rows = [line.split(":") for line in text_of(root / "etc/passwd").splitlines()]
    entry = next((row for row in rows if len(row) == 7 and row[2] == str(os.getuid())), None)
    user = entry[0] if entry else os.environ.get("LOGNAME", os.environ.get("USER", ""))
    listed = [names.get(int(entry[3]), entry[3])] if entry and entry[3].isdecimal() else []
    listed += [name for name, _, _, members in _group_rows(root) if user and user in members.split(",")]
    access = Access(
        kfd=answers.get(kfd, "absent"),
        kfd_group="" if gid is None else names.get(gid, str(gid)),
        kfd_gid=gid,
        render_gid=render_gid,
        groups=tuple(names.get(group, str(group)) for group in sorted({os.getegid(), *os.getgroups()})),
        listed_groups=tuple(dict.fromkeys(listed)),
    )
    return access, {f"/dev/dri/{path.name}": answers[path] for path in renders}


def openings(paths: list[Path]) -> dict[Path, Opening]:
    """Whether each file can be opened read-write, tested in a child process that may hang."""
    if not paths:
        return {}
    answer = output_of([sys.executable, "-I", "-S", "-c", OPENER, *map(str, paths)], seconds=OPEN_SECONDS)
    if answer is None:
        return dict.fromkeys(paths, "hung")
    numbers = answer.split()
    if len(numbers) != len(paths):  # the child could not be started: use the permission bits
        return {path: "open" if os.access(path, os.R_OK | os.W_OK) else "denied" for path in paths}
    return {path: OPENING.get(int(number), "denied") for path, number in zip(paths, numbers, strict=True)}


def _group_rows(root: Path) -> list[list[str]]:
    """Lines of /etc/group: name, password, number, members. The name service is not used, as it can hang."""
    lines = text_of(root / "etc/group").splitlines()
    return [fields for line in lines if len(fields := line.split(":")) == 4 and fields[2].isdecimal()]


def read_driver(root: Path) -> Driver:
    """Kernel drivers, and the file or boot parameter that blacklists amdgpu."""
    command_line = text_of(root / "proc/cmdline")
    files = [file for folder in MODPROBE_FOLDERS for file in sorted((root / folder).glob("*.conf"))]
    blacklisted = next(("/" + str(file.relative_to(root)) for file in files if BLACKLISTED.search(text_of(file))), "")
    boot = re.search(r"(?:modprobe\.blacklist|module_blacklist)=\S*\bamdgpu\b\S*", command_line)
    # A line such as "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release".
    nvidia = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text_of(root / "proc/driver/nvidia/version"))
    balancing = text_of(root / "proc/sys/kernel/numa_balancing").strip()
    return Driver(
        kernel=text_of(root / "proc/sys/kernel/osrelease").strip() or platform.release(),
        amdgpu=(root / "sys/module/amdgpu").is_dir(),
        amdgpu_version=text_of(root / "sys/module/amdgpu/version").strip(),
        nvidia=nvidia[1] if nvidia else text_of(root / "sys/module/nvidia/version").strip(),
        blacklisted=blacklisted or (f"{boot[0]} in /proc/cmdline" if boot else ""),
        boot=" ".join(BOOT_WORDS.findall(command_line)),
        rocm=system_rocm(root),
        numa_balancing=balancing != "0" if balancing else None,
    )


def system_rocm(root: Path) -> str:
    """The newest installed ROCm; older ones often remain, and 10.1 is newer than 7.2."""
    folders = [root / "opt/rocm", *(root / "opt").glob("rocm-*")]
    folders += [_below(root, os.environ[name]) for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    texts = [text_of(folder / ".info/version") for folder in folders]
    texts += [folder.name.removeprefix("rocm-") for folder in folders]
    texts += [name.removeprefix("rocm/") for name in _modules() if name.startswith("rocm/")]
    libraries = (file for folder in LIBRARY_FOLDERS for file in (root / folder).glob("libamdhip64.so.*"))
    texts += [".".join(library.name.partition(".so.")[2].split(".")[:2]) for library in libraries]
    return newest(texts)


def newest(versions: Iterable[str]) -> str:
    """The newest version of the texts that begin with one of at least two numbers; otherwise ""."""
    matches = (re.match(r"\s*v?(\d+(?:\.\d+)+)", text) for text in versions)
    return max((match[1] for match in matches if match), key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """For sorting versions: 7.2.4 < 7.14 < 10.1."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _below(root: Path, path: str | Path) -> Path:
    """An absolute path, below `root`."""
    return root / str(path).lstrip("/")


def _modules() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get("LOADEDMODULES", "").split(":")))


def read_surroundings(root: Path) -> Surroundings:
    """WSL, container, control group, Slurm job and cluster of this process."""
    shared = root / "dev/shm"
    space = os.statvfs(shared) if shared.is_dir() else None
    return Surroundings(
        wsl="microsoft" in text_of(root / "proc/version").lower(),
        dxg=(root / "dev/dxg").exists(),
        container=_container(root),
        masked_gpus=masked_gpus(root / "sys"),
        shared_memory_bytes=space.f_blocks * space.f_frsize if space else None,
        slurm={name: os.environ[name] for name in SLURM if name in os.environ},
        site=detect_site(root),
        modules=_modules(),
    )


def _container(root: Path) -> str:
    """docker, podman, apptainer, kubernetes, lxc, or systemd's name of the container; empty outside of containers."""
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    marks = ((".dockerenv", "docker"), ("run/.containerenv", "podman"), (".singularity.d", "apptainer"))
    by_file = next((kind for mark, kind in marks if (root / mark).exists()), "")
    first = re.search(r"/(docker|lxc|libpod|kubepods)[/.-]", text_of(root / "proc/1/cgroup"))
    names = {"libpod": "podman", "kubepods": "kubernetes"}
    by_group = names.get(first[1], first[1]) if first else ""
    return by_file or text_of(root / "run/systemd/container").strip() or by_group


SMI_SECONDS = 5.0
QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


@final
@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU; `name`: of its command."""

    pid: int
    name: str
    bytes: int


def gpu_processes(root: Path = Path("/sys"), proc: Path = Path("/proc")) -> tuple[GpuProcess, ...]:
    """Other processes with memory on a GPU, the largest first, without those hidden from this user."""
    used: dict[int, int] = {}
    for path in (root / "class/kfd/kfd/proc").glob("[0-9]*/vram_*"):  # kfd_process.c, `kfd_procfs_show`
        owner = number_of(path.parent.name)
        used[owner] = used.get(owner, 0) + number_of(text_of(path))  # none: it has just ended, or is another user's
    for line in (output_of(QUERY, seconds=SMI_SECONDS) or "").splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():  # "[N/A]" under WSL
            used[int(pid)] = used.get(int(pid), 0) + int(mebibytes) * MIB
    others = [
        GpuProcess(pid, text_of(proc / str(pid) / "comm").strip() or "unknown", size)
        for pid, size in used.items()
        if size and pid != os.getpid()
    ]
    return tuple(sorted(others, key=lambda process: -process.bytes))
