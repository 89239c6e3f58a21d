"""What training would do on a machine, once it is mended: the last lines of `bloomery doctor`."""

from dataclasses import dataclass, replace
from typing import Any

from bloomery.cli.plan import document
from bloomery.errors import UserError
from bloomery.hardware.assume import best_device, with_gpu
from bloomery.hardware.doctor import ready
from bloomery.hardware.doctor_finding import Finding
from bloomery.hardware.doctor_torch import OVERRIDE
from bloomery.hardware.machine import Machine
from bloomery.plan.here import plan_here
from bloomery.plan.types import Plan
from bloomery.recipe.load import load_recipe
from bloomery.units import GIB, format_seconds

ROOM = 90  # of a line, behind its label
ON_A_GPU, ON_A_CPU = "go-coder-125m", "go-coder-tiny"


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A packaged recipe planned for a machine. `machine`: as it will be; `waits`: its GPU cannot be reached yet."""

    recipe: str
    machine: Machine
    plan: Plan | None
    problem: str = ""  # why there is no plan
    waits: bool = False
    alike: int = 0


def prospect(machine: Machine, findings: tuple[Finding, ...]) -> Prospect:
    """What training would choose, and whether a recipe fits: on the machine as it is when it is ready, else mended."""
    device, well = best_device(machine), ready(findings)
    known = device is not None or well or any(finding.id == "no-gpu" for finding in findings)
    recipe = ON_A_CPU if device is None else ON_A_GPU
    there = machine if well else mended(machine)
    alike = [one for one in machine.accelerators if device is not None and one.arch == device.arch]
    found = Prospect(recipe=recipe, machine=there, plan=None, waits=not known, alike=len(alike))
    try:
        return replace(found, plan=plan_here(load_recipe(recipe, ()), machine=there)[0])
    except UserError as error:
        return replace(found, problem=error.problem)


def then_lines(seen: Prospect) -> list[str]:
    """For people: one line, or two where one is too long."""
    if seen.plan is None:
        return [f"{seen.recipe} cannot be planned: {seen.problem}"]
    waits = ["what the GPU will do is said once it can be reached; the CPU could do this:"] if seen.waits else []
    choices, size = _choices(seen.plan), _size(seen.plan, seen.recipe, seen.alike)
    together = f"{choices} · {size}"
    return [*waits, *([together] if len(together) <= ROOM else [choices, size])]


def then_document(seen: Prospect) -> dict[str, Any]:
    """For programs: the keys of `plan --json`, null where nothing can be planned."""
    planned = {} if seen.plan is None else document(seen.plan, seen.machine)
    keys = ("fits", "memory", "seconds", "choices")
    told = {"recipe": seen.recipe, "waits": seen.waits, "problem": seen.problem}
    return told | {key: planned.get(key) for key in keys}


def mended(machine: Machine) -> Machine:
    """The machine with its best card open, the PyTorch that fits it and no override."""
    device = best_device(machine)
    if device is None:
        return machine
    host = machine.host
    access = host.access.model_copy(update={"kfd": "open"})
    opened = machine.model_copy(update={"host": host.model_copy(update={"access": access})})
    planned = with_gpu(opened, device.model_copy(update={"access": "open"}))
    kept = {name: value for name, value in planned.software.environment.items() if name != OVERRIDE}
    return planned.model_copy(update={"software": planned.software.model_copy(update={"environment": kept})})


def _choices(plan: Plan) -> str:
    decided = {decision.key: str(decision.value) for decision in plan.decisions}
    attention = decided["train.attention"].replace("_", " ")
    return f"{decided['train.precision']} · {attention} attention · {decided['train.compile']}"


def _size(plan: Plan, recipe: str, gpus: int) -> str:
    total, limit = plan.memory.total / GIB, plan.memory.limit / GIB
    one = f" on one of {gpus} GPUs" if gpus > 1 else ""
    said = f"{recipe} {'fits' if plan.fits else 'does not fit'}{one} ({total:.1f} of {limit:.1f} GiB)"
    return f"{said} · about {format_seconds(plan.seconds.value)}" if plan.seconds is not None and plan.fits else said
