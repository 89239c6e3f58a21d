"""`report.html`: what a run did, on one page that works offline, for readers who were not there."""

import os
from collections.abc import Sequence
from pathlib import Path

from bloomery.errors import UserError
from bloomery.report.charts import Bars

__all__ = ["Bars", "write_report"]


def write_report(run_dir: Path, *, extras: Sequence[Bars] = ()) -> Path:
    """Writes `report.html` into the run's folder, whatever state the run is in, and returns its path.

    `extras` are shown at the top, such as an exam beside compressors. Holds no secrets and nobody's home folder. Raises
    UserError when the run has told nothing yet or the folder cannot be written.
    """
    from bloomery.report.answers import Answered, compare_answers
    from bloomery.report.heldout import HeldOut, price_held_out
    from bloomery.report.page import page
    from bloomery.report.record import read_record

    run_dir = run_dir.absolute()
    record = read_record(run_dir)
    parameters = record.started.parameters if record.started else 0
    answers: list[Answered] = []
    if record.plan is None:
        held_out: HeldOut | str = "the run has no plan yet"
    else:
        held_out = price_held_out(record.plan, run_dir / "checkpoints", parameters)
        answers = compare_answers(record.plan, run_dir / "checkpoints", parameters)
    text = page(record, held_out, extras, run_dir.name, answers)
    path = run_dir / "report.html"
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="replace")
        return draft.replace(path)
    except OSError as error:
        problem, remedy = f"the report cannot be written: {error.strerror}", "free some space or mend the permissions"
        raise UserError(problem, where=str(path), remedy=remedy) from error
    finally:
        draft.unlink(missing_ok=True)
