"""Ranks that all others wait for: named when they are slow in half of the last steps."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import final

TIMES = 1.3  # of the median
STEPS, SLOW_STEPS = 100, 50


@final
class Stragglers:
    """Each rank is named once."""

    def __init__(self) -> None:
        self._last = deque[tuple[float, ...]](maxlen=STEPS)
        self._named = set[int]()

    def note(self, seconds: Sequence[float]) -> dict[int, float]:
        """`seconds` of one step that each rank worked, without waiting for others.

        The ranks to name now, and how many times the median their work takes.
        """
        median = statistics.median_low(seconds)
        self._last.append(tuple(each / median if median else 1.0 for each in seconds))
        found = dict[int, float]()
        for rank in range(len(seconds)):
            slow = [times[rank] for times in self._last if times[rank] > TIMES]
            if len(slow) >= SLOW_STEPS and rank not in self._named:
                self._named.add(rank)
                found[rank] = statistics.median(slow)
        return found
