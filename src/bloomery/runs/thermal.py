"""When a run pauses because a device is too hot, and how its process waits. No torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from bloomery.hardware.telemetry.sysfs import PROCESSOR, Reading
from bloomery.monitor.events import Emit, Event, Phase, StepDone

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
    because: str


@final
@dataclass
class Guard:
    """Decides from one look after another. `limit`: degrees, or auto: what each GPU says of itself, less a margin."""

    limit: Limit
    processor: bool = False  # whether training runs on the processor; auto leaves that to the processor itself
    since: float | None = None  # when it paused
    _hot: dict[int, int] = field(default_factory=dict)  # looks in a row
    _held_by: Reading | None = None  # the device for which it paused: the others cannot vouch for it
    _seen: float = 0.0  # when that one told its temperature last

    def judge(self, readings: Sequence[Reading], now: float) -> Change | None:
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

    def _paused(self, hot: Reading, known: Sequence[tuple[Reading, float, float]], now: float) -> Change | None:
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

    def _limit(self, reading: Reading) -> float | None:
        if self.limit is None or (reading.device == PROCESSOR and not self.processor):
            return None
        if self.limit != "auto":
            return self.limit
        return None if reading.critical is None else reading.critical - MARGIN_DEGREES


def _name(reading: Reading) -> str:
    return "the processor" if reading.device == PROCESSOR else f"GPU {reading.device}"


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
