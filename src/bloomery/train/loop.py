"""The training loop: steps, evaluations and checkpoints in order, without callbacks."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

from bloomery.data.order import Cursor
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.monitor.events import Emit, Phase
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import RunPlan
from bloomery.train.batch_source import StepBatches
from bloomery.train.context import RunContext
from bloomery.train.evaluation.evaluation import evaluate_and_sample, evaluate_start
from bloomery.train.failures import Stopped, TimeIsUp
from bloomery.train.optim.schedules import planned_lr_scale
from bloomery.train.recover import (
    Action,
    AllocationFailed,
    KernelStopped,
    action_after_step,
    attempt,
    plan_without_kernel,
    recover,
    rewind,
    save,
    save_best,
)
from bloomery.train.requests import StepRequests
from bloomery.train.run_clock import Timer, due, estimated_steps, fraction_done, is_save_due, passed
from bloomery.train.scorers.client import Scorers
from bloomery.train.scorers.process import scoring_processes
from bloomery.train.set_up import open_context
from bloomery.train.step import train_step
from bloomery.train.step_report import report_step, reports_experts

Outcome = Literal["done", "stopped"]
NEWS = 0.02  # of a wall-time run: how often its number of steps is estimated


def run(
    plan: RunPlan,
    *,
    run_dir: Path,
    emit: Emit,
    stop: Callable[[], bool],
    requests: StepRequests | None = None,
    resume_from: Path | None = None,
    timer: Timer | None = None,
    mesh: Mesh = SINGLE_RANK,
    before_save: Callable[[], None] = lambda: None,
    build_seconds: float = 0.0,
) -> Outcome:
    """Train for the planned length, or until `stop` returns True after a step, and save a checkpoint at the end.

    `requests`: for saves after a step. `resume_from`: a valid checkpoint; the run then equals the uninterrupted one.
    `timer`: the clock of a wall-time length. `mesh`: the ranks; `stop` answers alike on all of them. `before_save`:
    tells whoever watches for hangs that a save or a rewind follows, which may take minutes. `build_seconds`: as in
    `open_context`.
    The plan's scoring processes run as long as this call.
    Raises Diverged when the loss stays non-finite after skipping and rewinding, UserError when the last checkpoint
    cannot be written, KernelUnusable when an attention kernel that the recipe asks for fails.
    """
    timer = timer or Timer(time.perf_counter())
    with scoring_processes(plan, mesh, run_dir) as scorers:
        return _run(
            plan,
            run_dir=run_dir,
            emit=emit,
            stop=stop,
            requests=requests or StepRequests(),
            resume_from=resume_from,
            timer=timer,
            mesh=mesh,
            before_save=before_save,
            build_seconds=build_seconds,
            scorers=scorers,
        )


def _run(
    plan: RunPlan,
    *,
    run_dir: Path,
    emit: Emit,
    stop: Callable[[], bool],
    requests: StepRequests,
    resume_from: Path | None,
    timer: Timer,
    mesh: Mesh,
    before_save: Callable[[], None],
    build_seconds: float,
    scorers: Scorers | None,
) -> Outcome:
    """`run` with the processes that score for this rank."""
    context: RunContext | None = None
    while context is None:
        try:
            context = open_context(
                plan,
                run_dir,
                emit,
                resume_from,
                stop,
                mesh,
                timer=timer,
                build_seconds=build_seconds,
                scorers=scorers,
            )
        except Stopped:  # before the first step
            return "stopped"
        except KernelFailed as error:
            plan = plan_without_kernel(plan, error, run_dir, emit, mesh)
        if context is None:
            gc.collect()  # the model of the failed attempt, which its traceback held until here
    context.before_save = before_save
    context.requests = requests
    timer.restored = context.state.progress.seconds
    context.note_save()
    if plan.train.seconds is not None:
        # The time of opening counts as training time. What becomes due in it is due after the first step: due is what
        # lies between this fraction, of the checkpoint, and the one after that step.
        context.checked_fraction = fraction_done(
            plan.train, step=context.step, seconds=timer.restored
        )

    try:
        # Each rewind and each smaller micro-batch begins another round, from the restored position in the data.
        while (outcome := take_steps(context, stop)) == "rewind" or outcome == "again":
            if outcome == "rewind":
                rewind(context)

        # The last checkpoint: `save` copies it and a thread writes it, which may take as long again.
        save(context)
        before_save()
        context.saver.wait()
    except Exception:
        # An error on one rank ends the run, but a checkpoint that is being written needs the rows of all of them.
        before_save()
        context.saver.settle()
        raise
    return outcome


def take_steps(
    context: RunContext, stop: Callable[[], bool]
) -> Outcome | Literal["rewind", "again"]:
    """Take steps until the run ends, is stopped, must rewind, or continues with another micro-batch size."""
    action: Action = "step"
    try:
        with context.source.steps(context.plan) as steps, closing(context.recorder):
            context.read_clock()
            context.first_step = context.step
            context.first_fraction = context.fraction
            # An evaluation that a stop interrupted is repeated before the first step.
            if context.state.progress.eval_due and not context.finished:
                after_step(context, action)
            if context.plan.eval.on_start and context.step == 0:
                evaluate_start(context)
            while not context.finished:
                if stop():
                    return "stopped"
                try:
                    with context.recorder.around(
                        context.step + 1,
                        planned_steps=context.plan.logging.profile_steps,
                        device=context.plan.train.device,
                    ):
                        action = take_step(context, steps)
                except TimeIsUp:  # in a rollout, on all ranks
                    break
                if action in ("rewind", "again"):
                    return action
                if context.mesh.world == 1:  # several ranks read it with the figures of the step
                    context.read_clock()
                after_step(context, action)
        # A run ends with an evaluation; the last step may have had it.
        evaluate_and_sample(context)
    except Stopped:
        return "stopped"
    return "done"


def take_step(context: RunContext, steps: Iterator[StepBatches]) -> Action:
    """Get the step's micro-batches, train on them, emit its events and decide how to continue."""
    plan = context.plan.train
    state = context.state
    step = context.step + 1
    start = time.perf_counter()
    context.mesh.clock.reset()  # it adds up the seconds of this step's collectives
    list_tensors = partial(context.recorder.record_out_of_memory, plan.device, step, f"step {step}")
    # A rollout scores its completions with forwards as large as those of the step: it may run out of memory, too.
    step_batches = attempt(partial(next, steps), state, list_tensors)
    if isinstance(step_batches, AllocationFailed | KernelStopped):
        return recover(context, step_batches)
    data_wait_seconds = time.perf_counter() - start

    # One rank of each stage measures the health of some updates. `attempt` turns a failed allocation into a value.
    lr_scale = planned_lr_scale(context.step, context.plan, fraction_done=context.fraction)
    is_measured = context.mesh.first_data_rank and context.health_check.due(
        step, context.plan.logging.every_steps
    )
    state.model_and_optimizer.health_check = context.health_check if is_measured else None
    result = attempt(
        partial(
            train_step,
            state.model_and_optimizer,
            step_batches.batches,
            context.recorder.objective(context.objective),
            plan=plan,
            lr_scale=lr_scale,
            position=state.cursor.consumed,
            reports_experts=reports_experts(step, context.plan.logging.every_steps),
        ),
        state,
        list_tensors,
    )
    if isinstance(result, AllocationFailed | KernelStopped):
        return recover(context, result)

    # A skipped step counts, too: its sequences are behind the run. Tokens are the planned ones, with padding.
    sequences = range(state.cursor.consumed, state.cursor.consumed + step_batches.consumed)
    state.cursor = Cursor(state.cursor.seed, sequences.stop)
    state.progress.step += 1
    tokens = plan.tokens_per_step if step_batches.tokens is None else step_batches.tokens
    state.progress.tokens += tokens
    report_step(
        context,
        result,
        step_batches,
        lr_scale=lr_scale,
        seconds=time.perf_counter() - start,
        data_wait_seconds=data_wait_seconds,
    )
    return action_after_step(context, result, sequences, step_batches.batches[0])


def after_step(context: RunContext, action: Action) -> None:
    """Evaluate and save where due. The weights of the best evaluation so far are always saved."""
    fraction_before = context.checked_fraction
    context.checked_fraction = context.fraction
    if context.plan.train.seconds is not None and passed(NEWS, fraction_before, context.fraction):
        announce_length(context)
    is_due = partial(
        due,
        plan=context.plan,
        step=context.step,
        fraction_before=fraction_before,
        fraction=context.fraction,
    )
    if context.state.progress.eval_due or is_due("evaluation"):
        evaluate_and_sample(context)
    context.saving_due |= (
        context.requests.take_save()
        or is_due("checkpoint")
        or is_save_due(context.plan.checkpoint, context.seconds_since_save)
    )

    # The best weights so far are a checkpoint where that costs little more, and where this step has one already, which
    # a stop saved before the evaluation was done: it is saved again, to be marked as the best.
    saves_best_whole = context.best_due and (
        context.plan.checkpoint.at_best
        or context.step in (context.saved_step, context.restored_step)
    )
    # No checkpoint between non-finite steps: a rewind takes the newest, which must be one before them. It never takes
    # the best weights alone. A run that is finished saves in `run`.
    if (context.saving_due or saves_best_whole) and action == "step" and not context.finished:
        save(context)
        context.requests.forget()
    elif context.best_due and not context.finished:
        save_best(context)
        context.requests.forget()
    context.saver.poll()


def announce_length(context: RunContext) -> None:
    """Emit how many steps a wall-time run is expected to take."""
    steps = estimated_steps(
        step=context.step,
        fraction=context.fraction,
        first_step=context.first_step,
        first_fraction=context.first_fraction,
    )
    context.emit(Phase(step=context.step, name="length", done=context.step, total=steps))
