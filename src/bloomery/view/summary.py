"""Figures of a run, updated from its events, for the terminal, `runs`, metrics.json and the report."""

import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Literal, cast

from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    ExpertLoad,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    StepDone,
    StepHealth,
    TaskDone,
    Warned,
)
from bloomery.view.devices import Devices
from bloomery.view.step_columns import NEWEST, StepColumns, in_groups

# Loss tokens of an evaluation: with fewer, a mean of losses that vary by 1 to 2 nats is off by more than 0.03.
MEASURABLE_TOKENS = 2000
# Held-out prompts: with fewer, a mean of rewards of 0 or 1 is off by more than 0.1.
MEASURABLE_PROMPTS = 25
SMOOTHING = 0.9  # of the moving average of the loss, bias-corrected as Adam's first moment is
_ANNOUNCED_CHANGE = 0.1  # of the planned steps, relative: a larger one is printed


# Of a run, as its folder and its events tell it. Running ones: "starting" until the first step, which the process that
# trains tells of itself and a folder does not (there it is "running"); "paused" while the request file exists;
# "stopping" once a stop was asked. Ended ones: the status of RunEnded ("done", "stopped", "failed"), or "killed"
# without one. Where no `Status` can be known, a view has words of its own:
# - `bloomery runs`: "unreadable"; it tells any live run as "running".
# - studio: "reading" before the first read, "unreadable", "deleted" (`studio/watching.py`).
# - the report: "unfinished" for live and killed, which a copied folder cannot tell apart (`RunRecord.state`).
Status = Literal["starting", "running", "paused", "stopping", "done", "stopped", "failed", "killed"]


@dataclass
class Elapsed:
    """Wall time of the run's processes, without the time between a stop and its resume. A clock set back adds none."""

    seconds: float = 0.0
    _before: float | None = None
    _is_open: bool = False  # steps were taken, and no event ended them

    def add(self, event: Event) -> float:
        """The seconds from the first event to this one."""
        if isinstance(event, StepDone):
            return self.add_steps((event.time,))[0]
        # Other threads and processes write these, out of order; a step has written the others.
        if isinstance(event, Saved | Warned | DeviceStats | ExpertLoad | StepHealth | TaskDone):
            return self.seconds
        if isinstance(event, RunStarted) and self.shows_kill(event):
            self._before = None
        self.seconds += max(0.0, event.time - self._before) if self._before is not None else 0.0
        self._before = None if isinstance(event, RunEnded) else event.time
        self._is_open = self._is_open and not isinstance(event, RunStarted | Resumed | RunEnded)
        return self.seconds

    def shows_kill(self, event: Event) -> bool:
        """Whether a process begins after steps that no event ended: the one before it was killed."""
        return self._is_open and isinstance(event, RunStarted | Resumed)

    def add_steps(self, times: Iterable[float]) -> list[float]:
        """The seconds from the first event to each of the steps that ended at these times."""
        seconds = self.seconds
        before = self._before
        seconds_at_steps = []
        for time in times:
            if before is not None and time > before:
                seconds += time - before
            before = time
            seconds_at_steps.append(seconds)
        self.seconds = seconds
        self._before = before
        self._is_open = self._is_open or bool(seconds_at_steps)
        return seconds_at_steps

    def until(self, now: float) -> float:
        """The seconds up to `now`; constant once the run has ended."""
        return self.seconds + (max(0.0, now - self._before) if self._before is not None else 0.0)


@dataclass
class MovingAverage:
    """Mutable: an exponential average, bias-corrected as Adam's first moment is."""

    _mean: float = 0.0
    _weight: float = 0.0

    def add(self, values: Iterable[float]) -> None:
        mean = self._mean
        weight = self._weight
        for value in values:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        self._mean = mean
        self._weight = weight

    @property
    def value(self) -> float | None:
        return self._mean / self._weight if self._weight else None


@dataclass
class RunSummary:
    """Mutable: the state of one run after the events that `add` was given."""

    planned_steps: int | None = None
    # `planned_steps` as printed. A run with train.max_time estimates them again and again.
    announced: int | None = None
    step: int = 0
    tokens: int = 0
    phase: Phase | None = None
    last_step: StepDone | None = None
    evaluations: dict[int, EvalDone] = field(default_factory=dict)  # by step
    best_saved: int | None = None  # the step of best.json, where a folder is read
    ended: RunEnded | None = None
    loss_unit: str = "token"  # the loss is per one of these
    steps_per_rollout: int | None = None
    reward: float | None = None  # of the newest rollout
    stopping: bool = False  # on request, after the current step and its checkpoint
    began: float | None = None
    latest_time: float | None = None  # of the newest event
    clock: Elapsed = field(default_factory=Elapsed)
    step_seconds_total: float = 0.0  # steps that were repeated after a kill count twice
    # Seconds of the first step of each compiled process.
    compiling_steps: list[float] = field(default_factory=list)
    # Seconds from a process's start to its restored state.
    resume_seconds: list[float] = field(default_factory=list)
    preparation_seconds: float = 0.0  # of the dataset, before training
    loss_average: MovingAverage = field(default_factory=MovingAverage)
    reward_average: MovingAverage = field(default_factory=MovingAverage)
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0
    resumes: int = 0
    recoveries: int = 0
    peak_gib: float = 0.0
    recent: deque[StepDone] = field(default_factory=lambda: deque(maxlen=NEWEST))
    devices: Devices = field(default_factory=Devices)

    def add(self, event: Event) -> None:
        """Events in the order of the file."""
        if isinstance(event, StepDone):
            self.add_steps(StepColumns.of((event,)))
            return
        self.began = event.time if self.began is None else self.began
        self.latest_time = event.time
        self.clock.add(event)
        match event:
            case EvalDone():
                self.evaluations[event.step] = event
                if self.phase is not None and self.phase.name == "evaluation":
                    self.phase = None
            case RunStarted():
                self.planned_steps = event.steps or self.planned_steps
                self.ended = None
                self.stopping = False
                self.announced = event.steps or None
                self.loss_unit = event.loss_unit
                self.steps_per_rollout = event.steps_per_rollout
                self.recent.clear()
            case Phase(name="stopping"):
                self.stopping = True
            case Phase(name="tokenizer" | "tokens" | "checksums"):
                self.phase = event
                self.preparation_seconds = self.clock.seconds
            case Phase():
                self.phase = event
                if event.name == "length" and event.total:
                    self.planned_steps = int(event.total)
                    if (
                        self.announced is None
                        or abs(self.planned_steps - self.announced)
                        > _ANNOUNCED_CHANGE * self.announced
                    ):
                        self.announced = self.planned_steps
            case Resumed():
                self.resumes += 1
                self._go_back(event.step)
                self.ended = None
                self.resume_seconds.append(event.seconds)
                if not event.step:  # it starts over: no earlier loss belongs to it
                    self.loss_average = MovingAverage()
                    self.reward_average = MovingAverage()
                    self.reward = None
                    self.last_step = None
                    self.tokens = 0
            case Recovered():
                self.recoveries += 1
                if event.step < self.step:  # not after a skipped step
                    self._go_back(event.step)
                self.warnings.append(f"{event.reason}: {event.action}")
            case Warned():
                self.warnings.append(event.reason)
            case DeviceStats():
                self.devices.add(event)
            case RunEnded():
                self.ended = event
                self.stopping = False

    def _go_back(self, last_kept_step: int) -> None:
        """Discards what later steps have left; seconds and energy are kept.

        `last_step`, `tokens`, `reward` and the moving averages stay those of the newest step that was taken, until the
        next one: nothing here knows those of the step that the run goes back to (a list reads only the ends of a file).
        A run that ends in between tells that step with the loss and tokens of a discarded one; where it starts over,
        `add` resets them. An average goes on over the discarded steps, and has forgotten them within tens of steps.
        """
        self.step = last_kept_step
        self.evaluations = {
            step: evaluation
            for step, evaluation in self.evaluations.items()
            if step <= last_kept_step
        }
        self.recent.clear()

    @property
    def unit(self) -> str:
        """Unit of the loss."""
        return "nats per token" if self.loss_unit == "token" else f"per {self.loss_unit}"

    def add_steps(self, steps: StepColumns) -> list[float]:
        """As `add` of each. Returns the seconds of training until the end of each."""
        last = steps.newest[-1]
        self.began = steps.time[0] if self.began is None else self.began
        self.latest_time = last.time
        seconds_at_steps = self.clock.add_steps(steps.time)
        if self.phase is not None and self.phase.name == "compile":
            self.compiling_steps.append(steps.step_seconds[0])
        self.phase = None
        self.step = last.step
        self.tokens = last.tokens
        self.last_step = last
        self.recent.extend(steps.newest)
        for seconds in steps.step_seconds:
            self.step_seconds_total += seconds
        self.peak_gib = max(self.peak_gib, max(steps.memory_gib))

        losses = [loss for loss in steps.loss if not isnan(loss)]
        self.skipped += len(steps.loss) - len(losses)
        self.loss_average.add(losses)
        rewards = [reward for reward in steps.metrics.get("reward", ()) if not isnan(reward)]
        if rewards:
            self.reward = rewards[-1]
            self.reward_average.add(rewards)
        return seconds_at_steps

    @property
    def smoothed(self) -> float | None:
        """The moving average of the loss."""
        return self.loss_average.value

    @property
    def smoothed_reward(self) -> float | None:
        return self.reward_average.value

    @property
    def judged_reward(self) -> float | None:
        """Of held-out prompts, else of the newest rollouts: the one reward of a run in a list of runs."""
        held_out = None if self.evaluation is None else self.evaluation.metrics.get("reward")
        return self.smoothed_reward if held_out is None else held_out

    @property
    def scores_completions(self) -> bool:
        """Whether the run is judged by rewards of generated completions: its loss stays near 0."""
        return self.loss_unit == "completion"

    @property
    def sampling_share(self) -> float | None:
        """Of the recent steps' time, the share in which completions were sampled and rewarded."""
        seconds = sum(step.step_seconds for step in self.recent)
        sampling = sum(step.step_seconds - step.update_seconds for step in self.recent)
        return sampling / seconds if seconds and self.scores_completions else None

    @property
    def evaluation(self) -> EvalDone | None:
        """The newest."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    @property
    def best(self) -> EvalDone | None:
        """The evaluation with the lowest loss, the first of equals, but that of the start; None without a finite loss.

        Of a folder it is that of the best checkpoint: a killed run may have evaluated without saving.
        """
        finite = [e for e in self.evaluations.values() if e.loss is not None and e.step > 0]
        saved = next((e for e in finite if e.step == self.best_saved), None)
        if saved is not None:
            return saved
        return min(finite, key=lambda e: e.loss or 0.0, default=None)

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the recent steps, without evaluations and checkpoints."""
        if not self.recent:
            return None
        return statistics.median(step.tokens_per_second for step in self.recent)

    @property
    def compile_seconds(self) -> float | None:
        """Of all processes: their first steps without the usual time of a step. None: uncompiled."""
        if not self.compiling_steps:
            return None
        usual_seconds = (
            statistics.median(step.step_seconds for step in self.recent) if self.recent else 0.0
        )
        return sum(max(0.0, seconds - usual_seconds) for seconds in self.compiling_steps)

    @property
    def data_wait(self) -> float | None:
        """Share of the recent steps' time spent waiting for data."""
        seconds = sum(step.step_seconds for step in self.recent)
        return sum(step.data_wait_seconds for step in self.recent) / seconds if seconds else None

    @property
    def eta_seconds(self) -> float | None:
        """From the wall clock of the recent steps, evaluations and checkpoints included, slow first steps excluded."""
        if self.planned_steps and self.steps_per_rollout is not None and self.recent:
            return self._seconds_of_rollouts(max(self.planned_steps - self.step, 0))
        if not self.planned_steps or len(self.recent) < 2:
            return None
        slow_seconds = 3 * statistics.median(step.step_seconds for step in self.recent)
        num_slow = sum(
            1
            for _ in itertools.takewhile(lambda step: step.step_seconds > slow_seconds, self.recent)
        )
        counted = list(self.recent)[max(num_slow - 1, 0) :]
        clock = Elapsed()
        for step in counted:
            clock.add(step)
        steps_left = max(self.planned_steps - self.step, 0)
        steps_counted = max(counted[-1].step - counted[0].step, 1)
        return steps_left * clock.seconds / steps_counted

    def _seconds_of_rollouts(self, steps_left: int) -> float | None:
        """Of so many steps, some of which begin with a rollout; known once one rollout is.

        Rollouts, updates and what lies between steps (evaluations, checkpoints) have means of their own.
        """
        assert self.steps_per_rollout is not None
        rollouts = [step for step in self.recent if step.rollout_seconds is not None]
        if not rollouts:
            return None
        sampling = _usual([step.step_seconds - step.update_seconds for step in rollouts])
        update = _usual([step.update_seconds for step in self.recent])

        # The wall clock without the steps themselves.
        clock = Elapsed()
        for step in self.recent:
            clock.add(step)
        later_steps = list(self.recent)[1:]
        between = clock.seconds - sum(step.step_seconds for step in later_steps)
        between_steps = max(0.0, between / len(later_steps)) if later_steps else 0.0

        # The rest of the newest rollout is sampled already.
        drawn_steps = self.steps_per_rollout - 1 - (self.step - rollouts[-1].step)
        undrawn_steps = max(0, steps_left - max(0, drawn_steps))
        rollouts_left = -(-undrawn_steps // self.steps_per_rollout)
        return rollouts_left * sampling + steps_left * (update + between_steps)

    @property
    def joules_per_token(self) -> float | None:
        """Of the devices whose power is known. A repeated step costs twice and counts once."""
        joules = self.devices.joules
        return joules / self.tokens if joules is not None and self.tokens else None

    @property
    def seconds(self) -> float:
        """Wall time from the first event to the last, without the time between two processes."""
        return self.clock.seconds

    @property
    def training_seconds(self) -> float:
        """`seconds` without the preparation of the dataset."""
        return self.seconds - self.preparation_seconds


def _usual(seconds: Sequence[float]) -> float:
    """The mean, without the first where it took much longer than the others: it compiles, loads and allocates."""
    if len(seconds) > 1 and seconds[0] > 1.5 * statistics.median(seconds[1:]):
        return statistics.fmean(seconds[1:])
    return statistics.fmean(seconds)


def summary_of(events: Iterable[Event | StepColumns]) -> RunSummary:
    """The figures after all of these events."""
    summary = RunSummary()
    for group in in_groups(events):
        if isinstance(group, StepColumns):
            summary.add_steps(group)
        else:
            summary.add(group)
    return summary


def in_millions(tokens: float) -> str:
    """0.33 M, 3.19 B: two decimals, for aligned columns; below 10,000 the number itself."""
    if tokens < 10_000:
        return f"{tokens:,.0f}"
    return f"{tokens / 1e9:.2f} B" if tokens >= 1e9 else f"{tokens / 1e6:.2f} M"


def status_of_end(end: RunEnded) -> Status:
    """The event is read from a file: its status is a string there."""
    return cast("Status", end.status)


def status_text(status: Status, summary: RunSummary) -> str:
    """The status of a run with its reason, for a list of runs."""
    at_step = f"at step {summary.step:,}"
    match status:
        case "killed" if summary.step:
            return f"killed {at_step}, resumes from its last checkpoint"
        case "killed":
            return "killed before its first step"
        case "stopped":
            return f"stopped {at_step}, resumes exactly"
        case "failed" if summary.ended is not None:
            return f"failed {at_step}: {summary.ended.error.partition(chr(10))[0]}"
    return status
