"""The thread that looks at the devices while a run trains, tells what it sees, and pauses what is too hot. No torch.

It lives in the parent process. What reads the sensors is a child of its own, so that no driver can hold this process.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from bloomery.core.errors import UserError
from bloomery.hardware.machine import read_machine
from bloomery.hardware.telemetry import CPU_DEVICE, SensorDevice, SensorReader, SensorReading
from bloomery.monitor.events import DeviceStats, Emit, Event, EventLog, Phase, StepDone, Warned
from bloomery.plan.types import RunPlan
from bloomery.runs.folder import RunFolder

PAUSE = "pause"  # the file in the run's folder that makes training wait between two steps
MARGIN_DEGREES = 5.0  # below the temperature at which the hardware saves itself
COOLER_DEGREES = 10.0  # below the limit, before training goes on
HOT_LOOKS = 2  # in a row: one look may be a spike
BLIND_SECONDS = 60.0  # a run whose hot device has gone silent goes on after that

Limit = float | Literal["auto"] | None


@final
@dataclass(frozen=True)
class Change:
    """Training is to wait, or to go on."""

    paused: bool
    reason: str


@final
@dataclass
class Guard:
    """Decides from one look after another. `limit`: degrees, or auto: what each GPU says of itself, less a margin."""

    limit: Limit
    processor: bool = False  # whether training runs on the processor; auto leaves that to the processor itself
    since: float | None = None  # when it paused
    _hot: dict[int, int] = field(default_factory=dict)  # looks in a row
    _held_by: SensorReading | None = None  # the device for which it paused: the others cannot vouch for it
    _seen: float = 0.0  # when that one told its temperature last

    def judge(self, readings: Sequence[SensorReading], now: float) -> Change | None:
        """`now`: seconds of any clock."""
        known = [(r, r.temperature, limit) for r in readings if r.temperature and (limit := self._limit(r)) is not None]
        if self._held_by is not None:
            return self._paused(self._held_by, [(r, heat, limit - COOLER_DEGREES) for r, heat, limit in known], now)
        for reading, heat, limit in known:
            looks = self._hot.get(reading.device, 0) + 1 if heat > limit else 0
            self._hot[reading.device] = looks
            at_once = reading.critical is not None and heat >= reading.critical
            if looks >= HOT_LOOKS or (at_once and looks):
                self.since, self._held_by, self._seen = now, reading, now
                cooler = f"training goes on below {limit - COOLER_DEGREES:.0f} °C"
                return Change(True, f"{_name(reading)} is at {heat:.0f} °C, above {limit:.0f}: paused; {cooler}")
        return None

    def _paused(
        self, hot: SensorReading, known: Sequence[tuple[SensorReading, float, float]], now: float
    ) -> Change | None:
        assert self.since is not None
        told = [heat for reading, heat, _ in known if reading.device == hot.device]
        self._seen = now if told else self._seen
        silent = now - self._seen > BLIND_SECONDS
        if not (told or silent) or any(heat >= below for _, heat, below in known):
            return None
        now_is = f"is at {told[0]:.0f} °C" if told else f"has told no temperature for {BLIND_SECONDS:.0f} s"
        said = f"training goes on after {now - self.since:.0f} s: {_name(hot)} {now_is}"
        self.since = self._held_by = None
        self._hot.clear()
        return Change(False, said)

    def _limit(self, reading: SensorReading) -> float | None:
        if self.limit is None or (reading.device == CPU_DEVICE and not self.processor):
            return None
        if self.limit != "auto":
            return self.limit
        return None if reading.critical is None else reading.critical - MARGIN_DEGREES


def _name(reading: SensorReading) -> str:
    return "the processor" if reading.device == CPU_DEVICE else f"GPU {reading.device}"


@final
class Waiting:
    """The training process's side: it waits between two steps while the file is there, and still hears a stop."""

    def __init__(self, pause: Path, emit: Emit) -> None:
        self._pause, self._emit, self._step = pause, emit, 0

    def emit(self, event: Event) -> None:
        self._step = event.step if isinstance(event, StepDone) else self._step
        self._emit(event)

    def until(self, asked: Callable[[], bool], poll_seconds: float = 0.5) -> bool:
        """Whether somebody asked to stop, once nothing holds the run any more."""
        if self._pause.exists() and not asked():
            self._emit(Phase(step=self._step, name="paused"))
            while self._pause.exists() and not asked():
                time.sleep(poll_seconds)
        return asked()


LOOK_SECONDS = 5.0  # between two looks
REPORT_SECONDS = 3  # looks to an event, once a run is older than
YOUNG_SECONDS = 600.0
LONGEST_SECONDS = 30.0  # that one look stands for: a machine that slept used no power meanwhile
ENDING_SECONDS = 1.0


@final
@dataclass
class Stretch:
    """Several looks at one device as one event: means over the time, the highest temperature, the rest as last seen."""

    seconds: float = 0.0
    load: list[tuple[float, float]] = field(default_factory=list)  # percent, seconds
    power: list[tuple[float, float]] = field(default_factory=list)
    hottest: float | None = None
    throttled: set[str] = field(default_factory=set)
    last: SensorReading | None = None

    def add(self, reading: SensorReading, seconds: float) -> None:
        self.seconds += seconds
        self.load += [(reading.utilization, seconds)] if reading.utilization is not None else []
        self.power += [(reading.power, seconds)] if reading.power is not None else []
        self.hottest = max(filter(None, (self.hottest, reading.temperature)), default=None)
        self.throttled |= set(filter(None, (reading.throttled or "").split(", ")))
        self.last = reading

    def event(self, step: int) -> DeviceStats:
        assert self.last is not None, "a stretch is told once something was seen in it"
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
    """`saw` hears the run's events, `begin` starts the thread, `end` stops it: neither ever waits for a sensor."""

    def __init__(self, reader: SensorReader, guard: Guard, emit: Callable[[Event], None], pause: Path) -> None:
        self._reader, self._guard, self._emit, self._pause = reader, guard, emit, pause
        self._step = 0
        self._stretches: dict[int, Stretch] = {}
        self._looked: float | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)

    def saw(self, event: Event) -> None:
        self._step = event.step if isinstance(event, StepDone) else self._step

    def begin(self) -> None:
        self._pause.unlink(missing_ok=True)  # of a run that was killed while it waited
        self._thread.start()

    def end(self) -> None:
        """Waits a moment for the last look; a hanging one is left behind."""
        self._ending.set()
        self._thread.join(ENDING_SECONDS)
        self._pause.unlink(missing_ok=True)

    def _work(self) -> None:
        began = time.monotonic()
        looks = 0
        try:
            while True:
                ending = self._ending.is_set()
                self._look()
                looks += 1
                often = time.monotonic() - began < YOUNG_SECONDS or ending
                if looks > 1 and (often or looks % REPORT_SECONDS == 0):
                    self._tell()
                if ending:
                    return
                self._ending.wait(LOOK_SECONDS if looks > 1 else LOOK_SECONDS / 2)
        except (UserError, OSError):
            return  # the disk is full, or the folder is gone: training says so itself
        finally:
            with suppress(OSError):
                self._pause.unlink(missing_ok=True)  # nobody would take it away any more
            self._reader.close()

    def _look(self) -> None:
        readings, now = self._reader.read(), time.monotonic()
        before, self._looked = self._looked, now
        change = self._guard.judge(readings, now)
        if change is not None:
            if change.paused and not self._ending.is_set():
                self._pause.touch()
            else:
                self._pause.unlink(missing_ok=True)
            self._emit(Warned(step=self._step, reason=change.reason))
        if before is not None:
            for reading in readings:
                stretch = self._stretches.setdefault(reading.device, Stretch())
                stretch.add(reading, min(now - before, LONGEST_SECONDS))

    def _tell(self) -> None:
        stretches, self._stretches = self._stretches, {}
        for device in sorted(stretches):
            self._emit(stretches[device].event(self._step))


@contextmanager
def sensing(folder: RunFolder, plan: RunPlan, *, root: Path = Path("/")) -> Iterator[Callable[[Event], None]]:
    """Inside the block the devices of the run's machine are looked at; what is yielded is told the run's events.

    Events go to events.jsonl alone: whoever follows the file shows them, as those of the training process.
    """
    machine = read_machine(folder.machine)
    on_processor = plan.train.device == "cpu"
    with EventLog(folder.events) as emit:
        devices = [
            SensorDevice(
                index=gpu.index, vendor=gpu.vendor, name=gpu.name, node=gpu.node, pci_address=gpu.pci_address,
                device_id=gpu.device_id,
            )
            for gpu in machine.accelerators
        ]  # fmt: skip
        reader = SensorReader(
            [] if on_processor else devices,
            on_problem=lambda reason: emit(Warned(reason=reason)),
            cpu_name=machine.host.cpu_name,
            root=root,
        )
        guard = Guard(plan.logging.max_gpu_temperature, processor=on_processor)
        watcher = Watcher(reader, guard, emit, folder.path / PAUSE)
        watcher.begin()
        try:
            yield watcher.saw
        finally:
            watcher.end()
