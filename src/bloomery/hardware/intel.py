"""Intel's GPUs on the PCI bus, by their device IDs in gpus.toml. Standard library only: set-up uses it.

Their drivers (xe, i915) name neither product nor architecture. Graphics in a processor of Intel's are not listed there:
nothing is known of them, and no training is planned on them.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bloomery.hardware.kfd import file_text, whole_number

INTEL_VENDOR = 0x8086
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class IntelGpu:
    """One device as Level Zero lists it; fields as in `Accelerator`. A Max 1550 has two stacks, each a device."""

    name: str
    arch: str
    device_id: int
    pci_address: str
    memory_bytes: int
    node: str  # /dev/dri/renderD128; empty without a driver
    driver: str  # xe, i915; empty: none


@cache
def listed_products() -> dict[int, dict[str, Any]]:
    """The rows of gpus.toml with device IDs, by these; with the architecture of their line."""
    text = Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    return {
        device_id: gpu | {"arch": line["arch"]}
        for line in tomllib.loads(text)["line"]
        for gpu in line["gpus"]
        for device_id in gpu.get("pci", ())
    }


def read_intel(root: Path = Path("/sys")) -> tuple[IntelGpu, ...]:
    """The listed GPUs of Intel below `root` in the order of their addresses, with or without a driver."""
    folders = sorted((root / "bus/pci/devices").glob("*"))
    return tuple(gpu for folder in folders for gpu in _devices_of(folder))


def _devices_of(folder: Path) -> Iterator[IntelGpu]:
    vendor, device_id = (whole_number(file_text(folder / name)) for name in ("vendor", "device"))
    product = listed_products().get(device_id) if vendor == INTEL_VENDOR else None
    if product is None:
        return
    nodes = sorted((folder / "drm").glob("renderD*"))
    driver = folder / "driver"
    for _ in range(product.get("dies_per_board", 1)):
        yield IntelGpu(
            name=product["name"],
            arch=product["arch"],
            device_id=device_id,
            pci_address=folder.name,
            memory_bytes=_memory_bytes(folder, product["gib"]),
            node=f"/dev/dri/{nodes[0].name}" if nodes else "",
            driver=driver.resolve().name if driver.exists() else "",
        )


def _memory_bytes(folder: Path, sizes_gib: list[int]) -> int:
    """The variant of a product that has the size of its largest window on the bus; the smallest where none has.

    With a resizable BAR, which Intel asks for, the window is all of the memory. `resource` has a line for each window:
    first address, last address, flags.
    """
    windows = [line.split() for line in file_text(folder / "resource").splitlines()]
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in windows if int(end, 16)]
    largest = max(sizes, default=0)
    return next((gib for gib in sizes_gib if gib * GIB == largest), sizes_gib[0]) * GIB
