"""AMD GPUs in the topology of the kernel's compute driver. Standard library only: used before anything is installed.

Source of the format: drivers/gpu/drm/amd/amdkfd/kfd_topology.c (`node_show`, `mem_show`). The kernel writes them,
so HSA_OVERRIDE_GFX_VERSION has no effect here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

AMD_VENDOR = 0x1002
TOPOLOGY = "class/kfd/kfd/topology/nodes"


@dataclass(frozen=True, kw_only=True)
class KfdNode:
    """One GPU of the topology; fields as in `Accelerator`. A GCD of an MI250X has 110 of its own compute units."""

    arch: str
    device_id: int
    revision: int
    render_minor: int
    compute_units: int
    memory_bytes: int
    memory_used_bytes: int
    integrated: bool
    pci_address: str
    gtt_bytes: int = 0  # system memory available to the GPU
    unique_id: str = ""  # of the die
    hive_id: str = ""  # of the dies connected by xGMI


def gfx_name(version: int) -> str:
    """100301 -> gfx1031, 90010 -> gfx90a: decimal major; minor and stepping as one hexadecimal digit each."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def read_kfd(root: Path = Path("/sys")) -> tuple[KfdNode, ...]:
    """The AMD GPUs below `root` in the order of the topology, without those hidden from a container."""
    folder = root / TOPOLOGY
    if not folder.is_dir():
        return ()
    folders = sorted(
        (path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    return tuple(node for path in folders if (node := _read_node(root, path)) is not None)


def masked_gpus(root: Path = Path("/sys")) -> int:
    """GPUs that the kernel lists and the control group of this process hides: reading them fails with EPERM."""
    count = 0
    for path in (root / TOPOLOGY).glob("[0-9]*/properties"):
        try:
            path.read_text(errors="replace")
        except PermissionError:
            count += 1
        except OSError:  # a node that disappears while it is read is not hidden
            continue
    return count


def file_text(path: Path) -> str:
    """The content of a system file, with invalid UTF-8 replaced; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def whole_number(text: str, default: int = 0) -> int:
    """A number in decimal or 0x form of at most 20 digits; otherwise `default`."""
    match = re.fullmatch(r"\s*(0[xX][0-9a-fA-F]{1,16}|\d{1,20})\s*", text)
    return int(match[1], 16 if match[1][:2].lower() == "0x" else 10) if match else default


def _read_node(root: Path, folder: Path) -> KfdNode | None:
    facts = _properties(folder / "properties")
    if facts.get("gfx_target_version", 0) == 0 or facts.get("vendor_id") != AMD_VENDOR:
        return None
    minor = facts.get("drm_render_minor", 0)
    bus = facts.get("location_id", 0)
    device = root / f"class/drm/renderD{minor}/device"
    # Memory banks that are not system memory (heap_type 0); `local_mem_size` is always 0.
    banks = [
        _properties(bank / "properties") for bank in sorted((folder / "mem_banks").glob("[0-9]*"))
    ]
    local = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type", 0) != 0)
    return KfdNode(
        arch=gfx_name(facts["gfx_target_version"]),
        device_id=facts.get("device_id", 0),
        revision=_integer(device / "revision"),
        render_minor=minor,
        compute_units=facts.get("simd_count", 0) // max(1, facts.get("simd_per_cu", 1)),
        memory_bytes=_integer(device / "mem_info_vram_total") or local,
        memory_used_bytes=_integer(device / "mem_info_vram_used"),
        integrated=facts.get("cpu_cores_count", 0) > 0 or facts["gfx_target_version"] in INTEGRATED,
        pci_address=f"{facts.get('domain', 0):04x}:{bus >> 8 & 0xFF:02x}:{bus >> 3 & 0x1F:02x}.{bus & 7}",
        gtt_bytes=_integer(device / "mem_info_gtt_total"),
        unique_id=_identity(facts.get("unique_id", 0)),
        hive_id=_identity(facts.get("hive_id", 0)),
    )


# Integrated GPUs that Linux lists as nodes of their own. Detection adds those of gpus.toml, which set-up does not read.
INTEGRATED = frozenset(
    (90012, 100303, 100305, 100306, 100307, 110003, 110500, 110501, 110502, 110503)
)


def _properties(path: Path) -> dict[str, int]:
    """`key value` lines; empty for a device hidden by the control group (EPERM)."""
    return {
        key: int(value)
        for key, value in re.findall(r"^(\w+) (\d{1,20})$", file_text(path), re.MULTILINE)
    }


def _identity(number: int) -> str:
    return hex(number) if number else ""


def _integer(path: Path) -> int:
    return whole_number(file_text(path))
