"""How a wall-time run keeps to its time: what it costs, how many steps are left, and which of them are fixed when.

Seconds count from the start of the process, with compilation, evaluations, samples and checkpoints. The learning rates
of a block of steps are fixed in the plan before the first of them, so that a run which is killed repeats them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, final

from bloomery.core.units import Duration
from bloomery.plan.lengths import MEASURED_STEPS, UNKNOWN_STEPS, complete, provisional_steps
from bloomery.plan.types import RunPlan, ScheduleBlock
from bloomery.train.optim.schedules import block_at, fraction_done, fraction_of_run

BLOCK = 0.02  # of the time: about how long the steps of a block take
RECENT = 0.1  # of the time: the steps that a step's seconds are taken from
LONG_START = 0.15  # of the time: first steps that take more are measured before they are ten
CAUTIOUS_STEPS = 200  # at least so many are reckoned with before any is measured
WARMING = 2  # steps that warm caches and compile: they tell nothing of those that follow
_EPSILON = 1e-9
Repeated = Literal["evaluation", "checkpoint"]


@dataclass
class Costs:
    """Measured seconds of what a run does again and again; kept up to date."""

    step: float
    sequence: float  # one of the validation set
    samples: float  # all of one evaluation
    save: float
    sequences: int = 0  # in the validation set
    end: float = 0.0  # of the last checkpoint besides, which is waited for

    def evaluation(self, plan: RunPlan) -> float:
        return min(plan.eval.sequences or self.sequences, self.sequences) * self.sequence + self.samples

    def until_the_end(self, plan: RunPlan, *, done: int, fraction: float = 0.0) -> float:
        """Seconds from the end of step `done` to that of the run, with an evaluation and a checkpoint at the end.

        `fraction`: how much of the run is done by then.
        """
        steps = plan.train.steps
        assert steps is not None
        evaluations = _left("evaluation", plan, done, fraction)
        saves = _left("checkpoint", plan, done, fraction)
        return (steps - done) * self.step + evaluations * self.evaluation(plan) + saves * self.save + self.end


def _left(what: Repeated, plan: RunPlan, done: int, fraction: float) -> int:
    """How often it happens after step `done`: at every multiple, and at the end."""
    assert plan.train.steps is not None
    every = _every(what, plan)
    if isinstance(every, int):
        return -(-plan.train.steps // every) - done // every
    whole = int(1.0 / every + _EPSILON)
    return whole - int(fraction / every + _EPSILON) + (whole * every < 1.0 - _EPSILON)


def _every(what: Repeated, plan: RunPlan) -> float | int:
    """Steps between one and the next; a float is the share of a wall-time run, infinite where it is turned off."""
    steps = plan.eval.every_steps if what == "evaluation" else plan.checkpoint.every_steps
    if steps is None:
        return math.inf
    if plan.train.seconds is None or plan.lengths is None:
        return steps
    asked = plan.lengths.evaluation if what == "evaluation" else plan.lengths.checkpoint
    assert asked is not None
    fraction = fraction_of_run(asked, plan.train.seconds)
    return steps if fraction is None else fraction


def due(what: Repeated, plan: RunPlan, *, step: int) -> bool:
    """Whether it happens after `step`. Shares of a wall-time run follow what is done of it."""
    every, blocks = _every(what, plan), plan.train.blocks
    if isinstance(every, int):
        return step % every == 0
    if math.isinf(every):
        return False
    before, after = (int(fraction_done(at, blocks) / every + _EPSILON) for at in (step - 1, step))
    return after > before


@final
@dataclass
class Timer:
    """What the clock says of one process of a run. `before`: seconds that the run took until its checkpoint."""

    began: float
    clock: Callable[[], float] = time.perf_counter
    before: float = 0.0
    costs: Costs | None = None
    steps: int = 0  # taken since `forget`
    last: float = math.inf  # seconds of the last of them
    _laps: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # of steps, once they are warm
    _begun: float = 0.0  # of the step that is being taken
    _aside: float = 0.0  # seconds since then that are not the step's

    @property
    def elapsed(self) -> float:
        return self.before + self.clock() - self.began

    def start(self) -> None:
        """Steps begin here."""
        self._begun, self._aside = self.clock(), 0.0

    def stepped(self) -> None:
        """A step ends here; what follows it and is timed by `aside` is not the next one's."""
        self.last = self.clock() - self._begun - self._aside
        if self.steps >= WARMING:
            self._laps.append(self.last)
        self.steps += 1
        self.start()

    @contextmanager
    def aside(self) -> Iterator[Callable[[], float]]:
        """Work between steps. Yields a function that gives its seconds so far."""
        begun = self.clock()
        try:
            yield lambda: self.clock() - begun
        finally:
            self._aside += self.clock() - begun

    def note_evaluation(self, seconds: float, plan: RunPlan) -> None:
        """What one really took."""
        if self.costs is not None and self.costs.sequences:
            self.costs.sequence = seconds / min(plan.eval.sequences or self.costs.sequences, self.costs.sequences)

    def note_samples(self, seconds: float) -> None:
        if self.costs is not None:
            self.costs.samples = seconds

    def note_save(self, seconds: float) -> None:
        """What the run waited for it."""
        if self.costs is not None:
            self.costs.save = seconds

    def forget(self) -> None:
        """What was measured of steps: they are cut otherwise from here on."""
        self._laps.clear()
        self.steps, self.last = 0, math.inf

    def step_seconds(self, recent: float) -> float | None:
        """Of a step: the mean over the last `recent` seconds of them, the median of so few that one could mislead."""
        if len(self._laps) <= MEASURED_STEPS - WARMING:
            return median(self._laps) if self._laps else None
        taken, seconds = 0, 0.0
        for lap in reversed(self._laps):
            taken, seconds = taken + 1, seconds + lap
            if seconds >= recent and taken >= MEASURED_STEPS - WARMING:
                break
        return seconds / taken


def current(plan: RunPlan, *, step: int) -> RunPlan | None:
    """The plan as it was when the block of the step after `step` was fixed; None where none is fixed yet."""
    blocks = plan.train.blocks
    if not blocks or blocks[0].step > step:
        return None
    block = block_at(step, blocks)
    steps = block.steps if block.step_seconds is not None else None
    plan = plan if plan.train.steps == steps else _with(plan, steps)
    return plan if step < block.until or steps == step else None


def measured(plan: RunPlan, timer: Timer, *, step: int) -> float | None:
    """Seconds of a step; None while too few were taken to know."""
    seconds, blocks = plan.train.seconds, plan.train.blocks
    assert seconds is not None
    before = block_at(step, blocks).step_seconds if blocks else None
    now = timer.step_seconds(RECENT * seconds)
    if before is None and timer.elapsed >= seconds and timer.steps:
        return now or timer.elapsed / timer.steps
    early = before is None and timer.steps < MEASURED_STEPS and timer.elapsed < LONG_START * seconds
    return None if early else now or before


def with_next_block(plan: RunPlan, timer: Timer, *, step: int) -> RunPlan:
    """The plan with the schedule of the steps after `step` fixed, once more is known of how many there will be.

    Until steps are measured the rate rises as if the estimate held, or slower: too steep a warmup does harm.
    """
    seconds, blocks = plan.train.seconds, plan.train.blocks
    assert seconds is not None
    blocks = blocks if blocks and blocks[0].step <= step else ()
    begins = min(1.0, timer.elapsed / seconds) if step else 0.0  # what passed before the first step trained nothing
    fraction = fraction_done(step, blocks) if blocks else begins
    lasts = measured(plan, timer, step=step)
    if lasts is None:
        if blocks:
            guessed = blocks[-1].steps
        elif step:  # a run that goes on for longer than it was planned
            guessed = step + max(1, round((seconds - timer.elapsed) / max(timer.elapsed / step, _EPSILON)))
        else:
            typical = None if plan.step_seconds is None else plan.step_seconds.value
            provisional = provisional_steps(Duration(seconds, "seconds"), typical)
            guessed = max(CAUTIOUS_STEPS, provisional or UNKNOWN_STEPS)
        left = MEASURED_STEPS - timer.steps  # all that are to be timed, one where they may take long
        length = left if timer.steps and left * timer.last <= BLOCK * seconds else 1
        guess = ScheduleBlock(step=step, until=step + length, fraction=fraction, steps=guessed)
        return _with(plan, None, (*blocks, guess))
    assert timer.costs is not None, "costs are measured before they are needed"
    timer.costs.step = lasts
    plan = fitted(plan, timer.costs, done=step, seconds=seconds - timer.elapsed, fraction=fraction)
    steps = plan.train.steps
    assert steps is not None
    length = max(1, min(int(BLOCK * seconds / lasts), (steps - step + 2) // 3)) if steps > step else 0
    block = ScheduleBlock(step=step, until=step + length, fraction=fraction, steps=steps, step_seconds=lasts)
    return _with(plan, steps, (*blocks, block))


def fitted(plan: RunPlan, costs: Costs, *, done: int, seconds: float, fraction: float = 0.0) -> RunPlan:
    """The plan with the steps that end `seconds` from now, to half a step, with all that comes between and after.

    At least `done`, and those that the recipe asks for.
    """
    least = max(done, plan.train.min_steps or 1)
    low, high = least, max(least, done + max(0, int(seconds / costs.step)) + 1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        ends = costs.until_the_end(_longer(plan, middle, costs.step), done=done, fraction=fraction)
        low, high = (middle, high) if ends <= seconds + costs.step / 2 else (low, middle)
    return _longer(plan, low, costs.step)


def _longer(plan: RunPlan, steps: int, step_seconds: float) -> RunPlan:
    """Shares of the run become steps once, when its length is first known; the schedule goes by the shares."""
    first = plan.train.steps is None
    return complete(plan, steps=steps, step_seconds=step_seconds) if first else _with(plan, steps)


def _with(plan: RunPlan, steps: int | None, blocks: tuple[ScheduleBlock, ...] | None = None) -> RunPlan:
    train: dict[str, object] = {"steps": steps}
    if blocks is not None:
        train["blocks"] = blocks
    total = None if steps is None else steps * plan.train.tokens_per_step
    return plan.model_copy(update={"train": plan.train.model_copy(update=train), "total_tokens": total})
