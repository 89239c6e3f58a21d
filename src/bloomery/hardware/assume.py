"""The PyTorch that fits a GPU, and a machine with a GPU that is not here: what would be installed, nothing probed."""

import re

from bloomery.hardware.machine import Accelerator, Access, Machine, Software
from bloomery.hardware.visible import CUDA_ORDER, MASKS
from bloomery.hardware.wheels import TorchBuild, torch_builds


def fitting_builds(machine: Machine, device: Accelerator | None) -> list[TorchBuild]:
    """The builds of PyTorch that fit `device` in this machine, the best first; never empty."""
    major, minor = (int(part) for part in machine.software.python.split(".")[:2])
    driver = machine.host.driver.nvidia.partition(".")[0]
    return torch_builds(
        device.arch if device else None,
        python=(major, minor),
        system=machine.host.system,
        processor=machine.host.processor,
        driver=int(driver) if driver.isdigit() else None,
        site=machine.host.around.site,
    )


def with_gpu(machine: Machine, device: Accelerator) -> Machine:
    """This machine with `device` as its only accelerator and the PyTorch that fits it; masks of its own cards go."""
    wanted = fitting_builds(machine, device)[0].requirement
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
