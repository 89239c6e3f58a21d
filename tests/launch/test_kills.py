"""A run that was killed at any moment ends, once resumed, equal to the undisturbed one to the last bit."""

import random
import time
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, assert_bitwise_equal

from bloomery.monitor.events import Phase, StepDone

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")
RESUME = ("resume", "one")


def saving(bloomery: Bloomery) -> bool:
    return any((bloomery.run_dir / "checkpoints").glob(".tmp-*"))


def go_on(bloomery: Bloomery) -> tuple[str, ...]:
    return RESUME if (bloomery.run_dir / "recipe.yaml").exists() else TRAIN


def finish(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    done = bloomery.run(*go_on(bloomery))
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


def test_kills_in_preparing_stepping_and_saving_leave_no_trace(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    bloomery.kill_when(bloomery.saw(Phase), *TRAIN)
    bloomery.kill_when(bloomery.saw(StepDone, 5), *RESUME)
    bloomery.kill_when(lambda: bloomery.saw(StepDone, 10)() and saving(bloomery), *RESUME)
    finish(bloomery, undisturbed)


def test_a_kill_in_set_up_leaves_a_run_that_starts_over(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    bloomery.kill_when(lambda: (bloomery.run_dir / "recipe.yaml").exists(), *TRAIN)
    bloomery.kill_when(lambda: (bloomery.run_dir / "plan.json").exists(), *RESUME)
    finish(bloomery, undisturbed)


@pytest.mark.soak
def test_twenty_kills_at_random_moments(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    draw = random.Random(20)
    saves = 0
    for number in range(20):
        if number % 4 == 3:  # a quarter of them in the middle of a save
            bloomery.kill_when(lambda: saving(bloomery), *go_on(bloomery))
            saves += 1
        else:
            begun, delay = time.monotonic(), draw.uniform(0.05, 8.0)
            bloomery.kill_when(lambda b=begun, d=delay: time.monotonic() - b > d, *go_on(bloomery))
        assert not list(Path(bloomery.folder).glob("runs/one-*"))
    finish(bloomery, undisturbed)
