"""How the learning rate moves: pure functions from a step's number to a share of the peak rate.

A run with a known number of steps counts in steps. A wall-time run counts in the share of it that is done, which its
schedule blocks fix ahead of each step: the number of steps may be estimated anew, and no rate jumps.
"""

import math
from collections.abc import Sequence
from typing import Literal

from bloomery.core.units import Duration
from bloomery.plan.types import OptimizerPlan, RunPlan, ScheduleBlock

Shape = Literal["cosine", "linear", "constant", "wsd"]
STEEPEST = 0.1  # of the peak rate: how far a warmup whose end came nearer may rise in a step


def lr_scale_at(
    step: int, *, steps: int | None, warmup_steps: int, shape: Shape, min_lr_ratio: float = 0.0, decay_steps: int = 0
) -> float:
    """The share of the peak rate with which the step after `step` finished ones is taken.

    Warmup is linear and reaches 1 at its last step. Afterwards cosine and linear fall to `min_lr_ratio` at the end of
    training
    as in transformers' `get_cosine_schedule_with_warmup` and `get_linear_schedule_with_warmup`; wsd stays at 1 and
    falls linearly over the last `decay_steps` (warmup-stable-decay, arXiv:2404.06395). `steps` None (a length that is
    unknown) holds the peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if steps is None:
        return 1.0
    start = max(warmup_steps, steps - decay_steps) if shape == "wsd" else warmup_steps
    return _fallen((step - start) / max(1, steps - start), shape, min_lr_ratio)


def _fallen(progress: float, shape: Shape, min_lr_ratio: float) -> float:
    """The share of the peak after that share of the part of a run in which the rate falls."""
    if shape == "constant":
        return 1.0
    progress = min(1.0, max(0.0, progress))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * left


def planned_lr_scale(step: int, plan: RunPlan) -> float:
    """The share of the peak rate for the step after `step` finished ones, as the plan says."""
    optimizer, blocks = plan.optimizer, plan.train.blocks
    shape, min_lr_ratio = _shape(optimizer)
    if not blocks:
        return lr_scale_at(
            step, steps=plan.train.steps, warmup_steps=optimizer.warmup_steps, shape=shape, min_lr_ratio=min_lr_ratio,
            decay_steps=optimizer.decay_steps,
        )  # fmt: skip
    assert plan.lengths is not None and plan.train.seconds is not None, "blocks are of a wall-time run"
    whole = fraction_of_run(plan.lengths.warmup, plan.train.seconds)
    if whole is None:
        warm = _at(optimizer.warmup_steps, blocks, step)
        rising = min(1.0, (step + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    else:
        warm, rising = whole, _risen(step + 1, blocks, whole)
    decay = None if plan.lengths.decay is None else fraction_of_run(plan.lengths.decay, plan.train.seconds)
    start = max(warm, 1.0 - (decay or 0.0)) if shape == "wsd" else warm
    progress = (fraction_done(step, blocks) - start) / (1.0 - start) if start < 1.0 else 0.0
    return min(rising, _fallen(progress, shape, min_lr_ratio))


def _shape(optimizer: OptimizerPlan) -> tuple[Shape, float]:
    if isinstance(optimizer.schedule, str):
        return optimizer.schedule, optimizer.min_lr_ratio
    return "wsd", optimizer.schedule.min_lr_ratio


def fraction_of_run(length: Duration, seconds: float) -> float | None:
    """The share of a run of so many seconds; None for a length in steps, tokens or epochs."""
    if length.unit == "percent":
        return length.amount / 100
    return length.amount / seconds if length.unit == "seconds" else None


def block_at(step: int, blocks: Sequence[ScheduleBlock]) -> ScheduleBlock:
    """The block that the step after `step` finished ones belongs to."""
    return next((block for block in reversed(blocks) if block.step <= step), blocks[0])


def fraction_done(step: int, blocks: Sequence[ScheduleBlock]) -> float:
    """The share of a wall-time run that is done after `step` steps."""
    return _along(step, block_at(step, blocks))


def _at(boundary: int, blocks: Sequence[ScheduleBlock], step: int) -> float:
    """The share after `boundary` steps, as it is known when the step after `step` finished ones is taken."""
    return _along(boundary, block_at(min(boundary, step), blocks))


def _along(step: int, block: ScheduleBlock) -> float:
    left = block.steps - block.step
    fraction = block.fraction + (1.0 - block.fraction) * (step - block.step) / left if left > 0 else 1.0
    return min(1.0, max(0.0, fraction))


def _risen(boundary: int, blocks: Sequence[ScheduleBlock], warm: float) -> float:
    """How far a warmup over the `warm` first share of a run has risen at the end of step `boundary`.

    It follows the share that is done, and no faster than STEEPEST a step: a warmup in % has at least ten steps.
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
