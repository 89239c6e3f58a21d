"""Intervals, tests and pass@k, against published figures, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest

from bloomery.evals.statistics import (
    Scores,
    compare_scores,
    mcnemar,
    shares,
    sign_flip,
    wilson,
)


# R: prop.test(x, n, correct = FALSE)$conf.int; 81 of 263: Newcombe 1998, table I
@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_equals_published_figures(successes, count, low, high):
    found = wilson(successes, count)
    assert found == pytest.approx((low, high), abs=6e-5)


def test_mcnemar_is_the_two_sided_binomial_test():
    assert mcnemar(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert mcnemar(2, 10) == mcnemar(10, 2)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1.0
    for count in range(1, 9):
        for better in range(count + 1):
            all_flips = [sum(flips) for flips in itertools.product((0, 1), repeat=count)]
            as_far = [n for n in all_flips if abs(n - count / 2) >= abs(better - count / 2)]
            assert mcnemar(better, count - better) == pytest.approx(len(as_far) / 2**count)


def test_few_signs_are_enumerated_and_many_are_drawn():
    parts = np.array([0.3, -0.1, 0.4, 0.2, -0.05])
    sums = [abs(np.dot(signs, parts)) for signs in itertools.product((1, -1), repeat=5)]
    assert sign_flip(parts) == pytest.approx(
        np.mean([one >= abs(parts.sum()) - 1e-12 for one in sums])
    )
    many = np.random.default_rng(1).normal(0.25, 1.0, 60)
    # the sum's limit under flips
    normal = math.erfc(abs(many.sum()) / math.sqrt((many**2).sum()) / math.sqrt(2))
    assert sign_flip(many) == pytest.approx(normal, abs=0.015)


def test_a_ratio_of_sums_has_a_bootstrap_interval_that_covers():
    covered, random = 0, np.random.default_rng(2)
    for _ in range(100):
        weights = random.integers(50, 400, 40).astype(float)
        values = weights * random.normal(1.5, 0.3, 40)
        found = Scores("bits_per_byte", values, weights).estimate()
        assert found.value == values.sum() / weights.sum() and found.interval == "bootstrap"
        covered += found.low <= 1.5 <= found.high
    assert 86 <= covered <= 99  # 95% of 100, with the percentile bootstrap's small lack at 40 items


def test_a_comparison_of_shares_counts_the_items_on_which_the_models_disagree():
    first, second = (
        shares("acc", [True] * 12 + [False] * 4),
        shares("acc", [True] * 2 + [False] * 12 + [True] * 2),
    )
    found = compare_scores(first, second)
    assert found.test == "mcnemar-exact" and (found.better, found.worse) == (10, 2)
    assert found.value == pytest.approx(8 / 16) and found.p_value == pytest.approx(mcnemar(10, 2))
    assert found.low < found.value < found.high


def test_a_comparison_of_bits_per_byte_pairs_the_documents():
    """Documents differ by much more than the models: only a paired test finds the difference."""
    random = np.random.default_rng(3)
    size = random.integers(100, 1000, 50).astype(float)
    hard = random.uniform(0.5, 3.0, 50)
    first = Scores("bits_per_byte", size * (hard + random.normal(0.02, 0.02, 50)), size)
    second = Scores("bits_per_byte", size * hard, size)
    found = compare_scores(first, second)
    assert found.test == "sign-flip" and found.p_value < 0.001 and found.low > 0
    assert found.value == pytest.approx(first.estimate().value - second.estimate().value)
    assert first.estimate().low < second.estimate().value < first.estimate().high
    same = compare_scores(first, first)
    assert same.value == 0 and same.p_value == 1.0 and (same.better, same.worse) == (0, 0)


def test_one_document_has_neither_interval_nor_test():
    one = Scores("bits_per_byte", np.array([3.0]), np.array([2.0]))
    assert one.estimate().low is None and compare_scores(one, one).p_value is None
