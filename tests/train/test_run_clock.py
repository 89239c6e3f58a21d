"""How far a run is, what is due, and the learning rates of a run whose length is a time."""

import itertools

import pytest
from plans_for_tests import tiny_plan

from bloomery.core.units import Duration
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Wsd
from bloomery.train.optim.schedules import planned_lr_scale
from bloomery.train.run_clock import Timer, due, estimated_steps, fraction_done


def timed(*, min_steps: int | None = None, optimizer=None, **lengths) -> RunPlan:
    """A run of 100 seconds that evaluates at each half."""
    train = {"steps": None, "seconds": 100.0, "min_steps": min_steps}
    plan = tiny_plan(train=train, optimizer=optimizer or {}, checkpoint={"every_steps": 1000})
    return plan.model_copy(update={"lengths": plan.lengths.model_copy(update=lengths)})


def rates(plan: RunPlan, steps: int) -> list[float]:
    """The factors of a run that takes `steps` equal steps."""
    return [planned_lr_scale(step, plan, fraction_done=step / steps) for step in range(steps)]


def test_the_clock_continues_from_the_checkpoint():
    now = 5.0
    timer = Timer(began=2.0, clock=lambda: now, restored=40.0)
    assert timer.elapsed == 43.0


def test_a_wall_time_run_is_done_as_far_as_its_time():
    train = timed().train
    assert fraction_done(train, step=7, seconds=25.0) == 0.25
    assert fraction_done(train, step=7, seconds=130.0) == 1.0
    assert fraction_done(train, step=0, seconds=130.0) == 0.0, "at least one step"
    least = timed(min_steps=10).train
    assert fraction_done(least, step=7, seconds=130.0) == 0.7
    assert fraction_done(least, step=10, seconds=130.0) == 1.0
    assert fraction_done(tiny_plan(train={"steps": 8}).train, step=2, seconds=9e9) == 0.25


def test_steps_are_estimated_at_the_pace_of_this_process():
    assert estimated_steps(step=0, fraction=0.1, first_step=0, first_fraction=0.1) == 0
    # 40 steps took a fifth of the run: as many again for each of the two fifths that are left.
    assert estimated_steps(step=140, fraction=0.6, first_step=100, first_fraction=0.4) == 220
    assert estimated_steps(step=90, fraction=1.0, first_step=0, first_fraction=0.1) == 90


@pytest.mark.parametrize("steps", [20, 333, 5000])
def test_shares_of_the_time_are_due_once_each(steps):
    plan = timed(checkpoint=Duration(70, "percent"))

    def due_at(repeated):
        return [
            step
            for step in range(1, steps + 1)
            if due(
                repeated,
                plan,
                step=step,
                fraction_before=(step - 1) / steps,
                fraction=step / steps,
            )
        ]

    assert len(due_at("evaluation")) == 2 and due_at("evaluation")[-1] == steps
    # Checkpoints move to a multiple of the evaluations.
    assert due_at("checkpoint") == due_at("evaluation")


def test_what_became_due_while_the_run_was_stopped_is_due_after_the_next_step():
    plan = timed()
    assert due("evaluation", plan, step=11, fraction_before=0.4, fraction=0.55)
    assert not due("evaluation", plan, step=12, fraction_before=0.55, fraction=0.6)


def test_an_interval_in_steps_stays_one():
    plan = timed(evaluation=Duration(10, "steps"))
    plan = plan.model_copy(update={"eval": plan.eval.model_copy(update={"every_steps": 10})})
    told = [step for step in range(1, 31) if due("evaluation", plan, step=step, fraction=0.5)]
    assert told == [10, 20, 30]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", Wsd()], ids=str)
def test_a_run_by_time_and_one_in_as_many_steps_have_the_same_schedule(schedule):
    decay = Duration(20, "percent") if isinstance(schedule, Wsd) else None
    by_time = timed(optimizer={"schedule": schedule}, warmup=Duration(10, "percent"), decay=decay)
    steps = 1000
    optimizer = {"schedule": schedule, "warmup_steps": 100, "decay_steps": 200 if decay else 0}
    in_steps = tiny_plan(train={"steps": steps}, optimizer=optimizer)
    expected = [planned_lr_scale(step, in_steps, fraction_done=0.0) for step in range(steps)]
    # A warmup by time begins at 0, one in steps at its first step's share.
    assert rates(by_time, steps) == pytest.approx(expected, abs=0.0101)


def test_a_warmup_of_few_steps_rises_over_ten():
    """The first step compiles for longer than the whole warmup."""
    plan = timed(optimizer={"schedule": "linear"}, warmup=Duration(5, "percent"))
    told = [planned_lr_scale(step, plan, fraction_done=0.2 + step / 100) for step in range(10)]
    assert told[0] == 0.1
    assert max(b - a for a, b in itertools.pairwise(told)) <= 0.1 + 1e-9


def test_a_warmup_in_steps_counts_steps():
    plan = timed(
        optimizer={"schedule": "constant", "warmup_steps": 30}, warmup=Duration(30, "steps")
    )
    assert rates(plan, 300)[:31] == pytest.approx([*((step + 1) / 30 for step in range(30)), 1.0])


def test_no_warmup_begins_at_the_peak():
    plan = timed(optimizer={"schedule": "cosine", "warmup_steps": 0}, warmup=Duration(0, "steps"))
    assert rates(plan, 100)[0] == 1.0 and rates(plan, 100)[-1] < 0.001
