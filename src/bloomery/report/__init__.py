"""`report.html`: what a run did, on one page that works offline, for readers who were not there; or what a model is"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.report.charts import Bars

if TYPE_CHECKING:
    from bloomery.report.model_page import Asked, ModelFacts
    from bloomery.train.use import Use

__all__ = ["Bars", "refuse_place", "write_model_report", "write_report"]


def write_report(
    run_dir: Path, *, extras: Sequence[Bars] = (), out: Path | None = None, use: "Use | None" = None
) -> Path:
    """Writes `report.html` into the run's folder or to `out`, whatever state the run is in, and returns its path.

    `extras` are shown at the top, such as an exam beside compressors. `use`: where held-out texts are put to the model;
    None: on the CPU. Holds no secrets and nobody's home folder. Raises
    UserError when the run has told nothing yet or the folder cannot be written.
    """
    from bloomery.report.heldout import Answered, HeldOut, compare_answers, price_held_out
    from bloomery.report.page import page
    from bloomery.report.record import read_record

    run_dir = run_dir.absolute()
    record = read_record(run_dir)
    parameters = record.started.parameters if record.started else 0
    answers: list[Answered] = []
    if record.plan is None:
        held_out: HeldOut | str = "the run has no plan yet"
    else:
        held_out = price_held_out(record.plan, run_dir / "checkpoints", parameters, use)
        answers = compare_answers(record.plan, run_dir / "checkpoints", parameters, use)
    text = page(record, held_out, extras, run_dir.name, answers)
    return _write(text, out or run_dir / "report.html")


def write_model_report(facts: "ModelFacts", asked: "Asked", *, name: str, command: str, out: Path) -> Path:
    """Writes the page about a model to `out`, and returns its path. Raises UserError when it cannot be written."""
    from bloomery.report.model_page import model_page

    return _write(model_page(facts, asked, name=name, command=command), out)


def refuse_place(path: Path) -> None:
    """Raises UserError where no page can lie, or what lies there is none of Bloomery's."""
    from bloomery.report.render import TITLE

    fix = "name another place: --out FILE"
    if not path.parent.is_dir() or path.is_dir():
        problem = "this is a folder" if path.is_dir() else "there is no such folder"
        raise UserError(problem, where=str(path if path.is_dir() else path.parent), fix=fix, code=2)
    if path.exists() and not path.is_file():  # a page would take the place of /dev/null itself
        raise UserError("this is no file but a device, a pipe or a socket", where=str(path), fix=fix, code=2)
    if path.is_file():
        with path.open("rb") as file:
            ours = f"{TITLE}</title>".encode() in file.read(16_384)  # the title stands at the top
        if not ours:
            raise UserError("this file is no page of Bloomery's and is kept", where=str(path), fix=fix, code=2)


def _write(text: str, path: Path) -> Path:
    try:
        write_durably(path, text.encode("utf-8", errors="replace").decode())
        return path
    except OSError as error:
        problem, fix = f"the report cannot be written: {error.strerror}", "free some space or mend the permissions"
        raise UserError(problem, where=str(path), fix=fix) from error
