"""What a person sees when Bloomery itself is at fault: one sentence, and where the traceback is kept."""

import os
import tempfile
import time
import traceback
from contextvars import ContextVar
from pathlib import Path

import click

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.files import open_regular, state_folder
from bloomery.core.text import harmless, redact_secrets

# Set by a verb that has a run folder, so that a traceback ends up in the run's own log.txt.
traceback_file: ContextVar[Path | None] = ContextVar("traceback_file", default=None)


def explain(kind: type[BaseException], error: BaseException) -> None:
    """Print the sentence for an exception that nothing caught; the traceback goes to a file."""
    if issubclass(kind, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return
    kept = _keep("".join(traceback.format_exception(kind, error, error.__traceback__)))
    click.echo(harmless(redact_secrets(str(_sentence(error, kept)))), err=True)


def _sentence(error: BaseException, kept: Path | None) -> UserError:
    known = of_the_system(error) if isinstance(error, OSError) else None
    if known is not None:
        return known
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        from bloomery.hardware.detect.detect import detect
        from bloomery.hardware.doctor.software import torch_missing

        return torch_missing(detect())
    if isinstance(error, MemoryError):
        fix = "close other programs or choose smaller sizes"
        return UserError("this machine's memory is used up", where=str(error), fix=fix)
    said = (str(error).strip().splitlines() or [""])[0][:200]
    what = f"Bloomery stumbled over something it did not expect: {type(error).__name__}" + (f": {said}" if said else "")
    where = f"the whole traceback is in {kept}" if kept else ""
    return UserError(what, where=where, fix="run it again with --debug to see it here; please report it")


def _keep(text: str) -> Path | None:
    """Append the traceback to the run's log, else to a file of its own; None when no place can be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    state = state_folder() / "errors.txt"
    text = redact_secrets(text)  # people attach these files to reports
    for place in (traceback_file.get(), state, Path(tempfile.gettempdir()) / f"bloomery-errors-{os.getpid()}.txt"):
        if place is None:
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_regular(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
                file.write(f"{stamp}\n{text}\n")
        except (OSError, UserError):
            continue
        return place
    return None
