"""`bloomery train RECIPE --smoke-test`: 3 steps, then evaluation, sampling, save, kill, resume and export, timed"""

import shutil
import time
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from bloomery.cli.common import literal
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.monitor.console.words import progress_text
from bloomery.monitor.events import EvalDone, Event, Phase, RunStarted, Sampled, Saved, StepDone
from bloomery.recipe.load import LoadedRecipe
from bloomery.report import write_report
from bloomery.runs.folder import propose_folder
from bloomery.runs.smoke_test import (
    Requirements,
    SmokeTest,
    incidents,
    requirements,
    smoke_test,
    validation_sequences,
)
from bloomery.train.model_folder import find_model

TITLE, TEXT = 11, 78  # columns


def run_smoke_test(loaded: LoadedRecipe, *, words: str, run_dir: Path | None, devices: str | None) -> int:
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
                loaded, folder, devices=devices, on_event=lambda result, event: report_event(result, event, status)
            )
            _report_resume(result, folder)
        _export(folder)
    except UserError as error:
        log = f"; see {folder / 'log.txt'}" if folder.exists() else ""
        problem, where = f"smoke test failed: {error.problem}", f"{error.where}{log}"
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
    took = "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else format_seconds(seconds)
    click.echo(f"{title:<{TITLE}}{text:<{TEXT}}{took:>{10}}".rstrip())


def report_event(result: SmokeTest, event: Event, status: Status) -> None:
    """Print a line for each first of its kind."""
    train, prompts = result.plan.train, len(result.plan.sample.prompts)
    match event:
        case Phase():
            status.update(literal(progress_text(event)))
        case RunStarted():
            report("ready", "dataset prepared; model and optimizer built", result.prepare_seconds)
        case StepDone(step=1):
            tokens = f"{train.tokens_per_step:,} tokens: {train.accumulation} x {train.micro_batch_size} sequences"
            report("first step", f"{tokens}, with compilation and allocation", event.step_seconds)
        case StepDone():
            status.update(literal(progress_text(event)))
        case EvalDone() if len(result.of(EvalDone)) == 1:
            report("evaluation", f"on {event.tokens:,} tokens", event.seconds)
        case Sampled() if len(result.of(Sampled)) == prompts:
            report("sampling", f"{prompts} {'replies' if event.chat else 'completions'}", result.sample_seconds)
        case Saved():
            report("save", f"{format_bytes(event.bytes)}, hashed and flushed to disk", event.seconds)


def _report_resume(result: SmokeTest, folder: Path) -> None:
    if not result.of(EvalDone):
        skipped = "skipped: see the warning below"
        report("evaluation", skipped if validation_sequences(result.plan, folder) else "none: no validation set")
    peak = max(step.memory_gib for step in result.of(StepDone))
    report("step", f"median, {peak:.1f} GiB peak memory", result.step_seconds)
    steps = sorted(result.before)
    report("kill", f"kill -9 of the training process after step {steps[-1]}")
    repeated = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    same = "bitwise identical" if result.exact else "equal up to rounding"
    report("resume", f"from step {result.saved.step}; losses of repeated {repeated} {same}", result.resume_seconds)


def _export(folder: Path) -> None:
    """Export the model and write the report of the stopped run."""
    from bloomery.export.layouts import export, export_adapter

    begun, model, out = time.perf_counter(), find_model(folder, "last"), folder / "export"
    done = export(model.weights, out) if model.base is None else export_adapter(model, out)
    kind = "Hugging Face" if model.base is None else "PEFT"
    report("export", f"{format_bytes(done.bytes)} in {kind} format, read back and run", time.perf_counter() - begun)
    begun = time.perf_counter()
    page = write_report(folder)
    report("report", f"{format_bytes(page.stat().st_size)}, one HTML page", time.perf_counter() - begun)


def _report_requirements(needed: Requirements, words: str) -> int:
    parts = f"{format_bytes(needed.checkpoints)} of checkpoints"
    parts += "" if needed.events is None else f", {format_bytes(needed.events)} of events"
    report("disk", f"{parts}; {format_bytes(needed.free)} free")
    if not needed.fits:
        report("not ready", "every test passed, but the disk is too small; set checkpoint.keep=1")
        return 1
    duration = "" if needed.seconds is None else f"; the run takes about {format_seconds(needed.seconds)}"
    report("ready", f"every test passed{duration}")
    report("next", f"bloomery train {words}")
    return 0


def _clear(folder: Path, *, keep: bool) -> None:
    if keep or not folder.exists():
        return
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
