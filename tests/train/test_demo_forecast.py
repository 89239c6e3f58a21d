"""The planned time of `bloomery demo`."""

import pytest
from plans_for_tests import tiny_plan

from bloomery.cli.demo import END_IN_STARTS, Kill, StartUp, _resume_text, forecast_of
from bloomery.monitor.events import Phase, RunStarted, StepDone
from bloomery.plan.types import RunPlan


def started(**changes) -> RunStarted:
    facts = {"schema": 2, "version": "0", "parameters": 1, "steps": 100, "attention": "sdpa"}
    return RunStarted(**facts, device="cpu", **changes)


def step_done(step: int, *, time: float) -> StepDone:
    return StepDone(
        step=step,
        time=time,
        loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens=step,
        tokens_per_second=1.0,
        sequences_per_second=1.0,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        memory_gib=0.0,
    )


def demo_plan(*, steps: int = 100) -> RunPlan:
    return tiny_plan(
        train={"steps": steps},
        checkpoint={"every_steps": steps // 5},
        eval={"every_steps": steps // 5, "sequences": 4},
    )


def test_the_demo_is_planned_from_its_timed_steps_to_its_last_file():
    plan = demo_plan()
    validation = 10 * plan.train.tokens_per_step
    forecast = forecast_of(
        plan, elapsed=20.0, finished_steps=12, step=0.5, start=4.0, validation=validation
    )
    # as steps without backward
    evaluated = 5 * 4 * plan.data.sequence_length / plan.train.tokens_per_step + 2 * 10
    assert forecast.total == pytest.approx(
        20.0 + (100 - 12 + 10 + evaluated / 3) * 0.5 + (1 + END_IN_STARTS) * 4.0
    )


def test_a_start_counts_neither_the_dataset_nor_a_build():
    start_up = StartUp(launched=100.0)
    for event in (
        Phase(name="prepare", time=101.0),
        Phase(name="tokens", time=105.0),
        Phase(name="checksums", time=109.0),
        started(time=125.0, build_seconds=13.0),
        step_done(1, time=127.0),
        step_done(2, time=128.0),
    ):
        start_up.note(event)
    assert start_up.seconds == (101 - 100) + (127 - 109) - 13


def test_a_resume_names_the_steps_whose_losses_differ():
    kill = Kill(step=63, saved_step=60, results_before={61: 1.0, 62: 2.0, 63: 3.0})
    kill.results_after = {61: 1.0, 62: 2.0, 63: 3.0}
    assert _resume_text(kill, 6.21, "losses") == (
        "resumed in 6.2 s; repeated steps 61 to 63: losses bitwise identical"
    )
    kill.results_after[62] = 2.5
    assert "losses of 1 of 3 steps differ, the first at step 62" in _resume_text(
        kill, 6.21, "losses"
    )
