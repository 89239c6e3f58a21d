"""The page that compares runs: their curves over one another, what differs in their recipes, their final figures."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.text import harmless
from bloomery.core.units import format_count, format_seconds
from bloomery.monitor.events import TaskDone
from bloomery.monitor.words import eval_text
from bloomery.recipe.load import merged_text
from bloomery.studio.charts import LineChart
from bloomery.studio.curves import Point
from bloomery.studio.frame import address_of, notify, page
from bloomery.studio.recipe_form import value_text
from bloomery.studio.watching import OpenRun, Watching

MOST_RUNS = 20
UPDATE_SECONDS = 2.0
_AXES = {"step": "step", "tokens": "tokens", "hours": "hours"}
_CURVES = ("loss", "reward", "gradient norm", "tokens per second")


async def compare_page(watching: Watching, names: str) -> None:
    with page("Compare", "/compare"):
        ui.label("Compare").classes("text-xl font-semibold").props("role=heading aria-level=1")
        known_names = [row.name for row in await asyncio.to_thread(watching.rows)]
        chosen = [name for name in names.split("/") if name in known_names][:MOST_RUNS]
        selection = (
            ui.select(known_names, value=chosen, multiple=True, label=f"Runs, at most {MOST_RUNS}")
            .props("use-chips dense outlined")
            .classes("w-full")
        )
        with ui.row().classes("items-center"):
            ui.label("Over")
            axis = ui.toggle(_AXES, value="step").props("dense no-caps")
        content = ui.column().classes("w-full gap-4")
        drawn: list[tuple[LineChart, Overlay]] = []

        async def draw() -> None:
            """Everything anew, for the chosen runs and the axis."""
            runs = []
            for name in (selection.value or [])[:MOST_RUNS]:
                try:
                    runs.append(watching.run(name))
                except UserError as error:  # deleted since
                    notify(error)
            await asyncio.gather(*(asyncio.to_thread(run.update) for run in runs))
            content.clear()
            drawn.clear()
            with content:
                if not runs:
                    ui.label("Choose runs above, or mark them in the list of runs.")
                    return
                drawn.extend(_charts(runs, str(axis.value)))
                _figures(runs)
                _differences(runs)

        async def update() -> None:
            runs = {run for _, overlay in drawn for run in overlay.runs.values()}
            await asyncio.gather(*(asyncio.to_thread(run.update) for run in runs))
            for chart, overlay in drawn:
                chart.show(overlay)

        selection.on_value_change(draw)
        axis.on_value_change(draw)
        await draw()
        ui.timer(UPDATE_SECONDS, update)


@dataclass(frozen=True)
class Overlay:
    """One curve of several runs, by their names. `axis`: step, tokens or hours."""

    runs: Mapping[str, OpenRun]
    curve: str
    axis: str

    def points(self, name: str, first: int = 0, last: int | None = None) -> list[Point]:
        """A zoom loads detail where the axis is the step."""
        run = self.runs[name]
        with run.lock:
            if self.axis == "step":
                return run.curves.points(self.curve, first, last)
            places = run.curves.by_name.get(self.axis)
            points = run.curves.points(self.curve)
            if places is None or not points:
                return []
            across = places.at([point[0] for point in points])
        return [[x, point[1]] for x, point in zip(across, points, strict=True)]


def _charts(runs: Sequence[OpenRun], axis: str) -> Iterator[tuple[LineChart, Overlay]]:
    by_name = {harmless(run.reader.folder.name): run for run in runs}
    with ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2"):
        for curve in _CURVES:
            with_curve = {name: run for name, run in by_name.items() if curve in run.curves.by_name}
            if with_curve:
                overlay = Overlay(with_curve, curve, axis)
                chart = LineChart(curve.capitalize(), tuple(with_curve), across=axis)
                chart.show(overlay)
                yield chart, overlay


def figures_of(runs: Sequence[OpenRun]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row per run. Scores have their 95% confidence interval."""
    tasks = list(dict.fromkeys(key for run in runs for key in run.tasks))
    headings = ["run", "status", "step", "loss", "validation", "tokens", "tokens/s", "time"]
    headings += [f"{task}, {metric}" for task, metric in tasks]
    rows = []
    for run in runs:
        summary = run.summary
        best = summary.best
        rows.append(
            [
                run.reader.folder.name,
                run.status,
                f"{summary.step:,}",
                "" if summary.smoothed is None else f"{summary.smoothed:.4f}",
                "" if best is None else f"{eval_text(best, 4)} at step {best.step:,}",
                format_count(summary.tokens),
                "" if not summary.tokens_per_second else f"{summary.tokens_per_second:,.0f}",
                format_seconds(summary.seconds),
                *(_score(run.tasks.get(key)) for key in tasks),
            ]
        )
    return headings, [[harmless(cell) for cell in row] for row in rows]


def _score(task: TaskDone | None) -> str:
    if task is None or task.value is None:
        return ""
    interval = (
        "" if task.low is None or task.high is None else f" [{task.low:.3g}, {task.high:.3g}]"
    )
    return f"{task.value:.4g}{interval}"


def _figures(runs: Sequence[OpenRun]) -> None:
    headings, rows = figures_of(runs)
    ui.label("Figures").classes("text-lg font-semibold").props("role=heading aria-level=2")
    _table(headings, rows)


def differences_of(texts: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Keys with different values, and the value of each run; "" where a run does not set the key."""
    flat = {name: dict(_flat(merged_text(text, ()), "")) for name, text in texts.items()}
    keys = sorted({key for values in flat.values() for key in values})
    rows = []
    for key in keys:
        values = [flat[name].get(key, "") for name in texts]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return ["key", *texts], [[harmless(cell) for cell in row] for row in rows]


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value_text(value)


def _differences(runs: Sequence[OpenRun]) -> None:
    ui.label("Recipes").classes("text-lg font-semibold").props("role=heading aria-level=2")
    texts = {}
    for run in runs:
        try:
            content = read_whole(run.reader.folder / "recipe.yaml")
            texts[run.reader.folder.name] = content.decode("utf-8", errors="replace")
        except (OSError, UserError) as error:
            ui.label(harmless(f"{run.reader.folder.name}: {error}"))
    headings, rows = differences_of(texts)
    if rows:
        _table(headings, rows)
    else:
        ui.label("The recipes are the same." if len(runs) > 1 else "Choose a second run.")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    columns = [
        {
            "name": str(index),
            "label": heading,
            "field": str(index),
            "align": "left",
            "sortable": True,
        }
        for index, heading in enumerate(headings)
    ]
    table = ui.table(
        columns=columns,
        rows=[{str(index): cell for index, cell in enumerate(row)} for row in rows],
        row_key="0",
        pagination=0,
    )
    table.props("flat bordered dense hide-pagination wrap-cells").classes("w-full")


def address_of_comparison(names: Sequence[str]) -> str:
    """The page with these runs; no name of a folder has a slash."""
    return f"/compare?runs={address_of('/'.join(names)).removeprefix('/run/')}"
