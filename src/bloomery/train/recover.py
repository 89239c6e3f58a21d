"""What a run survives, and the checkpoints that it goes back to: memory that runs out, losses that are no numbers.

Of an attempt that memory was too small for nothing is left, and the same work is done in smaller parts.
"""

import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, final

import torch

from bloomery.core.units import GIB, format_bytes
from bloomery.data.loading.loader import Batch
from bloomery.hardware.detect.system import GpuProcess, gpu_processes
from bloomery.monitor.events import Recovered, Warned
from bloomery.plan.fallback import smaller_micro_batch
from bloomery.plan.store import write_plan
from bloomery.plan.types import RunPlan
from bloomery.train.checkpoint import newest_valid
from bloomery.train.context import RunContext
from bloomery.train.objectives.build import build_objective
from bloomery.train.process import out_of_memory
from bloomery.train.run import Diverged, OutOfMemory
from bloomery.train.state import TrainState, go_back, random_states, set_random_states
from bloomery.train.step import StepResult

R = TypeVar("R")
Action = Literal["step", "skip", "rewind", "again"]


@final
@dataclass(frozen=True)
class AllocationFailed:
    """An attempt ended because memory ran out; `wanted` is what the allocator was asked for, "" when it did not say.

    `listed`: the file in the run's folder that says what filled memory, "" without one.
    """

    wanted: str
    listed: str = ""

    def __str__(self) -> str:
        return f"memory ran out ({self.wanted} more were wanted)" if self.wanted else "memory ran out"


def attempt(work: Callable[[], R], state: TrainState, listing: Callable[[], str] = str) -> R | AllocationFailed:
    """What `work` returns; when memory runs out in it, `AllocationFailed`, and the state is as before.

    `listing` is called while everything that filled memory is still there, and names the file where it wrote that.

    Gradients are dropped, random numbers put back, cached memory is given back to the device. What cannot be undone is
    an update that was cut short: `state.trainee.updating` says so.
    """
    random = random_states()
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        full = AllocationFailed(_wanted(str(error)), listing())
    # Outside the handler: the traceback held every tensor of the attempt.
    state.model_and_optimizer.optimizer.zero_grad()
    set_random_states(random)
    gc.collect()  # a compiled graph may sit in a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return full


def _wanted(text: str) -> str:
    """Of the allocator's own sentence; the CPU's says bytes, those of GPUs say GiB."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", text, re.IGNORECASE)
    if found is None:
        return ""
    return format_bytes(int(float(found[1]))) if found[2].lower() == "bytes" else f"{found[1]} {found[2]}"


def shrink(context: RunContext, full: AllocationFailed) -> Action:
    """The step that memory was too small for is taken again in smaller micro-batches; `plan.json` keeps them.

    Raises MemoryFull when its micro-batches are single rows, or cannot be cut.
    """
    plan, begun = context.plan, context.step
    rows, place = plan.train.micro_batch_size, f"{full} in step {begun + 1}"
    if rows == 1 and not context.state.model_and_optimizer.updating:  # this is the end, and nothing is lost
        save(context)
        context.saver.wait()
    listed = f"; what filled memory is listed in {full.listed}" if full.listed else ""
    fallback = smaller_micro_batch(plan, f"{place} with {rows}")
    if fallback is None:
        at_once = "a single row" if rows == 1 else f"{rows} rows (an optimizer in backward takes them all at once)"
        raise OutOfMemory(
            f"{place}, with {at_once} of {plan.data.sequence_length:,} tokens at once{who_else(plan.train.device)}",
            where=f"train.micro_batch_size={rows}{listed}",
            fix=_fix(plan),
        )
    replan(context, fallback.plan)
    action = fallback.action
    if context.state.model_and_optimizer.updating:
        return_to_checkpoint(context, policy=True)
        action += f"; the update was half done, so the run goes back to step {context.step}"
    context.emit(Recovered(step=context.step, reason=place, action=action + listed))
    return "again"


def replan(context: RunContext, plan: RunPlan) -> None:
    """Goes on with another plan of the same training; what was measured under the old one is forgotten."""
    context.plan, context.objective = plan, build_objective(plan)
    context.timer.forget()
    write_plan(plan, context.run_dir / "plan.json")


def _fix(plan: RunPlan) -> str:
    """The plan's own remedies, cheapest first, and where it saw no need for any what always helps."""
    if plan.train.micro_batch_size > 1:
        rows = plan.train.micro_batch_size // 2
        return (
            f"start again with train.micro_batch_size={rows} train.tokens_per_step={rows * plan.data.sequence_length}"
        )
    edits = [edit for edit in plan.suggestions if not edit.startswith("train.micro_batch_size")]
    if not edits:
        train = plan.train
        edits += ["train.activation_checkpointing=full"] if train.activation_checkpointing != "full" else []
        edits += ["optimizer.kind=adafactor"] if plan.optimizer.kind == "adamw" else []
        edits += ["train.precision=auto"] if train.precision == "float32" and train.device != "cpu" else []
    words = " or ".join(edits) or "a smaller model"
    return (
        f"start again with {words}; `bloomery plan` says what each saves; shorter rows (data.sequence_length) come last"
    )


def who_else(device: str) -> str:
    """How much of this GPU others hold, and who is on GPUs here; "" when nobody does, and on the CPU."""
    if device != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return other_processes(gpu_processes(), others=others, total=total)


def other_processes(found: tuple[GpuProcess, ...], *, others: int, total: int) -> str:
    """To be added to a sentence. `others` is of one GPU, tenants are those of all.

    A GiB is left out: the driver's own context of this process takes about as much, and belongs to nobody else.
    """
    if others < GIB:
        return ""
    named = ", ".join(f"{tenant.name} (process {tenant.pid}) {format_bytes(tenant.bytes)}" for tenant in found[:3])
    used = f"; others use {format_bytes(others)} of this GPU's {format_bytes(total)}"
    return used + (f" (on the GPUs of this machine: {named})" if named else "")


def check_step(context: RunContext, result: StepResult, sequences: range, first: Batch) -> Action:
    """What follows from a step that learned from `rows`; says so when it was not taken."""
    if result.taken:
        return context.state.policy.decide(True, step=context.step, sequences=sequences)
    scale = context.state.model_and_optimizer.scale
    if result.overflowed and scale is not None:
        reason = (
            f"step {context.step} overflowed float16 and was {result.left}; the loss scale is now {scale.value:,.0f}"
        )
        context.emit(Warned(step=context.step, reason=reason))
        return "skip"
    what = "gradient" if math.isfinite(result.loss) else "loss"
    text = context.tokenizer.decode(first.tokens[0, :40].tolist())
    where = f"sequences {sequences.start} to {sequences.stop - 1}, which begin with {text!r}"
    reason = f"non-finite {what} at step {context.step} ({where}): the step was {result.left}"
    context.emit(Warned(step=context.step, reason=reason))
    exhausted = scale is not None and what == "gradient"
    return context.state.policy.decide(False, step=context.step, sequences=sequences, what=what, exhausted=exhausted)


def rewind(context: RunContext) -> None:
    """Back to the newest undamaged checkpoint (or the start), and on with the data after the bad rows."""
    bad_step, cursor = context.step, context.state.cursor
    return_to_checkpoint(context)
    context.state.cursor = cursor
    context.emit(
        Recovered(
            step=context.step,
            reason=f"non-finite loss or gradient up to step {bad_step}",
            action=f"resumes from step {context.step} with sequence {cursor.consumed:,} of the data order",
        )
    )


def return_to_checkpoint(context: RunContext, *, policy: bool = False) -> None:
    """The newest undamaged one, or how the run began; the count of bad steps stays, or with `policy` goes back too."""
    context.saver.drain()
    folder = newest_valid(
        context.saver.folder, on_damage=lambda problem: context.emit(Warned(step=context.step, reason=problem))
    )
    go_back(context.state, context.plan, folder, policy=policy)
    context.saver.follow(folder)
    context.saved_step, context.last_eval_step, context.evaluated, context.state.progress.eval_due = (
        context.step,
        None,
        None,
        False,
    )


def save(context: RunContext) -> None:
    """A checkpoint of this step, unless it has one; the best so far is marked.

    Raises Diverged when an update has overflowed: such weights are never saved, and older checkpoints stay.
    """
    if context.step == context.saved_step:
        return
    for name, parameter in context.state.model_and_optimizer.model.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            context.saver.drain()
            raise Diverged(
                f"after step {context.step} the weights are no longer finite numbers ({name}), and they are not saved",
                where=f"step {context.step}",
                fix="start again with a lower optimizer.learning_rate; older checkpoints are untouched",
            )
    context.saved_step, context.saving_due = context.step, False
    loss = context.evaluated[1] if context.evaluated is not None and context.evaluated[0] == context.step else None
    best = context.state.progress.note_save(loss)
    context.state.progress.seconds = context.timer.elapsed
    with context.timer.aside() as seconds:
        context.saver.save(context.step, context.state.parts(), context.state.scalars(), best=best)
        context.timer.note_save(seconds())
