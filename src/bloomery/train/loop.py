"""A run, from its plan to its last checkpoint. The order of everything is on this page; there are no callbacks."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from bloomery.data.loading.loader import Batch, Cursor, Prefetcher
from bloomery.model.sampling import NotFinite
from bloomery.monitor.events import Emit, Phase, Recovered, Sampled, StepDone, Warned
from bloomery.plan.store import write_plan
from bloomery.plan.types import Plan
from bloomery.train.checkpoint import newest_valid
from bloomery.train.evaluation.answers import samples
from bloomery.train.evaluation.evaluation import Evaluation, evaluate
from bloomery.train.job import Job, open_job, read_ahead
from bloomery.train.length import Costs, Timer, current, due, measured, with_next_block
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.reference import Stopped
from bloomery.train.optim.schedules import planned_share
from bloomery.train.process import allocator_sample, peak_memory_gib
from bloomery.train.recover import Full, attempt, smaller_look, smaller_step
from bloomery.train.run import Diverged
from bloomery.train.state import go_back
from bloomery.train.step import StepResult, train_step

Outcome = Literal["done", "stopped"]
Action = Literal["step", "skip", "rewind", "again"]

# A guess at checkpoints, for the share of a wall-time length that they take: a hash, a copy, a disk.
WRITTEN_PER_SECOND, COPIED_PER_SECOND = 300e6, 3e9


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
        with read_ahead(job) as stream, closing(job.recorder):
            job.timer.start()
            keep_time(job)
            if job.state.progress.look_due and not finished(job):
                after_step(job, action, save_asked)
            while not finished(job):
                if stop():
                    return "stopped"
                with job.recorder.around(job.plan, job.step + 1):
                    action = take_step(job, stream)
                if action in ("rewind", "again"):
                    return action
                job.timer.stepped()
                after_step(job, action, save_asked)
                keep_time(job)
        look(job)
    except Stopped:
        return "stopped"
    return "done"


def after_step(job: Job, action: Action, save_asked: Callable[[], bool]) -> None:
    """The evaluation and the checkpoint that are due."""
    if due("evaluation", job.plan, step=job.step):
        look(job)
    job.saving_due |= save_asked() or due("checkpoint", job.plan, step=job.step)
    # Between bad steps there is nothing new to keep, and a rewind must find what was before them.
    if job.saving_due and action == "step" and not finished(job):
        save(job)
    job.saver.poll()


def take_step(job: Job, stream: Prefetcher) -> Action:
    """Reads, computes, updates unless the result is not finite, and tells what happened."""
    plan, state, begun = job.plan.train, job.state, time.perf_counter()
    batches = [stream.next() for _ in range(plan.accumulation)]
    waited = time.perf_counter() - begun
    share = planned_share(job.step, job.plan)
    checkup = job.checkup if job.checkup.due(job.step + 1, job.plan.monitor.every_steps) else None
    state.trainee.checkup = checkup
    objective = job.recorder.objective(job.objective)
    full = partial(job.recorder.memory_full, job.plan, job.step + 1, f"step {job.step + 1}")
    result = attempt(lambda: train_step(state.trainee, batches, objective, plan=plan, share=share), state, full)
    if isinstance(result, Full):
        return shrink(job, result)
    rows = range(state.cursor.consumed, state.cursor.consumed + plan.accumulation * plan.micro_batch)
    state.cursor = Cursor(state.cursor.seed, rows.stop)
    state.progress.step += 1
    state.progress.tokens += plan.tokens_per_step
    seconds = time.perf_counter() - begun
    job.emit(
        StepDone(
            step=job.step,
            loss=result.loss if result.taken else None,
            learning_rate=job.plan.optimizer.learning_rate * share,
            grad_norm=result.grad_norm if result.taken else None,
            tokens=state.progress.tokens,
            tokens_per_second=plan.tokens_per_step / seconds,
            samples_per_second=len(rows) / seconds,
            step_seconds=seconds,
            data_wait_seconds=waited,
            memory_gib=peak_memory_gib(plan.device),
            learned_tokens=result.learned,
            metrics=result.metrics,
        )
    )
    if checkup is not None:
        job.emit(checkup.report(job.step, batches, job.objective, compiled=plan.compile))
        if plan.device == "cuda":
            job.emit(allocator_sample(torch.cuda.memory_stats(), step=job.step, device=job.device))
    return judge(job, result, rows, batches[0])


def shrink(job: Job, full: Full) -> Action:
    """The step that memory was too small for is taken again in smaller micro-batches; `plan.json` keeps them."""
    if job.plan.train.micro_batch == 1 and not job.state.trainee.updating:  # this is the end, and nothing is lost
        save(job)
        job.saver.wait()
    rung, begun = smaller_step(job.plan, full, step=job.step), job.step
    replan(job, rung.plan)
    action = rung.action
    if job.state.trainee.updating:
        return_to_checkpoint(job, policy=True)
        action += f"; the update was half done, so the run goes back to step {job.step}"
    action += f"; what filled memory is listed in {full.listed}" if full.listed else ""
    job.emit(Recovered(step=job.step, because=f"{full} in step {begun + 1}", action=action))
    return "again"


def replan(job: Job, plan: Plan) -> None:
    """Goes on with another plan of the same training; what was measured under the old one is forgotten."""
    job.plan, job.objective = plan, build_objective(plan)
    job.timer.forget()
    write_plan(plan, job.run_dir / "plan.json")


def judge(job: Job, result: StepResult, rows: range, first: Batch) -> Action:
    """What follows from a step that learned from `rows`; says so when it was not taken."""
    if result.taken:
        return job.state.policy.judge(True, step=job.step, rows=rows)
    scale = job.state.trainee.scale
    if result.overflowed and scale is not None:
        because = f"step {job.step} overflowed float16 and was {result.left}; the loss scale is now {scale.value:,.0f}"
        job.emit(Warned(step=job.step, because=because))
        return "skip"
    what = "gradient" if math.isfinite(result.loss) else "loss"
    text = job.tokenizer.decode(first.tokens[0, :40].tolist())
    where = f"rows {rows.start} to {rows.stop - 1} of the shuffled data, which begin with {text!r}"
    because = f"the {what} of step {job.step} is not a finite number ({where}): the step was {result.left}"
    job.emit(Warned(step=job.step, because=because))
    exhausted = scale is not None and what == "gradient"
    return job.state.policy.judge(False, step=job.step, rows=rows, what=what, exhausted=exhausted)


def rewind(job: Job) -> None:
    """Back to the newest undamaged checkpoint (or the start), and on with the data after the bad rows."""
    bad_step, cursor = job.step, job.state.cursor
    return_to_checkpoint(job)
    job.state.cursor = cursor
    job.emit(
        Recovered(
            step=job.step,
            because=f"the loss was not a finite number up to step {bad_step}",
            action=f"back to step {job.step}, and on with row {cursor.consumed:,} of the shuffled data",
        )
    )


def return_to_checkpoint(job: Job, *, policy: bool = False) -> None:
    """The newest undamaged one, or how the run began; the count of bad steps stays, or with `policy` goes back too."""
    job.saver.drain()
    folder = newest_valid(job.saver.folder, on_damage=lambda problem: job.emit(Warned(step=job.step, because=problem)))
    go_back(job.state, job.plan, folder, policy=policy)
    job.saver.follow(folder)
    job.saved_step, job.looked, job.evaluated, job.state.progress.look_due = job.step, None, None, False


def look(job: Job) -> None:
    """Evaluates and samples, once a step; the random numbers of training stay where they are.

    Raises Stopped when the run is asked to stop meanwhile: then nothing of it counts, and a resumed run does it again.
    """
    if job.looked == job.step:
        return
    before = replace(job.state.progress, look_due=True)

    def draw() -> None:
        for prompt, text in samples(job.state.trainee.model, job.tokenizer, job.prompts, plan=job.plan):
            job.emit(Sampled(step=job.step, prompt=prompt, text=text, answers=job.prompts.answers))

    try:
        with interruptible(job), job.timer.aside() as seconds:
            found = evaluate_rows(job, job.plan.eval.rows)
            if found is not None:
                job.evaluated = (job.step, found.loss)
                job.state.progress.note_evaluation(found.loss)
                job.emit(found.event(job.step))
            job.timer.note_evaluation(seconds(), job.plan)
        with interruptible(job), job.timer.aside() as seconds:
            if isinstance(drawn := attempt(draw, job.state), Full):
                job.emit(Warned(step=job.step, because=f"not all samples were drawn after step {job.step}: {drawn}"))
            job.timer.note_samples(seconds())
    except NotFinite as error:  # the next steps' losses say so, too, and are skipped, rewound, or end the run
        job.emit(Warned(step=job.step, because=f"no samples after step {job.step}: {error.problem}"))
    except Stopped:
        job.state.progress, job.evaluated = before, None
        raise
    job.looked, job.state.progress.look_due = job.step, False


@contextmanager
def interruptible(job: Job) -> Iterator[None]:
    """Inside the block a request to stop is heard before each forward: each batch, each token. Raises Stopped."""

    def ask(*_: object) -> None:
        if job.stop():
            raise Stopped

    hook = job.state.trainee.model.register_forward_pre_hook(ask)
    try:
        yield
    finally:
        hook.remove()


def evaluate_rows(job: Job, limit: int | None) -> Evaluation | None:
    """None when there is no validation split, nothing in it to score, or no memory for even one row of it."""
    validation = job.validation
    if validation is None:
        return None
    work = partial(evaluate, job.state.trainee.model, validation, token_bytes=job.tokenizer.token_bytes(), limit=limit)
    while True:
        plan = job.plan
        look_now = partial(work, job.objective, plan=plan.eval, precision=plan.train.precision)
        where = f"the evaluation after step {job.step}"
        found = attempt(look_now, job.state, partial(job.recorder.memory_full, plan, job.step, where))
        if not isinstance(found, Full):
            return found
        rung = smaller_look(plan, found, step=job.step)
        if rung is None:
            because = f"the evaluation after step {job.step} was left out: {found} for a single row"
            job.emit(Warned(step=job.step, because=because))
            return None
        replan(job, rung.plan)
        action = rung.action + (f"; what filled memory is listed in {found.listed}" if found.listed else "")
        job.emit(Recovered(step=job.step, because=f"{found} in {where}", action=action))


def save(job: Job) -> None:
    """A checkpoint of this step, unless it has one; the best so far is marked."""
    if job.step == job.saved_step:
        return
    refuse_damaged_weights(job)
    job.saved_step, job.saving_due = job.step, False
    loss = job.evaluated[1] if job.evaluated is not None and job.evaluated[0] == job.step else None
    best = job.state.progress.note_save(loss)
    job.state.progress.seconds = job.timer.elapsed
    with job.timer.aside() as seconds:
        job.saver.save(job.step, job.state.parts(), job.state.scalars(), best=best)
        job.timer.note_save(seconds())


def refuse_damaged_weights(job: Job) -> None:
    """Raises Diverged when an update has overflowed: such weights are never saved, and older checkpoints stay."""
    for name, parameter in job.state.trainee.model.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            job.saver.drain()
            raise Diverged(
                f"after step {job.step} the weights are no longer finite numbers ({name}), and they are not saved",
                where=f"step {job.step}",
                remedy="start again with a lower optimizer.learning_rate; older checkpoints are untouched",
            )


def finished(job: Job) -> bool:
    """Whether the length is reached, or so many evaluations brought nothing that the run ends early."""
    patience = job.plan.eval.stop_early
    tired = patience is not None and job.state.progress.evaluations_since_best >= patience
    return tired or (job.plan.train.steps is not None and job.step >= job.plan.train.steps)


def keep_time(job: Job) -> None:
    """Of a wall-time run: fixes the schedule of the next steps, in `plan.json` first, so that a resume repeats it."""
    if job.plan.train.seconds is None:
        return
    known = current(job.plan, step=job.step)
    if known is not None:
        job.plan = known
        return
    with interruptible(job), job.timer.aside():
        if job.timer.costs is None and measured(job.plan, job.timer, step=job.step) is not None:
            job.timer.costs = measure_costs(job)  # which may make evaluations smaller, in the plan, too
        before, job.plan = job.plan.train.steps, with_next_block(job.plan, job.timer, step=job.step)
        write_plan(job.plan, job.run_dir / "plan.json")
    if job.plan.train.steps not in (None, before):
        job.emit(Phase(step=job.step, name="length", done=job.step, total=job.plan.train.steps or 0))


def measure_costs(job: Job) -> Costs:
    """What the run repeats, timed on small parts of it that leave no trace."""
    plan, clock = job.plan, job.timer.clock
    evaluate_rows(job, plan.eval.micro_batch)  # the first one compiles
    begun = clock()
    evaluate_rows(job, plan.eval.micro_batch)
    looked = clock()
    try:
        sampled = attempt(partial(sampling_seconds, job, tokens=16), job.state)
    except NotFinite:  # then no samples are drawn, either
        sampled = 0.0
    token_seconds = 0.0 if isinstance(sampled, Full) else sampled / 16  # then none will be drawn, either
    written = sum(tensor.nbytes for part in job.state.parts().values() for tensor in part.values())
    save, copy = written / WRITTEN_PER_SECOND, written / COPIED_PER_SECOND
    return Costs(
        step=0.0,
        row=(looked - begun) / plan.eval.micro_batch,
        rows=0 if job.validation is None else job.validation.rows,
        samples=len(plan.eval.prompts) * plan.eval.max_tokens * token_seconds,
        save=copy if plan.checkpoint.asynchronous else save,
        end=save if plan.checkpoint.asynchronous else 0.0,
    )


def sampling_seconds(job: Job, *, tokens: int) -> float:
    """Of so many tokens after the first prompt; the first call warms caches and is not counted."""
    plan = job.plan.model_copy(update={"eval": job.plan.eval.model_copy(update={"max_tokens": tokens})})
    draw = partial(samples, job.state.trainee.model, job.tokenizer, replace(job.prompts, asked=job.prompts.asked[:1]))
    list(draw(plan=plan))
    begun = job.timer.clock()
    list(draw(plan=plan))
    return job.timer.clock() - begun
