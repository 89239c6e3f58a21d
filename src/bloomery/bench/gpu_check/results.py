"""What a check of a GPU found: rows, parts, the file that is sent, and its table. No torch.

The file names the card and the software on it, and no host, user or path.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import read_input, write_durably
from bloomery.core.text import PAGE_COLUMNS, fitted
from bloomery.core.units import format_seconds

# ok: as it must be. wrong: a number is not. failed: an error. crashed: the process ended by itself. timeout: it was
# killed at its limit. skipped: something is missing here, or the card refuses it, as it may.
Outcome = Literal["ok", "skipped", "wrong", "failed", "crashed", "timeout"]
WORST_FIRST: tuple[Outcome, ...] = ("wrong", "crashed", "timeout", "failed", "ok", "skipped")
# A path of more than one name; what stands behind its last slash may stay.
PATH = re.compile(r"(?<![\w.~:/-])~?(?:/[\w.@+-]+)+/(?=[\w.@+-])")


class Record(BaseModel):
    """Frozen, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(Record):
    """One case of a part. `numbers`: what was measured, by name."""

    case: str
    outcome: Outcome = "ok"
    message: str = ""
    numbers: dict[str, Any] = {}


class PartResult(Record):
    """The rows of one child. `message`: how it ended, where that was not after its last row."""

    part: str
    outcome: Outcome
    message: str = ""
    seconds: float
    limit_seconds: float
    rows: tuple[Row, ...] = ()
    printed: tuple[str, ...] = ()  # the last lines of a child that did not end well


class Card(Record):
    """The device and what runs on it."""

    name: str
    device: str  # PyTorch's name: cuda, xpu, cpu
    arch: str = ""
    memory_gib: float | None = None
    driver: str = ""
    torch: str
    runtime: str = ""  # HIP or CUDA that torch was built for
    python: str
    cpu: str = ""

    @property
    def is_simulated(self) -> bool:
        """Whether no such card was there: a build of PyTorch for CPUs has no accelerator of its own."""
        return self.device != "cpu" and "+cpu" in self.torch


class CheckResult(Record):
    """The file. `by`: who ran it, as they want to be called; "" where they gave no name."""

    bloomery: str
    day: str
    by: str = ""
    tiny: bool
    card: Card
    limit_seconds: float
    seconds: float = 0.0
    parts: tuple[PartResult, ...] = ()

    @property
    def passed(self) -> tuple[str, ...]:
        return tuple(part.part for part in self.parts if part.outcome == "ok")

    @property
    def failed(self) -> tuple[str, ...]:
        """Parts that were run and did not end as they must."""
        return tuple(part.part for part in self.parts if part.outcome not in ("ok", "skipped"))


def outcome_of(rows: Sequence[Row]) -> Outcome:
    """The worst of the rows; skipped where all are."""
    outcomes = {row.outcome for row in rows}
    return next((outcome for outcome in WORST_FIRST if outcome in outcomes), "skipped")


def without_paths(text: str) -> str:
    """The last name of each path alone."""
    return PATH.sub("", text)


def write_result(result: CheckResult, file: Path) -> None:
    """Replaces the file at once, so that whoever reads it meanwhile finds the earlier rows or all of them."""
    write_durably(file, result.model_dump_json(indent=1, exclude_defaults=True) + "\n")


def read_result(file: Path) -> CheckResult:
    """Raises UserError for another file."""
    try:
        return CheckResult.model_validate_json(read_input(file))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"not a result of --gpu-check: {first['msg'].lower()}"
        fix = "use a file that `bloomery doctor --gpu-check` wrote"
        raise UserError(problem, where=str(file), fix=fix) from error


# The table


def page(result: CheckResult) -> Iterator[str]:
    """The lines that a person reads: the parts, then the rows of those that did not pass, then the measurements."""
    card = result.card
    memory = f", {card.memory_gib:.1f} GiB" if card.memory_gib is not None else ""
    yield f"{card.name}{memory}, torch {card.torch}, {format_seconds(result.seconds)}"
    yield ""
    yield f"{'part':<15}{'outcome':<9}{'cases':>6}{'time':>7}  note"
    for part in result.parts:
        good_rows = sum(row.outcome == "ok" for row in part.rows)
        cases = f"{good_rows}/{len(part.rows)}" if part.rows else ""
        note = part.message or _first_problem(part.rows)
        time_text = f"{part.seconds:.0f} s"
        line = f"{part.part:<15}{part.outcome:<9}{cases:>6}{time_text:>7}  {note}".rstrip()
        yield from fitted([line], PAGE_COLUMNS)
    for part in result.parts:
        yield from _part_lines(part)


def _first_problem(rows: Iterable[Row]) -> str:
    """Of the row that gave the part its outcome."""
    problem_rows = sorted(
        (row for row in rows if row.message and row.outcome != "ok"),
        key=lambda row: WORST_FIRST.index(row.outcome),
    )
    return f"{problem_rows[0].case}: {problem_rows[0].message}" if problem_rows else ""


def _part_lines(part: PartResult) -> Iterator[str]:
    """Its rows with their numbers: of measurements all, of comparisons those that say something."""
    rows = [row for row in part.rows if row.outcome != "ok" or row.numbers or row.message]
    if rows:
        yield ""
        yield f"{part.part}:"
    width = max((len(row.case) for row in rows), default=0)
    for row in rows:
        line = f"  {row.case:<{width}}  {row.outcome:<8}  {_row_text(row)}".rstrip()
        yield from fitted([line], PAGE_COLUMNS)


def _row_text(row: Row) -> str:
    cells = [row.message] if row.message else []
    cells += [
        f"{name.replace('_', ' ').replace('gib', 'GiB')} {_number_text(value)}"
        for name, value in row.numbers.items()
        if isinstance(value, bool | int | float | str)
    ]
    return ", ".join(cells)


def _number_text(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
