"""The page of a run: figures next to the plan, charts, events in words, and the commands that act on it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import final
from urllib.parse import quote

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.monitor.words import phase_text
from bloomery.studio.charts import SMOOTHINGS, ChartMark, LineChart, LoadMap, marks_of
from bloomery.studio.commands import Commands
from bloomery.studio.components import Badge, Number, Progress, button, note, text, toolbar
from bloomery.studio.export_dialogs import ask_to_export
from bloomery.studio.frame import (
    CommandView,
    nothing_here,
    notify,
    page,
    starting_page,
    update_every,
)
from bloomery.studio.models_page import address_of_chat
from bloomery.studio.post_mortem import PostMortemView
from bloomery.studio.run_charts import Chart, charts_of, evaluations_of, run_figures
from bloomery.studio.run_headline import headline, subtitle
from bloomery.studio.run_notes_view import NotesView
from bloomery.studio.run_samples import RolloutList, SampleList
from bloomery.studio.run_sections import EventList, drawers_of
from bloomery.studio.watching import FIRST_SECONDS, OpenRun, Watching, timeline_of
from bloomery.view.curves import NO_POINTS
from bloomery.view.reader import LIVE

UPDATE_SECONDS = 1.0
DEFAULT_SMOOTHING = 0.9
FEWEST_STEPS = 10  # of the horizontal axis
LEAST_SHARE = 0.2  # of a run, before which its charts end with its newest step


async def run_page(watching: Watching, commands: Commands, name: str) -> None:
    try:
        opened = watching.run(name)
    except UserError as error:
        if commands.of(name) is not None:
            starting_page(commands, name, partial(_is_there, watching, name))
            return
        with page("No such run", ""):
            remark = "It may have been deleted or renamed. The list has the runs of this folder."
            nothing_here("No such run", harmless(error.problem), remark, ("All runs", "/"))
        return
    # It may be read already, since somebody pointed at it.
    reading = asyncio.create_task(asyncio.to_thread(opened.update, FIRST_SECONDS))
    await asyncio.wait({reading}, timeout=FIRST_SECONDS)
    with page(harmless(name), ""):
        view = RunPage(opened, commands)
        update_every(UPDATE_SECONDS, view.update)


def _is_there(watching: Watching, name: str) -> bool:
    with suppress(UserError):
        watching.run(name)
        return True
    return False


@final
class RunPage:
    """Mutable: one open page of a run."""

    def __init__(self, opened: OpenRun, commands: Commands) -> None:
        self.opened = opened
        self.commands = commands
        self.name = opened.name
        self._drawn: tuple[int, str] | None = None  # lines that were read, and the status
        with ui.element("div").classes("heading"):
            with ui.element("div").classes("min-w-0"):
                with ui.element("div").classes("toolbar"):
                    text(harmless(self.name), "h1", "title")
                    self._badge = Badge(opened.status)
                self._sub = text("", "p", "sub")
                self._notes = NotesView(opened)
            with toolbar():
                self._resume = self._button("Resume", "resume")
                self._evaluate = self._button("Evaluate", "eval")
                self._chat = button("Chat", self._open_chat)
                self._export = button("Export", self._ask_to_export)
                new_run = f"/new?run={quote(self.name, safe='')}"
                button("New run from this", lambda: ui.navigate.to(new_run))
                # Last, at the edge, and there while the page is open: no other button comes under the mouse.
                self._save = self._button("Save now", "save")
                self._stop = self._button("Save and stop", "stop")
                self._was_live = False
        self._reloads = False
        self._problem = note("").props("role=status")
        self._command = CommandView(commands, self.name)
        self._post_mortem = PostMortemView(opened)
        self._numbers = ui.element("div").classes("numbers")
        self._shown_numbers: list[Number] = []
        self._charts: dict[tuple[str, str], LineChart] = {}  # by title and first curve
        self._lead = ui.element("div").classes("w-full")
        self._progress = Progress()
        self._rollouts = RolloutList(opened)
        self._grid = ui.element("div").classes("grid3")
        self._smoothing = DEFAULT_SMOOTHING
        self._is_logarithmic = False
        self._experts = ui.element("div").classes("w-full")
        self._experts.visible = False
        self._load_map: LoadMap | None = None  # of a mixture
        self._samples = SampleList(opened)
        self._events = EventList()
        with ui.element("section").classes("card"):
            with ui.expansion("All figures").classes("w-full"):
                self._figures = ui.element("div").classes("facts")
            self._values: dict[str, TextElement] = {}  # of the figures, by label
            self._drawers = drawers_of(opened)
        with opened.lock:
            self._draw()

    def _button(self, words: str, command: str) -> ui.button:
        return button(words, lambda: self._start(command))

    def _start(self, command: str) -> None:
        try:
            started = self.commands.start(command, f"runs/{self.name}", subject=self.name)
        except UserError as error:
            notify(error)
            return
        ui.notify(f"started: {harmless(started.line)}")
        self._command.update()

    def _open_chat(self) -> None:
        ui.navigate.to(address_of_chat([f"runs/{self.name}"], "auto"))

    async def _ask_to_export(self) -> None:
        plan = self.opened.reader.plan
        is_adapter = plan is not None and plan.adapter.kind != "none"
        if await ask_to_export(self.commands, f"runs/{self.name}", is_adapter=is_adapter):
            ui.navigate.to("/models")  # which shows what it prints

    async def update(self) -> None:
        if not self.opened.is_reading:
            await asyncio.to_thread(self.opened.update)
        if self.opened.is_replaced and not self._reloads:
            # A deleted run's page becomes that of the run which has its name now, as after `bloomery demo`.
            self._reloads = True
            ui.navigate.reload()
        self._command.update()
        with self.opened.lock:
            self._draw()
        await self._notes.update()
        await self._post_mortem.update()
        await self._rollouts.update()
        await self._samples.update()
        for drawer in self._drawers:
            await drawer.update()

    def _draw(self) -> None:
        """What has changed since the last time."""
        opened = self.opened
        status = opened.status
        self._badge.show(status)
        self._sub.text = subtitle(opened)
        reading = (
            f"reading events: step {opened.summary.step:,} so far" if opened.is_reading else ""
        )
        summary = opened.summary
        doing = ""
        if status == "running" and not summary.recent and summary.phase is not None:
            doing = f"{phase_text(summary.phase)} ..."
        self._problem.text = harmless(opened.problem or reading or doing)
        self._problem.visible = bool(self._problem.text)
        is_live = status in LIVE
        self._save.enabled = self._stop.enabled = status in ("running", "paused")
        self._was_live |= is_live
        self._save.visible = self._stop.visible = self._was_live
        self._resume.visible = not is_live and status not in ("done", "deleted")
        has_model = opened.view.saved is not None and status != "deleted"
        self._evaluate.visible = not is_live and has_model
        self._chat.visible = self._export.visible = has_model

        # A run that is killed has a new status, and no new event.
        drawn = opened.reader.tail.read_lines, status
        if drawn == self._drawn and not is_live:
            return
        has_events = self._drawn is None or drawn[0] != self._drawn[0]
        self._drawn = drawn
        steps = summary.planned_steps or opened.reader.planned.steps
        self._progress.show(summary.step / steps if steps else 0.0)
        self._progress.element.visible = is_live and bool(steps)
        self._draw_numbers()
        self._draw_figures()
        if has_events:
            timeline = timeline_of(opened)
            self._draw_charts(marks_of(timeline), steps if is_live else None)
            self._draw_experts()
            self._events.show(timeline)

    def _draw_numbers(self) -> None:
        """What decides, in one row."""
        figures = list(headline(self.opened))
        if len(figures) != len(self._shown_numbers):
            self._numbers.clear()
            with self._numbers:
                self._shown_numbers = [Number(lead=index == 0) for index in range(len(figures))]
        for number, figure in zip(self._shown_numbers, figures, strict=True):
            number.show(figure.label, figure.value, figure.below, figure.tone, unit=figure.unit)

    def _draw_figures(self) -> None:
        figures = dict(run_figures(self.opened))
        if list(figures) != list(self._values):
            self._figures.clear()
            self._values = {}
            with self._figures:
                for label in figures:
                    with ui.element("div").classes("fact"):
                        self._values[label] = text("", "b")
                        text(label)
        for label, value in figures.items():
            self._values[label].text = value

    def _draw_experts(self) -> None:
        load = self.opened.view.expert_load
        rows = [] if load is None else load.rows()
        if load is None or not rows:
            return
        if self._load_map is None:
            self._experts.visible = True
            with self._experts:
                self._load_map = LoadMap(rows)
        self._load_map.show(load.step, rows)

    def _draw_charts(self, marks: Sequence[ChartMark], steps: int | None) -> None:
        """`steps`: of the whole run, while it trains: the axis ends there once a part of it is behind."""
        step = self.opened.summary.step
        end = float(steps) if steps and LEAST_SHARE * steps <= step <= steps else None
        if (
            end is None and step < FEWEST_STEPS
        ):  # the first points stand at the left, not at the edge
            end = float(FEWEST_STEPS)
        place = 0  # of those below the one that leads
        for chart in charts_of(self.opened):
            names = tuple(chart.curves)
            key = chart.title, names[0]  # a metric may have any name
            drawn = self._charts.get(key)
            if drawn is not None and drawn.names != names:
                drawn.delete()
                drawn = None
            if drawn is None:
                drawn = self._charts[key] = self._chart(chart, names)
                if not chart.leads:
                    # The first values of a curve may come after those of later charts.
                    drawn.move(place)
            place += not chart.leads
            evaluations = (
                evaluations_of(self.opened, chart.evaluated) if chart.evaluated else NO_POINTS
            )
            drawn.show(
                self.opened,
                extra={"validation": evaluations} if len(evaluations) else None,
                marks=marks,
                end=end,
            )

    def _chart(self, chart: Chart, names: tuple[str, ...]) -> LineChart:
        with self._lead if chart.leads else self._grid:
            drawn = LineChart(
                chart.title,
                names,
                labels=chart.curves,
                unit=chart.unit,
                levels=chart.levels,
                is_lead=chart.leads,
                best=chart.best,
                color=chart.color,
            )
        if chart.smooths:
            drawn.smoothing = self._smoothing
            drawn.is_logarithmic = self._is_logarithmic
        if chart.leads:
            with drawn.tools:
                self._show_tools()
        return drawn

    def _show_tools(self) -> None:
        """Smoothing and the vertical axis, of all charts that are noisy."""
        text("smoothing", "span", "muted small")
        smoothing = ui.toggle(SMOOTHINGS, value=self._smoothing)
        smoothing.props('dense unelevated no-caps aria-label="Smoothing"')
        logarithm = ui.switch("log", value=self._is_logarithmic).props("dense")

        def change() -> None:
            self._smoothing = smoothing.value
            self._is_logarithmic = logarithm.value
            with self.opened.lock:
                smooths = {
                    (c.title, next(iter(c.curves))) for c in charts_of(self.opened) if c.smooths
                }
            for key in smooths & self._charts.keys():
                self._charts[key].change(
                    smoothing=self._smoothing, is_logarithmic=self._is_logarithmic
                )

        smoothing.on_value_change(change)
        logarithm.on_value_change(change)
