"""What the doctor found: one thing that stops or slows training or is worth knowing, with what mends it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.symptoms import Level, vendors
from bloomery.hardware.wheels import TorchBuild, torch_builds

PROBE = "bloomery doctor --probe"
AGAIN = "bloomery doctor"
NUMBER = "{number}"  # in `mend`: the number that the finding gets in the list


@dataclass(frozen=True, kw_only=True)
class Fix:
    """What `doctor --fix` may do: pin torch in pip's constraints, silence a line of a shell file, call pip."""

    kind: Literal["pin", "unset", "pip"]
    command: str = ""  # pip install ..., as it stands in `mend`
    name: str = ""  # of the variable
    file: str = ""  # the home folder as ~
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`mend`: lines for a shell, what they do after two blanks and a #. `fixes`: what `doctor --fix` may do itself."""

    id: str
    level: Level
    what: str
    evidence: str
    mend: tuple[str, ...]
    prove: str = AGAIN
    fixes: tuple[Fix, ...] = ()


Rule = Callable[[Machine], Iterator[Finding]]


def best_device(machine: Machine) -> Accelerator | None:
    """The card that training is meant for: no processor graphics where there is another, the most memory."""
    devices = machine.accelerators
    return max(devices, key=lambda one: (not one.integrated, one.usable_bytes, -one.index), default=None)


def has_amd(machine: Machine) -> bool:
    return "amd" in vendors(machine)


def fitting_builds(machine: Machine, device: Accelerator | None) -> list[TorchBuild]:
    """The builds of PyTorch that fit `device`, the best first."""
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


def installs(machine: Machine) -> tuple[Fix, ...]:
    """`install` as something that `--fix` may do; nothing where only the CPU's build is left."""
    cpu = best_device(machine) is not None and fitting_builds(machine, best_device(machine))[0].cpu
    return () if cpu else (Fix(kind="pip", command=install(machine)),)
