"""Every unit becomes steps, and refuses where it cannot."""

import pytest
from plan_help import loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.core.units import Duration, parse_duration
from bloomery.plan.lengths import (
    Scale,
    evaluation_sequences,
    provisional_steps,
    steps_of,
    total_steps,
)
from bloomery.plan.page_batch import batch_lines
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.load import load_recipe
from bloomery.train.run_clock import due

SCALE = Scale(
    tokens_per_step=16384,
    sequences_per_step=16,
    sequences_per_epoch=1000,
    steps=200,
    step_seconds=0.5,
)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("195000 steps", 195_000),
        ("0.0011M steps", 1_100),
        ("10B tokens", 610_352),
        ("16384 tokens", 1),
        ("16385 tokens", 2),
        ("1 epoch", 62),
        ("3 epochs", 187),
    ],
)
def test_the_length_of_a_run(length, steps):
    assert total_steps(parse_duration(length), SCALE) == steps


def test_lengths_that_have_no_steps_yet():
    unknown = Scale(
        tokens_per_step=16384,
        sequences_per_step=16,
        sequences_per_epoch=None,
        steps=None,
        step_seconds=None,
    )
    assert total_steps(Duration(2.0, "epochs"), unknown) is None
    assert total_steps(Duration(60.0, "seconds"), SCALE) is None
    assert provisional_steps(Duration(60.0, "seconds"), 0.5) == 120
    assert provisional_steps(Duration(60.0, "seconds"), None) is None


def test_text_that_fills_no_step_is_refused():
    tiny = Scale(
        tokens_per_step=16384,
        sequences_per_step=16,
        sequences_per_epoch=7,
        steps=None,
        step_seconds=None,
    )
    with pytest.raises(UserError, match="2 epochs of the dataset are 14 sequences"):
        total_steps(Duration(2.0, "epochs"), tiny)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("30 steps", 30),
        ("25%", 50),
        ("0.1%", 1),
        ("81920 tokens", 5),
        ("2 epochs", 125),
        ("1m", 120),
        ("0 steps", 0),
    ],
)
def test_parts_of_a_run(length, steps):
    assert steps_of(parse_duration(length), SCALE, key="eval.every") == steps


def test_a_fifth_of_a_run_comes_five_times():
    """Rounded to the nearest, 20% of 366 steps came at 365 and once more at the end."""
    run = Scale(
        tokens_per_step=16384,
        sequences_per_step=16,
        sequences_per_epoch=None,
        steps=366,
        step_seconds=None,
    )
    every = steps_of(parse_duration("20%"), run, key="eval.every")
    assert [step for step in range(1, 367) if step % every == 0 or step == 366] == [
        74,
        148,
        222,
        296,
        366,
    ]


@pytest.mark.parametrize(
    ("length", "run", "steps"),
    [
        ("0.25 epochs", {"epochs": 2.0}, 125),  # of the 1,000 steps that are assumed
        ("0.25 epochs", {"steps": 400}, 100),
        ("1 epoch", {}, 1000),
    ],
)
def test_epochs_of_a_dataset_that_is_not_here_are_assumed(length, run, steps):
    unknown = Scale(
        **{
            "tokens_per_step": 16384,
            "sequences_per_step": 16,
            "sequences_per_epoch": None,
            "steps": None,
            "step_seconds": None,
        }
        | run
    )
    assert steps_of(parse_duration(length), unknown, key="eval.every") == steps


@pytest.mark.parametrize("length", ["1h"])
def test_an_unknown_scale_names_the_key(length):
    unknown = Scale(
        tokens_per_step=16384,
        sequences_per_step=16,
        sequences_per_epoch=None,
        steps=None,
        step_seconds=None,
    )
    with pytest.raises(UserError) as error:
        steps_of(parse_duration(length), unknown, key="checkpoint.every")
    assert error.value.where == "checkpoint.every"


def test_a_wall_time_run_keeps_its_shares():
    recipe = loaded(
        train={"max_time": "90s"},
        optimizer={"schedule": {"kind": "wsd", "decay": "20%"}, "warmup": "5%"},
        checkpoint={"every": "25%"},
        eval={"every": "50%"},
    )
    plan = planned(recipe, machine())
    assert (plan.train.steps, plan.train.seconds, plan.total_tokens) == (None, 90.0, None)
    assert plan.lengths.warmup == Duration(5, "percent")
    assert plan.lengths.decay == Duration(20, "percent")
    assert plan.lengths.checkpoint == Duration(25, "percent")
    assert plan.lengths.evaluation == Duration(50, "percent")


def test_a_decay_in_steps_is_refused_where_steps_are_not_known():
    wsd = {"schedule": {"kind": "wsd", "decay": "50 steps"}, "warmup": "3 steps"}
    with pytest.raises(UserError, match="needs a number of steps") as refused:
        planned(loaded(train={"max_time": "90s"}, optimizer=wsd), machine())
    assert refused.value.where == "optimizer.schedule.decay"
    counted = planned(loaded(train={"max_steps": 90}, optimizer=wsd), machine())
    assert counted.optimizer.decay_steps == 50


def test_a_least_number_of_steps_is_of_a_wall_time_run():
    timed = planned(loaded(train={"max_time": "90s", "min_steps": 200}), machine())
    assert timed.train.min_steps == 200
    assert "at least 200 steps" in " ".join(batch_lines(timed))
    counted = reported(loaded(train={"max_steps": 90, "min_steps": 200}), machine())
    assert any("train.min_steps has no effect" in doubt for doubt in counted.warnings)


def test_epochs_come_from_the_counted_rows():
    dataset = DatasetFacts(sequences_per_epoch=1001, tokens=128_000, vocab_size=256)
    plan = planned(loaded(train={"epochs": 2}), machine(), dataset=dataset)
    assert plan.train.steps == 2002 // 8  # the last partial step is dropped
    assert plan.total_tokens == 250 * 1024
    said = next(choice for choice in plan.choices if choice.key == "train.epochs")
    assert (said.value, said.reason) == (
        "250 steps",
        "the last 2 sequences of 2 epochs fill no step and are left out",
    )
    assert "250 steps: the last 2 sequences of 2 epochs" in " ".join(batch_lines(plan))


def test_an_evaluation_reads_a_tenth_of_what_was_trained_on():
    scale = Scale(
        tokens_per_step=1024,
        sequences_per_step=8,
        sequences_per_epoch=None,
        steps=None,
        step_seconds=None,
    )
    assert evaluation_sequences(500, scale, tokens=None) == 400
    assert evaluation_sequences(10, scale, tokens=None) == 64


@pytest.mark.parametrize("length", [{"max_steps": 100}, {"max_time": "90s"}])
def test_an_evaluation_reads_as_many_tokens_as_the_recipe_asks_for(length):
    plan = planned(loaded(train=length, eval={"tokens": 1000}), machine())
    assert plan.eval.sequences == 8  # of 128 tokens


@pytest.mark.parametrize("length", ["1.5 steps", "1.5", 1.5, "0.5 steps", "0.0011k steps"])
def test_a_part_of_a_step_is_refused(length):
    with pytest.raises(ValueError, match="not a whole number of steps; write 1"):
        parse_duration(length)


@pytest.mark.parametrize("length", [{"max_steps": 100}, {"max_time": "90s"}])
def test_evaluation_turned_off_stays_off(length):
    plan = planned(loaded(train=length, eval={"every": "none"}), machine())
    assert (plan.eval.every_steps, plan.eval.sequences, plan.lengths.evaluation) == (
        None,
        None,
        None,
    )
    assert not due("evaluation", plan, step=100, fraction_before=0.4, fraction=0.6)


def test_a_wall_time_run_takes_at_least_its_steps():
    """The whole run takes the larger of max_time and min_steps; below one step the plan warns."""
    long = planned(loaded(train={"max_time": "1s", "min_steps": 1_000_000}), machine())
    assert (
        long.seconds.value == pytest.approx(1_000_000 * long.step_seconds.value)
        and long.seconds.value > 1
    )
    short = reported(loaded(train={"max_time": "0.001s"}), machine())
    assert short.plan.seconds.value == short.plan.step_seconds.value > 0.001
    assert any("train.max_time" in text and "1 step" in text for text in short.warnings)
    assert not any(
        "train.max_time" in text
        for text in reported(loaded(train={"max_time": "1h"}), machine()).warnings
    )


def test_a_step_that_outlasts_the_run_is_one_warning():
    report = reported(load_recipe("go-coder-125m", ("train.max_time=1s",)), machine())
    assert sum(text.startswith("train.max_time is") for text in report.warnings) == 1


def test_a_run_plans_its_epochs_without_its_dataset():
    """As imported recipes have them: `train` prepares the dataset before it plans."""
    recipe = loaded(
        train={"epochs": 2}, eval={"every": "0.25 epochs"}, checkpoint={"every": "1 epochs"}
    )
    plan = planned(recipe, machine())
    assert plan.train.steps is None
    assert 0 < plan.eval.every_steps < plan.checkpoint.every_steps
