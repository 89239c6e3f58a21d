"""The page of a run: figures next to the plan, charts, events in words, and the commands that act on it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import final
from urllib.parse import quote

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.monitor.words import phase_text
from bloomery.studio.charts import ChartMark, LineChart, LoadMap, marks_of
from bloomery.studio.commands import Commands
from bloomery.studio.frame import STATUS_COLORS, CommandView, notify, page, update_every
from bloomery.studio.models_page import address_of_chat, ask_to_export
from bloomery.studio.post_mortem import PostMortemView
from bloomery.studio.run_charts import charts_of, evaluations_of, run_figures
from bloomery.studio.run_sections import EventList, drawers_of
from bloomery.studio.watching import FIRST_SECONDS, OpenRun, Watching, timeline_of
from bloomery.view.curves import NO_POINTS
from bloomery.view.reader import LIVE

UPDATE_SECONDS = 1.0


async def run_page(watching: Watching, commands: Commands, name: str) -> None:
    try:
        opened = watching.run(name)
    except UserError as error:
        if commands.of(name) is not None:
            _starting_page(watching, commands, name)
            return
        with page("No such run", ""):
            ui.label(f"error: {error.problem}").classes("text-lg")
            ui.link("All runs", "/")
        return
    # It may be read already, since somebody pointed at it.
    reading = asyncio.create_task(asyncio.to_thread(opened.update, FIRST_SECONDS))
    await asyncio.wait({reading}, timeout=FIRST_SECONDS)
    with page(harmless(name), ""):
        view = RunPage(opened, commands)
        update_every(UPDATE_SECONDS, view.update)


def _starting_page(watching: Watching, commands: Commands, name: str) -> None:
    """Of a run whose command has made no folder yet: what it prints, until there is one."""
    with page(harmless(name), ""):
        ui.label(harmless(name)).classes("text-xl font-semibold break-all").props(
            "role=heading aria-level=1"
        )
        state = ui.label("starting").props("role=status")
        output = CommandView(commands, name, opened=True)

        def update() -> None:
            output.update()
            with suppress(UserError):
                watching.run(name)
                ui.navigate.reload()
            command = commands.of(name)
            if command is None or command.code is not None:
                state.text = "the command ended before it made the folder of the run"

        update_every(0.5, update)


@final
class RunPage:
    """Mutable: one open page of a run."""

    def __init__(self, opened: OpenRun, commands: Commands) -> None:
        self.opened = opened
        self.commands = commands
        self.name = opened.reader.folder.name
        self._version = -1
        with ui.row().classes("w-full items-center gap-3"):
            ui.label(harmless(self.name)).classes("text-xl font-semibold break-all").props(
                "role=heading aria-level=1"
            )
            self._badge = ui.badge(opened.status).classes("px-2 py-1").props('aria-live="polite"')
            ui.space()
            self._resume = self._button("Resume", "resume", "play_arrow")
            self._evaluate = self._button("Evaluate", "eval", "fact_check")
            self._chat = ui.button("Chat", icon="chat_bubble_outline", on_click=self._open_chat)
            self._export = ui.button("Export", icon="file_download", on_click=self._ask_to_export)
            for button in (self._chat, self._export):
                button.props("outline dense no-caps padding='xs sm'")
            new_run = f"/new?run={quote(self.name, safe='')}"
            ui.button(
                "New run from this", icon="add", on_click=lambda: ui.navigate.to(new_run)
            ).props("outline dense no-caps padding='xs sm'")
            # Last, at the edge, and there while the page is open: no other button comes under the mouse.
            self._save = self._button("Save now", "save", "save")
            self._stop = self._button("Save and stop", "stop", "stop")
            self._was_live = False
        self._reloads = False
        self._problem = ui.label().classes("studio-text").props("role=status")
        self._command = CommandView(commands, self.name)
        self._post_mortem = PostMortemView(opened)
        self._progress = ui.linear_progress(0, show_value=False, size="6px").props(
            "aria-hidden=true"
        )
        self._figures = ui.row().classes("w-full gap-x-6 gap-y-2")
        self._values: dict[str, ui.label] = {}  # of the figures, by label
        self._charts: dict[tuple[str, str], LineChart] = {}  # by title and first curve
        self._grid = ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2")
        self._experts = ui.column().classes("w-full gap-0")
        self._load_map: LoadMap | None = None  # of a mixture
        self._events = EventList()
        with ui.element("section").classes("w-full"):
            self._drawers = drawers_of(opened)
        with opened.lock:
            self._draw()

    def _button(self, text: str, command: str, icon: str) -> ui.button:
        return ui.button(text, icon=icon, on_click=lambda: self._start(command)).props(
            "outline dense no-caps padding='xs sm'"
        )

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
        await self._post_mortem.update()
        for drawer in self._drawers:
            await drawer.update()

    def _draw(self) -> None:
        """What has changed since the last time."""
        opened = self.opened
        status = opened.status
        self._badge.text = status
        self._badge.props(f"color={STATUS_COLORS.get(status, 'grey-7')}")
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

        version = opened.reader.tail.read_lines
        if version == self._version and not is_live:
            return
        has_events = version != self._version
        self._version = version
        steps = summary.planned_steps or opened.reader.planned.steps
        self._progress.value = min(summary.step / steps, 1.0) if steps else 0.0
        self._draw_figures()
        if has_events:
            timeline = timeline_of(opened)
            self._draw_charts(marks_of(timeline))
            self._draw_experts()
            self._events.show(timeline)

    def _draw_figures(self) -> None:
        figures = dict(run_figures(self.opened))
        if list(figures) != list(self._values):
            self._figures.clear()
            self._values = {}
            with self._figures:
                for label in figures:
                    with ui.column().classes("gap-0 studio-figure"):
                        ui.label(label).classes("text-xs opacity-75")
                        self._values[label] = ui.label().classes("text-base font-medium")
        for label, value in figures.items():
            self._values[label].text = value

    def _draw_experts(self) -> None:
        load = self.opened.view.expert_load
        rows = [] if load is None else load.rows()
        if load is None or not rows:
            return
        if self._load_map is None:
            with self._experts:
                self._load_map = LoadMap(rows)
        self._load_map.show(load.step, rows)

    def _draw_charts(self, marks: Sequence[ChartMark]) -> None:
        for place, chart in enumerate(charts_of(self.opened)):
            names = tuple(chart.curves)
            key = chart.title, names[0]  # a metric may have any name
            drawn = self._charts.get(key)
            if drawn is not None and drawn.names != names:
                drawn.delete()
                drawn = None
            if drawn is None:
                with self._grid:
                    drawn = self._charts[key] = LineChart(
                        chart.title,
                        names,
                        labels=chart.curves,
                        unit=chart.unit,
                        levels=chart.levels,
                    )
                drawn.move(
                    place
                )  # the first values of a curve may come after those of later charts
            evaluations = (
                evaluations_of(self.opened, chart.evaluated) if chart.evaluated else NO_POINTS
            )
            drawn.show(
                self.opened,
                extra={"validation": evaluations} if len(evaluations) else None,
                marks=marks,
            )
