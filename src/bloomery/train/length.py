"""How many steps fit into a wall-time length."""

from dataclasses import dataclass
from statistics import median

from bloomery.plan.lengths import MEASURED_STEPS


@dataclass(frozen=True)
class Costs:
    """Measured seconds of what a run does again and again, and how often it does it."""

    step: float
    evaluation: float
    save: float
    evaluate_every: int  # steps
    save_every: int

    def total(self, steps: int) -> float:
        """Seconds of that many steps, with an evaluation and a checkpoint at the end."""
        evaluations, saves = -(-steps // self.evaluate_every), -(-steps // self.save_every)
        return steps * self.step + evaluations * self.evaluation + saves * self.save


def typical_step(seconds: list[float]) -> float:
    """The median of the timed steps without the first two, which warm caches."""
    return median(seconds[2:MEASURED_STEPS])


def steps_within(seconds: float, costs: Costs) -> int:
    """The most steps that end within `seconds`, at least one."""
    low, high = 1, max(1, int(seconds / costs.step)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs.total(middle) <= seconds else (low, middle)
    return low

