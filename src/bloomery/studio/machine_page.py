"""The page of this machine: the doctor's findings with the commands to copy, and its sensors live. No torch."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.diagnose import diagnose, ready
from bloomery.hardware.doctor.symptoms import Finding
from bloomery.hardware.doctor.words import findings_headline, machine_facts
from bloomery.hardware.machine import Machine
from bloomery.hardware.telemetry import SensorReader, SensorReading, device_name, sensor_devices
from bloomery.monitor.words import figure
from bloomery.studio.commands import Commands
from bloomery.studio.frame import CommandView, copy_button, notify, page, update_every

UPDATE_SECONDS = 2.0
SUBJECT = "this machine"  # of its commands
_LEVELS = {"blocks": "negative", "slows": "warning", "note": "grey-7"}


@final
class Sensors:
    """Mutable: the sensors of this machine, read by one process for all pages."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # sources that are not read any more
        self._reader: SensorReader | None = None
        self._latest: list[SensorReading] = []
        self._read_at = 0.0
        self._lock = threading.Lock()

    def read(self, machine: Machine) -> list[SensorReading]:
        """At most UPDATE_SECONDS / 2 old. Waits for a driver that does not answer, up to the deadline of the reader."""
        with self._lock:
            if self._reader is None:
                self._reader = SensorReader(
                    sensor_devices(machine),
                    on_problem=self.problems.append,
                    cpu_name=machine.host.cpu_name,
                )
            if time.monotonic() - self._read_at > UPDATE_SECONDS / 2:
                self._latest = self._reader.read()
                self._read_at = time.monotonic()
            return self._latest


async def machine_page(sensors: Sensors, commands: Commands) -> None:
    with page("Machine", "/machine"):
        view = MachineView(sensors, commands)
        ui.timer(0, view.check, once=True)
        update_every(UPDATE_SECONDS, view.update)


@final
class MachineView:
    """Mutable: one open page of the machine."""

    def __init__(self, sensors: Sensors, commands: Commands) -> None:
        self.sensors = sensors
        self.commands = commands
        self.machine: Machine | None = None
        self._is_reading = False
        with ui.row().classes("w-full items-center gap-3"):
            ui.label("Machine").classes("text-xl font-semibold").props("role=heading aria-level=1")
            ui.space()
            for text, icon, act in (
                ("Check again", "refresh", self.check),
                ("Probe, about 1 min", "science", self._probe),
            ):
                ui.button(text, icon=icon, on_click=act).props(
                    "outline dense no-caps padding='xs sm'"
                )
        self._verdict = ui.label("checking this machine").classes("text-base").props("role=status")
        self._command = CommandView(commands, SUBJECT)
        with ui.element("section").classes("w-full"):
            _heading("Now")
            self._devices = ui.element("div").classes(
                "w-full grid gap-4 grid-cols-1 md:grid-cols-2 xl:grid-cols-3 mt-1"
            )
        with ui.element("section").classes("w-full"):
            _heading("Findings")
            self._findings = ui.column().classes("w-full gap-3 mt-1")
        with ui.element("section").classes("w-full"):
            _heading("Hardware and software")
            self._facts = ui.column().classes("w-full gap-1 mt-1")

    async def check(self) -> None:
        """What `bloomery doctor` finds now."""
        self._verdict.text = "checking this machine"
        machine = await asyncio.to_thread(detect)
        findings = await asyncio.to_thread(diagnose, machine)
        self.machine = machine
        self._verdict.text = harmless(findings_headline(findings))
        self._verdict.classes(
            remove="text-negative", add="" if ready(findings) else "text-negative"
        )
        self._facts.clear()
        with self._facts:
            for label, text in machine_facts(machine):
                with ui.row().classes("gap-3 no-wrap"):
                    ui.label(label).classes("opacity-75 min-w-[4.5rem]")
                    ui.label(harmless(text)).classes("break-words min-w-0")
        self._findings.clear()
        with self._findings:
            if not findings:
                ui.label("nothing to fix").classes("opacity-75")
            for finding in findings:
                show_finding(finding)
        await self.update()

    def _probe(self) -> None:
        try:
            self.commands.start("doctor", "--probe", subject=SUBJECT)
        except UserError as error:
            notify(error)
        self._command.update()

    async def update(self) -> None:
        if self._command.update():
            await self.check()  # probes leave their results for the next check
        if self.machine is None or self._is_reading:
            return
        self._is_reading = True
        try:
            readings = await asyncio.to_thread(self.sensors.read, self.machine)
        finally:
            self._is_reading = False
        self._devices.clear()
        with self._devices:
            for reading in readings:
                _show_reading(reading)
            for problem in self.sensors.problems or ([] if readings else ["no sensor answers"]):
                ui.label(harmless(problem)).classes("text-negative")


def _heading(text: str) -> None:
    ui.label(text).classes("text-lg font-semibold").props("role=heading aria-level=2")


def _show_reading(reading: SensorReading) -> None:
    name = device_name(reading.device)
    with ui.card().props("flat bordered").classes("p-3 gap-1 w-full"):
        with ui.row().classes("w-full items-baseline gap-2 no-wrap"):
            ui.label(name).classes("font-semibold whitespace-nowrap")
            ui.label(harmless(reading.name)).classes("opacity-75 text-sm truncate min-w-0")
        with ui.row().classes("gap-x-5 gap-y-1"):
            for label, value in sensor_figures(reading):
                with ui.column().classes("gap-0"):
                    ui.label(label).classes("text-xs opacity-75")
                    ui.label(value).classes("text-base font-medium")
        if reading.memory_gib is not None and reading.memory_total_gib:
            share = min(reading.memory_gib / reading.memory_total_gib, 1.0)
            ui.linear_progress(share, show_value=False, size="6px").props("aria-hidden=true")
        if reading.throttled:
            ui.label(f"throttled: {harmless(reading.throttled)}").classes("text-negative")


def sensor_figures(reading: SensorReading) -> Iterator[tuple[str, str]]:
    """Labels and values of the sensors that answered."""
    limit = figure(reading.critical, ".0f", " °C")
    memory = figure(reading.memory_gib, ".1f", "")
    if memory and reading.memory_total_gib:
        memory += f" of {reading.memory_total_gib:.1f}"
    power = figure(reading.power, ",.0f", " W")
    if reading.shared_with is not None:
        power = f"measured by GPU {reading.shared_with}"
    temperature = figure(reading.temperature, ".0f", " °C")
    for label, value in (
        ("Temperature", f"{temperature} (limit {limit})" if temperature and limit else temperature),
        ("Power", power),
        ("Memory", f"{memory} GiB" if memory else ""),
        ("Utilization", figure(reading.utilization, ".0f", "%")),
        ("Clock", figure(reading.clock_mhz, ",.0f", " MHz")),
    ):
        if value:
            yield label, value


def show_finding(finding: Finding) -> None:
    with ui.card().props("flat bordered").classes("p-3 gap-2 w-full"):
        with ui.row().classes("w-full items-start gap-2 no-wrap"):
            ui.badge(finding.level).props(f"color={_LEVELS[finding.level]}").classes("px-2 py-1")
            ui.label(harmless(finding.what)).classes("font-medium break-words min-w-0")
        if finding.evidence:
            ui.label(f"found: {harmless(finding.evidence)}").classes("studio-text opacity-75")
        for step in finding.fix:
            _show_step(harmless(step))
        if finding.level == "blocks" and finding.verify:
            ui.label("then verify with").classes("text-sm opacity-75")
            _show_step(harmless(finding.verify))


def _show_step(step: str) -> None:
    """A command to copy with its remark; a step that is a remark alone is text."""
    if step.startswith("# "):
        ui.label(step[2:]).classes("break-words")
        return
    command, _, remark = step.partition("  # ")

    with ui.column().classes("w-full gap-0"):
        with ui.row().classes("w-full items-center no-wrap gap-1 studio-command"):
            ui.label(command).classes("studio-text grow min-w-0")
            copy_button(command)
        if remark:
            ui.label(remark).classes("text-sm opacity-75 break-words")
