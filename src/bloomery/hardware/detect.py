"""What this machine is, read from the system's own files: no torch, no driver library, nothing that can hang."""

from pathlib import Path

from bloomery.hardware.detect_gpus import amd_accelerators, nvidia_accelerators
from bloomery.hardware.detect_host import read_host
from bloomery.hardware.detect_software import read_software
from bloomery.hardware.detect_system import read_access
from bloomery.hardware.machine import Machine
from bloomery.hardware.probes import remembering


def detect(*, root: Path = Path("/"), folder: Path | None = None) -> Machine:
    """The machine below `root` (tests give a constructed tree); `folder` is where runs will be written.

    What `bloomery doctor --probe` found out here earlier is part of it.
    """
    access, nodes = read_access(root)
    cards = amd_accelerators(root, nodes)
    machine = Machine(
        accelerators=(*cards, *nvidia_accelerators(root, start=len(cards))),
        host=read_host(root, folder or Path.cwd(), access),
        software=read_software(root),
    )
    return remembering(machine) if root == Path("/") else machine
