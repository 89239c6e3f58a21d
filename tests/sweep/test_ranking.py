"""Who is best, against figures computed by hand."""

import numpy as np
import pytest

from bloomery.evals.statistics import Scores
from bloomery.sweep.ranking import Judged, ranked


def judged(name, losses, tokens):
    scores = Scores("eval.loss", np.array(losses, np.float64), np.array(tokens, np.float64))
    return Judged(name, float(scores.values.sum() / scores.weights.sum()), scores)


def test_the_order_and_the_p_values_by_hand():
    """Six documents of ten tokens. All worse by one: of the 64 flips of signs, two are as far off: p = 2/64.

    One better by three, five worse by one: the sum of differences is 2. With signs s of parts (-3, 1, 1, 1, 1, 1) a sum
    of at least 2 in size has, for either sign of the 3, five ones that sum to -5, -3, -1, 1, 3 or 5: |3 + t| >= 2 for
    t = -5 (1 way), -1 (10), 1 (10), 3 (5), 5 (1): 27 of 32.
    """
    tokens = [10] * 6
    best = judged("best", [20, 21, 22, 23, 24, 25], tokens)
    worse = judged("worse", [21, 22, 23, 24, 25, 26], tokens)
    mixed = judged("mixed", [17, 22, 23, 24, 25, 26], tokens)
    ranking = ranked([worse, mixed, best], lower_is_better=True)

    assert [row.name for row in ranking.rows] == ["best", "mixed", "worse"]
    assert [row.estimate.value for row in ranking.rows] == [135 / 60, 137 / 60, 141 / 60]
    assert ranking.p_limit == pytest.approx(0.05 / 2)
    p_values = [row.p_value for row in ranking.rows]
    assert p_values == [None, 27 / 32, 2 / 64]
    # 2/64 is more than 0.025: six documents separate nothing among three runs.
    assert [row.contender for row in ranking.rows] == [True, True, True]
    assert ranking.winner is None


def test_two_runs_have_the_plain_limit_and_a_winner():
    tokens = [10] * 6
    best = judged("best", [20, 21, 22, 23, 24, 25], tokens)
    worse = judged("worse", [21, 22, 23, 24, 25, 26], tokens)
    ranking = ranked([worse, best], lower_is_better=True)
    assert ranking.winner is not None and ranking.winner.name == "best"
    assert [row.contender for row in ranking.rows] == [True, False]
    assert ranked([best], lower_is_better=True).winner is None


def test_a_mean_of_unknown_noise_and_other_items_win_nothing():
    short = judged("short", [20, 21, 22, 23, 24, 25], [10] * 6)
    other = judged("other items", [300, 310, 320, 330, 340, 350], [11] * 6)
    for rival in (other, Judged("a mean", 99.0)):
        ranking = ranked([rival, short], lower_is_better=True)
        assert ranking.rows[0].name == "short" and ranking.winner is None
        assert ranking.rows[1].p_value is None


def test_where_more_is_better_the_highest_comes_first():
    low = Judged("low", 0.1)
    high = Judged("high", 0.9)
    assert [row.name for row in ranked([low, high], lower_is_better=False).rows] == ["high", "low"]
