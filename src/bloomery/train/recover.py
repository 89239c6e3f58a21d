"""Recovery from out of memory, failing kernels and non-finite losses: smaller micro-batches, rewinds, checkpoints."""

import gc
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, final

import torch

from bloomery.core.device import free_and_total_bytes, memory_stats, release_cached_memory
from bloomery.core.units import GIB, format_bytes
from bloomery.data.batch import Batch
from bloomery.data.order import Cursor
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.detect import GpuProcess, gpu_processes
from bloomery.infer.model_folder import refuse_other_run, saved_steps, step_folder
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.model.decoder import trained_parameters
from bloomery.model.io.parameters import local
from bloomery.monitor.events import Emit, Recovered, Warned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.fallback import blockwise, smaller_micro_batch
from bloomery.plan.pipeline import layer_names
from bloomery.plan.store import write_plan
from bloomery.plan.types import DataPlan, RunPlan, TrainPlan
from bloomery.train.checkpoint.checkpointed_model import shared_damage
from bloomery.train.checkpoint.saver import Parts, newest_valid
from bloomery.train.context import RunContext, follow_checkpoint
from bloomery.train.failures import Diverged, KernelUnusable, OutOfMemory, Unsound
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.teacher import scored_teacher_of
from bloomery.train.process import out_of_memory
from bloomery.train.state import TrainState, restore
from bloomery.train.step import StepResult

R = TypeVar("R")
Action = Literal["step", "skip", "rewind", "again"]


@final
@dataclass(frozen=True)
class AllocationFailed:
    """An attempt ran out of memory. `requested_size`: that of the failed allocation, "" if unknown.

    `tensor_list`: the file in the run folder that lists the tensors in memory, "" without one.
    """

    requested_size: str
    tensor_list: str = ""

    def problem(self, moment: str) -> str:
        """The beginning of a message; `moment`: "at step 3"."""
        size = f" ({self.requested_size} allocation failed)" if self.requested_size else ""
        return f"out of memory {moment}{size}"

    @property
    def note(self) -> str:
        """The end of a message: where the tensors in memory are listed."""
        return f"; tensors in memory: {self.tensor_list}" if self.tensor_list else ""


@final
@dataclass(frozen=True)
class KernelStopped:
    """A Triton kernel failed in an attempt. `reason`: the message, which names the kernel."""

    reason: str

    @property
    def error(self) -> KernelUnusable:
        return KernelUnusable(
            self.reason,
            where="train.attention=triton",
            fix="set train.attention=blockwise, or auto, which then goes on with blockwise by itself",
        )


def attempt(
    work: Callable[[], R], state: TrainState, list_tensors: Callable[[], str] = str
) -> R | AllocationFailed | KernelStopped:
    """The result of `work`, or `AllocationFailed` or `KernelStopped` with the state as before.

    `list_tensors` runs before memory is freed and returns the name of the file that it wrote. Gradients are dropped
    and the allocator's cache freed. An interrupted update cannot be undone: `model_and_optimizer.updating` is then
    True. One of several ranks cannot undo an attempt while the others wait for it: raises OutOfMemory or
    KernelUnusable, and the launcher restarts all of them.
    """
    failure: AllocationFailed | KernelStopped
    mesh = state.model_and_optimizer.mesh
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        # A driver that finds no memory for a kernel says so in the kernel's error.
        if out_of_memory(error):
            failure = AllocationFailed(_requested_size(str(error)), list_tensors())
            if mesh.world > 1:
                raise _of_one_rank(failure, state) from error
        elif isinstance(error, KernelFailed):
            failure = KernelStopped(str(error))
            if mesh.world > 1:
                raise failure.error from error
        else:
            raise
    # Outside the handler: the traceback holds every tensor of the attempt.
    state.optimizer.zero_grad()
    gc.collect()  # a compiled graph may be part of a cycle
    release_cached_memory()
    return failure


def _of_one_rank(failure: AllocationFailed, state: TrainState) -> OutOfMemory:
    mesh = state.model_and_optimizer.mesh
    tensor_list = f", {failure.tensor_list}" if failure.tensor_list else ""
    moment = f"after step {state.progress.step}"
    if mesh.stages > 1:  # the stages differ in what they hold
        moment = f"on rank {mesh.rank} ({layer_names(state.model.stage)}) {moment}"
    return OutOfMemory(
        failure.problem(moment),
        where=f"rank {mesh.rank}{tensor_list}",
        fix="lower train.micro_batch_size, or set train.activation_checkpointing=full",
    )


def _requested_size(message: str) -> str:
    """The size in the allocator's message, in bytes on a CPU and in GiB on a GPU; "" without one."""
    match = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", message, re.IGNORECASE)
    if match is None:
        return ""
    number, unit = match.groups()
    return format_bytes(int(float(number))) if unit.lower() == "bytes" else f"{number} {unit}"


def recover(context: RunContext, failure: AllocationFailed | KernelStopped) -> Action:
    """Retry the step with settings that may succeed. Raises what `shrink` and `replace_kernel` raise."""
    if isinstance(failure, AllocationFailed):
        return shrink(context, failure)
    replace_kernel(context, failure, f"at step {context.step + 1}")
    return "again"


def attempt_with_kernels(
    work: Callable[[], R], context: RunContext, moment: str, list_tensors: Callable[[], str] = str
) -> R | AllocationFailed:
    """`attempt`, a second time with blockwise attention where a kernel fails that the plan chose by itself.

    Raises KernelUnusable as `replace_kernel`.
    """
    result = attempt(work, context.state, list_tensors)
    if isinstance(result, KernelStopped):
        replace_kernel(context, result, moment)
        result = attempt(work, context.state, list_tensors)
    if isinstance(result, KernelStopped):
        raise result.error
    return result


def replace_kernel(context: RunContext, failure: KernelStopped, moment: str) -> None:
    """Continue with blockwise attention, and store that in `plan.json`. `moment`: "at step 3".

    Raises KernelUnusable where the recipe asks for the kernel.
    """
    fallback = blockwise(context.plan, failure.reason)
    if fallback is None or not fallback.only_time:
        raise failure.error
    update_is_incomplete = context.state.model_and_optimizer.updating
    adopt_plan(context, fallback.plan)
    context.model.use_attention(fallback.plan.model.attention)
    action = fallback.action
    if update_is_incomplete:
        return_to_checkpoint(context, non_finite_counts=True)
        action += f"; the update was incomplete: resumes from step {context.step}"
    problem = f"{failure.reason} ({moment})"
    context.emit(Recovered(step=context.step, reason=problem, action=action))


def plan_without_kernel(
    plan: RunPlan, error: KernelFailed | Unsound, run_dir: Path, emit: Emit, mesh: Mesh
) -> RunPlan:
    """The plan with blockwise attention, stored, where a kernel fails or is wrong before the first step.

    Raises the error itself where another kernel is wrong, and KernelUnusable where the recipe asks for the kernel.
    Of several ranks one cannot change while the others go on: KernelUnusable, and the launcher restarts all of them.
    """
    if isinstance(error, KernelFailed) and out_of_memory(error):
        raise error
    stopped = KernelStopped(str(error) if isinstance(error, KernelFailed) else error.problem)
    fallback = blockwise(plan, stopped.reason)
    is_chosen = fallback is not None and fallback.only_time
    if fallback is None or not is_chosen or mesh.world > 1:
        raise stopped.error if is_chosen or isinstance(error, KernelFailed) else error
    write_plan(fallback.plan, run_dir / "plan.json")
    emit(Recovered(reason=f"{stopped.reason} (before the first step)", action=fallback.action))
    return fallback.plan


def shrink(context: RunContext, failure: AllocationFailed) -> Action:
    """Retry the step with a smaller micro-batch and more gradient accumulation, and store that in `plan.json`.

    Raises OutOfMemory when the micro-batch is one sequence or cannot be split.
    """
    plan = context.plan
    update_is_incomplete = context.state.model_and_optimizer.updating
    size = plan.train.micro_batch_size
    problem = failure.problem(f"at step {context.step + 1}")

    # With one sequence the run ends here; its weights are sound.
    if size == 1 and not update_is_incomplete:
        save(context)
        context.saver.wait()
    fallback = smaller_micro_batch(plan, f"{problem} with {size}")
    if fallback is None:
        raise OutOfMemory(
            f"{problem}, {_micro_batch_and_others(plan.train, plan.data)}",
            where=f"train.micro_batch_size={size}{failure.note}",
            fix=_fix(plan),
        )

    adopt_plan(context, fallback.plan)
    action = fallback.action
    if update_is_incomplete:
        return_to_checkpoint(context, non_finite_counts=True)
        action += f"; the update was incomplete: resumes from step {context.step}"
    context.emit(Recovered(step=context.step, reason=problem, action=action + failure.note))
    return "again"


def _micro_batch_and_others(train: TrainPlan, data: DataPlan) -> str:
    """The micro-batch that did not fit, and the memory of this GPU that other processes use."""
    size = train.micro_batch_size
    micro_batch = f"micro-batch {size} of {data.sequence_length:,} tokens"
    if size > 1:
        micro_batch += " (a fused backward cannot accumulate gradients)"
    device_memory = free_and_total_bytes(train.device)
    if device_memory is None:
        return micro_batch
    free, total = device_memory
    reserved = memory_stats(train.device).get("reserved_bytes.all.current", 0)
    used_by_others = total - free - reserved
    return micro_batch + other_processes(gpu_processes(), others=used_by_others, total=total)


def adopt_plan(context: RunContext, plan: RunPlan) -> None:
    """Continue with another plan of the same training, and store it."""
    context.plan = plan
    context.objective = build_objective(
        plan,
        mesh=context.mesh,
        value_head=context.model.value_head,
        reference=context.reference,
        scored_teacher=scored_teacher_of(plan, context.scorers),
    )
    write_plan(plan, context.run_dir / "plan.json")


def _fix(plan: RunPlan) -> str:
    """The plan's suggestions, cheapest first; without any, the settings that save most."""
    train = plan.train
    if train.micro_batch_size > 1:
        half = train.micro_batch_size // 2
        tokens = half * plan.data.sequence_length
        return f"start a new run with train.micro_batch_size={half} train.tokens_per_step={tokens}"
    edits = [edit for edit in plan.suggestions if not edit.startswith("train.micro_batch_size")]
    if not edits:
        if train.activation_checkpointing != "full":
            edits.append("train.activation_checkpointing=full")
        edits += [f"optimizer.kind={kind}" for kind in OPTIMIZERS[plan.optimizer.kind].smaller[-1:]]
        if train.precision == "float32" and train.device != "cpu":
            edits.append("train.precision=auto")
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
    largest = ", ".join(
        f"{process.name} (process {process.pid}) {format_bytes(process.bytes)}"
        for process in processes[:3]
    )
    used = f"; other processes use {format_bytes(others)} of this GPU's {format_bytes(total)}"
    return used + (f" (on all GPUs: {largest})" if largest else "")


def action_after_step(
    context: RunContext, result: StepResult, sequences: range, first: Batch
) -> Action:
    """How to continue after a step that trained on `sequences`; warns when the step was not taken."""
    non_finite = context.state.non_finite
    loss_scale = context.state.model_and_optimizer.loss_scale
    if result.taken:
        return non_finite.decide(True, step=context.step, sequences=sequences)

    # Overflows are how the loss scale finds its value: `NonFinite` does not count them.
    if result.overflowed and loss_scale is not None:
        problem = f"float16 overflow at step {context.step}: {result.ending}"
        reason = f"{problem}; the loss scale is now {loss_scale.value:,.0f}"
        context.emit(Warned(step=context.step, reason=reason))
        return "skip"

    what = "gradient" if math.isfinite(result.loss) else "loss"
    text = context.tokenizer.decode(first.tokens[0, :40].tolist())
    where = f"sequences {sequences.start} to {sequences.stop - 1}, which begin with {text!r}"
    reason = f"non-finite {what} at step {context.step} ({where}): the step was {result.ending}"
    context.emit(Warned(step=context.step, reason=reason))
    exhausted = loss_scale is not None and what == "gradient"
    return non_finite.decide(
        False, step=context.step, sequences=sequences, what=what, exhausted=exhausted
    )


def rewind(context: RunContext) -> None:
    """Restore the newest valid checkpoint (or the initial weights) and continue after the non-finite sequences."""
    bad_step = context.step
    cursor = context.state.cursor
    # Completions that were being trained on are left out with their prompts.
    rollout = context.state.rollout
    if rollout is not None and not rollout.is_over(context.step):
        cursor = Cursor(cursor.seed, cursor.consumed + rollout.num_prompts)
    return_to_checkpoint(context)
    context.state.cursor = cursor
    context.state.rollout = None
    context.emit(
        Recovered(
            step=context.step,
            reason=f"non-finite loss or gradient up to step {bad_step}",
            action=f"resumes from step {context.step} with sequence {cursor.consumed:,} of the data order",
        )
    )


def return_to_checkpoint(context: RunContext, *, non_finite_counts: bool = False) -> None:
    """Restore the newest valid checkpoint or the initial weights; with `non_finite_counts` those counts too."""
    # To write the last checkpoint, and to check and to read one, may take as long as a save.
    context.before_save()
    context.saver.drain()
    folder = agreed_checkpoint(
        context.mesh,
        context.saver.folder,
        lambda problem: context.emit(Warned(step=context.step, reason=problem)),
    )
    restore(context.state, folder, non_finite_counts=non_finite_counts)
    follow_checkpoint(context, folder)
    # The restored state is exactly this checkpoint: nothing has been evaluated since, and nothing is due.
    context.saved_step = context.step
    context.note_save()
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
    began = time.monotonic()
    context.before_save()
    bad_name = _non_finite_weight(context)
    if context.mesh.any_rank(bad_name is not None):
        context.saver.drain()
        where = bad_name or "on another rank"
        raise Diverged(
            f"non-finite weights after step {context.step} ({where}); no checkpoint was saved",
            where=f"step {context.step}",
            fix="start again with a lower optimizer.learning_rate; older checkpoints are untouched",
        )

    # Every rank takes part.
    best = context.best_due
    context.best_due = False
    context.state.progress.seconds = context.timer.elapsed
    with context.state.averaged():
        context.saver.save(
            context.step,
            live_parts(),
            context.state.scalars(),
            best=best,
            weights_only=weights_only,
            began=began,
        )
    if not weights_only:
        context.note_save()


@torch.no_grad()
def _non_finite_weight(context: RunContext) -> str | None:
    """The name of the first trained parameter with a non-finite value on this rank."""
    rows_by_name = {
        name: local(parameter)
        for name, parameter in trained_parameters(context.model).items()
        if local(parameter).numel()
    }
    if not rows_by_name:
        return None
    # NaN is the smallest and the largest of all. Training waits: `isfinite` of all rows takes ten times as long. The
    # host waits for the device once.
    are_finite = [
        torch.stack(torch.aminmax(rows)).isfinite().all() for rows in rows_by_name.values()
    ]
    answers = zip(rows_by_name, torch.stack(are_finite).tolist(), strict=True)
    return next((name for name, is_finite in answers if not is_finite), None)


def agreed_checkpoint(mesh: Mesh, folder: Path, on_damage: Callable[[str], None]) -> Path | None:
    """`newest_valid` of the checkpoints that the first rank finds, on every rank: others might see an older one.

    The ranks share out the hashing of each by file.
    """
    if mesh.world == 1:
        return newest_valid(folder, on_damage=on_damage)
    steps: list[int] = mesh.broadcast_json(saved_steps(folder) if mesh.first_rank else None)
    for step in reversed(steps):
        checkpoint = step_folder(folder, step)
        problem = shared_damage(mesh, checkpoint)
        if problem is None:
            if mesh.first_rank:
                refuse_other_run(checkpoint)
            return checkpoint
        on_damage(f"checkpoint {checkpoint.name} is damaged and ignored: {problem}")
    return None
