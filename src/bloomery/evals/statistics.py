"""Confidence intervals of scores and paired significance tests. Numpy alone.

Items are drawn again, not tokens: the tokens of a document are alike, so that a test over tokens finds differences
that another set of documents would not show (Miller 2024, "Adding error bars to evals", arXiv:2411.00640, 2.2).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95% of the normal distribution
_DRAWS = 10_000
_CORPUS_DRAWS = (
    100  # as lm-evaluation-harness takes for BLEU, chrF and TER: each one scores the whole corpus
)
_EXACT = 14  # items whose sign flips are all enumerated
_SEED = 0
_CELLS = 2**22  # random numbers at once: 32 MiB


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% confidence interval. `interval`: wilson, bootstrap, or none (one item, or unknown)."""

    value: float
    low: float | None
    high: float | None
    interval: str


@dataclass(frozen=True)
class Difference:
    """First model minus second on the same items. `p_value`: of no difference, two-sided; None with too few items.
    `test`: mcnemar-exact, sign-flip-exact, sign-flip or none. `better`, `worse`: items on which the first model scores
    higher or lower; None where an item has no score of its own.
    """

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    test: str
    better: int | None
    worse: int | None


@dataclass(frozen=True)
class Scores:
    """A metric of every item: the figure is sum(values) / sum(weights), float64 [items] each."""

    metric: str
    values: np.ndarray
    weights: np.ndarray

    @property
    def binary(self) -> bool:
        """Whether each item is right or wrong."""
        return bool(np.isin(self.values, (0.0, 1.0)).all() and (self.weights == 1).all())

    def estimate(self) -> Estimate:
        """Wilson's interval of a share, else the percentile bootstrap over items."""
        value = float(self.values.sum() / self.weights.sum())
        if self.binary:
            return Estimate(value, *wilson(int(self.values.sum()), len(self.values)), "wilson")
        if len(self.values) < 2:
            return Estimate(value, None, None, "none")
        means = np.concatenate(
            [
                self.values[rows].sum(1) / self.weights[rows].sum(1)
                for rows in _resamples(len(self.values))
            ]
        )
        return Estimate(value, *_percentiles(means), "bootstrap")


@dataclass(frozen=True)
class CorpusScores:
    """A metric of all items together, such as BLEU: `aggregate` of the items is the figure.

    `aggregate`: None where it is unknown: `figure` then has no interval.
    """

    metric: str
    items: tuple[Any, ...]
    figure: float
    aggregate: Callable[[Sequence[Any]], float] | None

    def estimate(self) -> Estimate:
        """The figure, and 1.96 standard deviations of it over items drawn again on each side."""
        drawn = self.drawn()
        if drawn is None:
            return Estimate(self.figure, None, None, "none")
        return Estimate(self.figure, *_around(self.figure, drawn), "bootstrap")

    def drawn(self) -> np.ndarray | None:
        """The figures of items drawn with replacement, the same ones for every model."""
        if self.aggregate is None or len(self.items) < 2:
            return None
        random = np.random.default_rng(_SEED)
        figures = []
        for _ in range(_CORPUS_DRAWS):
            rows = random.integers(0, len(self.items), len(self.items))
            figures.append(float(self.aggregate([self.items[row] for row in rows])))
        return np.array(figures, np.float64)


def compare_corpora(first: CorpusScores, second: CorpusScores) -> Difference:
    """Of the same items in the same order. No item has a score of its own, so that nothing is tested."""
    assert len(first.items) == len(second.items), "both models score the same items"
    value = first.figure - second.figure
    drawn = first.drawn()
    other_drawn = second.drawn()
    low = high = None
    if drawn is not None and other_drawn is not None:
        low, high = _around(value, drawn - other_drawn)
    return Difference(value, low, high, None, "none", None, None)


def _around(value: float, drawn: np.ndarray) -> tuple[float, float]:
    margin = _Z * float(drawn.std(ddof=1))
    return value - margin, value + margin


def shares(metric: str, correct: list[bool] | list[float]) -> Scores:
    """Scores of items that weigh the same."""
    return Scores(metric, np.array(correct, np.float64), np.ones(len(correct)))


def compare_scores(first: Scores, second: Scores) -> Difference:
    """Of the same items in the same order.

    Shares: McNemar's exact test. Other figures: items' models are exchanged at random (a paired permutation test).
    The interval is the percentile bootstrap over items, drawn for both models together.
    """
    assert len(first.values) == len(second.values), "both models score the same items"
    # Each item's part of the difference: they sum to it.
    parts = first.values / first.weights.sum() - second.values / second.weights.sum()
    first_values = first.values / first.weights
    second_values = second.values / second.weights
    better = int((first_values > second_values).sum())
    worse = int((first_values < second_values).sum())
    low = high = None
    if len(parts) > 1:
        drawn = [
            first.values[rows].sum(1) / first.weights[rows].sum(1)
            - second.values[rows].sum(1) / second.weights[rows].sum(1)
            for rows in _resamples(len(parts))
        ]
        low, high = _percentiles(np.concatenate(drawn))
    if first.binary and second.binary:
        return Difference(
            float(parts.sum()), low, high, mcnemar(better, worse), "mcnemar-exact", better, worse
        )
    p_value = sign_flip(parts) if len(parts) > 1 else None
    test = "sign-flip" + ("-exact" if len(parts) <= _EXACT else "")
    return Difference(float(parts.sum()), low, high, p_value, test, better, worse)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927), which Brown, Cai and DasGupta 2001 recommend for few items."""
    share = successes / count
    correction = _Z**2 / count
    center = share + correction / 2
    half = _Z * math.sqrt(share * (1 - share) / count + correction / (4 * count))
    low = (center - half) / (1 + correction)
    high = (center + half) / (1 + correction)
    return max(low, 0.0) if successes else 0.0, min(high, 1.0) if successes < count else 1.0


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p-value: of the items on which the models disagree, half would favor each (McNemar 1947)."""
    count = better + worse
    fewer = min(better, worse)
    if better == worse:
        return 1.0
    tail = sum(math.comb(count, hits) for hits in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**count))


def sign_flip(parts: np.ndarray) -> float:
    """The two-sided p-value of the sum of paired differences, float64 [items], under random signs (Fisher 1935).

    All signs of up to 14 items, else 10,000 random ones, counted with the observed one (Phipson and Smyth 2010).
    """
    count = len(parts)
    observed = abs(float(parts.sum()))
    reached = observed * (1 - 1e-9)  # the same sum in another order
    if count <= _EXACT:
        signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float((np.abs(signs @ parts) >= reached).mean())
    random = np.random.default_rng(_SEED)
    hits = 0
    for draws in _pieces(count):
        signs = 1.0 - 2.0 * random.integers(0, 2, (draws, count), dtype=np.int8)
        hits += int((np.abs(signs @ parts) >= reached).sum())
    return (hits + 1) / (_DRAWS + 1)


def _pieces(count: int) -> list[int]:
    """The draws in pieces of bounded memory."""
    size = max(1, min(_DRAWS, _CELLS // count))
    return [min(size, _DRAWS - start) for start in range(0, _DRAWS, size)]


def _resamples(count: int) -> Iterator[np.ndarray]:
    """Indices of items sampled with replacement, [draws, items] a piece, the same for every metric and model."""
    random = np.random.default_rng(_SEED)
    yield from (random.integers(0, count, (draws, count)) for draws in _pieces(count))


def _percentiles(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
