"""The page of this machine: the doctor's findings with the commands to copy, and its sensors live. No torch."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bloomery.core.errors import UserError
from bloomery.core.run_folder import every_run
from bloomery.core.run_lock import worked_on
from bloomery.core.text import harmless
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.diagnose import diagnose, ready
from bloomery.hardware.doctor.symptoms import PIN, Finding
from bloomery.hardware.doctor.words import findings_headline, machine_facts
from bloomery.hardware.machine import Machine
from bloomery.hardware.telemetry import SensorReading, device_name
from bloomery.monitor.words import figure
from bloomery.studio.command_progress import CommandProgress
from bloomery.studio.commands import Commands
from bloomery.studio.components import button, card, heading, note, sentence, text
from bloomery.studio.finding_view import DEMO, LEVELS, show_finding
from bloomery.studio.fitting_models import ask_what_fits
from bloomery.studio.frame import notify, page, question, update_every
from bloomery.studio.sensors import HOT_SHARE, UPDATE_SECONDS, Sensors
from bloomery.studio.watching import address_of

SUBJECT = "this machine"  # of its commands


def _training() -> list[Path]:
    """The runs of this folder that train now."""
    return [run for run in every_run() if worked_on(run)]


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
        with heading("Machine", "Checking this machine") as (_, self._verdict):
            button("What fits?", lambda: ask_what_fits())
            button("Check again", self.check)
            button("Probe, about 1 min", self._probe)
        self._verdict.props("role=status")
        self._command = CommandProgress(commands, SUBJECT, opened=True)
        with ui.element("div").classes("two"):
            self._findings = ui.column().classes("w-full gap-3")
            with ui.column().classes("w-full gap-3"):
                with card("Now", "every two seconds"):
                    self._devices = ui.column().classes("w-full gap-4")
                    self._problems = sentence("", "muted")
                with card("Hardware and software"):
                    self._facts = ui.element("dl").classes("studio-facts")
        self._gauges: list[DeviceGauges] = []

    async def check(self) -> None:
        """What `bloomery doctor` finds now."""
        self._verdict.text = "Checking this machine"
        machine = await asyncio.to_thread(detect)
        findings = await asyncio.to_thread(diagnose, machine)
        self.machine = machine
        self._verdict.text = harmless(findings_headline(findings))
        self._verdict.classes(remove="bad", add="" if ready(findings) else "bad")
        self._facts.clear()
        with self._facts:
            for label, words in machine_facts(machine):
                text(label, "dt")
                text(harmless(words), "dd", "break-words")
        self._findings.clear()
        with self._findings:
            if not findings:
                with card("Nothing to fix"):
                    sentence("A probe runs kernels on each GPU and compares what they compute.")
            for finding in sorted(findings, key=lambda one: list(LEVELS).index(one.level)):
                show_finding(finding, on_run=self._run, on_fix=self._ask_to_fix)
        await self.update()

    def _probe(self) -> None:
        self._run("doctor", "--probe")

    def _run(self, *words: str) -> None:
        """What it prints appears above the findings; a demo has the page of its run."""
        is_demo = words == (DEMO,)
        try:
            self.commands.start(*words, subject=DEMO if is_demo else SUBJECT)
        except UserError as error:
            notify(error)
        else:
            if is_demo:
                ui.navigate.to(address_of(DEMO))
        self._command.update()

    async def _ask_to_fix(self, finding: Finding) -> None:
        """Starts what `bloomery doctor --fix` does, once somebody has agreed."""
        training = await asyncio.to_thread(_training)
        with question("Fix it") as dialog:
            sentence(harmless(finding.what))
            with ui.row().classes("w-full items-center no-wrap gap-1 studio-command"):
                ui.label(harmless(finding.fix[0].partition("  # ")[0])).classes("studio-text")
            if finding.run == PIN:
                sentence("pip is told, for this environment alone, to keep this PyTorch.")
            else:
                sentence(
                    f"pip installs into {harmless(sys.prefix)}, and downloads several GB. Nothing else is changed."
                )
            if training:
                names = ", ".join(run.name for run in training)
                note(harmless(f"Stop the runs that train in it first: {names}."), "warn")
            with ui.element("div").classes("toolbar w-full dialog-buttons"):
                ui.space()
                button("Cancel", lambda: dialog.submit(False), kind="quiet")
                agree = button("Fix it", lambda: dialog.submit(True), kind="go")
                agree.enabled = not training
        if not await dialog:
            return
        findings = await asyncio.to_thread(lambda: diagnose(detect()))
        for number, one in enumerate(findings, 1):
            if (one.id, one.run) == (finding.id, finding.run):
                self._run("doctor", f"--fix={number}", "--yes")
                return
        await self.check()  # it is mended by now

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
        if [one.device for one in self._gauges] != [reading.device for reading in readings]:
            self._devices.clear()
            with self._devices:
                self._gauges = [DeviceGauges(reading) for reading in readings]
        for gauges, reading in zip(self._gauges, readings, strict=True):
            gauges.show(reading)
        problems = self.sensors.problems or ([] if readings else ["no sensor answers"])
        self._problems.text = harmless("\n".join(problems))
        self._problems.visible = bool(problems)


class Gauge(NamedTuple):
    """A sensor in words. `share`: of its limit, from 0 to 1; None where there is none."""

    label: str
    value: str
    share: float | None = None
    is_high: bool = False


def gauges_of(reading: SensorReading) -> Iterator[Gauge]:
    """The sensors that answered."""
    if reading.temperature is not None:
        value = figure(reading.temperature, ".0f", " °C")
        if reading.critical:
            share = reading.temperature / reading.critical
            limit = figure(reading.critical, ".0f", " °C")
            yield Gauge("Temperature", f"{value} of {limit}", share, share >= HOT_SHARE)
        else:
            yield Gauge("Temperature", value)
    if reading.memory_gib is not None:
        value = figure(reading.memory_gib, ".1f", "")
        if reading.memory_total_gib:
            share = reading.memory_gib / reading.memory_total_gib
            yield Gauge("Memory", f"{value} of {reading.memory_total_gib:.1f} GiB", share)
        else:
            yield Gauge("Memory", f"{value} GiB")
    if reading.utilization is not None:
        value = figure(reading.utilization, ".0f", "%")
        yield Gauge("Utilization", value, reading.utilization / 100)
    if reading.shared_with is not None:
        yield Gauge("Power", f"measured by GPU {reading.shared_with}")
    elif reading.power is not None:
        yield Gauge("Power", figure(reading.power, ",.0f", " W"))
    if reading.clock_mhz is not None:
        yield Gauge("Clock", figure(reading.clock_mhz, ",.0f", " MHz"))


@final
class DeviceGauges:
    """Mutable: the sensors of a device, as thin bars against their limits."""

    def __init__(self, reading: SensorReading) -> None:
        self.device = reading.device
        self._labels: list[str] = []
        with ui.element("div").classes("w-full"):
            with ui.element("div").classes("card-title"):
                text(device_name(reading.device))
                text(harmless(reading.name), "small")
            self._throttled = sentence("", "bad", small=True)
            self._rows = ui.element("div").classes("studio-gauges")
        self._values: list[TextElement] = []
        self._bars: list[ui.element] = []

    def show(self, reading: SensorReading) -> None:
        gauges = list(gauges_of(reading))
        self._throttled.text = f"throttled: {harmless(reading.throttled or '')}"
        self._throttled.visible = bool(reading.throttled)
        labels = [gauge.label for gauge in gauges]
        if labels != self._labels:
            self._labels = labels
            self._rows.clear()
            with self._rows:
                parts = [_gauge(label) for label in labels]
            self._values = [value for value, _ in parts]
            self._bars = [bar for _, bar in parts]
        for gauge, value, bar in zip(gauges, self._values, self._bars, strict=True):
            value.text = gauge.value
            bar.visible = gauge.share is not None
            width = 100 * min(max(gauge.share or 0.0, 0.0), 1.0)
            color = "var(--bad)" if gauge.is_high else "var(--ink-3)"
            bar.style(f"--filled: {width:.1f}%; --color: {color}")


def _gauge(label: str) -> tuple[TextElement, ui.element]:
    """A row of a device: its value and its bar, to be changed."""
    text(label)
    value = text("", "b")
    with ui.element("div").classes("studio-gauge").props("aria-hidden=true") as bar:
        ui.element("i")
    return value, bar
