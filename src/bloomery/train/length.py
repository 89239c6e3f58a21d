"""How many steps fit into a wall-time length."""

from dataclasses import dataclass
from statistics import median

from bloomery.plan.lengths import MEASURED_STEPS, complete
from bloomery.plan.types import Plan


@dataclass(frozen=True)
class Costs:
    """Measured seconds of what a run does again and again."""

    step: float
    evaluation: float
    save: float

    def until_the_end(self, plan: Plan, *, done: int) -> float:
        """Seconds from the end of step `done` to that of the run, with an evaluation and a checkpoint at the end."""
        steps = plan.train.steps
        assert steps is not None
        evaluations = _left(plan.eval.every_steps, done, steps)
        saves = _left(plan.checkpoint.every_steps, done, steps)
        return (steps - done) * self.step + evaluations * self.evaluation + saves * self.save


def _left(every: int, done: int, steps: int) -> int:
    """How often something happens after step `done`: at every multiple of `every`, and at the end."""
    return -(-steps // every) - done // every


def typical_step(seconds: list[float]) -> float:
    """The median of the timed steps without the first two, which warm caches."""
    return median(seconds[2:MEASURED_STEPS])


def fitted(plan: Plan, costs: Costs, *, done: int, seconds: float) -> Plan:
    """The plan with the most steps that end within `seconds` from now, at least one more than the `done` ones."""
    low, high = done + 1, done + max(1, int(seconds / costs.step)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        longer = complete(plan, steps=middle, step_seconds=costs.step)
        low, high = (middle, high) if costs.until_the_end(longer, done=done) <= seconds else (low, middle)
    return complete(plan, steps=low, step_seconds=costs.step)
