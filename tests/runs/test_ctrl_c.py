"""One Ctrl+C at any stage saves what there is, exits with 75, and costs nothing."""

import sys
from pathlib import Path

import pytest
from pressing import CHILD_STARTED, MOMENT, PLANNED, SAVING
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery, assert_bitwise_equal

from bloomery.monitor.events import RunEnded

RESUME = ("resume", "one")


def interrupt(bloomery: Bloomery, moment: str, *words: str) -> None:
    pressing = (sys.executable, "-m", "pressing")
    environment = {MOMENT: moment, "PYTHONPATH": str(Path(__file__).parent)}
    with bloomery.start(*words, command=pressing, **environment) as process:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    last_event = bloomery.events()[-1]
    assert isinstance(last_event, RunEnded) and last_event.status == "stopped"


@pytest.mark.parametrize(
    "moments",
    [
        (CHILD_STARTED, SAVING),
        pytest.param((PLANNED, "stepping", "evaluating"), marks=pytest.mark.soak),
    ],
)
def test_one_ctrl_c_costs_nothing(
    bloomery: Bloomery, undisturbed: Bloomery, moments: tuple[str, ...]
) -> None:
    for moment in moments:
        interrupt(bloomery, moment, *bloomery.go_on)
    done = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


@pytest.mark.soak
def test_ctrl_c_while_compiling(bloomery: Bloomery) -> None:
    interrupt(bloomery, "compiling", *bloomery.go_on, "train.compile=true")
    done = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
