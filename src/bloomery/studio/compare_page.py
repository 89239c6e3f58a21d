"""The page that compares runs: a sweep's ranking, curves over one axis, and what differs. Does not import torch."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final
from urllib.parse import quote

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from bloomery.core.errors import UserError
from bloomery.core.run_folder import all_sweeps, is_run
from bloomery.core.text import harmless
from bloomery.core.units import counted, format_joules, format_seconds
from bloomery.monitor.events import TaskDone
from bloomery.monitor.words import number_format_of, with_interval
from bloomery.recipe.load import load_recipe
from bloomery.studio.charts import LineChart, color_of, dash_of
from bloomery.studio.commands import Commands
from bloomery.studio.components import button, card, choice, heading, note, sentence, text, toolbar
from bloomery.studio.frame import CommandView, notify, page, starting_page, update_every
from bloomery.studio.parallel_axes import Line, parallel_axes
from bloomery.studio.recipe_form import as_typed
from bloomery.studio.run_charts import charts_of, evaluations_of
from bloomery.studio.sweep_section import SweepSection, about, count_begun, name_of
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
from bloomery.sweep.table import read_sweep
from bloomery.view.curves import AXES, NO_POINTS, Axis, Points
from bloomery.view.summary import in_millions

UPDATE_SECONDS = 2.0
MOST_RUNS = 20
FIRST_CHARTS = ("Loss", "Validation loss", "Reward")  # what decides; the others follow the tables
MOST_AXES = 7  # of settings, in the picture
LEAST_LINES = 3  # runs from which on a picture says more than a table
SUBJECT = "differences of runs"  # of its commands
UNREADABLE = "recipe.yaml"  # the key of the reason why a recipe cannot be read
_MISSING = "–"
UNSET = {_MISSING, "null"}  # values of a key that a recipe does not set
MOST_KEYS = 16  # that differ, before "all"
_LOWER_IS_BETTER = ("bits_per_byte", "perplexity", "loss")  # of metrics of evaluations
# A column of the tables is a run; `color` and `dash` are those of its curves.
_HEADING = """
<q-th :props="props" style="vertical-align: bottom">
  <a v-if="props.col.address" :href="props.col.address" class="studio-run-heading"
    :style="{borderTop: `4px ${props.col.dash} ${props.col.color}`}">{{ props.col.label }}</a>
  <span v-else>{{ props.col.label }}</span>
</q-th>
"""
_CELL = """
<q-td :props="props"><b v-if="props.row.best === props.col.name" class="good">{{ props.value }}, best</b>
  <span v-else>{{ props.value }}</span></q-td>
"""


def address_of_comparison(names: Sequence[str], axis: Axis = "step") -> str:
    """The page with these runs, a slash between them: no name of a folder has one. A run of a sweep has two."""
    over = "" if axis == "step" else f"&over={axis}"
    joined = "/".join(name.replace("/", "//") for name in names)
    return f"/compare?runs={quote(joined, safe='')}{over}"


def address_of_sweep(name: str, axis: Axis = "step") -> str:
    """The page with a sweep of `runs/`."""
    over = "" if axis == "step" else f"&over={axis}"
    return f"/compare?sweep={quote(name, safe='')}{over}"


def names_in(text: str) -> list[str]:
    """The names of an address: "one/SWEEP//RUN" is one and SWEEP/RUN."""
    names = (name.replace("//", "/") for name in re.split("(?<!/)/(?!/)", text))
    return list(dict.fromkeys(filter(None, names)))


def axis_of(text: str) -> Axis:
    """The axis that the address names; "step" where it names none of them."""
    return next((axis for axis in AXES if axis == text), "step")


async def compare_page(
    watching: Watching, commands: Commands, names: str, over: str, sweep: str = ""
) -> None:
    """`names`: of the runs, with slashes between them. `over`: step, tokens or hours. `sweep`: its name in `runs/`, in
    place of the runs.
    """
    problems = list[str]()
    axis = axis_of(over)
    asked = names_in(names)
    folder = None
    if sweep:
        folder, asked, problems = await asyncio.to_thread(_sweep_of, sweep)
        if folder is None and commands.of(sweep) is not None:
            starting_page(commands, sweep, lambda: _sweep_of(sweep)[0] is not None)
            return
    runs = list[OpenRun]()
    for name in asked[:MOST_RUNS]:
        try:
            runs.append(watching.run(name))
        except UserError as error:
            problems.append(error.problem)
    if len(asked) > MOST_RUNS:
        rest = len(asked) - MOST_RUNS
        problems.append(
            f"at most {MOST_RUNS} runs are compared; {rest} are left out"
            if folder is None
            else f"the curves are those of {MOST_RUNS} runs"
        )
    with page("Compare", "/compare"):
        _show_choice(watching, runs, axis, folder)
        section = None
        if folder is not None:
            num_begun = await asyncio.to_thread(count_begun, folder)
            command = CommandView(commands, sweep)
            section = SweepSection(folder, commands)
        view = None
        if runs:
            view = CompareView(commands, runs, problems, axis, sweep if folder is not None else "")
            await view.update()
        else:
            for problem in problems:
                note(problem, "bad")
            if folder is None:
                await _show_start(problems)

        # Timers begin after the last await: with the first of them NiceGUI answers with what is there.
        if view is not None:
            update_every(UPDATE_SECONDS, view.update)
            ui.timer(0, view.show_recipes, once=True)
        if folder is not None and section is not None:

            async def update() -> None:
                command.update()
                await section.update()
                # A run that has begun gets its curves.
                if await asyncio.to_thread(count_begun, folder) > num_begun:
                    ui.navigate.reload()

            update_every(UPDATE_SECONDS, update)
            ui.timer(0, section.update, once=True)


def _sweep_of(name: str) -> tuple[Path | None, list[str], list[str]]:
    """The folder of a sweep, the names of its runs, best first, and why there is none."""
    folder = next((path for path in all_sweeps() if path.name == name), None)
    if folder is None:
        return None, [], [f"no sweep {harmless(name)[:80]!r} in runs/"]
    try:
        table = read_sweep(folder, noise=False)
    except UserError as error:
        return folder, [], [error.problem]
    return folder, [name_of(table, run) for run in table.runs if is_run(run.run)], []


async def _show_start(problems: Sequence[str]) -> None:
    """Without runs: the sweeps that are here, and how to choose."""
    sweeps = await asyncio.to_thread(all_sweeps)
    words = [await asyncio.to_thread(about, folder) for folder in sweeps]
    if sweeps:
        sentence("Sweeps")
        with ui.element("div").classes("grid3 studio-offers"):
            for folder, line in zip(sweeps, words, strict=True):
                choice(harmless(folder.name), line, _opener(folder.name))
    if not problems:
        with card("Nothing is compared yet"):
            sentence("Choose runs above, or mark them in the list of runs and press Compare.")
            sentence(
                "To compare settings, type several values into a field of New run, such as 1e-4, 3e-4: a run trains "
                "with each, and they are ranked here. In a terminal: bloomery sweep.",
                "muted",
                small=True,
            )
            with toolbar():
                button("Runs", lambda: ui.navigate.to("/"))
                button("New run", lambda: ui.navigate.to("/new"))


def _opener(name: str) -> Callable[[], None]:
    return lambda: ui.navigate.to(address_of_sweep(name))


def _show_choice(
    watching: Watching, runs: Sequence[OpenRun], axis: Axis, sweep: Path | None
) -> None:
    """The title, and a field that adds a run."""
    chosen = [run.name for run in runs]

    def add(event: ValueChangeEventArguments[str]) -> None:
        ui.navigate.to(address_of_comparison([*chosen, event.value], axis))

    def list_runs(rows: Sequence[RunRow]) -> None:
        field.set_options([row.name for row in rows if row.name not in chosen])

    async def read() -> None:
        list_runs(await asyncio.to_thread(watching.rows))

    title = f"Compare {counted(len(runs), 'runs')}" if runs else "Compare"
    below = "Add a run to compare it with." if len(runs) == 1 else ""
    if sweep is not None:
        title, below = harmless(sweep.name), about(sweep)
    with heading(title, below):
        if sweep is not None:
            button("Compare other runs", lambda: ui.navigate.to("/compare"))
        elif len(runs) < MOST_RUNS:
            field = ui.select([], with_input=True, label="Add a run", on_change=add)
            field.props("dense outlined").classes("w-64 max-w-full")
            list_runs(watching.known_rows())
            ui.timer(0, read, once=True)


class Result(NamedTuple):
    """The figure by which a run is judged."""

    name: str
    value: float
    lower_is_better: bool


@final
@dataclass(frozen=True)
class Snapshot:
    """What the page shows of a run. `charts`: curve and unit by title. `points`: of each curve, over the axis."""

    state: tuple[str, int]  # status and lines read: another one has another snapshot
    metrics: dict[str, str]
    tasks: dict[str, TaskDone]  # by their labels in the table
    scores_of_others: dict[str, dict[str, TaskDone]]  # that it was tested against, by their names
    result: Result | None
    charts: dict[str, tuple[str, str]]
    points: dict[str, Points]
    evaluations: Points


_NOTHING = Snapshot((UNREAD, 0), {"Status": UNREAD}, {}, {}, None, {}, {}, NO_POINTS)


def snapshot_of(run: OpenRun, axis: Axis) -> Snapshot:
    """Holds the lock of the run once: while events are read, each time waits for some of them."""
    with run.lock:
        charts = dict(_single_curves(run))
        return Snapshot(
            state=_state_of(run),
            metrics=dict(compared_metrics(run)),
            tasks={_label_of(task): task for task in run.view.tasks.values()},
            result=result_of(run),
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
        self,
        commands: Commands,
        runs: Sequence[OpenRun],
        problems: Sequence[str],
        axis: Axis,
        sweep: str = "",
    ) -> None:
        self.commands = commands
        self._sweep = sweep  # whose runs these are
        self._waiting_tests: list[str] = []  # names of runs
        self.runs = {harmless(run.name): run for run in runs}
        self.axis: Axis = axis
        self._problems = tuple(problems)
        self._snapshots: dict[str, Snapshot] = {}
        self._reading: asyncio.Task[None] | None = None
        self._charts: dict[str, LineChart] = {}
        with ui.element("div").classes("toolbar"):
            for index, name in enumerate(self.runs):
                self._show_name(index, name)
            ui.space()
            with ui.row().classes("items-center no-wrap"):
                text("over", classes="muted small")
                ui.toggle(list(AXES), value=axis, on_change=self._change_axis).props(
                    "dense no-caps unelevated aria-label='Horizontal axis'"
                )
        self._problem = ui.label().classes("studio-text text-negative").props("role=status")
        self._verdict = sentence("")
        self._first_grid = ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2")
        with card("Settings and result", "colored by rank, the best on top") as self._picture:
            self._lines = ui.element("div").classes("w-full")
        self._picture.visible = False
        self._settings: dict[str, dict[str, str]] = {}  # those that differ, of each run
        self._shown_lines: list[Line] = []
        self._recipes = self._table("What differs in the recipes")
        self._recipes.props("loading")
        with self._recipes.parent_slot.parent:  # type: ignore[union-attr]  # a card
            self._more = button("", self._show_all_keys, kind="quiet", icon="expand_more")
        self._more.visible = False
        self._rows: list[dict[str, str]] = []  # of every key that differs
        if len(self.runs) == 1:  # nothing can differ
            self._recipes.parent_slot.parent.visible = False  # type: ignore[union-attr]  # a card
        self._metrics = self._table("Final metrics")
        if len(self.runs) > 1 and not self._sweep:  # a sweep tests them itself
            with ui.element("div").classes("toolbar"):
                button("Test the differences", self._test, icon="balance")
                text(
                    f"The best checkpoint of each run against that of {next(iter(self.runs))} on the same validation "
                    "data, with 95% confidence intervals.",
                    classes="muted small",
                )
        self._command = CommandView(commands, SUBJECT)
        self._grid = ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2")

    def _show_name(self, index: int, name: str) -> None:
        line = f"border-bottom: 3px {dash_of(index)} {color_of(index)}"
        with ui.element("span").classes("studio-compared").style(line):
            ui.link(self._label(name), address_of(name)).classes("break-all")
            if len(self.runs) > 1 and not self._sweep:
                ui.button(icon="close", on_click=lambda: self._remove(name)).props(
                    "flat dense size=xs"
                ).props(f"aria-label={json.dumps(f'Leave out run {index + 1}')}")

    def _label(self, name: str) -> str:
        """Of a run of the sweep that the title names, its own name alone."""
        return name.removeprefix(f"{harmless(self._sweep)}/") if self._sweep else name

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
        return [run.name for run in self.runs.values()]

    def _remove(self, name: str) -> None:
        others = [run.name for key, run in self.runs.items() if key != name]
        ui.navigate.to(address_of_comparison(others, self.axis))

    def _change_axis(self, event: ValueChangeEventArguments[str]) -> None:
        self.axis = axis_of(event.value)
        address = address_of_comparison(self._names(), self.axis)
        if self._sweep:
            address = address_of_sweep(self._sweep, self.axis)
        ui.navigate.history.replace(address)
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
                    "label": self._label(name),
                    "field": f"run{index}",
                    "align": "left",
                    "address": address_of(name),
                    "color": color_of(index),
                    "dash": dash_of(index),
                }
            )
        with card(title):
            table = ui.table(columns=columns, rows=[], row_key="key", pagination=0)
            table.classes("w-full studio-compare")
            table.props("flat dense hide-pagination wrap-cells")
            table.add_slot("header-cell", _HEADING)
            table.add_slot("body-cell", _CELL)
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
        tasks = {name: dict(self._snapshots[name].tasks) for name in self.runs}
        for snapshot in self._snapshots.values():
            for name, scores in snapshot.scores_of_others.items():
                if name in metrics:
                    tasks[name] |= scores
                    metrics[name] |= {label: score_text(score) for label, score in scores.items()}
        rows = _rows(list(metrics.values()))
        for row in rows:
            best = supported_best({name: tasks[name].get(row["key"]) for name in self.runs})
            row["best"] = "" if best is None else f"run{list(self.runs).index(best)}"
        self._metrics.rows = rows
        self._judge()

    def _judge(self) -> None:
        """Which run has the best figure, and their settings as lines, once results and recipes are read."""
        results = {name: self._snapshots[name].result for name in self.runs}
        known = {name: result for name, result in results.items() if result is not None}
        names = {result.name for result in known.values()}
        if self._sweep or len(names) != 1 or len(known) < 2:
            return
        metric, _, lower = next(iter(known.values()))
        best = min(known, key=lambda name: known[name].value * (1 if lower else -1))
        self._verdict.text = (
            f"{'Lowest' if lower else 'Highest'} {metric}: {best}, {known[best].value:.4f}. Whether the "
            "difference is more than noise, the test below says."
        )
        keys = list(dict.fromkeys(key for recipe in self._settings.values() for key in recipe))
        keys = [key for key in keys if key != UNREADABLE]
        lines = [
            Line(name, address_of(name), self._settings.get(name, {}), known[name].value)
            for name in known
        ]
        self._picture.visible = len(lines) >= LEAST_LINES and 0 < len(keys) <= MOST_AXES
        if self._picture.visible and lines != self._shown_lines:
            self._shown_lines = lines
            self._lines.clear()
            with self._lines:
                parallel_axes(lines, metric, lower_is_better=lower)

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
            with self._first_grid if title in FIRST_CHARTS else self._grid:
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
        different -= {"name"}  # that of a run heads its column
        self._recipes.props(remove="loading")
        self._recipes.props(f'no-data-label="no key of {len(keys)} differs"')
        differences = [
            {key: recipe[key] for key in recipe if key in different} for recipe in recipes
        ]
        # Runs of another kind differ in most keys: what all of them set comes first.
        self._rows = sorted(_rows(differences), key=_is_not_of_all)
        self._recipes.rows = self._rows[:MOST_KEYS]
        self._more.text = f"All {len(self._rows)} keys that differ"
        self._more.visible = len(self._rows) > MOST_KEYS
        self._settings = dict(zip(self.runs, differences, strict=True))
        if self._snapshots:
            self._judge()

    def _show_all_keys(self) -> None:
        self._recipes.rows = self._rows
        self._more.visible = False


def _is_not_of_all(row: Mapping[str, str]) -> bool:
    """Whether some recipe does not set the key; why one cannot be read concerns all."""
    return row["key"] != UNREADABLE and bool(UNSET & {*row.values()})


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


def result_of(run: OpenRun) -> Result | None:
    """The lowest validation loss, or the reward of a run that is judged by rewards. Hold the lock of the run."""
    summary = run.summary
    if summary.scores_completions:
        reward = summary.judged_reward
        return None if reward is None else Result("reward", reward, lower_is_better=False)
    losses = [event.loss for event in summary.evaluations.values() if event.loss is not None]
    return Result("validation loss", min(losses), lower_is_better=True) if losses else None


def supported_best(scores: Mapping[str, TaskDone | None]) -> str | None:
    """The run whose score is better than that of every other one beyond the noise: their paired test says so, or their
    intervals are apart. None where the noise names none.
    """
    known = {name: score for name, score in scores.items() if score and score.value is not None}
    if len(known) < 2:
        return None
    metric = next(iter(known.values())).metric
    sign = 1 if metric.endswith(_LOWER_IS_BETTER) else -1
    best = min(known, key=lambda name: sign * (known[name].value or 0.0))
    others = (name for name in known if name != best)
    return best if all(_is_apart(known, best, other, sign) for other in others) else None


def _is_apart(scores: Mapping[str, TaskDone], best: str, other: str, sign: int) -> bool:
    """`sign`: 1 where a lower score is better."""
    for name, against, side in ((other, best, 1), (best, other, -1)):
        score = scores[name]
        bounds = (score.difference_low, score.difference_high)
        if harmless(score.against.removeprefix("runs/")) == against and None not in bounds:
            return all(side * sign * (bound or 0.0) > 0 for bound in bounds)
    first, second = scores[best], scores[other]
    if None in (first.low, first.high, second.low, second.high):
        return False
    if sign > 0:
        return (first.high or 0.0) < (second.low or 0.0)
    return (first.low or 0.0) > (second.high or 0.0)


def _scores_of_others(run: OpenRun) -> dict[str, dict[str, TaskDone]]:
    """Of the runs that it was tested against, by name: labels and scores. Hold the lock of the run."""
    scores = dict[str, dict[str, TaskDone]]()
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
            scores.setdefault(name, {})[_label_of(task)] = score
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
            text = value
            if not isinstance(value, str):
                text = json.dumps(as_typed(value), ensure_ascii=False)
            yield harmless(f"{path}{key}"), harmless(text)
