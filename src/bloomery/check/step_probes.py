"""Probes of one training step on a GPU against the CPU, for `hardware.probes`, and their child process.

Each takes the step of a packaged recipe in one precision, and names the part that the GPU computes wrong
(`check.examination`).
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.probe_worker import Result, exit_at_once, main
from bloomery.hardware.probes import ProbeSpec
from bloomery.hardware.profile import build_profile

if TYPE_CHECKING:
    from bloomery.plan.types import RunPlan

RECIPE = "go-coder-125m"
PRECISIONS = ("float32", "float16", "bfloat16")
COMPILED = "compiled"  # in the precision of the planner's choice
SECONDS = 120.0
COMPILED_SECONDS = 240.0  # the compiler takes minutes on a slow CPU


def step_probe_specs(machine: Machine) -> tuple[ProbeSpec, ...]:
    """One for each precision, and one of compiled layers, where a GPU trains. A CPU would be compared with itself."""
    profile = build_profile(machine)
    if profile.accelerator is None:
        return ()
    seconds = dict.fromkeys(PRECISIONS, SECONDS)
    if profile.compile.value:
        seconds[COMPILED] = COMPILED_SECONDS
    return tuple(
        ProbeSpec(name=f"step-{kind}", module=__name__, seconds=limit)
        for kind, limit in seconds.items()
    )


def probe_step(name: str, job: Mapping[str, Any]) -> Result:
    """`step-bfloat16`, uncompiled; `step-compiled`. "wrong" names the part; `facts`: the setting that is right."""
    kind = name.partition("-")[2]
    precision = job["dtype"] if kind == COMPILED else kind
    overrides = (
        f"train.precision={precision}",
        f"train.compile={str(kind == COMPILED).lower()}",
    )
    return examined(recipe_plan(job.get("recipe", RECIPE), overrides, detect()))


def recipe_plan(recipe: str, overrides: Sequence[str], machine: Machine) -> "RunPlan":
    """The plan of a packaged recipe on the machine, with random weights and without a dataset."""
    from bloomery.plan.gather import facts_of
    from bloomery.plan.resolve import resolve
    from bloomery.recipe.load import load_recipe

    loaded_recipe = load_recipe(recipe, overrides)
    plan = resolve(loaded_recipe, facts_of(loaded_recipe, machine))
    return plan.model_copy(update={"model": plan.model.model_copy(update={"source": None})})


def examined(plan: "RunPlan") -> Result:
    """The check of the plan's device, and of the settings that may help where it is wrong."""
    from bloomery.check.examination import examine
    from bloomery.check.known_devices import identity_of
    from bloomery.check.verdict import verdict_of
    from bloomery.plan.resolve import child_environment
    from bloomery.train.kernels import build_kernels
    from bloomery.train.process import set_up_process

    os.environ.update(child_environment(plan, os.environ))
    set_up_process(plan.train, memory_limit=plan.memory.limit)
    build_kernels(plan.model)
    examination = examine(plan)
    facts = {
        "precision": plan.train.precision,
        "attention": plan.model.attention,
        "unrepeatable": ", ".join(examination.unrepeatable),
    }
    result = {"outcome": "ok", "seconds": examination.seconds, "facts": facts}
    # After a fatal error no setting is tried: other probes try the other precisions.
    verdict = verdict_of(plan, identity_of(plan.train.device, None), examination)
    if not verdict.problem:
        return result
    setting = f": {verdict.setting_text}" if verdict.setting else ""
    return result | {
        "outcome": "wrong",
        "message": f"{verdict.problem}{setting}",
        "error": verdict.error if verdict.error < float("inf") else None,
        "facts": facts | {"part": verdict.part, "detail": verdict.detail, "fix": verdict.setting},
    }


if __name__ == "__main__":
    exit_at_once(main({"step": probe_step}))
