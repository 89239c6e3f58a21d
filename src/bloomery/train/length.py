"""Wall-time runs (`train.max_time`): measured costs, the steps that are left, and their learning rates.

Seconds count from the start of the process, including compilation, evaluations, samples and checkpoints. The learning
rates of a block of steps are stored in the plan before its first step, so that a killed run repeats them.
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
from bloomery.plan.lengths import (
    MEASURED_STEPS,
    UNKNOWN_STEPS,
    complete,
    on_evaluations,
    provisional_steps,
)
from bloomery.plan.types import RunPlan, ScheduleBlock
from bloomery.train.optim.schedules import block_at, fraction_done, fraction_of_run

BLOCK = 0.02  # of the run's time: a block of steps
RECENT = 0.1  # of the run's time: the window in which step time is measured
LONG_START = 0.15  # of the run's time: slower first steps are measured before there are ten of them
CAUTIOUS_STEPS = 200  # the least assumed number of steps before any is measured
WARMING = 2  # first steps, which compile and warm caches, are not measured
_EPSILON = 1e-9
Repeated = Literal["evaluation", "checkpoint"]


@dataclass
class Costs:
    """Measured seconds of a step, an evaluation and a save; updated during the run."""

    step: float
    sequence: float  # one of the validation set
    samples: float  # all of one evaluation
    save: float
    sequences: int = 0  # in the validation set
    end: float = 0.0  # the wait for the last checkpoint, in addition to `save`
    best: float = 0.0  # saving the weights after the best evaluation so far, as often as not

    def evaluation(self, plan: RunPlan) -> float:
        evaluated = min(plan.eval.sequences or self.sequences, self.sequences)
        return evaluated * self.sequence + self.samples + self.best

    def until_the_end(self, plan: RunPlan, *, done: int, fraction: float = 0.0) -> float:
        """Seconds from the end of step `done` to the end of the run, including its last evaluation and checkpoint.

        `fraction` of the run is done after step `done`.
        """
        steps = plan.train.steps
        assert steps is not None
        evaluations = _left("evaluation", plan, done, fraction)
        saves = _left("checkpoint", plan, done, fraction)
        return (
            (steps - done) * self.step
            + evaluations * self.evaluation(plan)
            + saves * self.save
            + self.end
        )


def _left(what: Repeated, plan: RunPlan, done: int, fraction: float) -> int:
    """How often it is due after step `done`: at every multiple, and at the end."""
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
    if fraction is None:
        return steps
    evaluation = _every("evaluation", plan) if what == "checkpoint" else None
    # Both as shares of the run; an interval in steps has no place on the same grid.
    return on_evaluations(fraction, evaluation) if isinstance(evaluation, float) else fraction


def due(what: Repeated, plan: RunPlan, *, step: int) -> bool:
    """Whether it is due after `step`."""
    every = _every(what, plan)
    blocks = plan.train.blocks
    if isinstance(every, int):
        return step % every == 0
    if math.isinf(every):
        return False
    before, after = (int(fraction_done(at, blocks) / every + _EPSILON) for at in (step - 1, step))
    return after > before


@final
@dataclass
class Timer:
    """Times the steps of one process of a run. `before`: seconds of the run up to its checkpoint."""

    began: float
    clock: Callable[[], float] = time.perf_counter
    before: float = 0.0
    costs: Costs | None = None
    steps: int = 0  # taken since `forget`
    last: float = math.inf  # seconds of the last of them
    # of steps, once they are warm
    _laps: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    _begun: float = 0.0  # start of the current step
    _aside: float = 0.0  # seconds since then that do not belong to the step

    @property
    def elapsed(self) -> float:
        return self.before + self.clock() - self.began

    def start(self) -> None:
        """Start timing steps."""
        self._begun = self.clock()
        self._aside = 0.0

    def stepped(self) -> None:
        """End a step. Work timed by `aside` does not count toward the next one."""
        self.last = self.clock() - self._begun - self._aside
        if self.steps >= WARMING:
            self._laps.append(self.last)
        self.steps += 1
        self.start()

    @contextmanager
    def aside(self) -> Iterator[Callable[[], float]]:
        """Time work between steps. Yields a function that returns its seconds so far."""
        begun = self.clock()
        try:
            yield lambda: self.clock() - begun
        finally:
            self._aside += self.clock() - begun

    def note_evaluation(self, seconds: float, plan: RunPlan) -> None:
        if self.costs is not None and self.costs.sequences:
            self.costs.sequence = seconds / min(
                plan.eval.sequences or self.costs.sequences, self.costs.sequences
            )

    def note_samples(self, seconds: float) -> None:
        if self.costs is not None:
            self.costs.samples = seconds

    def note_best(self, seconds: float) -> None:
        if self.costs is not None:
            self.costs.best = seconds

    def note_save(self, seconds: float) -> None:
        if self.costs is not None:
            self.costs.save = seconds

    def forget(self) -> None:
        """Drop the measured step times: the micro-batch size has changed."""
        self._laps.clear()
        self.steps = 0
        self.last = math.inf

    def step_seconds(self, recent: float) -> float | None:
        """Mean step time over the last `recent` seconds; the median of a few first steps."""
        if len(self._laps) <= MEASURED_STEPS - WARMING:
            return median(self._laps) if self._laps else None
        taken = 0
        seconds = 0.0
        for lap in reversed(self._laps):
            taken = taken + 1
            seconds = seconds + lap
            if seconds >= recent and taken >= MEASURED_STEPS - WARMING:
                break
        return seconds / taken


def current(plan: RunPlan, *, step: int) -> RunPlan | None:
    """The plan as it was when the block after `step` was stored; None where none is stored yet."""
    blocks = plan.train.blocks
    if not blocks or blocks[0].step > step:
        return None
    block = block_at(step, blocks)
    steps = block.steps if block.step_seconds is not None else None
    plan = plan if plan.train.steps == steps else _with(plan, steps)
    return plan if step < block.until or steps == step else None


def measured(plan: RunPlan, timer: Timer, *, step: int) -> float | None:
    """Seconds per step; None while too few steps were taken."""
    seconds = plan.train.seconds
    blocks = plan.train.blocks
    assert seconds is not None
    before = block_at(step, blocks).step_seconds if blocks else None
    now = timer.step_seconds(RECENT * seconds)
    if before is None and timer.elapsed >= seconds and timer.steps:
        return now or timer.elapsed / timer.steps
    early = before is None and timer.steps < MEASURED_STEPS and timer.elapsed < LONG_START * seconds
    return None if early else now or before


def with_next_block(plan: RunPlan, timer: Timer, *, step: int) -> RunPlan:
    """The plan with the schedule of the steps after `step` stored.

    Until steps are measured the learning rate rises as if the estimate were right, or slower: too steep a warmup harms.
    """
    seconds = plan.train.seconds
    blocks = plan.train.blocks
    assert seconds is not None
    blocks = blocks if blocks and blocks[0].step <= step else ()
    begins = min(1.0, timer.elapsed / seconds) if step else 0.0  # set-up time trained nothing
    fraction = fraction_done(step, blocks) if blocks else begins
    lasts = measured(plan, timer, step=step)
    if lasts is None:
        if blocks:
            guessed = blocks[-1].steps
        elif step:  # a run resumed for longer than planned
            guessed = step + max(
                1, round((seconds - timer.elapsed) / max(timer.elapsed / step, _EPSILON))
            )
        else:
            typical = None if plan.step_seconds is None else plan.step_seconds.value
            provisional = provisional_steps(Duration(seconds, "seconds"), typical)
            guessed = max(CAUTIOUS_STEPS, provisional or UNKNOWN_STEPS)
        left = MEASURED_STEPS - timer.steps  # all steps to measure, or one where they are slow
        length = left if timer.steps and left * timer.last <= BLOCK * seconds else 1
        guess = ScheduleBlock(step=step, until=step + length, fraction=fraction, steps=guessed)
        return _with(plan, None, (*blocks, guess))
    assert timer.costs is not None, "costs are measured before they are needed"
    timer.costs.step = lasts
    plan = fitted(plan, timer.costs, done=step, seconds=seconds - timer.elapsed, fraction=fraction)
    steps = plan.train.steps
    assert steps is not None
    length = (
        max(1, min(int(BLOCK * seconds / lasts), (steps - step + 2) // 3)) if steps > step else 0
    )
    ends = timer.elapsed + timer.costs.until_the_end(plan, done=step, fraction=fraction)
    block = ScheduleBlock(
        step=step,
        until=step + length,
        fraction=fraction,
        steps=steps,
        step_seconds=lasts,
        ends=ends,
    )
    return _with(plan, steps, (*blocks, block))


def fitted(
    plan: RunPlan, costs: Costs, *, done: int, seconds: float, fraction: float = 0.0
) -> RunPlan:
    """The plan with the number of steps that ends `seconds` from now, to half a step, evaluations and saves included.

    At least `done`, and at least the recipe's minimum.
    """
    least = max(done, plan.train.min_steps or 1)
    low = least
    high = max(least, done + max(0, int(seconds / costs.step)) + 1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        ends = costs.until_the_end(_longer(plan, middle, costs.step), done=done, fraction=fraction)
        low, high = (middle, high) if ends <= seconds + costs.step / 2 else (low, middle)
    return _longer(plan, low, costs.step)


def _longer(plan: RunPlan, steps: int, step_seconds: float) -> RunPlan:
    """Shares of the run become steps once, when its length is first known; the schedule goes by the shares."""
    first = plan.train.steps is None
    return complete(plan, steps=steps, step_seconds=step_seconds) if first else _with(plan, steps)


def _with(
    plan: RunPlan, steps: int | None, blocks: tuple[ScheduleBlock, ...] | None = None
) -> RunPlan:
    train: dict[str, object] = {"steps": steps, **({} if blocks is None else {"blocks": blocks})}
    total = None if steps is None else steps * plan.train.tokens_per_step
    return plan.model_copy(
        update={"train": plan.train.model_copy(update=train), "total_tokens": total}
    )
