"""`report.html`: one page about a run. It works offline."""

from collections.abc import Sequence
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.progress import progress
from bloomery.report.charts import Bars

__all__ = ["Bars", "refuse_occupied", "write_report"]


def write_report(
    run_dir: Path,
    *,
    extras: Sequence[Bars] = (),
    out: Path | None = None,
) -> Path:
    """Writes `report.html` into the run folder or to `out` and returns its path. The run may be unfinished.

    `extras` are shown at the top. The page has no secrets and no path of a home folder.
    Raises UserError when there are no events or the place is not writable.
    """
    from bloomery.report.page import page
    from bloomery.report.record import read_run_record

    run_dir = run_dir.absolute()
    progress("reading the events")
    record = read_run_record(run_dir)
    progress("drawing the page")
    html = page(record, extras, run_dir.name)
    path = out or run_dir / "report.html"
    try:
        write_durably(path, html.encode("utf-8", errors="replace").decode())
    except OSError as error:
        problem = f"cannot write the report: {error.strerror}"
        fix = "free disk space or fix the permissions"
        raise UserError(problem, where=str(path), fix=fix) from error
    return path


def refuse_occupied(path: Path) -> None:
    """Raises UserError for a path that cannot hold a page, or that holds a file of another program."""
    from bloomery.report.charts import TITLE

    fix = "set another place: --out FILE"
    if path.is_dir():
        raise UserError("--out is a folder", where=str(path), fix=fix, code=2)
    if not path.parent.is_dir():
        raise UserError("folder not found", where=str(path.parent), fix=fix, code=2)
    if path.exists() and not path.is_file():  # a page would replace /dev/null itself
        raise UserError("--out is a device, a pipe or a socket", where=str(path), fix=fix, code=2)
    if not path.is_file():
        return
    with path.open("rb") as file:
        is_report = f"{TITLE}</title>".encode() in file.read(16_384)  # the title is at the top
    if not is_report:
        raise UserError(
            "not overwritten: this file is no Bloomery report", where=str(path), fix=fix, code=2
        )
