"""The PyTorch that fits a GPU, and a machine with a GPU that is not here: what would be installed, nothing probed."""

import re

from bloomery.hardware.machine import Accelerator, Access, Machine, Software
from bloomery.hardware.specs.wheels import TorchBuild, torch_builds
from bloomery.hardware.visible import CUDA_ORDER, MASKS


def best_device(machine: Machine) -> Accelerator | None:
    """The card that training is meant for: no processor graphics where there is a card, of cards those that the
    installed PyTorch was built for, of those the most memory."""
    maker = {"rocm": "amd", "cuda": "nvidia"}.get(machine.software.build or "")
    return max(
        machine.accelerators,
        key=lambda one: (not one.integrated, one.vendor == maker, one.usable_bytes, -one.index),
        default=None,
    )


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


def install(machine: Machine, *, anew: bool = True) -> str:
    """The command that installs the fitting build; `anew`: over another build of that version, which pip would keep."""
    command = fitting_builds(machine, best_device(machine))[0].command
    if anew:
        command = command.replace("pip install ", "pip install --force-reinstall ", 1)
    return "PIP_CONSTRAINT=/dev/null " + command if machine.software.pinned else command  # the pin names the old build


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
