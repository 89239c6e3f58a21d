"""A run that was killed at any moment ends, once resumed, equal to the undisturbed one to the last bit."""

import random
import signal
import time

import pytest
from runs_of_bloomery import Bloomery, assert_bitwise_equal, write_workshop

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
def test_twenty_kills_at_random_moments(bloomery: Bloomery, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two in set-up and preparing, then one every ten steps or so; a quarter of all in the middle of a save."""
    long = ("train.length=200 steps", "checkpoint.every=4 steps")
    calm = Bloomery(tmp_path_factory.mktemp("calm"))
    write_workshop(calm.folder)
    assert calm.run(*TRAIN, *long).returncode == 0

    draw = random.Random(20)
    killed = 0
    for number in range(20):
        words = RESUME if (bloomery.run_dir / "recipe.yaml").exists() else (*TRAIN, *long)
        step, saves = number * 10 - 10 + draw.randrange(10), number % 4 == 3
        delay = draw.uniform(0.2, 1.5) if number < 2 else draw.uniform(0.0, 0.1)
        reached = (lambda: True) if number < 2 else bloomery.saw(StepDone, step)

        def moment(reached=reached, delay=delay, saves=saves) -> bool:
            if not reached() or (saves and not saving(bloomery)):
                return False
            time.sleep(0 if saves else delay)
            return True

        killed += bloomery.run_until(moment, signal.SIGKILL, *words) == -signal.SIGKILL
    assert killed == 20
    done = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm.run_dir, step=200)
