"""What a run has reached, kept up to date from its events; terminal, `runs` and report take figures from here."""

import itertools
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from bloomery.monitor.devices import Devices
from bloomery.monitor.events import (
    EvalDone,
    Event,
    GpuSampled,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    StepDone,
    Warned,
)

SMOOTHING = 0.9  # of the moving average of the loss, bias-corrected as Adam's first moment is
BARS = "▁▂▃▄▅▆▇█"
NEWS = 0.1  # by how much the number of steps must change to be told
_RECENT = 50  # steps that the speed is taken from


@dataclass(frozen=True)
class RunFacts:
    """What a view cannot see in the events; None is not shown."""

    name: str = ""
    every_steps: int = 10
    steps: int | None = None
    flops_per_token: float | None = None  # forward and backward
    peak_flops: float | None = None  # per second, of all devices together
    memory_limit_gib: float | None = None
    tells_memory: bool = False  # in each printed line

    def utilisation(self, tokens_per_second: float) -> float | None:
        """MFU: the share of the device's peak that the model's own arithmetic uses (PaLM, appendix B)."""
        if not self.flops_per_token or not self.peak_flops:
            return None
        return tokens_per_second * self.flops_per_token / self.peak_flops


@dataclass
class Elapsed:
    """Wall time while somebody worked on the run: a night between a stop and its resume is none of it.

    For a clock that may be set back meanwhile: time that went backwards is none either.
    """

    seconds: float = 0.0
    _before: float | None = None
    _stepped: bool = False  # whether the process that speaks has taken a step

    def add(self, event: Event) -> float:
        """The seconds from the first event to this one."""
        if isinstance(event, Saved | Warned | GpuSampled):  # other threads make these, and they are told late
            return self.seconds
        if isinstance(event, RunStarted) and self._stepped:  # another process: the one before was killed
            self._before = None
        self.seconds += max(0.0, event.time - self._before) if self._before is not None else 0.0
        self._before = None if isinstance(event, RunEnded) else event.time
        self._stepped = isinstance(event, StepDone) or (self._stepped and not isinstance(event, RunStarted))
        return self.seconds

    def until(self, now: float) -> float:
        """The same up to this moment; it stands still once the run has ended."""
        return self.seconds + (max(0.0, now - self._before) if self._before is not None else 0.0)


@dataclass
class Tally:
    """Mutable: the state of one run after the events that `add` was given."""

    steps: int | None = None
    announced: int | None = None  # steps as a line told them; a wall-time run estimates them anew all the time
    step: int = 0
    tokens: int = 0
    phase: Phase | None = None
    last: StepDone | None = None
    evaluations: dict[int, EvalDone] = field(default_factory=dict)  # by step
    ended: RunEnded | None = None
    per: str = "token"  # what a loss is of
    stopping: bool = False  # it was asked to, and saves after the step that it is taking
    began: float | None = None
    latest: float | None = None
    clock: Elapsed = field(default_factory=Elapsed)
    trained_seconds: float = 0.0
    smoothed: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0
    resumes: int = 0
    recoveries: int = 0
    saves: int = 0
    peak_gib: float = 0.0
    recent: deque[StepDone] = field(default_factory=lambda: deque(maxlen=_RECENT))
    devices: Devices = field(default_factory=Devices)
    _mean: float = 0.0
    _weight: float = 0.0

    def add(self, event: Event) -> None:
        """Events in the order of the file."""
        self.began = event.time if self.began is None else self.began
        self.latest = event.time
        self.clock.add(event)
        match event:
            case StepDone():
                self._add_step(event)
            case EvalDone():
                self.evaluations[event.step] = event
            case RunStarted():
                self.steps, self.ended, self.stopping = event.steps or self.steps, None, False
                self.announced = event.steps or None
                self.per = event.per
                self.recent.clear()
            case Phase(name="stopping"):
                self.stopping = True
            case Phase():
                self.phase = event
                if event.name == "length" and event.total:
                    self.steps = int(event.total)
                    if self.announced is None or abs(self.steps - self.announced) > NEWS * self.announced:
                        self.announced = self.steps
            case Resumed():
                self.resumes, self.step, self.ended = self.resumes + 1, event.step, None
                self.evaluations = {step: told for step, told in self.evaluations.items() if step <= event.step}
                self.recent.clear()
            case Recovered():
                self.recoveries += 1
                if event.step < self.step:  # back to a checkpoint: what came after it is given up
                    self.step = event.step
                    self.evaluations = {step: told for step, told in self.evaluations.items() if step <= event.step}
                    self.recent.clear()
                self.warnings.append(f"{event.because}: {event.action}")
            case Warned():
                self.warnings.append(event.because)
            case Saved():
                self.saves += 1
            case GpuSampled():
                self.devices.add(event)
            case RunEnded():
                self.ended, self.stopping = event, False

    @property
    def unit(self) -> str:
        """Of the loss, in words."""
        return "nats a token" if self.per == "token" else f"a {self.per}"

    def _add_step(self, event: StepDone) -> None:
        self.step, self.tokens, self.last, self.phase = event.step, event.tokens, event, None
        self.trained_seconds += event.step_seconds
        self.peak_gib = max(self.peak_gib, event.memory_gib)
        self.recent.append(event)
        if event.loss is None:
            self.skipped += 1
            return
        self.losses.append(event.loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * event.loss
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self.smoothed = self._mean / self._weight

    @property
    def evaluation(self) -> EvalDone | None:
        """The newest."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    @property
    def best(self) -> EvalDone | None:
        """The first of those with the lowest loss; None while no loss was finite."""
        finite = [told for told in self.evaluations.values() if told.loss is not None]
        return min(finite, key=lambda told: told.loss or 0.0, default=None)

    @property
    def tokens_per_second(self) -> float | None:
        """Over the recent steps, evaluations and saves apart."""
        if not self.recent:
            return None
        return statistics.median(step.tokens_per_second for step in self.recent)

    @property
    def data_wait(self) -> float | None:
        """The share of the recent steps' time that was spent waiting for data."""
        seconds = sum(step.step_seconds for step in self.recent)
        return sum(step.data_wait_seconds for step in self.recent) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """From the wall clock of the recent steps, so that evaluations and saves count too.

        The first steps of a process, which compile, do not count while they stand out.
        """
        if not self.steps or len(self.recent) < 2:
            return None
        usual = 3 * statistics.median(step.step_seconds for step in self.recent)
        slow = sum(1 for _ in itertools.takewhile(lambda step: step.step_seconds > usual, self.recent))
        counted = list(self.recent)[max(slow - 1, 0) :]
        clock = Elapsed()
        for step in counted:
            clock.add(step)
        return max(self.steps - self.step, 0) * clock.seconds / max(counted[-1].step - counted[0].step, 1)

    @property
    def joules_per_token(self) -> float | None:
        """Of the devices whose power was told. Steps that were computed twice cost twice and count once."""
        joules = self.devices.joules
        return joules / self.tokens if joules is not None and self.tokens else None

    @property
    def seconds(self) -> float:
        """Wall time from the first event to the last, without what lay between a process and the next."""
        return self.clock.seconds


def tally_of(events: Iterable[Event]) -> Tally:
    """The state after all of these events."""
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally


def sparkline(values: Iterable[float], width: int) -> str:
    """Bars of the last `width` values; the lowest of all is the lowest bar. A flat series is a line of low bars."""
    shown = list(values)
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown[max(len(shown) - width, 0) :])


def thinned(values: list[float], width: int) -> list[float]:
    """At most `width` means of equal stretches."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


def in_millions(tokens: float) -> str:
    """0.33 M, 3.19 B: two decimals so that columns stay aligned; below 10,000 the number itself."""
    if tokens < 10_000:
        return f"{tokens:,.0f}"
    return f"{tokens / 1e9:.2f} B" if tokens >= 1e9 else f"{tokens / 1e6:.2f} M"
