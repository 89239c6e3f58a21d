"""How much of a run is done: its clock, and when evaluations and checkpoints are due.

A wall-time run (`train.max_time`) is done as far as its time is over. Seconds count from the start of the process,
including compilation, evaluations, samples and checkpoints; a resumed run continues from the seconds of its checkpoint.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from bloomery.plan.lengths import on_evaluations
from bloomery.plan.types import CheckpointPlan, RunPlan, TrainPlan
from bloomery.train.optim.schedules import fraction_of_run

# Ten thirds of a run are not exactly ten times a third of it in floating point.
_EPSILON = 1e-9
Repeated = Literal["evaluation", "checkpoint"]


@final
@dataclass
class Timer:
    """The clock of a run. `began`: when this process did; `restored`: seconds of the run up to its checkpoint."""

    began: float
    clock: Callable[[], float] = time.perf_counter
    restored: float = 0.0

    @property
    def elapsed(self) -> float:
        return self.restored + self.clock() - self.began


def fraction_done(train: TrainPlan, *, step: int, seconds: float) -> float:
    """The fraction of the run that is done after `step` steps and `seconds`.

    A wall-time run takes at least one step, or `min_steps`, even if they take longer.
    """
    if train.seconds is not None:
        # Rounded, because a sum of seconds misses the end by a rounding error.
        elapsed_fraction = round(seconds / train.seconds, 9)
        return min(1.0, elapsed_fraction, step / (train.min_steps or 1))
    assert train.steps is not None, "a run has a number of steps or a time"
    return min(1.0, step / train.steps)


def is_time_up(train: TrainPlan, step: int, timer: Timer) -> bool:
    """Whether a wall-time run that has taken `step` steps is over."""
    if train.seconds is None:
        return False
    return fraction_done(train, step=step, seconds=timer.elapsed) >= 1.0


def estimated_steps(*, step: int, fraction: float, first_step: int, first_fraction: float) -> int:
    """The steps of a wall-time run at the pace since `first_step`, when `first_fraction` was done."""
    pace = (fraction - first_fraction) / (step - first_step) if step > first_step else 0.0
    return step + (round((1.0 - fraction) / pace) if pace > 0.0 else 0)


def due(
    repeated: Repeated,
    plan: RunPlan,
    *,
    step: int,
    fraction_before: float = 0.0,
    fraction: float = 0.0,
) -> bool:
    """Whether an evaluation or a checkpoint is due after `step`.

    A share of a wall-time run is due once its multiple lies between `fraction_before`, done when this was asked last,
    and `fraction`, done now.
    """
    interval = _interval(repeated, plan)
    if isinstance(interval, int):
        return step % interval == 0
    return passed(interval, fraction_before, fraction)


def is_save_due(checkpoint: CheckpointPlan, seconds_since_save: float) -> bool:
    """Whether checkpoints are saved by time, and it is time for one."""
    return checkpoint.every_seconds is not None and seconds_since_save >= checkpoint.every_seconds


def passed(interval: float, start: float, end: float) -> bool:
    """Whether a multiple of `interval` lies after `start`, and not after `end`."""
    return int(end / interval + _EPSILON) > int(start / interval + _EPSILON)


def _interval(repeated: Repeated, plan: RunPlan) -> float | int:
    """An int: steps between one and the next. A float: a share of a wall-time run, infinite where it is turned off."""
    steps = plan.eval.every_steps if repeated == "evaluation" else plan.checkpoint.every_steps
    if steps is None:
        return math.inf
    if plan.train.seconds is None or plan.lengths is None:
        return steps
    length = plan.lengths.evaluation if repeated == "evaluation" else plan.lengths.checkpoint
    assert length is not None
    share = fraction_of_run(length, plan.train.seconds)
    if share is None:
        return steps
    if repeated == "evaluation":
        return share
    # A checkpoint should have an evaluation; an interval in steps has no place on the grid of shares.
    evaluation = _interval("evaluation", plan)
    return on_evaluations(share, evaluation) if isinstance(evaluation, float) else share
