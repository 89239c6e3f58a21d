"""Internal errors: print one sentence, and store the traceback in a file."""

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

# Set by a command with a run folder: the traceback goes to the run's log.txt.
traceback_file: ContextVar[Path | None] = ContextVar("traceback_file", default=None)


def explain(kind: type[BaseException], error: BaseException) -> None:
    """Print the error of an uncaught exception; its traceback goes to a file."""
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
        from bloomery.hardware.detect import detect
        from bloomery.hardware.doctor.software import torch_missing

        return torch_missing(detect())
    if isinstance(error, MemoryError):
        fix = "close other programs, or use smaller sizes"
        return UserError("out of host memory (RAM)", where=str(error), fix=fix)
    message = (str(error).strip().splitlines() or [""])[0][:200]
    problem = f"internal error: {type(error).__name__}" + (f": {message}" if message else "")
    where = f"traceback in {kept}" if kept else ""
    return UserError(problem, where=where, fix="report this bug; --debug prints the traceback")


def _keep(text: str) -> Path | None:
    """Append the traceback to the run's log, else to a separate file; None when neither can be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    state = state_folder() / "errors.txt"
    text = redact_secrets(text)  # users attach these files to bug reports
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
