"""The GPUs that BLOOMERY_SIMULATED names. Imports no torch.

"amd", "nvidia" or "intel", then the number of devices and the GiB of each: "amd,2,4". Devices of different sizes:
"amd,24+12". A product of hardware/gpus.toml: "amd:RX 6700 XT,1,12". A recorded machine of tests/machines:
"mi300x-node", whose GPUs have the sizes that it names (no byte of them is taken before it is used).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

MACHINES = Path(__file__).parent.parent / "machines"


@dataclass(frozen=True)
class Card:
    vendor: str
    name: str
    arch: str  # gfx942, sm_90
    num_bytes: int
    units: int = 0
    has_fused_attention: bool = True

    @property
    def capability(self) -> tuple[int, int]:
        """As torch.cuda tells it: (9, 4) of gfx942, (10, 3) of gfx1031, (12, 0) of sm_120."""
        digits = self.arch.partition("_")[2] or self.arch.removeprefix("gfx")[:-1]
        return (int(digits[:-1]), int(digits[-1], 16)) if digits.isalnum() else (0, 0)


PLAYED = {
    "amd": Card("amd", "AMD Instinct MI300X", "gfx942", 0, 304),
    "nvidia": Card("nvidia", "NVIDIA H100 80GB HBM3", "sm_90", 0, 132),
    "intel": Card("intel", "Intel(R) Arc(TM) B580 Graphics", "bmg-g21", 0, 160),
}


def machine_file(description: str) -> Path | None:
    file = MACHINES / f"{description}.json"
    return file if description and "," not in description and file.is_file() else None


def described() -> str:
    return os.environ.get("BLOOMERY_SIMULATED", "")


def vendor_of(description: str) -> str:
    file = machine_file(description)
    if file is not None:
        return str(json.loads(file.read_text())["accelerators"][0]["vendor"])
    return description.partition(",")[0].partition(":")[0]


def cards(description: str) -> list[Card]:
    file = machine_file(description)
    if file is not None:
        return [
            _of_table(found["vendor"], found["name"], found["arch"], found["memory_bytes"])
            for found in json.loads(file.read_text())["accelerators"]
        ]
    head, *sizes = description.split(",")
    vendor, _, product = head.partition(":")
    sizes = [sizes[1]] * int(sizes[0]) if len(sizes) == 2 else sizes[0].split("+")
    card = PLAYED[vendor]
    if product:
        from bloomery.hardware.specs import find_gpu

        found = find_gpu(product)
        card = _of_table(vendor, found.name, found.arch, 0)
    return [
        Card(
            card.vendor,
            card.name,
            card.arch,
            int(float(size) * 2**30),
            card.units,
            card.has_fused_attention,
        )
        for size in sizes
    ]


def _of_table(vendor: str, name: str, arch: str, num_bytes: int) -> Card:
    """With what hardware/gpus.toml says of its architecture."""
    from bloomery.hardware.specs import arch_spec

    spec = arch_spec(arch)
    fused = spec is not None and spec.fused_attention != "none"
    return Card(vendor, name, arch, num_bytes, has_fused_attention=fused)
