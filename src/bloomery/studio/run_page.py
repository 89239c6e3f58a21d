"""The page of a run: figures next to the plan, charts, events in words, and the commands that act on it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import final
from urllib.parse import quote

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless, redact_secrets
from bloomery.core.units import GIB, format_seconds
from bloomery.monitor.summary import in_millions
from bloomery.monitor.words import eval_text, figure, format_joules
from bloomery.runs.reader import LIVE
from bloomery.studio.charts import Level, LineChart, marks_of
from bloomery.studio.commands import Commands
from bloomery.studio.curves import Point
from bloomery.studio.frame import STATUS_COLORS, notify, page, show_command
from bloomery.studio.models_page import address_of_chat, ask_to_export
from bloomery.studio.watching import FIRST_SECONDS, OpenRun, Watching, incidents_of, planned_speed

UPDATE_SECONDS = 1.0
_LOG_BYTES = 20_000
_SHOWN_INCIDENTS = 60


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
    reading = asyncio.create_task(asyncio.to_thread(opened.update))
    await asyncio.wait({reading}, timeout=FIRST_SECONDS)
    with page(harmless(name), ""):
        view = RunView(opened, commands)
        ui.timer(UPDATE_SECONDS, view.update)


def _starting_page(watching: Watching, commands: Commands, name: str) -> None:
    """Of a run whose command has made no folder yet: what it prints, until there is one."""
    with page(harmless(name), ""):
        ui.label(harmless(name)).classes("text-xl font-semibold break-all").props(
            "role=heading aria-level=1"
        )
        state = ui.label("starting").props("role=status")
        output = ui.column().classes("w-full gap-0")
        shown: list[tuple[int | None, str]] = []

        def update() -> None:
            command = commands.of(name)
            assert command is not None
            if (current := (command.code, command.text())) not in shown[-1:]:
                shown.append(current)
                output.clear()
                with output:
                    show_command(command, opened=True)
            with suppress(UserError):
                watching.run(name)
                ui.navigate.reload()
            if command.code is not None:
                state.text = "the command ended before it made the folder of the run"

        ui.timer(0.5, update)


@final
class RunView:
    """Mutable: one open page of a run."""

    def __init__(self, opened: OpenRun, commands: Commands) -> None:
        self.opened = opened
        self.commands = commands
        self.name = opened.reader.folder.name
        self._version = -1
        self._command_code: int | None = None
        with ui.row().classes("w-full items-center gap-3"):
            ui.label(harmless(self.name)).classes("text-xl font-semibold break-all").props(
                "role=heading aria-level=1"
            )
            self._badge = ui.badge(opened.status).classes("px-2 py-1").props('aria-live="polite"')
            ui.space()
            self._save = self._button("Save now", "save", "save")
            self._stop = self._button("Save and stop", "stop", "stop")
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
        self._problem = ui.label().classes("studio-text").props("role=status")
        self._command = ui.column().classes("w-full gap-0")
        self._command.visible = False
        self._progress = ui.linear_progress(0, show_value=False, size="6px").props(
            "aria-hidden=true"
        )
        self._figures = ui.row().classes("w-full gap-x-6 gap-y-2")
        self._values: dict[str, ui.label] = {}  # of the figures, by label
        self._charts: dict[str, LineChart] = {}
        self._grid = ui.element("div").classes("w-full grid gap-4 grid-cols-1 md:grid-cols-2")
        with ui.element("section").classes("w-full"):
            ui.label("Events").classes("text-lg font-semibold").props("role=heading aria-level=2")
            self._events = ui.column().classes("w-full gap-1")
        with ui.element("section").classes("w-full"):
            self._samples = ui.expansion("Samples").classes("w-full")
            self._samples.on_value_change(self._draw_samples)
            self._plan = ui.expansion("Plan").classes("w-full")
            self._plan.on_value_change(self._draw_plan)
            self._file("Log", "log.txt")
            self._file("Recipe", "recipe.yaml")
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
        self._show_command()

    def _show_command(self) -> None:
        command = self.commands.of(self.name)
        self._command.visible = command is not None
        self._command.clear()
        with self._command:
            show_command(command)
        self._command_code = None if command is None else command.code

    def _open_chat(self) -> None:
        ui.navigate.to(address_of_chat([f"runs/{self.name}"], "auto"))

    async def _ask_to_export(self) -> None:
        if await ask_to_export(self.commands, f"runs/{self.name}"):
            ui.navigate.to("/models")  # which shows what it prints

    def _file(self, title: str, file_name: str) -> None:
        """A file of the run, read when it is opened."""
        with ui.expansion(title).classes("w-full") as expansion:
            content = ui.label().classes("studio-text")

        async def read() -> None:
            if expansion.value:
                content.text = await asyncio.to_thread(self._end_of, file_name)

        expansion.on_value_change(read)

    def _draw_samples(self) -> None:
        """The newest first; a prompt that is sampled at every evaluation shows how the model changes."""
        if not self._samples.value:
            return
        self._samples.clear()
        with self._samples:
            if not self.opened.samples:
                ui.label("none yet: set sample.prompts in the recipe").classes("opacity-75")
            for sample in reversed(self.opened.samples):
                ui.label(f"step {sample.step:,}").classes("text-xs opacity-75")
                ui.label(redact_secrets(sample.whole)).classes("studio-text pb-2")

    def _draw_plan(self) -> None:
        """Each choice of the plan that the run executes, with its reason."""
        if not self._plan.value:
            return
        self._plan.clear()
        plan = self.opened.reader.plan
        with self._plan:
            if plan is None:
                ui.label("no plan yet, or one of another version").classes("opacity-75")
                return
            rows = [choice.model_dump() for choice in plan.choices]
            columns = [
                {"name": name, "label": name, "field": name, "align": "left"}
                for name in ("key", "value", "reason")
            ]
            table = ui.table(columns=columns, rows=rows, row_key="key", pagination=0)
            table.props("flat dense hide-pagination wrap-cells").classes("w-full")

    def _end_of(self, file_name: str) -> str:
        path = self.opened.reader.folder / file_name
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                content = file.read(_LOG_BYTES)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return redact_secrets(harmless(content.decode("utf-8", errors="replace")))

    async def update(self) -> None:
        if not self.opened.is_reading:
            await asyncio.to_thread(self.opened.update)
        command = self.commands.of(self.name)
        if command is not None and command.code != self._command_code:
            self._show_command()
        with self.opened.lock:
            self._draw()

    def _draw(self) -> None:
        """What has changed since the last time."""
        opened = self.opened
        status = opened.status
        self._badge.text = status
        self._badge.props(f"color={STATUS_COLORS.get(status, 'grey-7')}")
        reading = (
            f"reading events: step {opened.summary.step:,} so far" if opened.is_reading else ""
        )
        self._problem.text = harmless(opened.problem or reading)
        self._problem.visible = bool(self._problem.text)
        is_live = status in LIVE
        self._save.enabled = self._stop.enabled = status in ("running", "paused")
        self._save.visible = self._stop.visible = is_live
        self._resume.visible = not is_live and status not in ("done", "deleted")
        has_model = opened.reader.run.saved is not None and status != "deleted"
        self._evaluate.visible = not is_live and has_model
        self._chat.visible = self._export.visible = has_model

        version = opened.reader.tail.read_lines
        if version == self._version and not is_live:
            return
        has_events = version != self._version
        self._version = version
        summary = opened.summary
        steps = summary.steps or opened.reader.facts.steps
        self._progress.value = min(summary.step / steps, 1.0) if steps else 0.0
        self._draw_figures()
        if has_events:
            self._draw_charts()
            self._draw_events()
            self._draw_samples()

    def _draw_figures(self) -> None:
        figures = dict(figures_of(self.opened))
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

    def _draw_charts(self) -> None:
        curves = self.opened.curves
        incidents = self.opened.reader.run.incidents
        for title, names, unit, levels in charts_of(self.opened):
            chart = self._charts.get(title)
            is_loss = title in ("Loss", "Reward")
            if chart is None or chart.names != names:
                if chart is not None:
                    chart.delete()
                with self._grid:
                    chart = self._charts[title] = LineChart(
                        title, names, unit=unit, levels=levels, has_dots=is_loss
                    )
            chart.show(
                curves,
                extra=evaluations_of(self.opened) if is_loss else None,
                marks=marks_of(list(incidents)) if is_loss else (),
            )

    def _draw_events(self) -> None:
        self._events.clear()
        incidents = incidents_of(self.opened)
        with self._events:
            if not incidents:
                ui.label("nothing but training so far").classes("opacity-75")
            for event, text in incidents[:_SHOWN_INCIDENTS]:
                clock = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
                with ui.row().classes("gap-3 no-wrap items-start"):
                    ui.label(clock).classes("opacity-75 whitespace-nowrap")
                    ui.label(f"step {event.step:,}").classes("whitespace-nowrap min-w-[5.5rem]")
                    ui.label(text).classes("break-words whitespace-pre-wrap")


def figures_of(opened: OpenRun) -> Iterator[tuple[str, str]]:
    """Labels and values, each next to the plan's figure."""
    reader = opened.reader
    summary = opened.summary
    plan = reader.plan
    facts = reader.facts
    steps = summary.steps or facts.steps
    yield "Step", f"{summary.step:,}" + (f" of {steps:,}" if steps else "")
    if summary.smoothed is not None:
        yield f"Loss, {summary.unit}", f"{summary.smoothed:.4f}"
    if summary.smoothed_reward is not None:
        yield "Reward", f"{summary.smoothed_reward:.3f}"
    if summary.evaluation is not None:
        has_bits = summary.evaluation.bits_per_byte is not None
        label = "Validation, bits per byte" if has_bits else "Validation"
        yield label, f"{eval_text(summary.evaluation)} at step {summary.evaluation.step:,}"
    speed = summary.tokens_per_second
    planned = planned_speed(plan)
    if speed:
        yield "Tokens per second", f"{speed:,.0f}" + (f" (plan {planned:,.0f})" if planned else "")
        if utilization := facts.utilization(speed):
            yield "MFU", f"{utilization:.1%}"
    if summary.peak_gib:
        of_plan = "" if plan is None else f" (plan {plan.memory.total / GIB:.1f} GiB)"
        yield "Peak memory", f"{summary.peak_gib:.1f} GiB{of_plan}"
    if summary.tokens:
        yield "Tokens", in_millions(summary.tokens)
    is_live = opened.status in LIVE
    end = time.time() if is_live or summary.latest is None else summary.latest
    yield "Time", format_seconds(summary.clock.until(end))
    if opened.status == "running" and (seconds := summary.eta_seconds):
        yield "Time left", format_seconds(seconds)
    for device in summary.devices.all:
        sample = device.latest
        cells = (
            figure(sample.utilization, ".0f", "%"),
            figure(sample.temperature, ".0f", " °C"),
            figure(sample.power, ",.0f", " W"),
            figure(sample.memory_gib, ".1f", " GiB"),
            f"throttled: {sample.throttled}" if sample.throttled else "",
        )
        if text := " · ".join(filter(None, cells)):
            yield device.name, text
    if (joules := summary.devices.joules) is not None:
        yield "Energy", format_joules(joules)


def charts_of(opened: OpenRun) -> Iterator[tuple[str, tuple[str, ...], str, list[Level]]]:
    """Title, names of the curves, unit and planned figures of each chart that has values."""
    plan = opened.reader.plan
    curves = opened.curves.by_name
    memory = [] if plan is None else [Level("plan", plan.memory.total / GIB)]
    speed = planned_speed(plan)
    of_gpus = {
        kind: tuple(name for name in curves if name.startswith(f"{kind} of "))
        for kind in ("temperature", "power")
    }
    known = {
        "tokens",
        "hours",
        "loss",
        "learning rate",
        "gradient norm",
        "tokens per second",
        "memory",
        "reward",
    }
    others = [name for name in curves if name not in known and " of GPU " not in name]
    candidates: list[tuple[str, tuple[str, ...], str, list[Level]]] = [
        ("Reward", ("reward",), "", []),
        ("Loss", ("loss",), opened.summary.unit, []),
        ("Learning rate", ("learning rate",), "", []),
        ("Gradient norm", ("gradient norm",), "before clipping", []),
        ("Tokens per second", ("tokens per second",), "", [Level("plan", speed)] if speed else []),
        ("Memory", ("memory",), "GiB, peak", memory),
        ("Temperature", of_gpus["temperature"], "°C", []),
        ("Power", of_gpus["power"], "W", []),
        *((harmless(name), (name,), "", []) for name in others),
    ]
    for title, names, unit, levels in candidates:
        if names and any(name in curves for name in names):
            yield title, names, unit, levels


def evaluations_of(opened: OpenRun) -> dict[str, list[Point]]:
    """The validation loss by step."""
    points = [
        [float(step), float(f"{event.loss:.6g}")]
        for step, event in sorted(opened.summary.evaluations.items())
        if event.loss is not None
    ]
    return {"validation": points} if points and not opened.summary.scores_completions else {}
