"""Recorded machines with one thing changed, and what the doctor finds on them."""

from pathlib import Path

from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.machine import Machine, read_machine

MACHINES = Path(__file__).parent / "machines"
AMD_WHEEL = (
    "pip install --force-reinstall --index-url https://stable.repo.amd.com/rocm/whl-next/ "
    "'torch[device-gfx1031]==2.13.0+rocm10.0.0'"
)


def machine(name: str = "rx-6700-xt", **changed) -> Machine:
    """A recorded machine, changed: `software__torch="2.13.0"`, `host__driver__boot=""`, `accelerators=()`."""
    found = read_machine(MACHINES / f"{name}.json")
    for path, value in changed.items():
        found = changed_part(found, path.split("__"), value)
    return found


def changed_part(part, path, value):
    name, *rest = path
    return part.model_copy(
        update={name: changed_part(getattr(part, name), rest, value) if rest else value}
    )


def ids(one: Machine) -> list[str]:
    return [finding.id for finding in diagnose(one)]


def only(one: Machine, id: str):
    (found,) = [finding for finding in diagnose(one) if finding.id == id]
    return found
