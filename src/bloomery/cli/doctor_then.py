"""What training would do on a machine, once it is mended: the last lines of `bloomery doctor`."""

from collections.abc import Iterator

from bloomery.errors import UserError
from bloomery.hardware.assume import with_gpu
from bloomery.hardware.doctor_finding import best_device
from bloomery.hardware.machine import Machine
from bloomery.plan.here import plan_here
from bloomery.plan.types import Plan
from bloomery.recipe.load import load_recipe
from bloomery.units import GIB, format_seconds

ON_A_GPU, ON_A_CPU = "go-coder-125m", "go-coder-tiny"


def then_lines(machine: Machine, *, ready: bool) -> list[str]:
    """The choices of the profile, and whether a packaged recipe fits: on the machine as it is when it is ready."""
    device = best_device(machine)
    assumed = machine if ready or device is None else with_gpu(machine, device)
    recipe = ON_A_CPU if device is None else ON_A_GPU
    try:
        plan, _ = plan_here(load_recipe(recipe, ()), machine=assumed)
    except UserError as error:
        return [f"{recipe} cannot be planned: {error.problem}"]
    return [" · ".join(_parts(plan, recipe))]


def _parts(plan: Plan, recipe: str) -> Iterator[str]:
    decided = {decision.key: decision.value for decision in plan.decisions}
    yield str(decided["train.precision"])
    yield f"{str(decided['train.attention']).replace('_', ' ')} attention"
    yield str(decided["train.compile"])
    total, limit = plan.memory.total / GIB, plan.memory.limit / GIB
    yield f"{recipe} {'fits' if plan.fits else 'does not fit'} ({total:.1f} of {limit:.1f} GiB)"
    if plan.seconds is not None and plan.fits:
        yield f"about {format_seconds(plan.seconds.value)}"
