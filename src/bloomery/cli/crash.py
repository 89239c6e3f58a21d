"""What a person sees when Bloomery itself is at fault: one sentence, and where the traceback is kept."""

import errno
import os
import tempfile
import time
import traceback
from contextvars import ContextVar
from pathlib import Path

import click

from bloomery.disk import open_regular, state_folder
from bloomery.errors import UserError
from bloomery.text import harmless, scrub

# Set by a verb that has a run folder, so that a traceback ends up in the run's own log.txt.
traceback_file: ContextVar[Path | None] = ContextVar("traceback_file", default=None)

_FREE_SPACE = "free some space, then run the same command again: what is complete is kept"
_SYSTEM_ERRORS = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EROFS: ("the file system is read-only", "mend its rights, or copy the folder to a disk that can be written"),
    errno.EACCES: ("access was refused", "check the owner and the permissions, or choose another folder"),
    errno.EPERM: ("access was refused", "check the owner and the permissions, or choose another folder"),
    errno.EMFILE: ("too many files are open", "raise the limit: ulimit -n 4096"),
    errno.EFBIG: ("a file would grow beyond the limit that is set", "raise it: ulimit -f unlimited"),
    errno.ENAMETOOLONG: ("a name is longer than the file system takes", "choose a shorter one"),
    errno.ELOOP: ("links lead round in a circle", "name the file itself"),
    errno.EISDIR: ("a folder stands where a file should be", "move it away, then run the same command again"),
    errno.ENOTDIR: ("a file stands where a folder should be", "move it away, then run the same command again"),
    errno.EIO: ("the disk cannot be read or written", "check it (`dmesg`), then run the same command again"),
    errno.EPIPE: ("nobody reads what is printed any more", "let the reader go on, or write into a file"),
}


def shorten(text: str, width: int) -> str:
    """The text, or its beginning and end."""
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def explain(kind: type[BaseException], error: BaseException) -> None:
    """Print the sentence for an exception that nothing caught; the traceback goes to a file."""
    if issubclass(kind, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return
    kept = _keep("".join(traceback.format_exception(kind, error, error.__traceback__)))
    click.echo(harmless(scrub(str(_sentence(error, kept)))), err=True)


def _sentence(error: BaseException, kept: Path | None) -> UserError:
    known = _SYSTEM_ERRORS.get(error.errno or 0) if isinstance(error, OSError) else None
    if known is not None and isinstance(error, OSError):
        return UserError(known[0], where=shorten(str(error.filename or ""), 200), remedy=known[1])
    if isinstance(error, MemoryError):
        remedy = "close other programs or choose smaller sizes"
        return UserError("this machine's memory is used up", where=str(error), remedy=remedy)
    said = (str(error).strip().splitlines() or [""])[0][:200]
    what = f"Bloomery stumbled over something it did not expect: {type(error).__name__}" + (f": {said}" if said else "")
    where = f"the whole traceback is in {kept}" if kept else ""
    return UserError(what, where=where, remedy="run it again with --debug to see it here; please report it")


def _keep(text: str) -> Path | None:
    """Append the traceback to the run's log, else to a file of its own; None when no place can be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    state = state_folder() / "errors.txt"
    text = scrub(text)  # people attach these files to reports
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
