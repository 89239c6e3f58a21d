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
from bloomery.core.units import Duration, format_bytes, format_seconds
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
from bloomery.runs.folder import propose_folder
from bloomery.runs.lifecycle import resume, start
from bloomery.runs.signals import StopRequests
from bloomery.train.model_folder import NOT_SAVED, find_model

STEPS = 3
EVALUATED_BATCHES = 4  # of the validation set: enough to test it and to extrapolate its time
LONG = 10_000  # steps: the run must not end before the kill
ROUNDING = 1e-2  # relative tolerance of a repeated loss where it need not be bitwise identical

E = TypeVar("E", bound=Event)


class KilledOnPurpose(BaseException):
    """The training process was killed on purpose."""


@final
@dataclass
class SmokeTest:
    """Events and losses of the smoke test. Times are seconds; `saved` is the checkpoint that the run resumed from."""

    plan: RunPlan  # of the real run
    events: list[Event] = field(default_factory=list)
    # losses after the checkpoint, until the kill
    before: dict[int, float | None] = field(default_factory=dict)
    # losses of the same steps after the resume
    after: dict[int, float | None] = field(default_factory=dict)
    killed: float = 0.0
    began: float = field(default_factory=time.time)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def saves(self) -> list[Saved]:
        """Checkpoints to resume from."""
        return [event for event in self.of(Saved) if not event.weights_only]

    @property
    def saved(self) -> Saved:
        return self.saves[0]

    @property
    def step_seconds(self) -> float:
        steps = self.of(StepDone)
        return statistics.median(step.step_seconds for step in (steps[1:] or steps))

    @property
    def sample_seconds(self) -> float | None:
        """Of all prompts together; None without prompts."""
        samples = self.of(Sampled)[: len(self.plan.sample.prompts)]
        if not samples:
            return None
        before = [
            e.time for e in (*self.of(StepDone), *self.of(EvalDone)) if e.step == samples[0].step
        ]
        return samples[-1].time - max(
            (time for time in before if time <= samples[0].time), default=samples[0].time
        )

    @property
    def exact(self) -> bool:
        """Whether repeated losses must be bitwise identical."""
        return self.plan.train.device == "cpu" or self.plan.train.deterministic

    @property
    def differing(self) -> list[int]:
        """The steps whose repeated loss differs, by more than rounding where it need not be bitwise identical."""
        pairs = [(step, self.before[step], loss) for step, loss in self.after.items()]
        return [
            step
            for step, one, two in pairs
            if one != two
            and (
                self.exact
                or one is None
                or two is None
                or not math.isclose(one, two, rel_tol=ROUNDING)
            )
        ]


OnEvent = Callable[[SmokeTest, Event], None]  # the events so far, and this one


def smoke_test(
    loaded: LoadedRecipe, folder: Path, *, devices: str | None, on_event: OnEvent
) -> SmokeTest:
    """Trains, evaluates, samples, saves, kills, resumes and stops a run in `folder`, a run folder afterwards.

    Calls `on_event` for each event until the kill. Raises UserError where the real run would fail, and
    KeyboardInterrupt when it is stopped.
    """
    results: list[SmokeTest] = []

    def edit(plan: RunPlan) -> RunPlan:
        results.append(SmokeTest(plan, began=began))
        return shortened(plan)

    def until_killed(event: Event, requests: StopRequests) -> None:
        if results:
            results[0].events.append(event)
            on_event(results[0], event)
            _until_killed(results[0], event, requests)

    began = time.time()
    try:
        start(loaded, run_dir=folder, devices=devices, quiet=True, edit=edit, watch=until_killed)
        raise KeyboardInterrupt  # ended before the kill: it was stopped
    except KilledOnPurpose:
        results[0].killed = time.time()
    return _repeated(results[0], folder)


def shortened(plan: RunPlan) -> RunPlan:
    """The real shapes, learning rates and dataset, with an early and short evaluation and without trackers."""
    train = plan.train
    evaluation = plan.eval
    limit = EVALUATED_BATCHES * evaluation.micro_batch_size
    return plan.model_copy(
        update={
            "train": train.model_copy(
                update={"steps": None if train.steps is None else max(train.steps, LONG)}
            ),
            "eval": evaluation.model_copy(
                update={
                    "every_steps": STEPS - 1,
                    "sequences": min(evaluation.sequences or limit, limit),
                    "early_stopping_patience": None,
                }
            ),
            "checkpoint": plan.checkpoint.model_copy(update={"every_steps": LONG}),
            "lengths": plan.lengths
            and plan.lengths.model_copy(
                update={
                    "evaluation": Duration(STEPS - 1, "steps"),
                    "checkpoint": Duration(LONG, "steps"),
                }
            ),
            "logging": plan.logging.model_copy(update={"trackers": (), "commands": ()}),
        }
    )


def _until_killed(result: SmokeTest, event: Event, requests: StopRequests) -> None:
    """Requests a checkpoint after the first step; kills the run at a later step, once the checkpoint is saved.

    Step STEPS is after the evaluation, which a run without a validation set skips.
    """
    if isinstance(event, StepDone) and event.step == 1:
        requests.ask_save()
    if isinstance(event, Warned) and NOT_SAVED in event.reason:
        reason = event.reason.partition(f"{NOT_SAVED}: ")[2]
        raise UserError(
            f"cannot write the checkpoint: {reason}",
            where="the first checkpoint",
            fix="free disk space, correct the folder's permissions, or use another --run-dir",
        )
    saves = result.saves
    if saves:
        result.before = {
            step.step: step.loss for step in result.of(StepDone) if step.step > saves[0].step
        }
    if result.before and max(step.step for step in result.of(StepDone)) >= STEPS:
        raise KilledOnPurpose


def _repeated(result: SmokeTest, folder: Path) -> SmokeTest:
    """Resumes the run, and stops it after the lost steps are repeated."""
    last = max(result.before)

    def until_repeated(event: Event, requests: StopRequests) -> None:
        result.events.append(event)
        if isinstance(event, StepDone) and event.step in result.before:
            result.after[event.step] = event.loss
        if isinstance(event, StepDone) and event.step == last and not requests.stop_requested:
            requests.ask(0)

    run = resume(folder, quiet=True, watch=until_repeated)
    if set(result.after) != set(result.before):
        raise KeyboardInterrupt
    if result.differing:
        step = result.differing[0]
        expected = "bitwise identical" if result.exact else f"equal up to {ROUNDING:.0%}"
        raise UserError(
            f"loss of step {step} differs after the resume: {result.before[step]} -> {result.after[step]}"
            f" (must be {expected})",
            where=str(run.folder),
            fix="report this bug with that folder's plan.json, machine.json and events.jsonl",
        )
    return result


def incidents(folder: Path) -> tuple[str, ...]:
    """The distinct reasons of warnings and recoveries."""
    events = [
        event
        for event in read_events(folder / "events.jsonl")
        if isinstance(event, Warned | Recovered)
    ]
    return tuple(dict.fromkeys(event.reason for event in events))


@final
@dataclass(frozen=True)
class Requirements:
    """Time and disk of the real run, extrapolated. Bytes and seconds; None: the length of the run is unknown."""

    seconds: float | None
    checkpoints: int
    events: int | None
    free: int

    @property
    def disk(self) -> int:
        return self.checkpoints + (self.events or 0)

    @property
    def fits(self) -> bool:
        return self.disk <= self.free


def requirements(result: SmokeTest, folder: Path, *, free: int) -> Requirements:
    """Checkpoints: those kept, the best, and one being written. Times of steps, evaluations and samples as measured."""
    plan = result.plan
    steps = plan.train.steps
    lines = (folder / "events.jsonl").stat().st_size / max(1, len(result.of(StepDone)))
    weights = max((event.bytes for event in result.of(Saved) if event.weights_only), default=0)
    checkpoints = result.saved.bytes * (plan.checkpoint.keep + 2) + weights * plan.checkpoint.keep
    if steps is None:
        return Requirements(plan.train.seconds, checkpoints, None, free)
    evaluations = steps // plan.eval.every_steps + 1 if plan.eval.every_steps else 0
    sequences = validation_sequences(plan, folder)
    share = max(1.0, sequences / max(1, EVALUATED_BATCHES * plan.eval.micro_batch_size))
    evaluation = sum(event.seconds for event in result.of(EvalDone)[:1]) * share
    waits = (
        0.0
        if plan.checkpoint.async_save
        else result.saved.seconds * (steps // plan.checkpoint.every_steps + 1)
    )
    seconds = (
        steps * result.step_seconds
        + evaluations * (evaluation + (result.sample_seconds or 0.0))
        + waits
    )
    return Requirements(seconds, checkpoints, round(lines * steps), free)


def validation_sequences(plan: RunPlan, folder: Path) -> int:
    """Sequences in an evaluation of the real run."""
    from bloomery.data.shards import read_manifest

    tokens = read_manifest(read_plan(folder / "plan.json").data.prepared).validation.tokens
    sequences = -(-tokens // plan.data.sequence_length)
    return min(sequences, plan.eval.sequences or sequences)


# columns
TITLE = 11
TEXT = 78


def run_smoke_test(
    loaded: LoadedRecipe, *, words: str, run_dir: Path | None, devices: str | None
) -> int:
    """Runs the smoke test in a separate folder, deleted on success unless --run-dir names it.

    `words`: arguments of the real run, after `bloomery train`. Exit code 0 when the run is ready, 1 when the disk is
    too small. Raises UserError where the run would fail.
    """
    folder = run_dir or Path("smoke-tests").absolute() / propose_folder(loaded.name).name
    folder = folder.expanduser().absolute()
    report("smoke test", f"{loaded.name}, in {folder}")
    try:
        with Console(stderr=True).status("preparing") as status:
            result = smoke_test(
                loaded,
                folder,
                devices=devices,
                on_event=lambda result, event: report_event(result, event, status),
            )
            _report_resume(result, folder)
        _export(folder)
    except UserError as error:
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
    needed = requirements(result, folder, free=shutil.disk_usage(folder).free)
    code = _report_requirements(needed, words)
    _clear(folder, keep=run_dir is not None)
    return code


def report(title: str, text: str, seconds: float | None = None) -> None:
    """Print one line: title, result, and the time if known."""
    took = (
        ""
        if seconds is None
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else format_seconds(seconds)
    )
    click.echo(f"{title:<{TITLE}}{text:<{TEXT}}{took:>{10}}".rstrip())


def report_event(result: SmokeTest, event: Event, status: Status) -> None:
    """Print a line for each first of its kind."""
    train = result.plan.train
    prompts = len(result.plan.sample.prompts)
    match event:
        case Phase():
            status.update(literal(progress_text(event)))
        case RunStarted():
            report(
                "ready", "dataset prepared; model and optimizer built", event.time - result.began
            )
        case StepDone(step=1):
            tokens = f"{train.tokens_per_step:,} tokens: {train.accumulation} x {train.micro_batch_size} sequences"
            report("first step", f"{tokens}, with compilation and allocation", event.step_seconds)
        case StepDone():
            status.update(literal(progress_text(event)))
        case EvalDone() if len(result.of(EvalDone)) == 1:
            report("evaluation", f"on {event.tokens:,} tokens", event.seconds)
        case Sampled() if len(result.of(Sampled)) == prompts:
            report(
                "sampling",
                f"{prompts} {'replies' if event.chat else 'completions'}",
                result.sample_seconds,
            )
        case Saved(weights_only=False):
            report(
                "save", f"{format_bytes(event.bytes)}, hashed and flushed to disk", event.seconds
            )


def _report_resume(result: SmokeTest, folder: Path) -> None:
    if not result.of(EvalDone):
        skipped = "skipped: see the warning below"
        report(
            "evaluation",
            skipped if validation_sequences(result.plan, folder) else "none: no validation set",
        )
    peak = max(step.memory_gib for step in result.of(StepDone))
    report("step", f"median, {peak:.1f} GiB peak memory", result.step_seconds)
    steps = sorted(result.before)
    report("kill", f"kill -9 of the training process after step {steps[-1]}")
    repeated = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    same = "bitwise identical" if result.exact else "equal up to rounding"
    took = (
        next(step.time for step in result.of(StepDone) if step.time > result.killed) - result.killed
    )
    report("resume", f"from step {result.saved.step}; losses of repeated {repeated} {same}", took)


def _export(folder: Path) -> None:
    """Export the model and write the report of the stopped run."""
    from bloomery.export.layouts import export, export_adapter

    begun = time.perf_counter()
    model = find_model(folder, "last")
    out = folder / "export"
    done = export(model.weights, out) if model.base is None else export_adapter(model, out)
    kind = "Hugging Face" if model.base is None else "PEFT"
    report(
        "export",
        f"{format_bytes(done.bytes)} in {kind} format, read back and run",
        time.perf_counter() - begun,
    )
    begun = time.perf_counter()
    page = write_report(folder)
    report(
        "report", f"{format_bytes(page.stat().st_size)}, one HTML page", time.perf_counter() - begun
    )


def _report_requirements(needed: Requirements, words: str) -> int:
    parts = f"{format_bytes(needed.checkpoints)} of checkpoints"
    parts += "" if needed.events is None else f", {format_bytes(needed.events)} of events"
    report("disk", f"{parts}; {format_bytes(needed.free)} free")
    if not needed.fits:
        report("not ready", "every test passed, but the disk is too small; set checkpoint.keep=1")
        return 1
    duration = (
        "" if needed.seconds is None else f"; the run takes about {format_seconds(needed.seconds)}"
    )
    report("ready", f"every test passed{duration}")
    report("next", f"bloomery train {words}")
    return 0


def _clear(folder: Path, *, keep: bool) -> None:
    if keep or not folder.exists():
        return
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
