"""Learning-rate schedules: pure functions from the step to a factor of the peak learning rate.

A run with a known number of steps counts steps. A wall-time run (`train.max_time`) counts the fraction of its time.
"""

import math
from typing import Literal

from bloomery.core.units import Duration
from bloomery.plan.types import OptimizerPlan, RunPlan

Shape = Literal["cosine", "linear", "constant", "wsd"]
# The fewest steps of a warmup that is a share of a wall-time run: the first step may compile for all of it.
FEWEST_WARMUP_STEPS = 10


def lr_scale_at(
    step: int,
    *,
    steps: int | None,
    warmup_steps: int,
    shape: Shape,
    min_lr_ratio: float = 0.0,
    decay_steps: int = 0,
) -> float:
    """The factor of the peak learning rate after `step` steps.

    Linear warmup reaches 1 at its last step. Then cosine and linear fall to `min_lr_ratio` at the end of training as in
    transformers' `get_cosine_schedule_with_warmup` and `get_linear_schedule_with_warmup`; wsd stays at 1 and falls
    linearly over the last `decay_steps` (warmup-stable-decay, arXiv:2404.06395). `steps` None (unknown length): 1.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if steps is None:
        return 1.0
    start = max(warmup_steps, steps - decay_steps) if shape == "wsd" else warmup_steps
    return _fallen((step - start) / max(1, steps - start), shape, min_lr_ratio)


def _fallen(progress: float, shape: Shape, min_lr_ratio: float) -> float:
    """The factor after a fraction `progress` of the decay."""
    if shape == "constant":
        return 1.0
    progress = min(1.0, max(0.0, progress))
    remaining_share = 1.0 - progress
    if shape == "cosine":
        remaining_share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining_share


def planned_lr_scale(step: int, plan: RunPlan, *, fraction_done: float) -> float:
    """The factor of the peak learning rate after `step` steps; `fraction_done` is that of a wall-time run."""
    optimizer = plan.optimizer
    shape, min_lr_ratio = _shape(optimizer)
    if plan.train.seconds is None:
        return lr_scale_at(
            step,
            steps=plan.train.steps,
            warmup_steps=optimizer.warmup_steps,
            shape=shape,
            min_lr_ratio=min_lr_ratio,
            decay_steps=optimizer.decay_steps,
        )

    # Warmup of a wall-time run: the scale rises by its share of the time, or step by step.
    assert plan.lengths is not None, "a wall-time run has the lengths of its recipe"
    warmup = fraction_of_run(plan.lengths.warmup, plan.train.seconds)
    warmup_scale = 1.0
    if warmup is None:
        # How much of the run a warmup in steps takes is unknown: the decay begins with the run.
        decay_start = 0.0
        if optimizer.warmup_steps:
            warmup_scale = (step + 1) / optimizer.warmup_steps
    else:
        decay_start = warmup
        if warmup > 0.0:
            warmup_scale = min(fraction_done / warmup, (step + 1) / FEWEST_WARMUP_STEPS)

    # Decay: from the end of the warmup, but over the last part of the run alone for wsd.
    if shape == "wsd":
        assert plan.lengths.decay is not None, "wsd has a decay"
        decay = fraction_of_run(plan.lengths.decay, plan.train.seconds)
        assert decay is not None, "the planner refuses a decay in steps of a wall-time run"
        decay_start = max(decay_start, 1.0 - decay)
    progress = (fraction_done - decay_start) / (1.0 - decay_start) if decay_start < 1.0 else 0.0
    return min(1.0, warmup_scale, _fallen(progress, shape, min_lr_ratio))


def _shape(optimizer: OptimizerPlan) -> tuple[Shape, float]:
    if isinstance(optimizer.schedule, str):
        return optimizer.schedule, optimizer.min_lr_ratio
    return "wsd", optimizer.schedule.min_lr_ratio


def fraction_of_run(length: Duration, seconds: float) -> float | None:
    """`length` as a fraction of a run of `seconds`; None for steps, tokens or epochs."""
    if length.unit == "percent":
        return length.amount / 100
    return length.amount / seconds if length.unit == "seconds" else None
