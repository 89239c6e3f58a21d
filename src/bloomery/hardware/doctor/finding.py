"""What the doctor found: one thing that stops or slows training or is worth knowing, with what mends it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bloomery.hardware.doctor.symptoms import Level, vendors
from bloomery.hardware.fitting import best_device, fitting_builds, install
from bloomery.hardware.machine import Machine

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


def has_amd(machine: Machine) -> bool:
    return "amd" in vendors(machine)


def install_steps(machine: Machine, *, anew: bool = True) -> tuple[str, ...]:
    """What a cluster loads before, then `install` with the reason where it leaves the GPU idle."""
    device = best_device(machine)
    build = fitting_builds(machine, device)[0]
    remark = f"  # for the CPU: {build.because}" if build.cpu and device is not None else ""
    return (*build.before, install(machine, anew=anew) + remark)


def installs(machine: Machine) -> tuple[Fix, ...]:
    """`install` as something that `--fix` may do; nothing where only the CPU's build is left."""
    cpu = best_device(machine) is not None and fitting_builds(machine, best_device(machine))[0].cpu
    return () if cpu else (Fix(kind="pip", command=install(machine)),)
