"""The planned time of `bloomery demo`."""

import subprocess
import sys

import pytest
from plans_for_tests import tiny_plan

from bloomery.cli.demo import Forecast, Kill, cores_used_by_others, forecast_of, time_text
from bloomery.plan.types import RunPlan


def demo_plan(*, steps: int = 100) -> RunPlan:
    return tiny_plan(
        train={"steps": steps},
        checkpoint={"every_steps": steps // 5},
        eval={"every_steps": steps // 5, "sequences": 4},
    )


def test_the_demo_is_planned_from_its_timed_steps_to_its_last_file():
    plan = demo_plan()
    validation = 10 * plan.train.tokens_per_step
    forecast = forecast_of(plan, elapsed=20.0, done=12, step=0.5, start=4.0, validation=validation)
    # as steps without backward
    evaluated = 5 * 4 * plan.data.sequence_length / plan.train.tokens_per_step + 2 * 10
    assert forecast.total == pytest.approx(
        20.0 + (100 - 12 + 10 + evaluated / 3) * 0.5 + (1 + 1.5) * 4.0
    )


def test_the_demo_names_slower_steps_than_those_it_timed():
    forecast = Forecast(step=0.5, start=4.0, total=100.0)
    kill = Kill(step=70, saved=60, before=dict.fromkeys(range(61, 71)), gap_seconds=6.2)
    quiet = time_text(forecast, 103.0, kill, 0.52)
    assert quiet == "time 100 s, took 103 s (+3%), resume 6.2 s"
    busy = time_text(forecast, 160.0, kill, 0.9)
    assert busy.startswith(
        "time 100 s, took 160 s (+60%), resume 6.2 s; steps took 0.90 s, not 0.50"
    )


def test_a_busy_core_is_seen_before_the_demo_begins():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = cores_used_by_others(0.5)
    finally:
        spinning.kill()
        spinning.wait()
    assert busy > 0.2  # of a core: this machine may have more programs than cores
