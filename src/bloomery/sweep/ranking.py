"""Who is best in a sweep, and whom the noise does not separate from the best. Numpy alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

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

    def same_items(self, other: "Judged") -> bool:
        """Whether both were judged by items of the same weights, so that their difference can be tested."""
        if self.scores is None or other.scores is None:
            return False
        return self.scores.weights.shape == other.scores.weights.shape and bool(
            (self.scores.weights == other.scores.weights).all()
        )


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
    in_order = sorted(runs, key=lambda run: run.value if lower_is_better else -run.value)
    p_limit = (1 - CONFIDENCE) / max(1, len(in_order) - 1)
    rows = []
    for run in in_order:
        best = in_order[0]
        estimate = Estimate(run.value, None, None, "none")
        if run.scores is not None:
            estimate = run.scores.estimate()
        p_value = None
        if run is not best and best.same_items(run):
            assert best.scores is not None and run.scores is not None
            p_value = compare_scores(best.scores, run.scores).p_value
        rows.append(Row(run.name, estimate, p_value, p_value is None or p_value >= p_limit))
    return Ranking(tuple(rows), p_limit)
