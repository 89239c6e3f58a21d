"""The link between a GPU and the memory of its host: measured, else by the GPU's entry in gpus.toml.

Does not import torch.
"""

import re
from dataclasses import dataclass

from bloomery.hardware.link_rates import measured_host_link
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile

# Bytes that a CPU's optimizer moves per second: two channels of DDR4-3200 give 35 of their 51 GB/s.
HOST_GBS = 35.0
DISK_GBS = 3.0  # of files, assumed: an NVMe drive on PCIe 3 or 4
HOST_CORES = 8  # assumed where the host is not here
# What a copy from memory that is not pinned reaches of one that is: 12.9 to 18 of 23.9 GB/s on an RTX 4090.
PAGEABLE_SHARE = 0.55


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """GB/s of copies between a GPU and pinned memory of its host, per direction.

    `both_gbs`: of each direction while both copy. `pageable_gbs`: from memory that is not pinned, through buffers that
    are; `disk_gbs`: from files. `host_gbs`: of an update on the CPU, bytes read and written, by `host_cores`, with
    compiled code or without. `spread`: the factor by which copies may be slower or faster.
    """

    to_device_gbs: float
    from_device_gbs: float
    both_gbs: float
    pageable_gbs: float
    disk_gbs: float
    host_gbs: float
    host_cores: int
    host_compiles: bool
    reason: str
    spread: float

    @property
    def text(self) -> str:
        return f"{self.to_device_gbs:g} GB/s ({self.reason})"


# By a pattern of the GPU table's entry, the first that matches: GB/s per direction, and the reason.
_BY_LINK: tuple[tuple[str, float, str], ...] = (
    (r"^APU$", 0.0, "one memory"),
    (r"NVLink[45]", 48.0, "assumed: PCIe 5 with 16 lanes, 76% of 63 GB/s"),
    (r"GCD-GCD", 27.0, "assumed: Infinity Fabric to the CPU, 75% of 36 GB/s"),
    (r"7x xGMI|PCIe5(?!x8)", 48.0, "assumed: PCIe 5 with 16 lanes, 76% of 63 GB/s"),
    (r"PCIe5x8|PCIe4(?!x8)|NVLink3|xGMI", 24.0, "assumed: PCIe 4 with 16 lanes, 76% of 31.5 GB/s"),
    (r"PCIe4x8", 12.0, "assumed: PCIe 4 with 8 lanes, 76% of 15.8 GB/s"),
    (r"PCIe3|NVLink2", 12.0, "assumed: PCIe 3 with 16 lanes, 76% of 15.8 GB/s"),
)
ASSUMED_SPREAD = 1.25  # the slot of the owner's board may be narrower
MEASURED_SPREAD = 1.05
BOTH_SHARE = 0.85  # of a direction alone: 48.2 of 28.4 + 29.0 GB/s on an RX 7900 XTX


def host_link(profile: Profile, machine: Machine) -> HostLink | None:
    """None without a GPU that has memory of its own, and for one that the table does not have."""
    device = profile.accelerator
    gpu = profile.gpu
    if device is None or device.integrated or gpu is None:
        return None
    is_here = machine.host.memory_origin == "read"
    rates = dict(gpu.host_gbs)
    reason = "published measurement of such a GPU"
    measured = measured_host_link(machine) if is_here else None
    if measured is not None:
        rates, reason = measured
    if not rates:
        rate, reason = next(
            ((rate, reason) for pattern, rate, reason in _BY_LINK if re.search(pattern, gpu.link)),
            (0.0, ""),
        )
        rates = {"to_device": rate, "from_device": rate}
    if not rates["to_device"]:
        return None

    # Of the host of a GPU that is planned for nothing is known but what a machine with such a GPU usually has.
    to_device = rates["to_device"]
    both = rates.get("both", BOTH_SHARE * (to_device + rates["from_device"]))
    return HostLink(
        to_device_gbs=to_device,
        from_device_gbs=rates["from_device"],
        both_gbs=both / 2,
        pageable_gbs=rates.get("pageable", PAGEABLE_SHARE * to_device),
        disk_gbs=DISK_GBS,
        host_gbs=HOST_GBS,
        host_cores=machine.host.cpu_cores if is_here else HOST_CORES,
        host_compiles=not is_here or machine.host.compiler is not None,
        reason=reason,
        spread=ASSUMED_SPREAD if measured is None else MEASURED_SPREAD,
    )
