"""What a process with the simulated device detects: GPUs of which the machine's system knows nothing.

`bloomery.hardware.detect` reads GPUs from the system's files and from nvidia-smi, and the build of PyTorch from its
package. Here its `detect` tells of the simulated GPUs instead, of a build for them, and of a driver that is open.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

from simulated_cards import cards, described, machine_file, vendor_of

MODULE = "bloomery.hardware.detect"
NODES = {"amd": "/dev/dri/renderD128"}
# What the build of PyTorch says. `simulated.py` has the same for PyTorch.
BUILDS = {
    "amd": {"torch": "2.13.0+rocm7.2", "build": "rocm", "hip": "7.2.53211"},
    "nvidia": {"torch": "2.13.0+cu130", "build": "cuda", "cuda": "13.0"},
}


class _WithDetection(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(place, self)
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            tell_of_simulated(module)

        spec.loader.exec_module = exec_module
        return spec


def tell_of_simulated(detection):
    from bloomery.hardware.machine import Accelerator, read_machine

    file = machine_file(described())
    recorded = None if file is None else read_machine(file)
    vendor = vendor_of(described())
    if vendor not in BUILDS:
        return
    accelerators = tuple(
        Accelerator(
            index=index,
            vendor=vendor,
            name=gpu.name,
            arch=gpu.arch,
            memory_bytes=gpu.num_bytes,
            node=NODES.get(vendor, ""),
            pci_address=f"0000:{index + 1:02x}:00.0",
            access="open",
            compute_units=gpu.units,
        )
        for index, gpu in enumerate(cards(described()))
    )
    plain = detection.detect

    def detect(*, root=Path("/"), folder=None):
        machine = plain(root=root, folder=folder)
        if root != Path("/"):  # a recorded tree
            return machine
        if recorded is not None:  # as it was recorded, but for what this process has
            host = recorded.host.model_copy(
                update={
                    name: getattr(machine.host, name)
                    for name in ("memory_bytes", "memory_free_bytes", "disk_free_bytes")
                }
            )
            return recorded.model_copy(update={"host": host})
        changes = {
            "accelerators": accelerators,
            "software": machine.software.model_copy(update=BUILDS[vendor]),
            "host": machine.host.model_copy(
                update={"access": machine.host.access.model_copy(update={"kfd": "open"})}
            ),
        }
        return detection.with_cached_probes(machine.model_copy(update=changes))

    detection.detect = detect


def install_with_detect():
    """From now on `import bloomery.hardware.detect` brings the GPUs that BLOOMERY_SIMULATED names."""
    sys.meta_path.insert(0, _WithDetection())
