"""The accelerators of this machine, and the display devices on its bus, from the kernel's files and nvidia-smi."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bloomery.hardware.ask import ask
from bloomery.hardware.kfd import KfdNode, number_of, read_kfd, text_of
from bloomery.hardware.machine import Accelerator, Display, Opening

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
    return tuple(parse_nvidia_smi(ask(query, seconds=NVIDIA_SECONDS) or "", start=start))


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
