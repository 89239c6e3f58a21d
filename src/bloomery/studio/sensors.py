"""The sensors of this machine, read once for all pages, and its GPUs in two lines of the rail. No torch."""

import asyncio
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, final

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.telemetry import SensorReader, SensorReading, sensor_devices
from bloomery.monitor.words import figure
from bloomery.studio.components import text

UPDATE_SECONDS = 2.0
RAIL_SECONDS = 5.0
FIRST_SECONDS = 2.0  # in which a page is loaded, before this machine is looked at for the rail
HOT_SHARE = 0.9  # of the temperature at which a device throttles


@final
class Sensors:
    """Mutable: the sensors of this machine, read by one process for all pages."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # sources that are not read any more
        self._machine: Machine | None = None
        self._reader: SensorReader | None = None
        self._latest: list[SensorReading] = []
        self._read_at = 0.0
        self._lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """Whether `gpus` answers without a look for them."""
        return self._machine is not None

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

    def gpus(self) -> list[SensorReading]:
        """Those with a temperature or memory in use. A machine is looked at once, and without a GPU not again."""
        if self._machine is None:
            self._machine = detect()
        if not self._machine.accelerators:
            return []
        return [
            reading
            for reading in self.read(self._machine)
            if reading.device >= 0
            and (reading.temperature is not None or reading.memory_gib is not None)
        ]


@cache
def shared_sensors() -> Sensors:
    """Of this process."""
    return Sensors()


class GpuWords(NamedTuple):
    """GPUs in two lines. `is_hot`: one of them is near the temperature at which it throttles."""

    name: str
    figures: str
    is_hot: bool


def gpu_words(readings: Sequence[SensorReading]) -> GpuWords | None:
    """Names, the range of temperatures, and the memory of all together; None where no sensor answers."""
    if not readings:
        return None
    names = {harmless(reading.name) for reading in readings}
    count = len(readings)
    name = names.pop() if len(names) == 1 else ""
    if count > 1:
        name = f"{count} × {name}" if name else f"{count} GPUs"
    degrees = sorted(round(r.temperature) for r in readings if r.temperature is not None)
    figures = []
    if degrees:
        low, high = degrees[0], degrees[-1]
        figures.append(f"{high} °C" if low == high else f"{low} to {high} °C")
    used = [reading.memory_gib for reading in readings if reading.memory_gib is not None]
    totals = [r.memory_total_gib for r in readings if r.memory_total_gib is not None]
    if used:
        of_all = f" of {sum(totals):.0f}" if len(totals) == len(used) else ""
        figures.append(f"{figure(sum(used), '.1f', '')}{of_all} GiB")
    is_hot = any(
        reading.temperature is not None
        and reading.critical
        and reading.temperature >= HOT_SHARE * reading.critical
        for reading in readings
    )
    return GpuWords(name or "GPU", " · ".join(figures), is_hot)


@final
class GpusOfRail:
    """Mutable: the GPUs of this machine at the foot of the rail, with the way to their page; nothing without a GPU."""

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._is_reading = False
        with ui.link(target="/machine").classes("rail-gpus") as self._link:
            self._name = text("", "b")
            self._figures = text("")
        self._link.visible = False

    async def update(self) -> None:
        if self._is_reading:
            return
        self._is_reading = True
        try:
            if not self._sensors.is_known:
                await asyncio.sleep(FIRST_SECONDS)
            words = gpu_words(await asyncio.to_thread(self._sensors.gpus))
        finally:
            self._is_reading = False
        self._link.visible = words is not None
        if words is not None:
            self._name.text = words.name
            self._figures.text = words.figures
            self._figures.classes(
                add="bad" if words.is_hot else "", remove="" if words.is_hot else "bad"
            )
