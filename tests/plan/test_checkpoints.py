"""When a run saves, and what the plan says a kill costs."""

import pytest
from plan_help import gpu_machine, machine, planned, reported

from bloomery.core.units import Duration, parse_duration
from bloomery.plan.page_memory import save_lines
from bloomery.recipe.load import load_recipe
from bloomery.recipe.values import write_duration


def of(*overrides: str, recipe: str = "go-coder-125m"):
    return reported(load_recipe(recipe, list(overrides)), gpu_machine("RTX 4090"))


def test_the_default_is_a_time_and_a_kill_costs_no_more():
    report = of()
    checkpoint = report.plan.checkpoint
    assert (checkpoint.every_steps, checkpoint.every_seconds) == (None, 900)
    assert (report.kill.seconds, report.kill.steps, report.kill.whole_run) == (900, None, False)
    choice = next(choice for choice in report.plan.choices if choice.key == "checkpoint.every")
    assert choice.value.startswith("15 min")


@pytest.mark.parametrize(
    ("overrides", "at_best"),
    [
        ((), True),
        (("eval.every=none",), False),
        (("data.validation=0",), False),
        # A save of 1.4 GiB takes 1.5 s: no small share of the time between these evaluations.
        (("eval.every=10 steps",), False),
        (("checkpoint.every=5s",), False),
        # What the recipe counts in steps is kept to.
        (("checkpoint.every=1000 steps",), False),
    ],
    ids=str,
)
def test_the_best_evaluations_save_a_checkpoint_where_that_is_cheap(overrides, at_best):
    assert of(*overrides).plan.checkpoint.at_best is at_best


def test_an_adapter_is_always_cheap_and_a_large_model_is_not():
    assert of(recipe="llama3.1-8b-lora").plan.checkpoint.at_best
    assert not of(recipe="llama2-7b-full-24gb").plan.checkpoint.at_best


def test_an_interval_in_steps_is_the_loss_in_steps_and_seconds():
    report = of("checkpoint.every=1000 steps")
    assert report.plan.checkpoint.every_steps == 1000
    assert report.kill.steps == 1000
    assert report.kill.seconds == pytest.approx(1000 * report.plan.step_seconds.value)


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        # Below the default interval the loss is no more than that.
        (("train.max_steps=20", "checkpoint.every=1000 steps"), False),
        (("train.max_steps=20",), False),
        (("train.max_steps=100000", "checkpoint.every=200000"), True),
        (("train.max_steps=100000", "checkpoint.every=30 days"), True),
        (("train.max_steps=100000", "checkpoint.every=100%"), True),
        (("train.max_steps=100000", "checkpoint.every=99%"), False),
    ],
    ids=str,
)
def test_a_run_without_a_checkpoint_before_its_end_loses_all(overrides, warns):
    report = of(*overrides, "optimizer.warmup=1", "eval.every=none")
    assert report.kill.whole_run is ("99%" not in str(overrides))
    assert any("a kill loses the whole run" in line for line in report.warnings) is warns
    if report.kill.whole_run:
        assert report.kill.seconds == report.plan.seconds.value
        assert "a kill loses all of it" in " ".join(save_lines(report))


def test_a_share_of_a_wall_time_run_is_a_time():
    report = of("train.max_time=10h", "train.max_steps=null", "checkpoint.every=20%")
    assert (report.kill.seconds, report.kill.whole_run) == (7200, False)


def test_a_time_needs_no_speed_of_the_device():
    """A number of steps could not be computed from it."""
    plan = planned(load_recipe("go-coder-125m", ["checkpoint.every=15m"]), machine())
    assert plan.checkpoint.every_seconds == 900


@pytest.mark.parametrize("text", ["15m", "8h", "90s", "1.5s", "900s", "36h", "0s"])
def test_a_time_is_written_in_its_largest_unit_and_read_back(text):
    duration = parse_duration(text)
    assert parse_duration(write_duration(duration)) == duration


def test_a_time_is_written_as_people_write_it():
    assert write_duration(Duration(900, "seconds")) == "15m"


@pytest.mark.parametrize(
    ("interval", "text", "loss"),
    [
        ("1 epochs", "every 1 epoch", "a kill loses at most 1 epoch"),
        ("0.5 epochs", "every 0.5 epochs", "a kill loses at most 0.5 epochs"),
        ("10%", "every 10% of the run", "a kill loses at most 10% of the run"),
        ("3 epochs", "every 3 epochs", "a kill loses all of it"),
        ("100%", "every 100% of the run", "a kill loses all of it"),
        ("500 steps", "every 500 steps", "a kill loses at most "),
    ],
)
def test_without_a_dataset_a_share_of_the_run_is_no_number_of_steps(interval, text, loss):
    """Also where it would be moved to evaluations: of 125 steps, which nobody has counted."""
    recipe = load_recipe("qwen3-0.6b-lora", ["train.epochs=3", f"checkpoint.every={interval}"])
    report = reported(recipe, gpu_machine("RTX 4090"))
    assert report.plan.train.steps is None
    line = " ".join(save_lines(report))
    assert text in line and loss in line
    if "steps" not in interval:
        assert "steps" not in line and (report.kill.steps, report.kill.seconds) == (None, None)
        assert "checkpoint.every" not in [choice.key for choice in report.plan.choices]
