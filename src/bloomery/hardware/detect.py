"""What this machine is, read from the system's own files: no torch, no driver library, nothing that can hang."""

from pathlib import Path

from bloomery.hardware.detect_gpus import amd_accelerators, nvidia_accelerators
from bloomery.hardware.detect_host import read_host
from bloomery.hardware.detect_software import read_software
from bloomery.hardware.detect_system import read_access
from bloomery.hardware.machine import Accelerator, Host, Machine
from bloomery.hardware.probes import remembering


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
    return remembering(machine) if root == Path("/") else machine


def _sized(device: Accelerator, host: Host) -> Accelerator:
    """An integrated device of whose memory its driver says nothing (GB10: "[N/A]") shares all of the machine's."""
    shares = device.integrated and not device.usable_bytes
    return device.model_copy(update={"gtt_bytes": host.memory_bytes}) if shares else device
