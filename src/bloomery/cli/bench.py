"""`bloomery bench RECIPE`: speed and memory measured on this machine, compared with the plan"""

import math
import re
import shlex
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from bloomery.cli.common import json_option, literal, print_json, recipe_argument
from bloomery.cli.plan import estimate
from bloomery.core.errors import UserError
from bloomery.core.units import parse_duration

if TYPE_CHECKING:
    from bloomery.bench.measuring import Bench, BenchResult, Largest
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import RunPlan


@click.command()
@recipe_argument
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=V1,V2",
    help="Measure all combinations of these values.",
)
@click.option(
    "--export",
    "export",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the measurements to FILE to share them.",
)
@click.option(
    "--author",
    "contributor",
    default="anonymous",
    metavar="NAME",
    show_default=True,
    help="Set the author in FILE.",
)
@click.option(
    "--limit", metavar="TIME", help="Start no new measurement after this time, such as 10m."
)
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    export: Path | None,
    contributor: str,
    limit: str | None,
    as_json: bool,
) -> int:
    """Measure speed and GPU memory of this machine, next to the plan.

    Finds the largest micro-batch size, then times training steps. Each setting runs in a separate process. `bloomery
    plan` uses the measurements from then on. Exit code 1 when the planned settings could not be measured.

    \b
    Example: bloomery bench go-coder-tiny --sweep train.compile=true,false
    """
    from bloomery.bench.measuring import (
        Bench,
        author_name,
        closing,
        make_measurement_file,
        noise_line,
        points,
        verdict_lines,
    )
    from bloomery.hardware.calibration import store, write_calibration
    from bloomery.hardware.cpu_check import with_cpu_check
    from bloomery.hardware.detect import detect
    from bloomery.recipe.load import load_recipe
    from bloomery.runs.held_sources import held_sources

    # What was typed wrong is refused before the machine is looked at and a child is started.
    contributor = author_name(contributor)
    settings = points(sweeps) if sweeps else None
    limit_seconds = seconds_of(limit)
    bench = Bench(recipe=recipe, overrides=overrides, machine=with_cpu_check(detect()))
    table = Table(to_stderr=as_json, limit=limit_seconds)
    sources = held_sources(load_recipe(recipe, overrides).recipe)
    click.get_current_context().with_resource(sources)
    plan = bench.plan()
    largest, trials, rows = table.measure(bench, plan, settings)

    # `bloomery plan` uses what is stored; disturbed figures would mislead it.
    measurement_file = make_measurement_file(
        [*rows, *trials], bench.machine, contributor=contributor
    )
    remembered = measurement_file is not None and not rows[0].disturbed and store(measurement_file)
    source = shlex.join((recipe, *overrides))
    table.print("", *verdict_lines(rows[0]), *noise_line(rows))
    table.print(*closing(rows[0], remembered=remembered, source=source))
    if measurement_file is not None and export is not None:
        write_calibration(measurement_file, export)
        hint = "to share it, add it to benchmarks/calibration/ in a pull request"
        table.print(f"{'exported':<10}{export}; {hint}")
    if as_json:
        print_json(document(largest, trials, rows))
    return 0 if rows[0].outcome == "ok" else 1


def one_of_several(recipe: str, machine: "Machine") -> list[str]:
    """The line for a recipe that trains on several devices, here or by its name (llama3.1-8b-full-8gpu); else none."""
    from bloomery.runs.devices import chosen_devices

    _, count = chosen_devices(machine, None)
    if count_in_name := re.search(r"-(\d+)gpu(-tiny)?$", recipe):
        count = max(count, int(count_in_name[1]))
    if count == 1:
        return []
    command = f"bloomery plan {shlex.quote(recipe)} --gpus {count}"
    return [f"{'devices':<10}one is measured; `{command}` estimates {count}"]


@final
class Table:
    """Prints each measurement when it is done; on a terminal, a status line shows the current one."""

    def __init__(self, *, to_stderr: bool, limit: float = math.inf) -> None:
        from rich.console import Console

        self._to_stderr = to_stderr
        self._limit = limit
        self._start_time = time.monotonic()
        self._status = Console(stderr=True).status("", spinner="line")
        self._live = sys.stderr.isatty()

    def print(self, *lines: str) -> None:
        if self._live:
            self._status.stop()
        for line in lines:
            click.echo(line, err=self._to_stderr)

    def measure(
        self, bench: "Bench", plan: "RunPlan", settings: list[tuple[str, ...]] | None
    ) -> tuple["Largest | None", list["BenchResult"], list["BenchResult"]]:
        """The largest micro-batch with its trials (none when micro-batch sizes are swept), and the sweep."""
        from bloomery.bench.measuring import (
            heading,
            largest_lines,
            line,
            opening,
            search,
            sequences_per_step,
            usual_points,
        )
        from bloomery.hardware.calibration import device_of

        # What is measured and on which device stands above the table.
        device = device_of(bench.machine)
        device_name = device.name
        if device.cores:
            device_name += f", {device.cores} core{'s' * (device.cores > 1)}"
        prepared = (plan.data.prepared / "manifest.json").is_file()
        self.print(*opening(plan, recipe=bench.recipe, device=device_name, prepared=prepared))
        self.print(*one_of_several(bench.recipe, bench.machine))

        largest: Largest | None = None
        trials: list[BenchResult] = []
        swept_keys = {
            override.partition("=")[0] for overrides in settings or () for override in overrides
        }

        def trial(size: int) -> "BenchResult":
            return bench.trial(size, on_phase=partial(self.show_phase, f"micro-batch {size}"))

        def on_row(row: "BenchResult") -> None:
            trials.append(row)
            self.print(line(row))

        try:
            # Who sweeps micro-batch sizes has chosen them: there is nothing to search.
            if "train.micro_batch_size" not in swept_keys:
                self.print(*heading(plan, "largest micro-batch"))
                largest = search(
                    trial,
                    full_step=sequences_per_step(plan),
                    on_row=on_row,
                    time_left=lambda: self.time_left(share=0.5),
                )
                self.print(*largest_lines(largest, plan))

            # The recipe as planned comes first: the verdict is about it.
            if settings is None:
                usable = largest.usable if largest else 0
                settings = usual_points(plan, bench.machine, largest=usable)
            self.print(*heading(plan, "settings"))
            rows = self._points(bench, list(dict.fromkeys([(), *settings])))
        finally:
            self._status.stop()
        return largest, trials, rows

    def time_left(self, *, share: float = 1.0) -> bool:
        return time.monotonic() - self._start_time < share * self._limit

    def _points(self, bench: "Bench", settings: list[tuple[str, ...]]) -> list["BenchResult"]:
        """The results of the first setting, and of those that start within the time limit."""
        from bloomery.bench.measuring import line

        rows: list[BenchResult] = []
        for index, overrides in enumerate(settings):
            # What the time limit leaves out is named, so that nobody takes it for measured.
            if rows and not self.time_left():
                remaining = "; ".join(", ".join(setting) for setting in settings[index:])
                label = f"{'left out':<10}"
                text = f"{remaining}: time limit reached"
                indent = " " * len(label)
                wrapped = textwrap.wrap(text, 100, initial_indent=label, subsequent_indent=indent)
                self.print(*wrapped)
                break
            name = ", ".join(overrides) or "planned settings"
            row = bench.point(*overrides, on_phase=partial(self.show_phase, name))
            rows.append(row)
            self.print(line(row))
        return rows

    def show_phase(self, name: str, phase: str) -> None:
        """Show the phase of a measurement on the status line of a terminal."""
        if self._live:
            self._status.start()
            self._status.update(literal(f"{name}: {phase}"))


def seconds_of(limit: str | None, option: str = "--limit") -> float:
    """The seconds of --limit, infinite without it. Raises UserError unless `limit` is a positive time."""
    if limit is None:
        return math.inf
    try:
        duration = parse_duration(limit)
        if duration.unit != "seconds" or duration.amount <= 0:
            raise ValueError(limit)
    except ValueError as error:
        fix = f"write {option} 10m, or 90s, or 2h"
        raise UserError(f"not a time: {limit!r}", where=option, fix=fix, code=2) from error
    return duration.amount


def document(
    largest: "Largest | None", trials: list["BenchResult"], rows: list["BenchResult"]
) -> dict[str, Any]:
    """The JSON of `bench --json`; `verdict` is about the planned settings, the first of `points`."""
    from bloomery.bench.measuring import verdict

    return {
        "largest_micro_batch": largest,
        "trials": [_row(row) for row in trials],
        "points": [_row(row) for row in rows],
        "verdict": verdict(rows[0]),
    }


def _row(row: "BenchResult") -> dict[str, Any]:
    from bloomery.bench.measuring import planned_rate

    plan = row.plan
    plan_document = None
    if plan is not None:
        plan_document = {
            "tokens_per_second": estimate(planned_rate(plan)),
            "peak_gib": row.planned_gib,
            "limit_gib": plan.memory.limit / 2**30,
        }
    return {
        "overrides": row.overrides,
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
        "learning": row.learning,
        "plan": plan_document,
    }
