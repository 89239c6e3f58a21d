"""`bloomery train RECIPE --smoke-test`: the first steps of a real run, with everything that follows them, timed

3 steps, then evaluation, sampling, save, kill, resume and export. No torch.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, final

import click
from rich.console import Console
from rich.status import Status

from bloomery.cli.common import literal
from bloomery.core.errors import UserError
from bloomery.core.run_folder import propose_folder
from bloomery.core.signals import StopRequests
from bloomery.core.units import Duration, format_bytes, format_seconds
from bloomery.infer.held_model import held_model
from bloomery.infer.model_folder import NOT_SAVED
from bloomery.monitor.events import (
    EvalDone,
    Event,
    Phase,
    Recovered,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Warned,
    read_events,
)
from bloomery.monitor.words import progress_text
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.report import write_report
from bloomery.runs.lifecycle import resume, start

STEPS = 3
EVALUATED_BATCHES = 4  # of the validation set: enough to test it and to extrapolate its time
UNREACHED_STEPS = 10_000  # the run must not end before the kill
ROUNDING = 1e-2  # relative tolerance of a repeated loss where it need not be bitwise identical

E = TypeVar("E", bound=Event)


class KilledOnPurpose(BaseException):
    """The training process was killed on purpose."""


@final
@dataclass
class SmokeTest:
    """Events and losses of the smoke test.

    `lost_losses`: of the steps after the checkpoint, until the kill; `repeated_losses`: of the same steps after the
    resume. `start_time` and `kill_time` are seconds since the epoch.
    """

    plan: RunPlan  # of the real run
    events: list[Event] = field(default_factory=list)
    lost_losses: dict[int, float | None] = field(default_factory=dict)
    repeated_losses: dict[int, float | None] = field(default_factory=dict)
    kill_time: float = 0.0
    start_time: float = field(default_factory=time.time)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def checkpoints(self) -> list[Saved]:
        """The saves that a run can resume from: weights alone are not enough."""
        return [event for event in self.of(Saved) if not event.weights_only]

    @property
    def step_seconds(self) -> float:
        steps = self.of(StepDone)
        return statistics.median(step.step_seconds for step in (steps[1:] or steps))

    @property
    def sample_seconds(self) -> float | None:
        """The seconds that all prompts took together; None without prompts."""
        samples = self.of(Sampled)[: len(self.plan.sample.prompts)]
        if not samples:
            return None
        # Sampling begins with the end of the step or of the evaluation before it.
        first = samples[0]
        events = (*self.of(StepDone), *self.of(EvalDone))
        times = [event.time for event in events if event.step == first.step]
        start_time = max((time for time in times if time <= first.time), default=first.time)
        return samples[-1].time - start_time

    @property
    def must_be_identical(self) -> bool:
        """Whether repeated losses must be bitwise identical."""
        return self.plan.train.device == "cpu" or self.plan.train.deterministic

    @property
    def differing(self) -> list[int]:
        """The steps whose repeated loss differs, by more than rounding where it need not be bitwise identical."""
        differing_steps = []
        for step, repeated_loss in self.repeated_losses.items():
            lost_loss = self.lost_losses[step]
            agrees = lost_loss == repeated_loss
            if not self.must_be_identical and lost_loss is not None and repeated_loss is not None:
                agrees = math.isclose(lost_loss, repeated_loss, rel_tol=ROUNDING)
            if not agrees:
                differing_steps.append(step)
        return differing_steps


OnEvent = Callable[[SmokeTest, Event], None]  # the events so far, and this one


def smoke_test(
    loaded_recipe: LoadedRecipe, folder: Path, *, devices: str | None, on_event: OnEvent
) -> SmokeTest:
    """Trains, evaluates, samples, saves, kills, resumes and stops a run in `folder`, a run folder afterwards.

    Calls `on_event` for each event until the kill. Raises UserError where the real run would fail, and
    KeyboardInterrupt when it is stopped.
    """
    result: SmokeTest | None = None
    start_time = time.time()

    # The plan of the real run comes first; events before it, of the dataset's preparation, belong to no result.
    def edit(plan: RunPlan) -> RunPlan:
        nonlocal result
        result = SmokeTest(plan, start_time=start_time)
        return shortened(plan)

    def watch(event: Event, requests: StopRequests) -> None:
        if result is not None:
            result.events.append(event)
            on_event(result, event)
            _kill_after_checkpoint(result, event, requests)

    try:
        start(loaded_recipe, run_dir=folder, devices=devices, quiet=True, edit=edit, watch=watch)
        raise KeyboardInterrupt  # ended before the kill: it was stopped
    except KilledOnPurpose:
        assert result is not None, "only events after the plan kill the run"
        result.kill_time = time.time()
    return _repeat_lost_steps(result, folder)


def shortened(plan: RunPlan) -> RunPlan:
    """The real shapes, learning rates and dataset, with an early and short evaluation and without trackers."""
    steps = plan.train.steps
    steps = None if steps is None else max(steps, UNREACHED_STEPS)
    max_sequences = EVALUATED_BATCHES * plan.eval.micro_batch_size
    evaluation = {
        "every_steps": STEPS - 1,
        "sequences": min(plan.eval.sequences or max_sequences, max_sequences),
        "early_stopping_patience": None,
    }
    checkpoint = {"every_steps": UNREACHED_STEPS, "every_seconds": None, "at_best": False}
    lengths = {
        "evaluation": Duration(STEPS - 1, "steps"),
        "checkpoint": Duration(UNREACHED_STEPS, "steps"),
    }
    sections = {
        "train": plan.train.model_copy(update={"steps": steps}),
        "eval": plan.eval.model_copy(update=evaluation),
        "checkpoint": plan.checkpoint.model_copy(update=checkpoint),
        "lengths": plan.lengths and plan.lengths.model_copy(update=lengths),
        "logging": plan.logging.model_copy(update={"trackers": (), "commands": ()}),
    }
    return plan.model_copy(update=sections)


def _kill_after_checkpoint(result: SmokeTest, event: Event, requests: StopRequests) -> None:
    """Requests a checkpoint after the first step; kills the run at a later step, once the checkpoint is saved.

    Step STEPS is after the evaluation, which a run without a validation set skips.
    """
    if isinstance(event, StepDone) and event.step == 1:
        requests.ask_save()
    if isinstance(event, Warned) and NOT_SAVED in event.reason:
        problem = f"cannot write the checkpoint: {event.reason.partition(f'{NOT_SAVED}: ')[2]}"
        fix = "free disk space, correct the folder's permissions, or use another --run-dir"
        raise UserError(problem, where="the first checkpoint", fix=fix)

    # The kill must lose at least one step, or the resume would have nothing to repeat.
    steps = result.of(StepDone)
    if result.checkpoints:
        saved_step = result.checkpoints[0].step
        result.lost_losses = {step.step: step.loss for step in steps if step.step > saved_step}
    if result.lost_losses and max(step.step for step in steps) >= STEPS:
        raise KilledOnPurpose


def _repeat_lost_steps(result: SmokeTest, folder: Path) -> SmokeTest:
    """Resumes the run, and stops it after the lost steps are repeated. Raises UserError for a loss that differs."""
    last_lost_step = max(result.lost_losses)

    def watch(event: Event, requests: StopRequests) -> None:
        result.events.append(event)
        if not isinstance(event, StepDone):
            return
        if event.step in result.lost_losses:
            result.repeated_losses[event.step] = event.loss
        if event.step == last_lost_step and not requests.stop_requested:
            requests.ask(0)

    run = resume(folder, quiet=True, watch=watch)
    # A step that was not repeated means that the user stopped the run.
    if set(result.repeated_losses) != set(result.lost_losses):
        raise KeyboardInterrupt

    if result.differing:
        step = result.differing[0]
        losses = f"{result.lost_losses[step]} -> {result.repeated_losses[step]}"
        required = f"equal up to {ROUNDING:.0%}"
        if result.must_be_identical:
            required = "bitwise identical"
        problem = f"loss of step {step} differs after the resume: {losses} (must be {required})"
        fix = "report this bug with that folder's plan.json, machine.json and events.jsonl"
        raise UserError(problem, where=str(run.folder), fix=fix)
    return result


def incidents(folder: Path) -> tuple[str, ...]:
    """The distinct reasons of warnings and recoveries."""
    events = read_events(folder / "events.jsonl")
    reasons = [event.reason for event in events if isinstance(event, Warned | Recovered)]
    return tuple(dict.fromkeys(reasons))


@final
@dataclass(frozen=True)
class Requirements:
    """Time and disk of the real run, extrapolated; None where the length of the run is unknown."""

    seconds: float | None
    checkpoint_bytes: int
    event_bytes: int | None
    free_bytes: int

    @property
    def fits(self) -> bool:
        return self.checkpoint_bytes + (self.event_bytes or 0) <= self.free_bytes


def requirements(result: SmokeTest, folder: Path, *, free_bytes: int) -> Requirements:
    """Extrapolates the disk and the time of the real run from the measured steps, evaluations and samples."""
    # On the disk at once: `keep` checkpoints, the best one, and one being written; weights alone only `keep` times.
    plan = result.plan
    checkpoint = result.checkpoints[0]
    weights_bytes = max((save.bytes for save in result.of(Saved) if save.weights_only), default=0)
    checkpoint_bytes = checkpoint.bytes * (plan.checkpoint.keep + 2)
    checkpoint_bytes += weights_bytes * plan.checkpoint.keep
    steps = plan.train.steps
    if steps is None:  # the run is limited by time
        return Requirements(plan.train.seconds, checkpoint_bytes, None, free_bytes)

    # An evaluation of the smoke test read EVALUATED_BATCHES; the real one reads the validation set.
    num_evaluations = steps // plan.eval.every_steps + 1 if plan.eval.every_steps else 0
    tested_sequences = EVALUATED_BATCHES * plan.eval.micro_batch_size
    scale = max(1.0, validation_sequences(plan, folder) / max(1, tested_sequences))
    evaluation_seconds = sum(evaluation.seconds for evaluation in result.of(EvalDone)[:1]) * scale
    evaluation_seconds += result.sample_seconds or 0.0

    # Training waits for a checkpoint unless it is written in the background.
    seconds = steps * result.step_seconds + num_evaluations * evaluation_seconds
    if not plan.checkpoint.async_save:
        num_saves = 1.0
        if plan.checkpoint.every_steps is not None:
            num_saves += steps // plan.checkpoint.every_steps
        elif plan.checkpoint.every_seconds is not None:
            num_saves += seconds / plan.checkpoint.every_seconds
        seconds += checkpoint.seconds * num_saves
    bytes_per_step = (folder / "events.jsonl").stat().st_size / max(1, len(result.of(StepDone)))
    return Requirements(seconds, checkpoint_bytes, round(bytes_per_step * steps), free_bytes)


def validation_sequences(plan: RunPlan, folder: Path) -> int:
    """Sequences in an evaluation of the real run."""
    from bloomery.data.shards import read_manifest

    tokens = read_manifest(read_plan(folder / "plan.json").data.prepared).validation.tokens
    sequences = -(-tokens // plan.data.sequence_length)
    return min(sequences, plan.eval.sequences or sequences)


# Widths of the columns of a printed line, in characters.
TITLE_WIDTH = 11
TEXT_WIDTH = 78
TIME_WIDTH = 10


def run_smoke_test(
    loaded_recipe: LoadedRecipe, *, arguments: str, run_dir: Path | None, devices: str | None
) -> int:
    """Runs the smoke test in a separate folder, deleted on success unless --run-dir names it.

    `arguments`: those of the real run, after `bloomery train`. Exit code 0 when the run is ready, 1 when the disk is
    too small. Raises UserError where the run would fail.
    """
    folder = run_dir or Path("smoke-tests") / propose_folder(loaded_recipe.name).name
    folder = folder.expanduser().absolute()
    report("smoke test", f"{loaded_recipe.name}, in {folder}")
    try:
        with Console(stderr=True).status("preparing") as status:
            result = smoke_test(
                loaded_recipe,
                folder,
                devices=devices,
                on_event=lambda result, event: report_event(result, event, status),
            )
            _report_resume(result, folder)
        _export(folder)
    except UserError as error:
        # The folder stays: its log is what the user needs now.
        log = f"; see {folder / 'log.txt'}" if folder.exists() else ""
        problem = f"smoke test failed: {error.problem}"
        where = f"{error.where}{log}"
        raise UserError(problem, where=where, fix=error.fix, code=error.code) from error
    except KeyboardInterrupt:
        _clear(folder, keep=run_dir is not None)
        click.echo("stopped    smoke test interrupted", err=True)
        return 130
    for reason in incidents(folder):
        report("warning", reason)
    needs = requirements(result, folder, free_bytes=shutil.disk_usage(folder).free)
    code = _report_requirements(needs, arguments)
    _clear(folder, keep=run_dir is not None)
    return code


def report(title: str, text: str, seconds: float | None = None) -> None:
    """Print one line: title, result, and the time if known."""
    duration = ""
    if seconds is not None:
        duration = f"{seconds * 1000:.0f} ms" if seconds < 1 else format_seconds(seconds)
    line = f"{title:<{TITLE_WIDTH}}{text:<{TEXT_WIDTH}}{duration:>{TIME_WIDTH}}"
    click.echo(line.rstrip())


def report_event(result: SmokeTest, event: Event, status: Status) -> None:
    """Print a line for the first event of each kind; later steps only move the status line."""
    train = result.plan.train
    num_prompts = len(result.plan.sample.prompts)
    match event:
        case Phase():
            status.update(literal(progress_text(event)))
        case RunStarted():
            seconds = event.time - result.start_time
            report("ready", "dataset prepared; model and optimizer built", seconds)
        case StepDone(step=1):
            sequences = f"{train.accumulation} x {train.micro_batch_size} sequences"
            text = f"{train.tokens_per_step:,} tokens: {sequences}, with compilation and allocation"
            if result.plan.rollout is not None:
                completions = f"{train.sequences_per_step:,} completions"
                text = f"{completions}, {event.tokens:,} tokens, drawn and trained on"
            report("first step", text, event.step_seconds)
        case StepDone():
            status.update(literal(progress_text(event)))
        case EvalDone() if len(result.of(EvalDone)) == 1:
            report("evaluation", f"on {event.tokens:,} tokens", event.seconds)
        case Sampled() if len(result.of(Sampled)) == num_prompts:
            unit = "replies" if event.chat else "completions"
            report("sampling", f"{num_prompts} {unit}", result.sample_seconds)
        case Saved(weights_only=False):
            text = f"{format_bytes(event.bytes)}, hashed and flushed to disk"
            report("save", text, event.seconds)


def _report_resume(result: SmokeTest, folder: Path) -> None:
    """Print the lines that need all events: the median step, the kill and the repeated steps."""
    if not result.of(EvalDone):
        has_validation = validation_sequences(result.plan, folder) > 0
        reason = "skipped: see the warning below" if has_validation else "none: no validation set"
        report("evaluation", reason)
    step_events = result.of(StepDone)
    peak_gib = max(event.memory_gib for event in step_events)
    report("step", f"median, {peak_gib:.1f} GiB peak memory", result.step_seconds)

    steps = sorted(result.lost_losses)
    report("kill", f"kill -9 of the training process after step {steps[-1]}")

    # The resume took until the first step after it was done.
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    agreement = "bitwise identical" if result.must_be_identical else "equal up to rounding"
    resumed_step = result.checkpoints[0].step
    first_step_time = next(event.time for event in step_events if event.time > result.kill_time)
    report(
        "resume",
        f"from step {resumed_step}; losses of repeated {span} {agreement}",
        first_step_time - result.kill_time,
    )


def _export(folder: Path) -> None:
    """Export the model and write the report of the stopped run."""
    from bloomery.export.layouts import export, export_adapter

    start_time = time.perf_counter()
    export_folder = folder / "export"
    with held_model(folder, "last") as model:
        if model.base is None:
            exported = export(model.weights, export_folder)
            layout = "Hugging Face"
        else:
            exported = export_adapter(model, export_folder)
            layout = "PEFT"
    text = f"{format_bytes(exported.bytes)} in {layout} format, read back and run"
    report("export", text, time.perf_counter() - start_time)

    start_time = time.perf_counter()
    page_bytes = write_report(folder).stat().st_size
    text = f"{format_bytes(page_bytes)}, one HTML page"
    report("report", text, time.perf_counter() - start_time)


def _report_requirements(needs: Requirements, arguments: str) -> int:
    """Print whether the disk is large enough, and the next command; return the exit code."""
    parts = f"{format_bytes(needs.checkpoint_bytes)} of checkpoints"
    parts += "" if needs.event_bytes is None else f", {format_bytes(needs.event_bytes)} of events"
    report("disk", f"{parts}; {format_bytes(needs.free_bytes)} free")
    if not needs.fits:
        report("not ready", "every test passed, but the disk is too small; set checkpoint.keep=1")
        return 1
    duration = ""
    if needs.seconds is not None:
        duration = f"; the run takes about {format_seconds(needs.seconds)}"
    report("ready", f"every test passed{duration}")
    report("next", f"bloomery train {arguments}")
    return 0


def _clear(folder: Path, *, keep: bool) -> None:
    """Delete the folder, and smoke-tests/ when nothing is left in it."""
    if keep or not folder.exists():
        return
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
