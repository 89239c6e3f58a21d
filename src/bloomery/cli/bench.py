"""`bloomery bench`: what this machine reaches with a recipe, beside what the plan said."""

import math
import shlex
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from bloomery.cli.common import literal, print_json, recipe_argument
from bloomery.core.errors import UserError
from bloomery.core.units import parse_duration

if TYPE_CHECKING:
    from bloomery.bench.measuring import Bench, BenchResult, Largest
    from bloomery.plan.types import Estimate, RunPlan


@click.command()
@recipe_argument
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=V1,V2", help="Measure these values in all combinations.")
@click.option(
    "--export", "card", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures for others to use."
)
@click.option(
    "--author", "contributor", default="anonymous", metavar="NAME", help="Who gives the card.", show_default=True
)
@click.option("--limit", metavar="TIME", help="Begin no further setting after this long, such as 10m.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; the table goes to stderr.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    card: Path | None,
    contributor: str,
    limit: str | None,
    as_json: bool,
) -> int:
    """Measure the largest micro-batch, speed and memory on this machine, beside the plan's figures.

    Every setting runs in a process of its own, with the steps of real training. Only the figures are kept, and
    `bloomery plan` uses them from then on. Exit code 1 when the recipe as planned could not be measured.

    Example: bloomery bench go-coder-tiny --sweep train.compile=true,false
    """
    from bloomery.bench.measuring import Bench, points
    from bloomery.bench.page import author_name, closing, make_measurement_file, noise_line, verdict_lines
    from bloomery.hardware.detect.detect import detect
    from bloomery.hardware.specs.calibration import remember, write_card

    contributor = author_name(contributor)
    asked = points(sweeps) if sweeps else None
    bench = Bench(recipe=recipe, overrides=overrides, machine=detect())
    table = Table(to_stderr=as_json, limit=seconds_of(limit))
    plan = bench.plan()
    largest, trials, rows = table.measure(bench, plan, asked)
    made = make_measurement_file([*rows, *trials], bench.machine, contributor=contributor)
    kept = made is not None and not rows[0].disturbed and remember(made)
    source = shlex.join((recipe, *overrides))
    table.say("", *verdict_lines(rows[0]), *noise_line(rows), *closing(rows[0], remembered=kept, source=source))
    if made is not None and card is not None:
        write_card(made, card)
        table.say(f"{'card':<10}{card}; to share it, add it to benchmarks/cards/ in a pull request")
    if as_json:
        print_json(document(largest, trials, rows))
    return 0 if rows[0].outcome == "ok" else 1


@final
class Table:
    """Prints rows as they are measured, and on a terminal what is being measured now."""

    def __init__(self, *, to_stderr: bool, limit: float = math.inf) -> None:
        from rich.console import Console

        self._to_stderr, self._limit, self._began = to_stderr, limit, time.monotonic()
        self._status = Console(stderr=True).status("", spinner="line")
        self._live = sys.stderr.isatty()

    def say(self, *lines: str) -> None:
        if self._live:
            self._status.stop()
        for line in lines:
            click.echo(line, err=self._to_stderr)

    def measure(
        self, bench: "Bench", plan: "RunPlan", asked: list[tuple[str, ...]] | None
    ) -> tuple["Largest | None", list["BenchResult"], list["BenchResult"]]:
        """The largest micro-batch and its trials (none when micro-batches are swept), then the rows of the sweep."""
        from bloomery.bench.measuring import search, sequences_per_step, usual_points
        from bloomery.bench.page import heading, largest_lines, line, opening
        from bloomery.hardware.specs.calibration import device_of

        device = device_of(bench.machine)
        named = f"{device.name}, {device.cores} core{'s' * (device.cores > 1)}" if device.cores else device.name
        prepared = (plan.data.prepared / "manifest.json").is_file()
        self.say(*opening(plan, recipe=bench.recipe, device=named, prepared=prepared))
        largest: Largest | None = None
        trials: list[BenchResult] = []

        def seen(row: "BenchResult") -> None:
            trials.append(row)
            self.say(line(row))

        try:
            if not any(word.startswith("train.micro_batch_size=") for words in asked or () for word in words):
                self.say(*heading(plan, "largest micro-batch"))
                largest = search(
                    lambda rows: bench.trial(rows, on_phase=lambda phase: self._now(f"{rows} rows", phase)),
                    most=sequences_per_step(plan),
                    on_row=seen,
                    time_left=lambda: self._time_left(share=0.5),
                )
                self.say(*largest_lines(largest, plan))
            usable = largest.usable if largest else 0
            wanted = asked if asked is not None else usual_points(plan, bench.machine, largest=usable)
            self.say(*heading(plan, "settings"))
            rows = self._points(bench, _once([(), *wanted]))
        finally:
            self._status.stop()
        return largest, trials, rows

    def _time_left(self, *, share: float = 1.0) -> bool:
        return time.monotonic() - self._began < share * self._limit

    def _points(self, bench: "Bench", wanted: list[tuple[str, ...]]) -> list["BenchResult"]:
        """The first in any case, and what is begun within the limit."""
        rows: list[BenchResult] = []
        for at, words in enumerate(wanted):
            if rows and not self._time_left():
                missing = "; ".join(", ".join(words) for words in wanted[at:])
                self.say(*left_out(missing))
                break
            rows.append(self._point(bench, words))
        return rows

    def _point(self, bench: "Bench", words: tuple[str, ...]) -> "BenchResult":
        from bloomery.bench.page import line

        name = ", ".join(words) or "the recipe as planned"
        row = bench.point(*words, on_phase=lambda phase: self._now(name, phase))
        self.say(line(row))
        return row

    def _now(self, name: str, phase: str) -> None:
        if self._live:
            self._status.start()
            self._status.update(literal(f"{name}: {phase}"))


def seconds_of(limit: str | None) -> float:
    """Raises UserError for what is no wall time."""
    if limit is None:
        return math.inf
    try:
        duration = parse_duration(limit)
        if duration.unit != "seconds" or duration.amount <= 0:
            raise ValueError(limit)
    except ValueError as error:
        fix = "write --limit 10m, or 90s, or 2h"
        raise UserError(f"{limit!r} is no time", where="--limit", fix=fix, code=2) from error
    return duration.amount


def left_out(missing: str) -> list[str]:
    """What was not measured, and why."""
    head = f"{'left out':<10}"
    return textwrap.wrap(f"{missing}: the time was up", 100, initial_indent=head, subsequent_indent=" " * len(head))


def _once(points: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(points))


def document(largest: "Largest | None", trials: list["BenchResult"], rows: list["BenchResult"]) -> dict[str, Any]:
    """The JSON of `bench --json`; `verdict` is that of the recipe as planned, the first of `points`."""
    from bloomery.bench.page import verdict

    return {
        "largest_micro_batch": largest,
        "trials": [_row(row) for row in trials],
        "points": [_row(row) for row in rows],
        "verdict": verdict(rows[0]),
    }


def _row(row: "BenchResult") -> dict[str, Any]:
    from bloomery.bench.page import planned_rate

    plan = row.plan
    return {
        "overrides": row.words,
        "outcome": row.outcome,
        "message": row.message,
        "micro_batch_size": row.micro_batch_size,
        "sequence_length": plan.data.sequence_length if plan else None,
        "step_seconds": row.step_seconds,
        "fastest_step_seconds": row.fastest_seconds,
        "tokens_per_second": row.tokens_per_second,
        "peak_gib": row.peak_gib,
        "reserved_gib": row.reserved_gib,
        "core_wait": row.core_wait,
        "plan": None if plan is None else {
            "tokens_per_second": _estimate(planned_rate(plan)),
            "peak_gib": row.planned_gib,
            "limit_gib": plan.memory.limit / 2**30,
        },
    }  # fmt: skip


def _estimate(estimate: "Estimate | None") -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "from": estimate.origin}
