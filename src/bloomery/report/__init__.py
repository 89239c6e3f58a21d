"""`report.html`: the page about a run, or about a model. It works offline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.progress import progress
from bloomery.report.charts import Bars

if TYPE_CHECKING:
    from bloomery.report.model_page import ModelFacts, ModelResults
    from bloomery.report.page import Answers
    from bloomery.train.use import Use

__all__ = ["Bars", "refuse_place", "write_model_report", "write_report"]


def write_report(
    run_dir: Path,
    *,
    extras: "Sequence[Bars | Answers]" = (),
    out: Path | None = None,
    use: "Use | None" = None,
) -> Path:
    """Writes `report.html` into the run folder or to `out` and returns its path. The run may be unfinished.

    `extras` are shown at the top. `use`: the device that evaluates the validation texts; None: the CPU. The page has no
    secrets and no path of a home folder. Raises UserError when there are no events or the folder is not writable.
    """
    from bloomery.report.page import page
    from bloomery.report.record import read_record
    from bloomery.report.validation_text import ResponsePair, ValidationText, compare_models

    run_dir = run_dir.absolute()
    record = read_record(run_dir)
    parameters = record.started.parameters if record.started else 0
    responses: list[ResponsePair] = []
    validation_text: ValidationText | str = "the run has no plan yet"
    if record.plan is not None:
        validation_text, responses = compare_models(
            record.plan, run_dir / "checkpoints", parameters, use
        )
    progress("drawing the page")
    text = page(record, validation_text, extras, run_dir.name, responses)
    return _write(text, out or run_dir / "report.html")


def write_model_report(
    facts: "ModelFacts", results: "ModelResults", *, name: str, command: str, out: Path
) -> Path:
    """Writes the page about a model to `out` and returns its path. Raises UserError when it is not writable."""
    from bloomery.report.model_page import model_page

    return _write(model_page(facts, results, name=name, command=command), out)


def refuse_place(path: Path) -> None:
    """Raises UserError for a place that cannot hold a page, or that holds a file of another program."""
    from bloomery.report.charts import TITLE

    fix = "set another place: --out FILE"
    if not path.parent.is_dir() or path.is_dir():
        problem = "--out is a folder" if path.is_dir() else "folder not found"
        raise UserError(problem, where=str(path if path.is_dir() else path.parent), fix=fix, code=2)
    if path.exists() and not path.is_file():  # a page would replace /dev/null itself
        raise UserError("--out is a device, a pipe or a socket", where=str(path), fix=fix, code=2)
    if path.is_file():
        with path.open("rb") as file:
            ours = f"{TITLE}</title>".encode() in file.read(16_384)  # the title is at the top
        if not ours:
            raise UserError(
                "not overwritten: this file is no Bloomery report", where=str(path), fix=fix, code=2
            )


def _write(text: str, path: Path) -> Path:
    """Raises UserError when the disk is full or the path is not writable."""
    try:
        write_durably(path, text.encode("utf-8", errors="replace").decode())
        return path
    except OSError as error:
        problem = f"cannot write the report: {error.strerror}"
        fix = "free disk space or fix the permissions"
        raise UserError(problem, where=str(path), fix=fix) from error
