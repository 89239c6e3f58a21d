"""A simulator of queues that run beside each other: a device's kernels, and the copies between it and the host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Work of a queue. `after`: the numbers of earlier tasks, of any queue, that must have ended before it begins."""

    queue: str
    seconds: float
    after: tuple[int, ...] = ()


def finish_times(tasks: Sequence[Task]) -> list[float]:
    """The second in which each task ends. Each queue runs its tasks one after the other, in their order."""
    ends = list[float]()
    free_at = dict[str, float]()
    for task in tasks:
        start = max((free_at.get(task.queue, 0.0), *(ends[number] for number in task.after)))
        ends.append(start + task.seconds)
        free_at[task.queue] = ends[-1]
    return ends


def busy_seconds(tasks: Sequence[Task], queue: str) -> float:
    """The seconds in which a queue works."""
    return sum(task.seconds for task in tasks if task.queue == queue)
