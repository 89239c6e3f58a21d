"""A machine with a GPU that is not here: what would be installed, nothing probed."""

import re

from bloomery.hardware.machine import Accelerator, Access, Machine, Software
from bloomery.hardware.visible import CUDA_ORDER, MASKS
from bloomery.hardware.wheels import TorchBuild, torch_builds


def fitting_build(device: Accelerator, python: str) -> TorchBuild:
    """The build of PyTorch that set-up would choose for this GPU."""
    major, minor = (int(part) for part in python.split(".")[:2])
    return torch_builds(device.arch, python=(major, minor))[0]


def with_gpu(machine: Machine, device: Accelerator) -> Machine:
    """This machine with `device` as its only accelerator and the PyTorch that fits it; masks of its own cards go."""
    wanted = fitting_build(device, machine.software.python).requirement
    version = re.search(r"==(.+)", wanted)
    said = machine.software.environment.items()
    software = Software(
        python=machine.software.python,
        torch=version[1] if version else None,
        build="rocm" if device.vendor == "amd" else "cuda",
        environment={name: value for name, value in said if name not in (*MASKS, CUDA_ORDER)},
    )
    host = machine.host.model_copy(update={"access": Access()})  # what may be opened here says nothing of that GPU
    return machine.model_copy(update={"accelerators": (device,), "host": host, "software": software, "probes": ()})
