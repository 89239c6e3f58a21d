"""`bloomery doctor --gpu-check`: prove on a GPU what no test without one can, and write a file to send. No torch."""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import click

from bloomery.cli.common import echo_page, print_json
from bloomery.core.errors import UserError
from bloomery.core.text import expanded, fitted, harmless

if TYPE_CHECKING:
    from bloomery.bench.gpu_check.results import PartResult, Row

DEFAULT_FILE = Path("gpu-check.json")
LEAST_SECONDS = 60.0  # of all parts


@final
@dataclass(frozen=True, kw_only=True)
class GpuCheckOptions:
    """As on the command line."""

    tiny: bool
    only: str
    limit: str | None
    output: Path | None
    by: str
    yes: bool
    as_json: bool


def run_gpu_check(options: GpuCheckOptions, *, public: Callable[[str], str]) -> int:
    """Say what will happen, ask, run the parts, print their table. Exit code 1 if a part did not end as it must.

    `public`: removes names of users and hosts from a text. Raises UserError for wrong options, and where the user
    declines.
    """
    from bloomery.bench.gpu_check.parts import chosen_parts, limits
    from bloomery.bench.gpu_check.results import page
    from bloomery.bench.gpu_check.supervise import Check, plan_lines, run_check
    from bloomery.bench.measuring import author_name
    from bloomery.cli.bench import seconds_of

    # What was typed wrong is refused before anything runs.
    parts = chosen_parts([name.strip() for name in options.only.split(",") if name.strip()])
    total_seconds = None if options.limit is None else seconds_of(options.limit)
    if total_seconds is not None and total_seconds < LEAST_SECONDS:
        problem = f"less than {LEAST_SECONDS:.0f} s are too few for {len(parts)} parts"
        raise UserError(problem, where="--limit", fix="write --limit 10m", code=2)
    by = author_name(options.by) if options.by else ""
    file = expanded(options.output or DEFAULT_FILE)
    refuse_other_file(file)
    part_limits = limits(parts, tiny=options.tiny, total_seconds=total_seconds)

    # Nothing runs before the user has read what it is.
    columns = shutil.get_terminal_size((1000, 24)).columns
    for line in fitted(plan_lines(parts, part_limits, file=file, tiny=options.tiny), columns):
        click.echo(line, err=True)
    if not options.yes:
        _confirm()

    progress = _Progress()
    check = Check(
        parts=parts,
        limits=part_limits,
        tiny=options.tiny,
        by=by,
        file=file,
        public=public,
    )
    result = run_check(
        check, on_part=progress.begin_part, on_row=progress.row, on_end=progress.end_part
    )
    progress.end()
    if options.as_json:
        print_json(result.model_dump(mode="json"))
    else:
        echo_page(["", *page(result), "", f"written    {file}; read it before you send it"])
    return 1 if result.failed else 0


def refuse_other_file(file: Path) -> None:
    """Raises UserError (code 2) for a file that is no earlier result: a mistyped name must not cost one."""
    from bloomery.bench.gpu_check.results import read_result

    if not file.exists() or not file.stat().st_size:
        return
    try:
        read_result(file)
    except UserError as error:
        problem = "this file is not an earlier result: not overwritten"
        fix = "pass a new file: --output gpu-check.json"
        raise UserError(problem, where=str(file), fix=fix, code=2) from error


def _confirm() -> None:
    """Raises UserError where the user declines, and (code 2) where stdin is not a terminal."""
    if not sys.stdin.isatty():
        problem = "nobody can be asked here; nothing was run"
        raise UserError(problem, where="stdin", fix="add --yes", code=2)
    if not click.confirm("run it?", err=True):
        raise UserError("nothing was run", where="your answer", fix="answer y, or add --yes")


@final
class _Progress:
    """Lines of stderr: when a part begins and how it ended, and each row that is not as it must be."""

    def __init__(self) -> None:
        self._begin_seconds = time.monotonic()

    def begin_part(self, name: str) -> None:
        click.echo(f"{self._clock()} {name}", err=True)

    def row(self, part: str, row: "Row") -> None:
        if row.outcome not in ("ok", "skipped"):
            click.echo(
                f"{self._clock()}   {part}: {row.case} {row.outcome}: {harmless(row.message)}",
                err=True,
            )

    def end_part(self, part: "PartResult") -> None:
        message = f": {harmless(part.message)}" if part.message else ""
        click.echo(f"{self._clock()}   {part.part}: {part.outcome}{message}", err=True)

    def end(self) -> None:
        click.echo(f"{self._clock()} done", err=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._begin_seconds), 60)
        return f"{minutes:>3}:{seconds:02}"
