"""A simulator of queues that run beside each other: a device's kernels, and the copies between it and the host."""

from collections import defaultdict


class Queues:
    """Each queue runs its tasks one after the other, in the order in which they were queued.

    `busy`: the seconds in which each queue works.
    """

    def __init__(self) -> None:
        self.busy = defaultdict[str, float](float)
        self._free_at = defaultdict[str, float](float)

    def run(self, queue: str, seconds: float, *after: float) -> float:
        """The second in which a task ends that begins when the tasks that end at `after` have ended."""
        start = max(self._free_at[queue], *after) if after else self._free_at[queue]
        end = start + seconds
        self._free_at[queue] = end
        self.busy[queue] += seconds
        return end

    @property
    def end(self) -> float:
        """The second in which all tasks have ended."""
        return max(self._free_at.values())
