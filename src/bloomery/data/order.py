"""The data order of a run: position is one integer, and sample i is f(seed, i) on every machine."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np
from numpy.typing import NDArray

_64_BITS = 2**64 - 1
FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class Cursor:
    """The data state of a run: `consumed` sequences of the order that `seed` keys are behind it."""

    seed: int
    consumed: int


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & _64_BITS)) + 0x9E3779B97F4A7C15 & _64_BITS
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _64_BITS
        state ^= state >> 31
    return state


def mix_arrays(states: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix(*keys, value)` of each value and the state `mix(*keys)` beside it."""
    states = (states ^ values) + np.uint64(0x9E3779B97F4A7C15)
    states = (states ^ states >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ states >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return states ^ states >> np.uint64(31)


def uniform_numbers(
    states: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """A number in [0, 1) of each state and position: the upper 53 bits of `mix_arrays`."""
    return (mix_arrays(states, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def feistel(position: int, *, size: int, key: int) -> int:
    """A keyed bijection of 0 .. size - 1: Feistel rounds over the next even power of two, walked until the result is
    inside.
    """
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left = position >> half_bits
        right = position & half_mask
        for feistel_round in range(FEISTEL_ROUNDS):
            left, right = right, left ^ mix(key, feistel_round, right) & half_mask
        position = left << half_bits | right
        if position < size:
            return position


@final
class Visits:
    """The order in which a run reads the items of several sources.

    An epoch is a row of visits: it visits a source of weight w floor(w) times, and a fraction w - floor(w) of its items
    once more; the fraction changes with the epoch.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`counts`: the items of each source."""
        self._counts = list(counts)
        self._visits = [
            round(count * weight) for count, weight in zip(counts, weights, strict=True)
        ]
        self._ends = list(accumulate(self._visits))
        self._total = sum(self._visits)
        self._seed = seed

    def __len__(self) -> int:
        """The visits of an epoch."""
        return self._total

    def locate(self, index: int) -> tuple[int, int]:
        """The index-th item of the run: its source, and its number there."""
        epoch, position = divmod(index, self._total)
        visit = feistel(position, size=self._total, key=mix(self._seed, epoch))
        source, visit_of_source = self._of_source(visit)
        count = self._counts[source]
        repetition, item = divmod(visit_of_source, count)
        # The last repetition of a source may visit a part of it. Its own permutation, over all of the source, chooses
        # the part, so that it changes with the epoch.
        if (repetition + 1) * count > self._visits[source]:
            item = feistel(item, size=count, key=mix(self._seed, epoch, source + 1))
        return source, item

    def in_order(self, visit: int) -> tuple[int, int]:
        """As `locate`, without the shuffles: source after source, each as often as its weight says."""
        source, visit_of_source = self._of_source(visit)
        return source, visit_of_source % self._counts[source]

    def _of_source(self, visit: int) -> tuple[int, int]:
        """The source of a visit, and the visit's number among those of the source."""
        source = bisect_right(self._ends, visit)
        return source, visit - self._ends[source] + self._visits[source]
