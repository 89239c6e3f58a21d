"""GPUs, CPU, memory and disk available to this process: those of the machine, or the limits of its control group."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.core.child import output_of
from bloomery.hardware.detect.kfd import number_of, read_kfd, text_of
from bloomery.hardware.detect.software import read_software
from bloomery.hardware.detect.system import read_access, read_driver, read_surroundings
from bloomery.hardware.machine import Accelerator, Access, Display, Host, Machine, Opening
from bloomery.hardware.probes.run import with_cached_probes

NVIDIA_FIELDS = ("index", "name", "memory.total", "memory.used", "compute_cap", "pci.bus_id", "pci.device_id")
NVIDIA_SECONDS = 5
NVIDIA_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvhost-gpu", "dev/dxg")  # of a loaded driver
NAME_TABLES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
LONGEST_NAME = 100
DISPLAY_CLASSES = ("0x03", "0x1200")  # display controllers, processing accelerators


def amd_accelerators(root: Path, access: dict[str, Opening]) -> tuple[Accelerator, ...]:
    """AMD GPUs in the order of the kernel's topology, which HIP uses too. `access`: of the render nodes."""
    line = re.compile(r"^([0-9A-Fa-f]{4}),\s*([0-9A-Fa-f]{2}),\s*(.+?)\s*$", re.MULTILINE)  # of libdrm's amdgpu.ids
    rows = (row for table in NAME_TABLES for row in line.findall(text_of(root / table)))
    names = {(int(device, 16), int(revision, 16)): name for device, revision, name in rows}
    devices = []
    for index, node in enumerate(read_kfd(root / "sys")):
        render = f"/dev/dri/renderD{node.render_minor}"
        product = root / f"sys/class/drm/renderD{node.render_minor}/device/product_name"  # Instinct and PRO
        listed = names.get((node.device_id, node.revision)) or text_of(product).strip()[:LONGEST_NAME]
        facts: dict[str, Any] = {**vars(node), "name": listed or node.arch, "node": render}
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
            pci_address=address.lower()[-12:],  # nvidia-smi prints a domain of eight digits, others four
            device_id=int(device, 16) >> 16 if device.lower().startswith("0x") else 0,  # 0x233510DE: device, vendor
        )


def display_devices(root: Path) -> tuple[Display, ...]:
    """Display and accelerator devices of the PCI bus, with or without a driver."""
    displays = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor, device = (text_of(folder / name).strip() for name in ("class", "vendor", "device"))
        if kind.startswith(DISPLAY_CLASSES) and number_of(vendor):
            driver = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
            ids = {"vendor": number_of(vendor), "device_id": number_of(device)}
            displays.append(Display(address=folder.name, driver=driver, **ids))
    return tuple(displays)


CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16", "sve")
MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size for no limit


def read_host(root: Path, folder: Path, access: Access) -> Host:
    """The host below `root`; runs are written to `folder`."""
    cpuinfo = text_of(root / "proc/cpuinfo")
    cpu = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    release = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', text_of(root / "etc/os-release"), re.MULTILINE))
    # torch.compile uses $CXX, else g++; another compiler works if CXX names it.
    compilers = (os.environ.get("CXX"), "g++", "c++", "clang++")
    runs = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    total, free = _memory(root)
    return Host(
        system=platform.system(),
        cpu_name=cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        cpu_cores=_cores(root),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in present),
        memory_bytes=total,
        memory_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(runs).free,
        compiler=next((path for name in compilers if name and (path := shutil.which(name))), None),
        cpu_arch=platform.machine(),
        distribution=" ".join(filter(None, (release.get("ID"), release.get("VERSION_ID")))),  # debian 12
        displays=display_devices(root),
        driver=read_driver(root),
        access=access,
        around=read_surroundings(root),
    )


def _cores(root: Path) -> int:
    """Cores available to this process: its affinity, and the quota of the cgroup rounded down; at least one."""
    cores = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _cgroups(root, "cpu"):
        v2, quota, period = folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        words = text_of(v2).split() if v2.is_file() else [text_of(quota), text_of(period)]
        share, whole = (number_of(word) for word in (words if len(words) == 2 else ("", "")))
        if share > 0 and whole > 0:  # "max" and -1: no limit
            cores.append(int(share / whole))
    return max(1, min(cores))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups of this process for `controller` and their parents, in cgroup v1 and v2."""
    base, table = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    rows = (line.split(":", 2) for line in text_of(table).splitlines())
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        group = mount / path.lstrip("/")
        # A container without its own cgroup namespace sees the path of the host but mounts only its own group.
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _memory(root: Path) -> tuple[int, int]:
    """(total, free) bytes of the machine, or of the smallest control group around this process."""
    lines = re.findall(r"^(\w+):\s+(\d{1,20}) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    kib = {key: int(value) * 1024 for key, value in lines}
    total, free = kib.get("MemTotal", 0), kib.get("MemAvailable", kib.get("MemFree", 0))
    for folder in _cgroups(root, "memory"):
        # Page cache that the kernel frees on demand counts as used in the cgroup.
        stat = re.search(r"^(?:total_)?inactive_file (\d{1,20})$", text_of(folder / "memory.stat"), re.MULTILINE)
        for limit_name, used_name in MEMORY_FILES:
            limit, used = (number_of(text_of(folder / name), default=-1) for name in (limit_name, used_name))
            if 0 <= limit < UNLIMITED:  # -1: missing, or "max"
                used = max(0, max(0, used) - (int(stat[1]) if stat else 0))
                total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def detect(*, root: Path = Path("/"), folder: Path | None = None) -> Machine:
    """The machine below `root`, with the cached probes of `bloomery doctor --probe`; runs are written to `folder`."""
    access, nodes = read_access(root)
    amd = amd_accelerators(root, nodes)
    host = read_host(root, folder or Path.cwd(), access)
    # An integrated GPU whose driver reports no memory (GB10: "[N/A]") shares all memory of the machine.
    devices = tuple(
        one.model_copy(update={"gtt_bytes": host.memory_bytes}) if one.integrated and not one.usable_bytes else one
        for one in (*amd, *nvidia_accelerators(root, start=len(amd)))
    )
    machine = Machine(
        accelerators=devices,
        host=host,
        software=read_software(root),
    )
    return with_cached_probes(machine) if root == Path("/") else machine
