"""The page that compares runs: their curves over one axis, final metrics, and their recipes as a diff. No torch."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import counted, format_joules, format_seconds
from bloomery.monitor.events import TaskDone
from bloomery.monitor.words import number_format_of, with_interval
from bloomery.recipe.load import load_recipe
from bloomery.studio.charts import LineChart, color_of, dash_of
from bloomery.studio.commands import Commands
from bloomery.studio.frame import CommandView, notify, page, update_every
from bloomery.studio.run_charts import charts_of, evaluations_of
from bloomery.studio.watching import (
    FIRST_SECONDS,
    UNREAD,
    OpenRun,
    RunRow,
    Watching,
    address_of,
    method_of,
    model_of,
)
from bloomery.view.curves import AXES, NO_POINTS, Axis, Points
from bloomery.view.summary import in_millions

UPDATE_SECONDS = 2.0
MOST_RUNS = 20
SUBJECT = "differences of runs"  # of its commands
UNREADABLE = "recipe.yaml"  # the key of the reason why a recipe cannot be read
_MISSING = "–"
# A column of the tables is a run; `color` and `dash` are those of its curves.
_HEADING = """
<q-th :props="props" style="vertical-align: bottom">
  <a v-if="props.col.address" :href="props.col.address" class="studio-run-heading"
    :style="{borderTop: `4px ${props.col.dash} ${props.col.color}`}">{{ props.col.label }}</a>
  <span v-else>{{ props.col.label }}</span>
</q-th>
"""


def address_of_comparison(names: Sequence[str], axis: Axis = "step") -> str:
    """The page with these runs; no name of a folder has a slash."""
    over = "" if axis == "step" else f"&over={axis}"
    return f"/compare?runs={quote('/'.join(names), safe='')}{over}"


def axis_of(text: str) -> Axis:
    """The axis that the address names; "step" where it names none of them."""
    return next((axis for axis in AXES if axis == text), "step")


async def compare_page(watching: Watching, commands: Commands, names: str, over: str) -> None:
    """`names`: of the runs, with slashes between them. `over`: step, tokens or hours."""
    runs = list[OpenRun]()
    problems = list[str]()
    asked = list(dict.fromkeys(filter(None, names.split("/"))))
    axis = axis_of(over)
    for name in asked[:MOST_RUNS]:
        try:
            runs.append(watching.run(name))
        except UserError as error:
            problems.append(f"error: {error.problem}")
    if len(asked) > MOST_RUNS:
        problems.append(
            f"at most {MOST_RUNS} runs are compared; {len(asked) - MOST_RUNS} are left out"
        )
    with page("Compare", "/compare"):
        _show_choice(watching, runs, axis)
        if not runs:
            text = "\n".join(problems) or "Choose runs above, or mark them in the list of runs."
            ui.label(text).classes("studio-text")
            return
        view = CompareView(commands, runs, problems, axis)
        await view.update()
        update_every(UPDATE_SECONDS, view.update)
        ui.timer(0, view.show_recipes, once=True)


def _show_choice(watching: Watching, runs: Sequence[OpenRun], axis: Axis) -> None:
    """The title, and a field that adds a run."""
    chosen = [run.reader.folder.name for run in runs]

    def add(event: ValueChangeEventArguments[str]) -> None:
        ui.navigate.to(address_of_comparison([*chosen, event.value], axis))

    def list_runs(rows: Sequence[RunRow]) -> None:
        field.set_options([row.name for row in rows if row.name not in chosen])

    async def read() -> None:
        list_runs(await asyncio.to_thread(watching.rows))

    with ui.row().classes("w-full items-center gap-3"):
        title = f"Compare {counted(len(runs), 'runs')}" if runs else "Compare"
        ui.label(title).classes("text-xl font-semibold").props("role=heading aria-level=1")
        ui.space()
        if len(runs) < MOST_RUNS:
            field = ui.select([], with_input=True, label="Add a run", on_change=add)
            field.props("dense outlined").classes("w-64 max-w-full")
            list_runs(watching.known_rows())
            ui.timer(0, read, once=True)


@final
@dataclass(frozen=True)
class Snapshot:
    """What the page shows of a run. `charts`: curve and unit by title. `points`: of each curve, over the axis."""

    state: tuple[str, int]  # status and lines read: another one has another snapshot
    metrics: dict[str, str]
    scores_of_others: dict[str, dict[str, str]]  # that it was tested against, by their names
    charts: dict[str, tuple[str, str]]
    points: dict[str, Points]
    evaluations: Points


_NOTHING = Snapshot((UNREAD, 0), {"Status": UNREAD}, {}, {}, {}, NO_POINTS)


def snapshot_of(run: OpenRun, axis: Axis) -> Snapshot:
    """Holds the lock of the run once: while events are read, each time waits for some of them."""
    with run.lock:
        charts = dict(_single_curves(run))
        return Snapshot(
            state=_state_of(run),
            metrics=dict(compared_metrics(run)),
            scores_of_others=_scores_of_others(run),
            charts=charts,
            points={curve: run.curves.points_over(axis, curve) for curve, _ in charts.values()},
            evaluations=run.curves.moved(axis, evaluations_of(run, "loss")),
        )


def _single_curves(run: OpenRun) -> Iterator[tuple[str, tuple[str, str]]]:
    """Titles of charts with one curve each, and its unit; no curves of single devices, which another run may lack."""
    for chart in charts_of(run):
        if chart.of_devices:
            continue
        for name, label in chart.curves.items():
            title = chart.title if len(chart.curves) == 1 else f"{chart.title}: {label}"
            yield title, (name, chart.unit)


def _state_of(run: OpenRun) -> tuple[str, int]:
    return run.status, run.reader.tail.read_lines


@final
@dataclass(frozen=True)
class Overlay:
    """One curve of several runs, by the name of the run; a zoom reads more points than the snapshots have."""

    runs: Mapping[str, OpenRun]
    snapshots: Mapping[str, Snapshot]
    curve: str
    axis: Axis

    def points(self, name: str, first: float = 0, last: float | None = None) -> Points:
        if not first and last is None:
            return self.snapshots[name].points.get(self.curve, NO_POINTS)
        run = self.runs[name]
        with run.lock:
            return run.curves.points_over(self.axis, self.curve, first, last)


@final
class CompareView:
    """Mutable: one open page that compares runs."""

    def __init__(
        self, commands: Commands, runs: Sequence[OpenRun], problems: Sequence[str], axis: Axis
    ) -> None:
        self.commands = commands
        self._waiting_tests: list[str] = []  # names of runs
        self.runs = {harmless(run.reader.folder.name): run for run in runs}
        self.axis: Axis = axis
        self._problems = tuple(problems)
        self._snapshots: dict[str, Snapshot] = {}
        self._reading: asyncio.Task[None] | None = None
        self._charts: dict[str, LineChart] = {}
        with ui.row().classes("w-full gap-2 items-end"):
            for index, name in enumerate(self.runs):
                self._show_name(index, name)
            ui.space()
            with ui.row().classes("items-center no-wrap"):
                ui.label("Over")
                ui.toggle(list(AXES), value=axis, on_change=self._change_axis).props(
                    "dense no-caps unelevated padding='xs md' aria-label='Horizontal axis'"
                )
        self._problem = ui.label().classes("studio-text text-negative").props("role=status")
        self._grid = ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2")
        self._metrics = self._table("Final metrics")
        self._command = CommandView(commands, SUBJECT)
        if len(self.runs) > 1:
            with ui.row().classes("w-full items-center gap-3"):
                ui.button("Test the differences", icon="balance", on_click=self._test).props(
                    "outline dense no-caps padding='xs sm'"
                )
                ui.label(
                    f"The best checkpoint of each run against that of {next(iter(self.runs))} on the same validation "
                    "data, with 95% confidence intervals."
                ).classes("text-sm break-words min-w-0")
        self._recipes = self._table("What differs in the recipes")
        self._recipes.props("loading")

    def _show_name(self, index: int, name: str) -> None:
        line = f"border-bottom: 4px {dash_of(index)} {color_of(index)}"
        with ui.row().classes("items-center gap-0 no-wrap").style(line):
            ui.link(name, address_of(name)).classes("break-all text-sm")
            if len(self.runs) > 1:
                ui.button(icon="close", on_click=lambda: self._remove(name)).props(
                    "flat dense size=xs"
                ).props(f"aria-label={json.dumps(f'Leave out run {index + 1}')}")

    def _test(self) -> None:
        """One evaluation after the other: each holds two models."""
        self._waiting_tests = self._names()[1:]
        self._test_next()

    def _test_next(self) -> None:
        name = self._waiting_tests.pop(0)
        first = self._names()[0]
        try:
            self.commands.start("eval", f"runs/{name}", f"--against=runs/{first}", subject=SUBJECT)
        except UserError as error:
            self._waiting_tests = []
            notify(error)
        self._command.update()

    def _names(self) -> list[str]:
        return [run.reader.folder.name for run in self.runs.values()]

    def _remove(self, name: str) -> None:
        others = [run.reader.folder.name for key, run in self.runs.items() if key != name]
        ui.navigate.to(address_of_comparison(others, self.axis))

    def _change_axis(self, event: ValueChangeEventArguments[str]) -> None:
        self.axis = axis_of(event.value)
        ui.navigate.history.replace(address_of_comparison(self._names(), self.axis))
        for chart in self._charts.values():
            chart.delete()
        self._charts.clear()
        self._snapshots = {}
        self._draw()

    def _table(self, title: str) -> ui.table:
        """An empty table with a column per run."""
        columns: list[dict[str, Any]] = [
            {"name": "key", "label": "", "field": "key", "align": "left"}
        ]
        for index, name in enumerate(self.runs):
            columns.append(
                {
                    "name": f"run{index}",
                    "label": name,
                    "field": f"run{index}",
                    "align": "left",
                    "address": address_of(name),
                    "color": color_of(index),
                    "dash": dash_of(index),
                }
            )
        with ui.element("section").classes("w-full"):
            ui.label(title).classes("text-lg font-semibold").props("role=heading aria-level=2")
            table = ui.table(columns=columns, rows=[], row_key="key", pagination=0)
            table.classes("w-full studio-compare")
            table.props("flat bordered dense hide-pagination wrap-cells")
            table.add_slot("header-cell", _HEADING)
        return table

    async def update(self) -> None:
        """Draws what has been read within FIRST_SECONDS; the rest is read meanwhile."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=FIRST_SECONDS)
        self._draw()
        self._command.update()
        command = self.commands.of(SUBJECT)
        if self._waiting_tests and (command is None or command.code is not None):
            self._test_next()

    async def _read(self) -> None:
        """One run after the other: several at once would take Python's lock from each other, and from the page."""
        for run in self.runs.values():
            if not run.is_reading:
                await asyncio.to_thread(run.update)

    def _draw(self) -> None:
        """What has changed since the last time."""
        changed = [
            name
            for name, run in self.runs.items()
            if name not in self._snapshots
            or (run.status != UNREAD and self._snapshots[name].state != _state_of(run))
        ]
        notes = [
            f"{name}: {harmless(run.problem)}" for name, run in self.runs.items() if run.problem
        ]
        unread = [name for name, run in self.runs.items() if run.status == UNREAD]
        notes += [f"{name}: reading" for name in unread]
        self._problem.text = "\n".join([*self._problems, *notes])
        self._problem.visible = bool(self._problem.text)
        # Each time draws all curves anew: after 1, 2, 4 runs and so on, it takes a third of the browser's work.
        num_drawn = sum(snapshot.state[0] != UNREAD for snapshot in self._snapshots.values())
        is_early = 0 < len(self.runs) - len(unread) < 2 * num_drawn
        if not changed or (unread and is_early):
            return
        for name in changed:
            run = self.runs[name]
            is_new = name in unread  # half a curve is drawn anew again and again: it waits
            self._snapshots[name] = _NOTHING if is_new else snapshot_of(run, self.axis)
        self._draw_charts()
        metrics = {name: dict(self._snapshots[name].metrics) for name in self.runs}
        for snapshot in self._snapshots.values():
            for name, scores in snapshot.scores_of_others.items():
                if name in metrics:
                    metrics[name] |= scores
        self._metrics.rows = _rows(list(metrics.values()))

    def _draw_charts(self) -> None:
        names = tuple(self.runs)
        charts = dict[str, tuple[str, str]]()
        for snapshot in self._snapshots.values():
            for title, (curve, unit) in snapshot.charts.items():
                same_unit = charts.get(title, (curve, unit))[1] == unit
                charts[title] = curve, unit if same_unit else ""
        evaluations = {name: self._snapshots[name].evaluations for name in names}
        for title, (curve, unit) in charts.items():
            overlay = Overlay(self.runs, self._snapshots, curve, self.axis)
            self._chart(title, names, unit).show(overlay)
            if title == "Loss" and any(map(len, evaluations.values())):
                self._chart("Validation loss", (), "").show(overlay, extra=evaluations)

    def _chart(self, title: str, names: tuple[str, ...], unit: str) -> LineChart:
        if title not in self._charts:
            with self._grid:
                self._charts[title] = LineChart(
                    title, names, unit=unit, across=self.axis, has_legend=False
                )
        return self._charts[title]

    async def show_recipes(self) -> None:
        """Reads the recipes, which takes a tenth of a second each."""
        folders = [run.reader.folder for run in self.runs.values()]
        recipes = [await asyncio.to_thread(recipe_of, folder) for folder in folders]
        keys = {key for recipe in recipes for key in recipe}
        different = {key for key in keys if len({recipe.get(key) for recipe in recipes}) > 1}
        different |= keys & {UNREADABLE}
        self._recipes.props(remove="loading")
        self._recipes.props(f'no-data-label="no key of {len(keys)} differs"')
        self._recipes.rows = _rows(
            [{key: recipe[key] for key in recipe if key in different} for recipe in recipes]
        )


def _rows(columns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows by key, in the order in which the columns have them."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [
        {"key": key}
        | {f"run{index}": column.get(key, _MISSING) for index, column in enumerate(columns)}
        for key in keys
    ]


def compared_metrics(run: OpenRun) -> Iterator[tuple[str, str]]:
    """Labels and values. Hold the lock of the run."""
    summary = run.summary
    plan = run.reader.plan
    yield "Status", run.status
    if plan is not None:
        yield "Model", model_of(plan)
        yield "Method", method_of(plan)
    yield (
        "Step",
        f"{summary.step:,}" + (f" of {summary.planned_steps:,}" if summary.planned_steps else ""),
    )
    if summary.tokens:
        yield "Tokens", in_millions(summary.tokens)
    if summary.smoothed is not None:
        yield f"Loss, moving average, {summary.unit}", f"{summary.smoothed:.4f}"
    if summary.smoothed_reward is not None:
        yield "Reward", f"{summary.smoothed_reward:.3f}"
    evaluations = [event for event in summary.evaluations.values() if event.loss is not None]
    if evaluations and not summary.scores_completions:
        last = max(evaluations, key=lambda event: event.step)
        best = min(evaluations, key=lambda event: event.loss or 0.0)
        yield "Validation loss, last", f"{last.loss:.4f}"
        yield "Validation loss, lowest", f"{best.loss:.4f} at step {best.step:,}"
        if last.bits_per_byte is not None:
            yield "Bits per byte, last", f"{last.bits_per_byte:.4f}"
    if summary.tokens_per_second:
        yield "Tokens per second", f"{summary.tokens_per_second:,.0f}"
    if summary.peak_gib:
        yield "Peak memory", f"{summary.peak_gib:.1f} GiB"
    yield "Time", format_seconds(summary.clock.seconds)
    if (joules := summary.devices.joules) is not None:
        yield "Energy", format_joules(joules)
    for task in run.view.tasks.values():
        yield _label_of(task), score_text(task)


def _label_of(event: TaskDone) -> str:
    against = f" against {event.against.removeprefix('runs/')}" if event.against else ""
    return harmless(f"{event.task}: {event.metric}{against}")


def _scores_of_others(run: OpenRun) -> dict[str, dict[str, str]]:
    """Of the runs that it was tested against, by name: labels and values. Hold the lock of the run."""
    scores = dict[str, dict[str, str]]()
    for task in run.view.tasks.values():
        if task.against_value is not None:
            name = harmless(task.against.removeprefix("runs/"))
            score = replace(
                task,
                value=task.against_value,
                low=task.against_low,
                high=task.against_high,
                step=0,
                difference=None,
            )
            scores.setdefault(name, {})[_label_of(task)] = score_text(score)
    return scores


def score_text(event: TaskDone) -> str:
    """The score with its 95% confidence interval, and the difference to another model."""
    spec = number_format_of(event.metric)
    text = (
        _MISSING if event.value is None else with_interval(event.value, event.low, event.high, spec)
    )
    if event.step:
        text += f", step {event.step:,}"
    if event.difference is not None:
        difference = with_interval(
            event.difference, event.difference_low, event.difference_high, f"+{spec}"
        )
        text += f"; difference {difference}"
    return text


def recipe_of(folder: Path) -> dict[str, str]:
    """The values of the run's recipe by key, as JSON; where it cannot be read, the reason under UNREADABLE."""
    try:
        recipe = load_recipe(folder / "recipe.yaml").recipe
    except (UserError, OSError) as error:
        problem = error.problem if isinstance(error, UserError) else error.strerror
        return {UNREADABLE: harmless(f"cannot be read: {problem}")}
    return dict(_flat(recipe.model_dump(mode="json", by_alias=True), ""))


def _flat(section: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield harmless(f"{path}{key}"), harmless(text)
