"""Learning-rate schedules: pure functions from the step to a factor of the peak learning rate.

A run with a known number of steps counts steps. A wall-time run counts the fraction of its time, which schedule blocks
fix before each step, so that a new estimate of the number of steps never makes the learning rate jump.
"""

import math
from collections.abc import Sequence
from typing import Literal

from bloomery.core.units import Duration
from bloomery.plan.types import OptimizerPlan, RunPlan, ScheduleBlock

Shape = Literal["cosine", "linear", "constant", "wsd"]
STEEPEST = 0.1  # of the peak learning rate: the largest rise per step of a warmup in percent


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
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * left


def planned_lr_scale(step: int, plan: RunPlan) -> float:
    """The factor of the peak learning rate after `step` steps of the plan."""
    optimizer = plan.optimizer
    blocks = plan.train.blocks
    shape, min_lr_ratio = _shape(optimizer)
    if not blocks:
        return lr_scale_at(
            step,
            steps=plan.train.steps,
            warmup_steps=optimizer.warmup_steps,
            shape=shape,
            min_lr_ratio=min_lr_ratio,
            decay_steps=optimizer.decay_steps,
        )
    assert plan.lengths is not None and plan.train.seconds is not None, (
        "only a wall-time run has blocks"
    )
    whole = fraction_of_run(plan.lengths.warmup, plan.train.seconds)
    if whole is None:
        warm = _at(optimizer.warmup_steps, blocks, step)
        rising = min(1.0, (step + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    else:
        warm = whole
        rising = _risen(step + 1, blocks, whole)
    decay = (
        None
        if plan.lengths.decay is None
        else fraction_of_run(plan.lengths.decay, plan.train.seconds)
    )
    start = max(warm, 1.0 - (decay or 0.0)) if shape == "wsd" else warm
    progress = (fraction_done(step, blocks) - start) / (1.0 - start) if start < 1.0 else 0.0
    return min(rising, _fallen(progress, shape, min_lr_ratio))


def _shape(optimizer: OptimizerPlan) -> tuple[Shape, float]:
    if isinstance(optimizer.schedule, str):
        return optimizer.schedule, optimizer.min_lr_ratio
    return "wsd", optimizer.schedule.min_lr_ratio


def fraction_of_run(length: Duration, seconds: float) -> float | None:
    """`length` as a fraction of a run of `seconds`; None for steps, tokens or epochs."""
    if length.unit == "percent":
        return length.amount / 100
    return length.amount / seconds if length.unit == "seconds" else None


def block_at(step: int, blocks: Sequence[ScheduleBlock]) -> ScheduleBlock:
    """The block of the step after `step`."""
    return next((block for block in reversed(blocks) if block.step <= step), blocks[0])


def fraction_done(step: int, blocks: Sequence[ScheduleBlock]) -> float:
    """The fraction of a wall-time run that is done after `step` steps."""
    return _along(step, block_at(step, blocks))


def _at(boundary: int, blocks: Sequence[ScheduleBlock], step: int) -> float:
    """The fraction done after `boundary` steps, as known after `step` steps."""
    return _along(boundary, block_at(min(boundary, step), blocks))


def _along(step: int, block: ScheduleBlock) -> float:
    left = block.steps - block.step
    fraction = (
        block.fraction + (1.0 - block.fraction) * (step - block.step) / left if left > 0 else 1.0
    )
    return min(1.0, max(0.0, fraction))


def _risen(boundary: int, blocks: Sequence[ScheduleBlock], warm: float) -> float:
    """The factor after `boundary` steps of a warmup over the first fraction `warm` of a run.

    Rises by at most STEEPEST per step: a warmup in percent has at least ten steps.
    """
    if warm <= 0.0:
        return 1.0
    reached = min(1.0, blocks[0].fraction / warm)
    for block, after in zip(blocks, [*(block.step for block in blocks[1:]), boundary], strict=True):
        end = min(after, boundary)
        reached = min(1.0, _along(end, block) / warm, reached + STEEPEST * (end - block.step))
        if end == boundary:
            break
    return reached
