"""Recovery from out of memory and from non-finite losses: smaller micro-batches, rewinds, checkpoints."""

import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, final

import torch

from bloomery.core.units import GIB, format_bytes
from bloomery.data.batch import Batch
from bloomery.hardware.detect import GpuProcess, gpu_processes
from bloomery.model.io.parameters import local
from bloomery.monitor.events import Recovered, Warned
from bloomery.parallel.fsdp import gather_full_tensors
from bloomery.parallel.mesh import Mesh
from bloomery.plan.fallback import smaller_micro_batch
from bloomery.plan.store import write_plan
from bloomery.plan.types import RunPlan
from bloomery.train.checkpoint import Parts, newest_valid
from bloomery.train.context import RunContext, follow
from bloomery.train.objectives import build_objective
from bloomery.train.process import out_of_memory
from bloomery.train.run import Diverged, OutOfMemory
from bloomery.train.state import TrainState, restore
from bloomery.train.step import StepResult

R = TypeVar("R")
Action = Literal["step", "skip", "rewind", "again"]


@final
@dataclass(frozen=True)
class AllocationFailed:
    """An attempt ran out of memory. `requested`: the size of the failed allocation, "" if unknown.

    `listed`: the file in the run folder that lists the tensors in memory, "" without one.
    """

    requested: str
    listed: str = ""

    def at(self, place: str) -> str:
        """`place`: "at step 3"."""
        return f"out of memory {place}" + (
            f" ({self.requested} allocation failed)" if self.requested else ""
        )


def attempt(
    work: Callable[[], R], state: TrainState, listing: Callable[[], str] = str
) -> R | AllocationFailed:
    """The result of `work`, or `AllocationFailed` with the state as before.

    `listing` runs before memory is freed and returns the name of the file that it wrote. Gradients are dropped and the
    allocator's cache freed. An interrupted update cannot be undone: `state.model_and_optimizer.updating` is then True.
    One of several ranks cannot undo an attempt while the others wait for it: raises OutOfMemory, and the launcher
    restarts all of them.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        full = AllocationFailed(_requested(str(error)), listing())
        if state.model_and_optimizer.mesh.world > 1:
            where = f"rank {state.model_and_optimizer.mesh.rank}" + (
                f", {full.listed}" if full.listed else ""
            )
            raise OutOfMemory(
                full.at(f"after step {state.progress.step}"),
                where=where,
                fix="lower train.micro_batch_size, or set train.activation_checkpointing=full",
            ) from error
    # Outside the handler: the traceback holds every tensor of the attempt.
    state.optimizer.zero_grad()
    gc.collect()  # a compiled graph may be part of a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return full


def _requested(text: str) -> str:
    """The size in the allocator's message, in bytes on a CPU and in GiB on a GPU."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", text, re.IGNORECASE)
    if found is None:
        return ""
    return (
        format_bytes(int(float(found[1])))
        if found[2].lower() == "bytes"
        else f"{found[1]} {found[2]}"
    )


def shrink(context: RunContext, full: AllocationFailed) -> Action:
    """Retry the step with a smaller micro-batch and more gradient accumulation, and store that in `plan.json`.

    Raises OutOfMemory when the micro-batch is one sequence or cannot be split.
    """
    plan = context.plan
    updating = context.state.model_and_optimizer.updating
    size = plan.train.micro_batch_size
    problem = full.at(f"at step {context.step + 1}")
    if size == 1 and not updating:  # the run ends here; its weights are sound
        save(context)
        context.saver.wait()
    listed = f"; tensors in memory: {full.listed}" if full.listed else ""
    fallback = smaller_micro_batch(plan, f"{problem} with {size}")
    if fallback is None:
        whole = f"micro-batch {size} of {plan.data.sequence_length:,} tokens"
        whole += " (a fused backward cannot accumulate gradients)" if size > 1 else ""
        # memory of this GPU used by other processes, and their names
        if plan.train.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            others = total - free - torch.cuda.memory_reserved()
            whole += other_processes(gpu_processes(), others=others, total=total)
        raise OutOfMemory(
            f"{problem}, {whole}", where=f"train.micro_batch_size={size}{listed}", fix=_fix(plan)
        )
    replan(context, fallback.plan)
    action = fallback.action
    if updating:
        return_to_checkpoint(context, policy=True)
        action += f"; the update was incomplete: resumes from step {context.step}"
    context.emit(Recovered(step=context.step, reason=problem, action=action + listed))
    return "again"


def replan(context: RunContext, plan: RunPlan) -> None:
    """Continue with another plan of the same training, and store it."""
    context.plan, context.objective = plan, build_objective(plan, mesh=context.mesh)
    write_plan(plan, context.run_dir / "plan.json")


def _fix(plan: RunPlan) -> str:
    """The plan's suggestions, cheapest first; without any, the settings that save most."""
    train = plan.train
    length = plan.data.sequence_length
    if (size := train.micro_batch_size) > 1:
        return f"start a new run with train.micro_batch_size={size // 2} train.tokens_per_step={size // 2 * length}"
    edits = [edit for edit in plan.suggestions if not edit.startswith("train.micro_batch_size")]
    if not edits:
        edits += (
            ["train.activation_checkpointing=full"]
            if train.activation_checkpointing != "full"
            else []
        )
        edits += ["optimizer.kind=adafactor"] if plan.optimizer.kind == "adamw" else []
        edits += (
            ["train.precision=auto"]
            if train.precision == "float32" and train.device != "cpu"
            else []
        )
    return (
        f"start a new run with {' or '.join(edits) or 'a smaller model'}; `bloomery plan` prints what each saves. "
        "Lower data.sequence_length last"
    )


def other_processes(processes: tuple[GpuProcess, ...], *, others: int, total: int) -> str:
    """The end of a sentence. `others`: bytes of one GPU; `processes`: those of all GPUs.

    Less than a GiB is ignored: the driver's context of this process takes about as much.
    """
    if others < GIB:
        return ""
    named = ", ".join(
        f"{process.name} (process {process.pid}) {format_bytes(process.bytes)}"
        for process in processes[:3]
    )
    used = f"; other processes use {format_bytes(others)} of this GPU's {format_bytes(total)}"
    return used + (f" (on all GPUs: {named})" if named else "")


def check_step(context: RunContext, result: StepResult, sequences: range, first: Batch) -> Action:
    """How to continue after a step that trained on `sequences`; warns when the step was not taken."""
    policy = context.state.policy
    scale = context.state.model_and_optimizer.loss_scale
    if result.taken:
        return policy.decide(True, step=context.step, sequences=sequences)
    if result.overflowed and scale is not None:
        reason = f"float16 overflow at step {context.step}: {result.ending}; the loss scale is now {scale.value:,.0f}"
        context.emit(Warned(step=context.step, reason=reason))
        return "skip"
    what = "gradient" if math.isfinite(result.loss) else "loss"
    text = context.tokenizer.decode(first.tokens[0, :40].tolist())
    where = f"sequences {sequences.start} to {sequences.stop - 1}, which begin with {text!r}"
    reason = f"non-finite {what} at step {context.step} ({where}): the step was {result.ending}"
    context.emit(Warned(step=context.step, reason=reason))
    exhausted = scale is not None and what == "gradient"
    return policy.decide(
        False, step=context.step, sequences=sequences, what=what, exhausted=exhausted
    )


def rewind(context: RunContext) -> None:
    """Restore the newest valid checkpoint (or the initial weights) and continue after the non-finite sequences."""
    bad_step = context.step
    cursor = context.state.cursor
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
    """Restore the newest valid checkpoint or the initial weights; with `policy` the count of non-finite steps too."""
    # to write the last checkpoint, to check and to read one takes minutes, too
    context.before_save()
    context.saver.drain()
    folder = agreed_checkpoint(
        context.mesh,
        context.saver.folder,
        lambda problem: context.emit(Warned(step=context.step, reason=problem)),
    )
    restore(context.state, context.plan, folder, policy=policy)
    follow(context, folder)
    # The restored state is exactly this checkpoint: nothing has been evaluated since, and nothing is due.
    context.saved_step = context.step
    context.last_eval_step = None
    context.best_due = False
    context.state.progress.eval_due = False


def save(context: RunContext) -> None:
    """Save a checkpoint of this step, unless it has one, and mark the best so far. Raises Diverged as `_write`."""
    if context.step == context.saved_step and not context.best_due:
        return
    context.saved_step = context.step
    context.saving_due = False
    _write(context, context.state.parts)


def save_best(context: RunContext) -> None:
    """Save the weights of this step, the best so far, where no checkpoint is due. Raises Diverged as `_write`."""
    _write(context, context.state.model_parts, weights_only=True)


def _write(
    context: RunContext, live_parts: Callable[[], Parts], *, weights_only: bool = False
) -> None:
    """Save the parts of this step.

    Raises Diverged for non-finite weights: they are never saved, and older checkpoints stay.
    """
    context.before_save()
    trained = (
        (name, local(weight))
        for name, weight in context.model.named_parameters()
        if weight.requires_grad
    )
    bad = next((name for name, weight in trained if not bool(weight.isfinite().all())), None)
    if context.mesh.any_rank(bad is not None):
        context.saver.drain()
        raise Diverged(
            f"non-finite weights after step {context.step} ({bad or 'on another rank'}); no checkpoint was saved",
            where=f"step {context.step}",
            fix="start again with a lower optimizer.learning_rate; older checkpoints are untouched",
        )
    best = context.best_due
    context.best_due = False
    context.state.progress.seconds = context.timer.elapsed
    with context.state.averaged():
        parts = gather_full_tensors(live_parts(), context.mesh, context.state.optimizer.is_split)
        if context.mesh.first_rank:
            state = context.state.scalars()
            context.saver.save(context.step, parts, state, best=best, weights_only=weights_only)
        context.mesh.barrier()


def agreed_checkpoint(mesh: Mesh, folder: Path, on_damage: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint that the first rank finds, on every rank: others might see an older one."""
    found = newest_valid(folder, on_damage=on_damage) if mesh.first_rank else None
    word = mesh.broadcast_str("" if found is None else str(found))
    return Path(word) if word else None
