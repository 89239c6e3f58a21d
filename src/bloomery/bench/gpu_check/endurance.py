"""Parts `resume`, `memory` and `out-of-memory`: runs that are interrupted, measured, or short of memory."""

import gc
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bloomery.bench import rig
from bloomery.bench.gpu_check.agreement import LORA, MODES, differences
from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import RunNumbers, SmallRuns, machine_of
from bloomery.core.device import can, release_cached_memory, reset_peak_memory
from bloomery.core.run_folder import RunFolder
from bloomery.core.units import GIB, MIB
from bloomery.hardware.machine import Machine
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

STEPS = 5
SAVED_STEP = 3
SAVES = (f"train.max_steps={STEPS}", f"checkpoint.every={SAVED_STEP} steps", "checkpoint.keep=2")
RESUMED = {
    "plain": (),
    "int8 states offloaded": ("optimizer.offload=true", "optimizer.state_dtype=int8"),
    "lora nf4, saved beside the work": (*LORA, "quantize.kind=nf4", "checkpoint.async_save=true"),
}


def resumed(job: PartJob) -> Iterator[Row]:
    """A row for each run that was stopped or killed: after its resume it must be the one that was not."""
    runs = SmallRuns(job.folder, job.device)
    names = list(RESUMED)[-1:] if job.tiny else list(RESUMED)
    cases = [
        (f"{ending}: {name}", partial(_resumed_row, runs, job.folder, name, ending))
        for name in names
        for ending in ("stopped", "killed")
    ]
    yield from rows_of(job, cases)


def _resumed_row(runs: SmallRuns, folder: Path, name: str, ending: str) -> Row:
    case = f"{ending}: {name}"
    plan = runs.on_device(runs.plan("texts", *SAVES, *RESUMED[name]))
    whole = runs.run(plan)
    run_folder = folder / case.replace(" ", "-").replace(":", "").replace(",", "")
    if ending == "stopped":
        runs.run(plan, folder=run_folder, stop_after=SAVED_STEP)
    else:
        code = runs.killed(plan, run_folder, at_step=STEPS)
        if code != -signal.SIGKILL:
            return Row(case=case, outcome="failed", message=f"the run ended with {code} by itself")
    checkpoint = RunFolder(run_folder).checkpoints / f"step-{SAVED_STEP:08d}"
    second = runs.run(plan, folder=run_folder, resume_from=checkpoint)
    expected = {step: loss for step, loss in whole.losses.items() if step > SAVED_STEP}
    other_tensors = [
        tensor for tensor, content in whole.tensors.items() if second.tensors.get(tensor) != content
    ]
    problem = ""
    if second.losses != expected:
        problem = (
            f"losses {list(second.losses.values())}, without the stop {list(expected.values())}"
        )
    elif other_tensors:
        problem = f"{len(other_tensors)} of {len(whole.tensors)} tensors differ: {other_tensors[0]}"
    numbers = {"tensors": len(whole.tensors), "same_bits": not problem}
    return Row(case=case, outcome="wrong" if problem else "ok", message=problem, numbers=numbers)


# Memory

# By case: the overrides of a recipe whose memory is tensors of a step, next to which a driver's buffers are small.
MEMORY = {
    **{mode: (f"train.activation_checkpointing={mode}",) for mode in MODES},
    "offloaded": ("train.activation_checkpointing=full", "train.offload_activations=true"),
    "states offloaded": ("optimizer.kind=adamw", "optimizer.offload=true"),
    "int8 states": ("optimizer.kind=adamw", "optimizer.state_dtype=int8"),
    "lora nf4": (*LORA, "quantize.kind=nf4"),
}
TINY_MEMORY = ("none", "full", "lora nf4")
MEASURED_RECIPE = "go-coder-125m"
MEASURED_SIZES = (
    "train.precision=float32",
    "train.compile=false",
    "train.micro_batch_size=4",
    "train.tokens_per_step=4096",
    "data.sequence_length=1024",
)


def memory_as_planned(job: PartJob) -> Iterator[Row]:
    """A row for each memory mode: the peak of the allocator must not be above what the plan calls possible."""
    if not can(job.device, "memory counts"):
        message = f"the allocator of {job.device} does not count"
        yield Row(case="memory", outcome="skipped", message=message)
        return
    machine = machine_of(job.device)
    runs = SmallRuns(job.folder, job.device)

    def plan(*overrides: str) -> RunPlan:
        if job.tiny:
            # A backend whose memory does not depend on the kernels of a card.
            tiny_overrides = ("train.attention=blockwise", *overrides)
            return runs.on_device(runs.plan("texts", *tiny_overrides, machine=machine))
        return planned(MEASURED_RECIPE, (*MEASURED_SIZES, *overrides), machine)

    names = TINY_MEMORY if job.tiny else tuple(MEMORY)
    cases = [(name, partial(_memory_row, name, partial(plan, *MEMORY[name]))) for name in names]
    yield from rows_of(job, cases)


def planned(recipe: str, overrides: tuple[str, ...], machine: Machine) -> RunPlan:
    """The plan of a packaged recipe on the machine, with random weights and random tokens."""
    loaded = load_recipe(recipe, overrides)
    plan = resolve(loaded, facts_of(loaded, machine))
    return plan.model_copy(update={"model": plan.model.model_copy(update={"source": None})})


def _ignore_phase(_phase: str) -> None:
    """A measurement here takes a second: nobody is told of its phases."""


def _memory_row(name: str, make_plan: "partial[RunPlan]") -> Row:
    plan = make_plan()
    gc.collect()
    release_cached_memory()
    reset_peak_memory(plan.train.device)
    job = {"plan": plan.model_dump(mode="json"), "seconds": 0.0, "text": "random", "learns": False}
    peak_gib = rig.measure(job, on_phase=_ignore_phase)["peak_gib"]
    planned_gib = plan.memory.allocated / GIB
    # The interval is of the total, with what a driver and an allocator add.
    highest_gib = planned_gib * plan.memory.high / plan.memory.total
    numbers = {
        "peak_gib": peak_gib,
        "planned_gib": planned_gib,
        "of_the_plan": peak_gib / planned_gib,
    }
    if peak_gib <= highest_gib:
        return Row(case=name, numbers=numbers)
    message = f"{peak_gib:.3f} GiB at the peak, the plan has at most {highest_gib:.3f}"
    return Row(case=name, outcome="wrong", message=message, numbers=numbers)


# Out of memory

SHARES = (0.8, 0.5)  # of what the allocator held without a cap


def short_of_memory(job: PartJob) -> Iterator[Row]:
    """A row for each cap: the run must end with less per micro-batch and nearly the same losses."""
    if not can(job.device, "memory counts"):
        message = f"the memory of {job.device} cannot be capped"
        yield Row(case="memory", outcome="skipped", message=message)
        return
    runs = SmallRuns(job.folder, job.device)
    plan = runs.on_device(runs.plan("texts"))
    whole = runs.run(plan)
    shares = SHARES[-1:] if job.tiny else SHARES
    cases = [
        (f"{share:.0%} of what it takes", partial(_short_row, runs, plan, whole, share))
        for share in shares
    ]
    yield from rows_of(job, cases)


def _short_row(runs: SmallRuns, plan: RunPlan, whole: RunNumbers, share: float) -> Row:
    cap_bytes = share * whole.reserved_bytes
    memory = plan.memory.model_copy(update={"limit": cap_bytes})
    capped = runs.run(plan.model_copy(update={"memory": memory}))
    numbers, problem = differences(whole, capped, plan.train.precision)
    numbers |= {
        "cap_mib": cap_bytes / MIB,
        "held_mib": capped.reserved_bytes / MIB,
        "changes": len(capped.recoveries),
    }
    if not capped.recoveries:
        problem = problem or "the cap had no effect: the run changed nothing"
    elif capped.reserved_bytes > cap_bytes:
        problem = problem or "the allocator held more than the cap"
    message = problem or capped.recoveries[-1]
    return Row(
        case=f"{share:.0%} of what it takes",
        outcome="wrong" if problem else "ok",
        message=message,
        numbers=numbers,
    )
