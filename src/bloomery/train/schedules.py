"""How the learning rate moves: pure functions from a step's number to a share of the peak rate."""

import math
from typing import Literal

from bloomery.plan.types import OptimizerPlan

Shape = Literal["cosine", "linear", "constant", "wsd"]


def rate_share(
    step: int, *, steps: int | None, warmup_steps: int, shape: Shape, floor: float = 0.0, decay_steps: int = 0
) -> float:
    """The share of the peak rate with which the step after `step` finished ones is taken.

    Warmup is linear and reaches 1 at its last step. Afterwards cosine and linear fall to `floor` at the end of training
    as in transformers' `get_cosine_schedule_with_warmup` and `get_linear_schedule_with_warmup`; wsd stays at 1 and
    falls linearly over the last `decay_steps` (warmup-stable-decay, arXiv:2404.06395). `steps` None (a wall-time
    length that has not been measured yet) holds the peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if steps is None or shape == "constant":
        return 1.0
    start = max(warmup_steps, steps - decay_steps) if shape == "wsd" else warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return floor + (1.0 - floor) * left


def planned_share(step: int, plan: OptimizerPlan, *, steps: int | None) -> float:
    """`rate_share` as the plan says."""
    shape: Shape = plan.schedule if isinstance(plan.schedule, str) else "wsd"
    floor = plan.floor if isinstance(plan.schedule, str) else plan.schedule.floor
    return rate_share(
        step, steps=steps, warmup_steps=plan.warmup_steps, shape=shape, floor=floor, decay_steps=plan.decay_steps
    )
