"""A run, from its plan to its last checkpoint. The order of everything is on this page; there are no callbacks."""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

from bloomery.data.loading.loader import Cursor
from bloomery.monitor.events import Emit
from bloomery.plan.types import Plan
from bloomery.train.evaluation.evaluation import keep_time, look
from bloomery.train.job import BatchSource, Job, open_job
from bloomery.train.length import Timer, due
from bloomery.train.objectives.reference import Stopped
from bloomery.train.optim.schedules import planned_share
from bloomery.train.recover import Action, Full, attempt, judge, rewind, save, shrink
from bloomery.train.step import train_step

Outcome = Literal["done", "stopped"]


def run(
    plan: Plan,
    *,
    run_dir: Path,
    emit: Emit,
    stop: Callable[[], bool],
    save_asked: Callable[[], bool] = lambda: False,
    resume_from: Path | None = None,
    timer: Timer | None = None,
) -> Outcome:
    """Trains for the planned length, or until `stop` says so after a step; either way a checkpoint stands afterwards.

    `save_asked`: whether somebody wants a checkpoint after this step; asked once a step. `resume_from`: an undamaged
    checkpoint; what follows equals the undisturbed run. `timer`: the clock of a wall-time length. Raises Diverged when
    the loss stays non-finite after skipping and rewinding, and when the last checkpoint cannot be written.
    """
    try:
        timer = timer or Timer(time.perf_counter())
        job = open_job(plan, run_dir, emit, resume_from, stop)
        job.timer, timer.before = timer, job.state.progress.seconds
    except Stopped:  # nothing was learned yet
        return "stopped"
    while (outcome := train(job, stop, save_asked)) == "rewind" or outcome == "again":
        if outcome == "rewind":
            rewind(job)
    save(job)
    job.saver.wait()
    return outcome


def train(job: Job, stop: Callable[[], bool], save_asked: Callable[[], bool]) -> Outcome | Literal["rewind", "again"]:
    """Steps until the run is finished, asked to stop, must go back to a good checkpoint, or reads in other batches."""
    action: Action = "step"
    try:
        with job.source() as source, closing(job.recorder):
            job.timer.start()
            keep_time(job)
            if job.state.progress.look_due and not job.finished:
                after_step(job, action, save_asked)
            while not job.finished:
                if stop():
                    return "stopped"
                with job.recorder.around(job.plan, job.step + 1):
                    action = take_step(job, source)
                if action in ("rewind", "again"):
                    return action
                job.timer.stepped()
                after_step(job, action, save_asked)
                keep_time(job)
        look(job)
    except Stopped:
        return "stopped"
    return "done"


def take_step(job: Job, source: BatchSource) -> Action:
    """Reads, computes, updates unless the result is not finite, and tells what happened."""
    plan, state, begun = job.plan.train, job.state, time.perf_counter()
    batches = [source.next() for _ in range(plan.accumulation)]
    waited = time.perf_counter() - begun
    share = planned_share(job.step, job.plan)
    looks = job.checkup.due(job.step + 1, job.plan.monitor.every_steps)
    state.trainee.checkup = job.checkup if looks else None
    objective = job.recorder.objective(job.objective)
    full = partial(job.recorder.memory_full, job.plan, job.step + 1, f"step {job.step + 1}")
    result = attempt(lambda: train_step(state.trainee, batches, objective, plan=plan, share=share), state, full)
    if isinstance(result, Full):
        return shrink(job, result)
    rows = range(state.cursor.consumed, state.cursor.consumed + plan.accumulation * plan.micro_batch)
    state.cursor = Cursor(state.cursor.seed, rows.stop)
    state.progress.step += 1
    state.progress.tokens += plan.tokens_per_step
    job.tell_step(result, batches, share=share, seconds=time.perf_counter() - begun, waited=waited)
    return judge(job, result, rows, batches[0])


def after_step(job: Job, action: Action, save_asked: Callable[[], bool]) -> None:
    """The evaluation and the checkpoint that are due."""
    if due("evaluation", job.plan, step=job.step):
        look(job)
    job.saving_due |= save_asked() or due("checkpoint", job.plan, step=job.step)
    # Between bad steps there is nothing new to keep, and a rewind must find what was before them.
    if job.saving_due and action == "step" and not job.finished:
        save(job)
    job.saver.poll()
