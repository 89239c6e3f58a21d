"""What training would do on a machine, once it is mended: the last lines of `bloomery doctor`."""

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


def then_lines(machine: Machine, findings: tuple[Finding, ...]) -> list[str]:
    """The choices of the profile, and whether a packaged recipe fits: on the machine as it is when it is ready."""
    device, well = best_device(machine), ready(findings)
    known = device or well or any(finding.id == "no-gpu" for finding in findings)
    waits = [] if known else ["what the GPU will do is said once it can be reached; the CPU could do this:"]
    recipe = ON_A_CPU if device is None else ON_A_GPU
    try:
        plan, _ = plan_here(load_recipe(recipe, ()), machine=machine if well else mended(machine))
    except UserError as error:
        return [f"{recipe} cannot be planned: {error.problem}"]
    alike = [one for one in machine.accelerators if device is not None and one.arch == device.arch]
    choices, size = _choices(plan), _size(plan, recipe, len(alike))
    together = f"{choices} · {size}"
    return [*waits, *([together] if len(together) <= ROOM else [choices, size])]


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
