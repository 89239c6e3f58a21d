import pytest
from plans_for_tests import tiny_plan

from bloomery.train.length import Costs, fitted, typical_step

PLAN = tiny_plan(train={"steps": None, "seconds": 100.0})  # evaluates after each half, saves every 1,000 steps


@pytest.mark.parametrize("evaluation", [0.0, 2.0, 10.0])
def test_the_longest_run_that_ends_in_time(evaluation):
    costs = Costs(step=0.1, evaluation=evaluation, save=1.0)
    plan = fitted(PLAN, costs, done=10, seconds=100.0)
    evaluations = -(-plan.train.steps // plan.eval.every_steps)
    seconds = (plan.train.steps - 10) * 0.1 + evaluations * evaluation + 1.0
    assert evaluations in (2, 3)  # a rounded half may leave a step over
    assert 99 - evaluation <= seconds <= 100.0 + 1e-6


def test_what_was_behind_is_not_counted_again():
    costs = Costs(step=1.0, evaluation=0.0, save=5.0)
    plan = PLAN.model_copy(update={"train": PLAN.train.model_copy(update={"steps": 2500})})
    plan = plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"every_steps": 1000})})
    assert costs.until_the_end(plan, done=1200) == 1300 + 2 * 5


def test_a_length_already_over_still_takes_one_step():
    assert fitted(PLAN, Costs(step=1.0, evaluation=9.0, save=9.0), done=10, seconds=-3.0).train.steps == 11


def test_shares_of_the_run_are_resolved():
    plan = fitted(PLAN, Costs(step=0.1, evaluation=0.0, save=0.0), done=10, seconds=100.0)
    assert plan.train.steps == 1010
    assert plan.eval.every_steps == 505
    assert plan.total_tokens == 1010 * PLAN.train.tokens_per_step


def test_the_typical_step_ignores_the_first_two_and_outliers():
    assert typical_step([9.0, 9.0, 1.0, 1.0, 1.1, 1.0, 7.0, 1.1, 1.1, 1.0]) == pytest.approx(1.05)
