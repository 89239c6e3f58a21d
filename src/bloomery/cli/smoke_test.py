"""`bloomery train RECIPE --rehearse`: three real steps, then all that fails on day six, each with its time."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import literal
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.monitor.console.words import progress_text
from bloomery.monitor.events import EvalDone, Event, Phase, RunStarted, Sampled, Saved, StepDone

if TYPE_CHECKING:
    from rich.status import Status

    from bloomery.recipe.load import LoadedRecipe
    from bloomery.runs.smoke_test import Outlook, Rehearsal

TITLE, TEXT = 11, 78  # columns


def rehearse_run(loaded: "LoadedRecipe", *, words: str, run_dir: Path | None, devices: str | None) -> int:
    """Rehearses in a folder of its own, which is deleted when all went well and nobody named it with --run-dir.

    `words`: what the real run is started with, after `bloomery train`. Exit code 0 when the run is ready, 1 when the
    disk is too small. Raises UserError where the run would fail.
    """
    from bloomery.runs.folder import propose_folder
    from bloomery.runs.smoke_test import incidents, outlook, rehearse

    folder = run_dir or Path("rehearsals").absolute() / propose_folder(loaded.name).name
    folder = folder.expanduser().absolute()
    say("rehearsal", f"{loaded.name}, in {folder}")
    try:
        with waiting() as status:
            seen = rehearse(loaded, folder, devices=devices, told=lambda seen, event: tell(seen, event, status))
            for line in _came_back(seen, folder):
                say(*line)
        _take_away(folder)
    except UserError as error:
        kept = f"; what happened is in {folder / 'log.txt'}" if folder.exists() else ""
        raise UserError(
            f"the rehearsal failed: {error.problem}", where=f"{error.where}{kept}", fix=error.fix, code=error.code
        ) from error
    except KeyboardInterrupt:
        _clear(folder, keep=run_dir is not None)
        click.echo("stopped    the rehearsal was ended early", err=True)
        return 130
    found = outlook(seen, folder, free=shutil.disk_usage(folder).free)
    for reason in incidents(folder):
        say("warned", reason)
    code = _verdict(words, found)
    _clear(folder, keep=run_dir is not None)
    return code


def say(title: str, text: str, seconds: float | None = None) -> None:
    """One line: a title, what happened, and how long it took where that is known."""
    took = "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else format_seconds(seconds)
    click.echo(f"{title:<{TITLE}}{text:<{TEXT}}{took:>{10}}".rstrip())


@contextmanager
def waiting() -> Iterator["Status"]:
    """On a terminal, a line that says what is going on."""
    from rich.console import Console

    with Console(stderr=True).status("preparing") as status:
        yield status


def tell(seen: "Rehearsal", event: Event, status: "Status") -> None:
    """The line of what this event completes, if any."""
    train = seen.plan.train
    match event:
        case Phase():
            status.update(literal(progress_text(event)))
        case RunStarted():
            say("ready", "text prepared, planned, model and optimizer built", seen.prepare_seconds)
        case StepDone(step=1):
            tokens = f"{train.tokens_per_step:,} tokens: {train.accumulation} x {train.micro_batch_size} rows"
            say("first step", f"{tokens}, with what it compiles and allocates", event.step_seconds)
        case StepDone():
            status.update(literal(progress_text(event)))
        case EvalDone() if len(seen.of(EvalDone)) == 1:
            say("evaluation", f"on {event.tokens:,} tokens", event.seconds)
        case Sampled() if len(seen.of(Sampled)) == len(seen.plan.sample.prompts):
            done = "answered" if event.chat else "continued"
            say("sampling", f"{len(seen.plan.sample.prompts)} of the recipe's prompts {done}", seen.sample_seconds)
        case Saved():
            say("save", f"{format_bytes(event.bytes)}, every file hashed and flushed to the disk", event.seconds)
        case _:
            pass


def _came_back(seen: "Rehearsal", folder: Path) -> Iterator[tuple[str, str, float | None]]:
    from bloomery.runs.smoke_test import validation_rows

    if not seen.of(EvalDone):
        rows = validation_rows(seen.plan, folder)
        yield "evaluation", "left out: see below" if rows else "none: the recipe holds out no text to validate on", None
    peak = max(step.memory_gib for step in seen.of(StepDone))
    yield "step", f"the typical one, {peak:.1f} GiB at the peak", seen.step_seconds
    steps = sorted(seen.before)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    yield "kill", f"kill -9 to the training process after step {steps[-1]}", None
    same = "equal to the last bit" if seen.exact else "equal up to rounding"
    yield "resume", f"from step {seen.saved.step}; {which} once more, every loss {same}", seen.back_seconds


def _take_away(folder: Path) -> None:
    """Export and report; both read what the run has left."""
    from bloomery.export.layouts import export, export_adapter
    from bloomery.report import write_report
    from bloomery.train.model_folder import find_model

    begun, found, out = time.perf_counter(), find_model(folder, "last"), folder / "export"
    done = export(found.weights, out) if found.base is None else export_adapter(found, out)
    layout = "Hugging Face's layout" if found.base is None else "PEFT's layout"
    say("export", f"{format_bytes(done.bytes)} in {layout}, read back and run", time.perf_counter() - begun)
    begun = time.perf_counter()
    page = write_report(folder)
    say("report", f"{format_bytes(page.stat().st_size)}, one page", time.perf_counter() - begun)


def _verdict(words: str, found: "Outlook") -> int:
    parts = f"{format_bytes(found.checkpoints)} of checkpoints"
    parts += "" if found.events is None else f", {format_bytes(found.events)} of events"
    say("disk", f"{parts}; {format_bytes(found.free)} are free")
    if not found.fits:
        say("not ready", "everything works, but the disk is too small: checkpoint.keep=1 needs least")
        return 1
    length = "" if found.seconds is None else f"; the whole run takes about {format_seconds(found.seconds)}"
    say("ready", f"everything that the run will do works here{length}")
    say("next", f"bloomery train {words}")
    return 0


def _clear(folder: Path, *, keep: bool) -> None:
    """A folder that somebody named stays."""
    if keep or not folder.exists():
        return
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
