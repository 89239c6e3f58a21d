"""Processor, memory and disk as this process may use them: the machine's, or its control group's share."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bloomery.core.child import output_of
from bloomery.hardware.detect.kfd import KfdNode, number_of, read_kfd, text_of
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
    """AMD's GPUs in the order of the kernel's topology, which is HIP's. `access`: what render nodes answered."""
    names = _amdgpu_ids(root)
    return tuple(_accelerator(root, index, node, names, access) for index, node in enumerate(read_kfd(root / "sys")))


def _accelerator(
    root: Path, index: int, node: KfdNode, names: dict[tuple[int, int], str], access: dict[str, Opening]
) -> Accelerator:
    render = f"/dev/dri/renderD{node.render_minor}"
    return Accelerator(
        index=index,
        vendor="amd",
        name=names.get((node.device_id, node.revision)) or _product(root, node) or node.arch,
        arch=node.arch,
        memory_bytes=node.memory_bytes,
        memory_used_bytes=node.memory_used_bytes,
        integrated=node.integrated,
        node=render,
        access=access.get(render),
        pci_address=node.pci_address,
        device_id=node.device_id,
        unique_id=node.unique_id,
        compute_units=node.compute_units,
        gtt_bytes=node.gtt_bytes,
        hive_id=node.hive_id,
    )


def _product(root: Path, node: KfdNode) -> str:
    """What the card's own memory says it is: Instinct and PRO cards have such a chip."""
    return text_of(root / f"sys/class/drm/renderD{node.render_minor}/device/product_name").strip()[:LONGEST_NAME]


def _amdgpu_ids(root: Path) -> dict[tuple[int, int], str]:
    """(PCI device, revision) -> product, from libdrm's table where it is installed."""
    line = re.compile(r"^([0-9A-Fa-f]{4}),\s*([0-9A-Fa-f]{2}),\s*(.+?)\s*$", re.MULTILINE)
    rows = (row for name in NAME_TABLES for row in line.findall(text_of(root / name)))
    return {(int(device, 16), int(revision, 16)): name for device, revision, name in rows}


def nvidia_accelerators(root: Path, *, start: int) -> tuple[Accelerator, ...]:
    """What nvidia-smi lists; none when it is absent, fails or takes too long."""
    program = shutil.which("nvidia-smi")
    if program is None or not any((root / trace).exists() for trace in NVIDIA_TRACES):
        return ()
    query = [program, "--query-gpu=" + ",".join(NVIDIA_FIELDS), "--format=csv,noheader,nounits"]
    return tuple(parse_nvidia_smi(output_of(query, seconds=NVIDIA_SECONDS) or "", start=start))


def parse_nvidia_smi(text: str, *, start: int = 0) -> Iterator[Accelerator]:
    """Rows of `nvidia-smi --query-gpu` (csv, no header, no units; memory in MiB) as devices."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(NVIDIA_FIELDS) or not fields[0].isdigit():
            continue
        number, name, total, used, capability, address, device = fields
        integrated = not total.isdigit()  # "[N/A]": memory shared with the processor
        yield Accelerator(
            index=start + int(number),
            vendor="nvidia",
            name=name,
            arch="sm_" + capability.replace(".", ""),
            memory_bytes=0 if integrated else int(total) * 2**20,
            memory_used_bytes=int(used) * 2**20 if used.isdigit() else 0,
            integrated=integrated,
            pci_address=address.lower()[-12:],  # the domain has eight digits here and four everywhere else
            device_id=int(device, 16) >> 16 if device.lower().startswith("0x") else 0,  # 0x233510DE: device, vendor
        )


def display_devices(root: Path) -> tuple[Display, ...]:
    """Display and accelerator devices of the PCI bus: also those that no driver has."""
    return tuple(found for folder in sorted((root / "sys/bus/pci/devices").glob("*")) if (found := _display(folder)))


def _display(folder: Path) -> Display | None:
    kind, vendor, device = (text_of(folder / name).strip() for name in ("class", "vendor", "device"))
    if not kind.startswith(DISPLAY_CLASSES) or not number_of(vendor):
        return None
    link = folder / "driver"
    driver = link.resolve().name if link.exists() else ""
    return Display(address=folder.name, vendor=number_of(vendor), device_id=number_of(device), driver=driver)


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


def detect(*, root: Path = Path("/"), folder: Path | None = None) -> Machine:
    """The machine below `root` (tests give a constructed tree); `folder` is where runs will be written.

    What `bloomery doctor --probe` found out here earlier is part of it.
    """
    access, nodes = read_access(root)
    cards = amd_accelerators(root, nodes)
    host = read_host(root, folder or Path.cwd(), access)
    machine = Machine(
        accelerators=tuple(_sized(each, host) for each in (*cards, *nvidia_accelerators(root, start=len(cards)))),
        host=host,
        software=read_software(root),
    )
    return with_cached_probes(machine) if root == Path("/") else machine


def _sized(device: Accelerator, host: Host) -> Accelerator:
    """An integrated device of whose memory its driver says nothing (GB10: "[N/A]") shares all of the machine's."""
    shares = device.integrated and not device.usable_bytes
    return device.model_copy(update={"gtt_bytes": host.memory_bytes}) if shares else device
