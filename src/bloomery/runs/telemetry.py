"""A thread of the parent process that reads the sensors, and pauses training above a temperature limit. No torch.

A separate child reads the sensors, so that a driver cannot block the parent.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.hardware.machine import read_machine
from bloomery.hardware.telemetry import (
    CPU_DEVICE,
    SensorReader,
    SensorReading,
    device_name,
    sensor_devices,
    unread_sensors,
)
from bloomery.monitor.events import DeviceStats, Event, EventLog, StepDone, Warned
from bloomery.plan.types import RunPlan

MARGIN_DEGREES = 5.0  # below the critical temperature of the hardware
COOLER_DEGREES = 10.0  # below the limit, before training resumes
SAMPLES_OVER_LIMIT = 2  # in a row: a single sample may be a spike
BLIND_SECONDS = 60.0  # without a reading of the hot device, training resumes after this time

Limit = float | Literal["auto"] | None


@final
@dataclass(frozen=True)
class PauseChange:
    """Pause or resume training."""

    paused: bool
    reason: str


@final
@dataclass
class TemperatureGuard:
    """Decides from a series of readings. `limit`: degrees, or auto: each GPU's critical temperature less a margin."""

    limit: Limit
    on_cpu: bool = False  # whether training runs on the CPU; auto sets no limit for it
    since: float | None = None  # start of the pause
    _over_limit: dict[int, int] = field(default_factory=dict)  # samples in a row, by device
    _held_by: SensorReading | None = None  # the device that caused the pause
    _last_reading: float = 0.0  # the time of its last temperature

    def check(self, readings: Sequence[SensorReading], time_now: float) -> PauseChange | None:
        """The change that these readings cause, such as a pause; None without one. `time_now`: seconds of any clock."""
        known_readings = [
            (r, r.temperature, limit)
            for r in readings
            if r.temperature and (limit := self._limit(r)) is not None
        ]
        if self._held_by is not None:
            return self._paused(
                self._held_by,
                [(r, heat, limit - COOLER_DEGREES) for r, heat, limit in known_readings],
                time_now,
            )
        for reading, heat, limit in known_readings:
            samples = self._over_limit.get(reading.device, 0) + 1 if heat > limit else 0
            self._over_limit[reading.device] = samples
            at_once = reading.critical is not None and heat >= reading.critical
            if samples >= SAMPLES_OVER_LIMIT or (at_once and samples):
                self.since = time_now
                self._held_by = reading
                self._last_reading = time_now
                resumes = f"training resumes below {limit - COOLER_DEGREES:.0f} °C"
                return PauseChange(
                    True,
                    f"{device_name(reading.device)} at {heat:.0f} °C, limit {limit:.0f} °C: paused; {resumes}",
                )
        return None

    def _paused(
        self,
        device: SensorReading,
        known_readings: Sequence[tuple[SensorReading, float, float]],
        time_now: float,
    ) -> PauseChange | None:
        assert self.since is not None
        temperatures = [
            heat for reading, heat, _ in known_readings if reading.device == device.device
        ]
        self._last_reading = time_now if temperatures else self._last_reading
        silent = time_now - self._last_reading > BLIND_SECONDS
        if not (temperatures or silent) or any(
            heat >= resume_below for _, heat, resume_below in known_readings
        ):
            return None
        state = (
            f"at {temperatures[0]:.0f} °C"
            if temperatures
            else f"without a reading for {BLIND_SECONDS:.0f} s"
        )
        reason = f"training resumed after {time_now - self.since:.0f} s: {device_name(device.device)} {state}"
        self.since = self._held_by = None
        self._over_limit.clear()
        return PauseChange(False, reason)

    def _limit(self, reading: SensorReading) -> float | None:
        if self.limit is None or (reading.device == CPU_DEVICE and not self.on_cpu):
            return None
        if self.limit != "auto":
            return self.limit
        return None if reading.critical is None else reading.critical - MARGIN_DEGREES


SAMPLE_SECONDS = 5.0  # between two samples
SAMPLES_PER_EVENT = 3  # after the first
YOUNG_SECONDS = 600.0  # of a run
LONGEST_SECONDS = 30.0  # counted for one sample: a suspended machine uses no power
ENDING_SECONDS = 1.0


@final
@dataclass
class Stretch:
    """Several samples of one device as one event: means over time, the highest temperature, the last other values."""

    seconds: float = 0.0
    load: list[tuple[float, float]] = field(default_factory=list)  # percent, seconds
    power: list[tuple[float, float]] = field(default_factory=list)
    hottest: float | None = None
    throttled: set[str] = field(default_factory=set)
    last: SensorReading | None = None

    def add(self, reading: SensorReading, seconds: float) -> None:
        """`seconds`: the time that the reading stands for, its weight in the means."""
        self.seconds += seconds
        self.load += [(reading.utilization, seconds)] if reading.utilization is not None else []
        self.power += [(reading.power, seconds)] if reading.power is not None else []
        self.hottest = max(filter(None, (self.hottest, reading.temperature)), default=None)
        self.throttled |= set(filter(None, (reading.throttled or "").split(", ")))
        self.last = reading

    def event(self, step: int) -> DeviceStats:
        assert self.last is not None, "no sample yet"
        return DeviceStats(
            step=step,
            device=self.last.device,
            name=self.last.name,
            seconds=round(self.seconds, 3),
            utilization=_mean(self.load),
            memory_gib=_rounded(self.last.memory_gib),
            memory_total_gib=_rounded(self.last.memory_total_gib),
            temperature=self.hottest,
            power=_mean(self.power),
            clock_mhz=self.last.clock_mhz,
            throttled=None if self.last.throttled is None else ", ".join(sorted(self.throttled)),
            shared_with=self.last.shared_with,
        )


def _mean(weighed: Sequence[tuple[float, float]]) -> float | None:
    seconds = sum(weight for _, weight in weighed)
    return round(sum(value * weight for value, weight in weighed) / seconds, 2) if seconds else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@final
class Watcher:
    """`on_event` gets the run's events, `begin` starts the thread, `end` stops it; none of them waits for a sensor."""

    def __init__(
        self,
        reader: SensorReader,
        guard: TemperatureGuard,
        emit: Callable[[Event], None],
        pause: Path,
    ) -> None:
        self._reader = reader
        self._guard = guard
        self._emit = emit
        self._pause = pause
        self._step = 0
        self._stretches: dict[int, Stretch] = {}
        self._sampled: float | None = None  # the time of the last sample
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)

    def on_event(self, event: Event) -> None:
        self._step = event.step if isinstance(event, StepDone) else self._step

    def begin(self) -> None:
        self._pause.unlink(missing_ok=True)  # of a run that was killed during a pause
        self._thread.start()

    def end(self) -> None:
        """Waits up to ENDING_SECONDS for the last sample."""
        self._ending.set()
        self._thread.join(ENDING_SECONDS)
        self._pause.unlink(missing_ok=True)

    def _work(self) -> None:
        began = time.monotonic()
        samples = 0
        try:
            while True:
                ending = self._ending.is_set()
                self._sample()
                samples += 1
                often = time.monotonic() - began < YOUNG_SECONDS or ending
                if samples > 1 and (often or samples % SAMPLES_PER_EVENT == 0):
                    stretches = self._stretches
                    self._stretches = {}
                    for device in sorted(stretches):
                        self._emit(stretches[device].event(self._step))
                if ending:
                    return
                self._ending.wait(SAMPLE_SECONDS if samples > 1 else SAMPLE_SECONDS / 2)
        except (UserError, OSError):
            return  # a full disk or a deleted folder: training reports that
        finally:
            with suppress(OSError):
                self._pause.unlink(missing_ok=True)
            self._reader.close()

    def _sample(self) -> None:
        readings = self._reader.read()
        time_now = time.monotonic()
        previous_time = self._sampled
        self._sampled = time_now
        change = self._guard.check(readings, time_now)
        if change is not None:
            if change.paused and not self._ending.is_set():
                self._pause.touch()
            else:
                self._pause.unlink(missing_ok=True)
            self._emit(Warned(step=self._step, reason=change.reason))
        if previous_time is not None:
            for reading in readings:
                stretch = self._stretches.setdefault(reading.device, Stretch())
                stretch.add(reading, min(time_now - previous_time, LONGEST_SECONDS))


@contextmanager
def sensing(
    folder: RunFolder, plan: RunPlan, *, root: Path = Path("/")
) -> Iterator[Callable[[Event], None]]:
    """Inside the block the sensors of the run's machine are read; yields a function that gets the run's events.

    Writes events to events.jsonl only; the reader of that file shows them, like those of the training process.
    """
    machine = read_machine(folder.machine)
    on_cpu = plan.train.device == "cpu"
    with EventLog(folder.events) as emit:
        devices = [] if on_cpu else sensor_devices(machine)
        if missing := unread_sensors(devices):
            emit(Warned(reason=missing))
        reader = SensorReader(
            devices,
            on_problem=lambda reason: emit(Warned(reason=f"{reason}; training continues without")),
            cpu_name=machine.host.cpu_name,
            root=root,
        )
        guard = TemperatureGuard(plan.logging.max_gpu_temperature, on_cpu=on_cpu)
        watcher = Watcher(reader, guard, emit, folder.pause_request)
        watcher.begin()
        try:
            yield watcher.on_event
        finally:
            watcher.end()
