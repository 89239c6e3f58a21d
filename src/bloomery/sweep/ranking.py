"""Who is best in a sweep, and whom the noise does not separate from the best. Numpy alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from bloomery.evals.statistics import CONFIDENCE, Estimate, Scores, compare_scores


@final
@dataclass(frozen=True)
class Judged:
    """A run with its figure after `step` steps.

    `scores`: of its items, the same ones for all runs; None where only the mean is known.
    """

    name: str
    value: float
    scores: Scores | None = None
    step: int = 0

    def estimate(self) -> Estimate:
        """The figure with its interval over the items that have a weight."""
        if self.scores is None:
            return Estimate(self.value, None, None, "none")
        return _of_items(self.scores, self.scores.weights > 0).estimate()

    def p_value(self, other: "Judged") -> float | None:
        """Of no difference, on the items that have a weight in both; None where they are not the same items."""
        if self.scores is None or other.scores is None:
            return None
        weights, other_weights = self.scores.weights, other.scores.weights
        if weights.shape != other_weights.shape:
            return None
        weighs = (weights > 0) & (other_weights > 0)
        if not weighs.any() or (weights[weighs] != other_weights[weighs]).any():
            return None
        return compare_scores(
            _of_items(self.scores, weighs), _of_items(other.scores, weighs)
        ).p_value


def _of_items(scores: Scores, chosen: np.ndarray) -> Scores:
    return Scores(scores.metric, scores.values[chosen], scores.weights[chosen])


def best_first(runs: Sequence[Judged], *, lower_is_better: bool) -> list[Judged]:
    """Of equal ones the first stays first."""
    return sorted(runs, key=lambda run: run.value if lower_is_better else -run.value)


@final
@dataclass(frozen=True)
class Row:
    """A ranked run. `p_value`: of no difference from the best, two-sided; None for the best and without a test.

    `contender`: the noise does not separate it from the best, which is one itself.
    """

    name: str
    estimate: Estimate
    p_value: float | None
    contender: bool


@final
@dataclass(frozen=True)
class Ranking:
    """`rows`: best first. `p_limit`: a run with a smaller p-value is worse than the best."""

    rows: tuple[Row, ...]
    p_limit: float

    @property
    def winner(self) -> Row | None:
        """The best run where every other one is worse beyond the noise. A single run wins nothing."""
        contenders = [row for row in self.rows if row.contender]
        return contenders[0] if len(contenders) == 1 and len(self.rows) > 1 else None


def ranked(runs: Sequence[Judged], *, lower_is_better: bool) -> Ranking:
    """The runs with the best first; of equal ones the first stays first.

    Each is tested against the best, item by item (`compare_scores`). The best of many is best by luck, too, so that
    the limit of 0.05 is divided by the number of tests: the runs that are not worse than the best then contain the
    truly best one of them with at least 95% confidence (subset selection: Gupta 1965; Hsu 1984, "Constrained
    simultaneous confidence intervals for multiple comparisons with the best"). This is the noise of the held-out
    items; another seed of training is not in it.
    """
    in_order = best_first(runs, lower_is_better=lower_is_better)
    p_limit = (1 - CONFIDENCE) / max(1, len(in_order) - 1)
    rows = []
    for run in in_order:
        best = in_order[0]
        p_value = None if run is best else best.p_value(run)
        is_contender = p_value is None or p_value >= p_limit
        rows.append(Row(run.name, run.estimate(), p_value, is_contender))
    return Ranking(tuple(rows), p_limit)
