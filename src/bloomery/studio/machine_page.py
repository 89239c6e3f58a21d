"""The page of this machine: the doctor's findings with the commands to copy, and its sensors live. No torch."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple, final

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.diagnose import diagnose, ready
from bloomery.hardware.doctor.symptoms import Finding
from bloomery.hardware.doctor.words import findings_headline, machine_facts
from bloomery.hardware.machine import Machine
from bloomery.hardware.telemetry import SensorReading, device_name
from bloomery.monitor.words import figure
from bloomery.studio.command_progress import CommandProgress
from bloomery.studio.commands import Commands
from bloomery.studio.components import button, card, heading, sentence, text
from bloomery.studio.fitting_models import ask_what_fits
from bloomery.studio.frame import copy_button, notify, page, update_every
from bloomery.studio.sensors import HOT_SHARE, UPDATE_SECONDS, Sensors

SUBJECT = "this machine"  # of its commands


class Level(NamedTuple):
    """How a finding is shown."""

    words: str
    tone: str


LEVELS = {  # the gravest first
    "blocks": Level("blocks training", "bad"),
    "slows": Level("slows training", "warn"),
    "note": Level("note", ""),
}


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
        self._command = CommandProgress(commands, SUBJECT)
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


def show_finding(finding: Finding) -> None:
    level = LEVELS[finding.level]
    with ui.element("section").classes("card") as section:
        with ui.element("div").classes("card-title"):
            text(level.words, "span", f"badge {level.tone}")
            text(harmless(finding.what), "h2", classes="studio-finding")
        if finding.level == "blocks":
            section.classes("studio-blocks")
        elif finding.level == "slows":
            section.classes("studio-slows")
        if finding.evidence:
            text(f"found: {harmless(finding.evidence)}", "p", "studio-text muted")
        for step in finding.fix:
            _show_step(harmless(step))
        if finding.level == "blocks" and finding.verify:
            sentence("Then check:", "muted", small=True)
            _show_step(harmless(finding.verify))


def _show_step(step: str) -> None:
    """A command to copy with its remark; a step that is a remark alone is text."""
    if step.startswith("# "):
        sentence(step[2:])
        return
    command, _, remark = step.partition("  # ")

    with ui.column().classes("w-full gap-0"):
        with ui.row().classes("w-full items-center no-wrap gap-1 studio-command"):
            ui.label(command).classes("studio-text grow min-w-0")
            copy_button(command)
        if remark:
            sentence(remark, "muted", small=True)
