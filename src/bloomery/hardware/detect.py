"""GPUs, CPU, memory, disk, drivers and cluster that this process has: the machine's, or its control group's.

System: kernel drivers, accessible devices, container and cluster of this process, and the processes on the GPUs.
"""

import errno
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bloomery.core.child import output_of
from bloomery.core.units import MIB
from bloomery.hardware.cpu_check import with_known_check
from bloomery.hardware.detect_software import below, read_software
from bloomery.hardware.intel import read_intel
from bloomery.hardware.kfd import file_text, masked_gpus, read_kfd, whole_number
from bloomery.hardware.machine import (
    Accelerator,
    Access,
    Display,
    Driver,
    Host,
    Machine,
    Opening,
    Surroundings,
)
from bloomery.hardware.probes import with_cached_probes
from bloomery.hardware.specs import is_integrated
from bloomery.hardware.wheels import detect_site

OPEN_SECONDS = 5
OPENING: dict[int, Opening] = {
    0: "open",
    errno.ENOENT: "absent",
    errno.ENXIO: "absent",
    errno.ENODEV: "absent",
}
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
BLACKLISTED = re.compile(
    r"^\s*(?:blacklist\s+amdgpu\s*$|install\s+amdgpu\s+\S*/(?:true|false))", re.MULTILINE
)
BOOT_WORDS = re.compile(
    r"(?:^|\s)((?:iommu|amd_iommu|intel_iommu|pcie_acs_override|modprobe\.blacklist|module_blacklist)=\S+|nomodeset"
    r"|amdgpu\.\S+)"
)
# Where the ROCm packages of distributions put their libraries.
LIBRARY_FOLDERS = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib")
SLURM = (
    "SLURM_JOB_ID",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_CPUS_PER_TASK",
    "SLURM_JOB_END_TIME",
)


def read_access(root: Path) -> tuple[Access, dict[str, Opening]]:
    """(access to /dev/kfd and groups, access to each render node)."""
    if os.name == "nt":
        return Access(), {}
    kfd = root / "dev/kfd"
    renders = sorted((root / "dev/dri").glob("renderD*"))
    answers = openings([path for path in (kfd, *renders) if path.exists()])
    names = {int(number): name for name, _, number, _ in _group_rows(root)}
    gid, render_gid = (
        path.stat().st_gid if path and path.exists() else None
        for path in (kfd, next(iter(renders), None))
    )
    # The groups of the user after the next login.
    rows = [line.split(":") for line in file_text(root / "etc/passwd").splitlines()]
    entry = next((row for row in rows if len(row) == 7 and row[2] == str(os.getuid())), None)
    user = entry[0] if entry else os.environ.get("LOGNAME", os.environ.get("USER", ""))
    listed = [names.get(int(entry[3]), entry[3])] if entry and entry[3].isdecimal() else []
    listed += [
        name for name, _, _, members in _group_rows(root) if user and user in members.split(",")
    ]
    access = Access(
        kfd=answers.get(kfd, "absent"),
        kfd_group="" if gid is None else names.get(gid, str(gid)),
        kfd_gid=gid,
        render_gid=render_gid,
        groups=tuple(
            names.get(group, str(group)) for group in sorted({os.getegid(), *os.getgroups()})
        ),
        listed_groups=tuple(dict.fromkeys(listed)),
    )
    return access, {f"/dev/dri/{path.name}": answers[path] for path in renders}


def openings(paths: list[Path]) -> dict[Path, Opening]:
    """Whether each file can be opened read-write, tested in a child process that may hang."""
    if not paths:
        return {}
    answer = output_of(
        [sys.executable, "-I", "-S", "-c", OPENER, *map(str, paths)], seconds=OPEN_SECONDS
    )
    if answer is None:
        return dict.fromkeys(paths, "hung")
    numbers = answer.split()
    if len(numbers) != len(paths):  # the child could not be started: use the permission bits
        return {path: "open" if os.access(path, os.R_OK | os.W_OK) else "denied" for path in paths}
    return {
        path: OPENING.get(int(number), "denied")
        for path, number in zip(paths, numbers, strict=True)
    }


def _group_rows(root: Path) -> list[list[str]]:
    """Lines of /etc/group: name, password, number, members. The name service is not used, as it can hang."""
    lines = file_text(root / "etc/group").splitlines()
    return [
        fields for line in lines if len(fields := line.split(":")) == 4 and fields[2].isdecimal()
    ]


def read_driver(root: Path) -> Driver:
    """Kernel drivers, and the file or boot parameter that blacklists amdgpu."""
    command_line = file_text(root / "proc/cmdline")
    files = [file for folder in MODPROBE_FOLDERS for file in sorted((root / folder).glob("*.conf"))]
    blacklisted = next(
        (
            "/" + str(file.relative_to(root))
            for file in files
            if BLACKLISTED.search(file_text(file))
        ),
        "",
    )
    boot = re.search(r"(?:modprobe\.blacklist|module_blacklist)=\S*\bamdgpu\b\S*", command_line)
    # A line such as "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release".
    nvidia = re.search(
        r"Kernel Module(?: for \S+)?\s+([\d.]+)", file_text(root / "proc/driver/nvidia/version")
    )
    balancing = file_text(root / "proc/sys/kernel/numa_balancing").strip()
    return Driver(
        kernel=file_text(root / "proc/sys/kernel/osrelease").strip() or platform.release(),
        amdgpu=(root / "sys/module/amdgpu").is_dir(),
        amdgpu_version=file_text(root / "sys/module/amdgpu/version").strip(),
        nvidia=nvidia[1] if nvidia else file_text(root / "sys/module/nvidia/version").strip(),
        blacklisted=blacklisted or (f"{boot[0]} in /proc/cmdline" if boot else ""),
        boot=" ".join(BOOT_WORDS.findall(command_line)),
        rocm=system_rocm(root),
        level_zero=level_zero(root),
        numa_balancing=balancing != "0" if balancing else None,
    )


def system_rocm(root: Path) -> str:
    """The newest installed ROCm; older ones often remain, and 10.1 is newer than 7.2."""
    folders = [root / "opt/rocm", *(root / "opt").glob("rocm-*")]
    folders += [
        below(root, os.environ[name]) for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)
    ]
    texts = [file_text(folder / ".info/version") for folder in folders]
    texts += [folder.name.removeprefix("rocm-") for folder in folders]
    texts += [name.removeprefix("rocm/") for name in _modules() if name.startswith("rocm/")]
    libraries = (
        file for folder in LIBRARY_FOLDERS for file in (root / folder).glob("libamdhip64.so.*")
    )
    texts += [".".join(library.name.partition(".so.")[2].split(".")[:2]) for library in libraries]
    return newest(texts)


def level_zero(root: Path) -> str:
    """The version of Intel's driver for Level Zero in user space, by the name of its library; empty without one."""
    libraries = (
        file for folder in LIBRARY_FOLDERS for file in (root / folder).glob("libze_intel_gpu.so.*")
    )
    names = [library.name.partition(".so.")[2] for library in libraries]
    return newest(names) or next(iter(sorted(names)), "")


def newest(versions: Iterable[str]) -> str:
    """The newest version of the texts that begin with one of at least two numbers; otherwise ""."""
    matches = (re.match(r"\s*v?(\d+(?:\.\d+)+)", text) for text in versions)
    return max((match[1] for match in matches if match), key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """For sorting versions: 7.2.4 < 7.14 < 10.1."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _modules() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get("LOADEDMODULES", "").split(":")))


def read_surroundings(root: Path) -> Surroundings:
    """WSL, container, control group, Slurm job and cluster of this process."""
    shared = root / "dev/shm"
    space = os.statvfs(shared) if shared.is_dir() else None
    return Surroundings(
        wsl="microsoft" in file_text(root / "proc/version").lower(),
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
    marks = (
        (".dockerenv", "docker"),
        ("run/.containerenv", "podman"),
        (".singularity.d", "apptainer"),
    )
    by_file = next((kind for mark, kind in marks if (root / mark).exists()), "")
    group_match = re.search(
        r"/(docker|lxc|libpod|kubepods)[/.-]", file_text(root / "proc/1/cgroup")
    )
    names = {"libpod": "podman", "kubepods": "kubernetes"}
    by_group = names.get(group_match[1], group_match[1]) if group_match else ""
    return by_file or file_text(root / "run/systemd/container").strip() or by_group


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
    bytes_of: dict[int, int] = {}
    # Written by `kfd_procfs_show` in the kernel's kfd_process.c.
    for path in (root / "class/kfd/kfd/proc").glob("[0-9]*/vram_*"):
        owner = whole_number(path.parent.name)
        # 0 where the file is empty: the process has just ended, or is another user's.
        bytes_of[owner] = bytes_of.get(owner, 0) + whole_number(file_text(path))
    for line in (output_of(QUERY, seconds=SMI_SECONDS) or "").splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():  # "[N/A]" under WSL
            bytes_of[int(pid)] = bytes_of.get(int(pid), 0) + int(mebibytes) * MIB
    processes = [
        GpuProcess(pid, file_text(proc / str(pid) / "comm").strip() or "unknown", size)
        for pid, size in bytes_of.items()
        if size and pid != os.getpid()
    ]
    return tuple(sorted(processes, key=lambda process: -process.bytes))


NVIDIA_FIELDS = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "compute_cap",
    "pci.bus_id",
    "pci.device_id",
)
NVIDIA_SECONDS = 5
# Files of a loaded driver.
NVIDIA_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvhost-gpu", "dev/dxg")
NAME_TABLES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
LONGEST_NAME = 100
DISPLAY_CLASSES = ("0x03", "0x1200")  # display controllers, processing accelerators


def amd_accelerators(root: Path, access: dict[str, Opening]) -> tuple[Accelerator, ...]:
    """AMD GPUs in the order of the kernel's topology, which HIP uses too. `access`: of the render nodes."""
    # A line of libdrm's amdgpu.ids: device ID, revision, name.
    line = re.compile(r"^([0-9A-Fa-f]{4}),\s*([0-9A-Fa-f]{2}),\s*(.+?)\s*$", re.MULTILINE)
    rows = (row for table in NAME_TABLES for row in line.findall(file_text(root / table)))
    names = {(int(device, 16), int(revision, 16)): name for device, revision, name in rows}
    devices = []
    for index, node in enumerate(read_kfd(root / "sys")):
        render = f"/dev/dri/renderD{node.render_minor}"
        # Instinct and PRO cards name themselves.
        product = root / f"sys/class/drm/renderD{node.render_minor}/device/product_name"
        listed = (
            names.get((node.device_id, node.revision)) or file_text(product).strip()[:LONGEST_NAME]
        )
        facts: dict[str, Any] = {**vars(node), "name": listed or node.arch, "node": render}
        facts["integrated"] = node.integrated or is_integrated(node.arch)
        devices.append(Accelerator(index=index, vendor="amd", access=access.get(render), **facts))
    return tuple(devices)


def nvidia_accelerators(root: Path, *, start: int) -> tuple[Accelerator, ...]:
    """The GPUs that nvidia-smi lists; none if it is missing, fails or times out."""
    program = shutil.which("nvidia-smi")
    if program is None or not any((root / trace).exists() for trace in NVIDIA_TRACES):
        return ()
    query = [program, "--query-gpu=" + ",".join(NVIDIA_FIELDS), "--format=csv,noheader,nounits"]
    return tuple(parse_nvidia_smi(output_of(query, seconds=NVIDIA_SECONDS) or "", start=start))


def parse_nvidia_smi(text: str, *, start: int = 0) -> Iterator[Accelerator]:
    """Devices from `nvidia-smi --query-gpu` (csv, no header, no units; memory in MiB)."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(NVIDIA_FIELDS) or not fields[0].isdigit():
            continue
        number, name, total, used, capability, address, device = fields
        integrated = not total.isdigit()  # "[N/A]": memory shared with the CPU
        yield Accelerator(
            index=start + int(number),
            vendor="nvidia",
            name=name,
            arch="sm_" + capability.replace(".", ""),
            memory_bytes=0 if integrated else int(total) * 2**20,
            memory_used_bytes=int(used) * 2**20 if used.isdigit() else 0,
            integrated=integrated,
            # nvidia-smi prints a domain of eight digits, others print four.
            pci_address=address.lower()[-12:],
            # In 0x233510DE the device comes first, then the vendor.
            device_id=int(device, 16) >> 16 if device.lower().startswith("0x") else 0,
        )


def intel_accelerators(
    root: Path, access: dict[str, Opening], *, start: int
) -> tuple[Accelerator, ...]:
    """Intel's GPUs with a driver, in the order of their addresses. `access`: of the render nodes.

    What is in use of their memory no file tells.
    """
    gpus = [gpu for gpu in read_intel(root / "sys") if gpu.node]
    return tuple(
        Accelerator(
            index=start + number,
            vendor="intel",
            name=gpu.name,
            arch=gpu.arch,
            memory_bytes=gpu.memory_bytes,
            node=gpu.node,
            access=access.get(gpu.node),
            pci_address=gpu.pci_address,
            device_id=gpu.device_id,
        )
        for number, gpu in enumerate(gpus)
    )


def display_devices(root: Path) -> tuple[Display, ...]:
    """Display and accelerator devices of the PCI bus, with or without a driver."""
    displays = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor, device = (
            file_text(folder / name).strip() for name in ("class", "vendor", "device")
        )
        if kind.startswith(DISPLAY_CLASSES) and whole_number(vendor):
            driver = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
            ids = {"vendor": whole_number(vendor), "device_id": whole_number(device)}
            displays.append(Display(address=folder.name, driver=driver, **ids))
    return tuple(displays)


CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16", "sve")
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size for no limit


def read_host(root: Path, folder: Path, access: Access) -> Host:
    """The host below `root`; runs are written to `folder`."""
    cpuinfo = file_text(root / "proc/cpuinfo")
    cpu = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    cpu_features = set(flags[1].split()) if flags else set()
    release = dict(
        re.findall(
            r'^(ID|VERSION_ID)="?([^"\n]*)"?$', file_text(root / "etc/os-release"), re.MULTILINE
        )
    )
    # torch.compile uses $CXX, else g++; another compiler works if CXX names it.
    compilers = (os.environ.get("CXX"), "g++", "c++", "clang++")
    runs = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    total, free = memory_bytes(root)
    return Host(
        system=platform.system(),
        cpu_name=cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        cpu_cores=usable_cores(root),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in cpu_features),
        memory_bytes=total,
        memory_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(runs).free,
        compiler=next((path for name in compilers if name and (path := shutil.which(name))), None),
        cpu_arch=platform.machine(),
        # Such as "debian 12".
        distribution=" ".join(filter(None, (release.get("ID"), release.get("VERSION_ID")))),
        displays=display_devices(root),
        driver=read_driver(root),
        access=access,
        around=read_surroundings(root),
    )


def usable_cores(root: Path) -> int:
    """Cores available to this process: its affinity, and the quota of the cgroup rounded down; at least one."""
    cores = [
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ]
    for folder in _cgroups(root, "cpu"):
        v2 = folder / "cpu.max"
        quota = folder / "cpu.cfs_quota_us"
        period = folder / "cpu.cfs_period_us"
        limit_texts = (
            file_text(v2).split() if v2.is_file() else [file_text(quota), file_text(period)]
        )
        quota_us, period_us = (
            whole_number(word) for word in (limit_texts if len(limit_texts) == 2 else ("", ""))
        )
        if quota_us > 0 and period_us > 0:  # "max" and -1: no limit
            cores.append(int(quota_us / period_us))
    return max(1, min(cores))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups of this process for `controller` and their parents, in cgroup v1 and v2."""
    base = root / "sys/fs/cgroup"
    table = root / "proc/self/cgroup"
    rows = (line.split(":", 2) for line in file_text(table).splitlines())
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        group = mount / path.lstrip("/")
        # A container without its own cgroup namespace sees the path of the host but mounts only its own group.
        yield from (
            folder
            for folder in (group, *group.parents)
            if folder.is_relative_to(mount) and folder.is_dir()
        )


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of the machine, or of the smallest control group around this process."""
    lines = re.findall(r"^(\w+):\s+(\d{1,20}) kB", file_text(root / "proc/meminfo"), re.MULTILINE)
    kib = {key: int(value) * 1024 for key, value in lines}
    total = kib.get("MemTotal", 0)
    free_bytes = kib.get("MemAvailable", kib.get("MemFree", 0))
    for folder in _cgroups(root, "memory"):
        # Page cache that the kernel frees on demand counts as used in the cgroup.
        stat = re.search(
            r"^(?:total_)?inactive_file (\d{1,20})$",
            file_text(folder / "memory.stat"),
            re.MULTILINE,
        )
        for limit_name, used_name in MEMORY_FILES:
            limit_bytes, used_bytes = (
                whole_number(file_text(folder / name), default=-1)
                for name in (limit_name, used_name)
            )
            if 0 <= limit_bytes < UNLIMITED:  # -1: missing, or "max"
                used_bytes = max(0, max(0, used_bytes) - (int(stat[1]) if stat else 0))
                total = min(total, limit_bytes)
                free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return total, free_bytes


def detect(*, root: Path = Path("/"), folder: Path | None = None) -> Machine:
    """The machine below `root`, with the cached probes of `bloomery doctor --probe`; runs are written to `folder`."""
    access, nodes = read_access(root)
    amd = amd_accelerators(root, nodes)
    host = read_host(root, folder or Path.cwd(), access)
    # An integrated GPU whose driver reports no memory (GB10: "[N/A]") shares all memory of the machine.
    nvidia = nvidia_accelerators(root, start=len(amd))
    intel = intel_accelerators(root, nodes, start=len(amd) + len(nvidia))
    devices = tuple(
        device.model_copy(update={"gtt_bytes": host.memory_bytes})
        if device.integrated and not device.usable_bytes
        else device
        for device in (*amd, *nvidia, *intel)
    )
    machine = Machine(accelerators=devices, host=host, software=read_software(root))
    return with_known_check(with_cached_probes(machine)) if root == Path("/") else machine
