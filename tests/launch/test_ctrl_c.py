"""One Ctrl+C at any stage saves what there is, exits with 75, and costs nothing."""

import shutil
import signal
import subprocess
from collections.abc import Callable

import pytest
from runs_of_bloomery import Bloomery, assert_bitwise_equal

from bloomery.monitor.events import EvalDone, Phase, RunEnded, StepDone

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")
RESUME = ("resume", "one")


def interrupt(bloomery: Bloomery, moment: Callable[[], bool], *words: str) -> None:
    begins = words[0] == "train"
    code = bloomery.run_until(moment, signal.SIGINT, *words)
    for _ in range(3):
        if code != 0 or not begins:
            break
        # On a fast machine this small run may be over before the signal comes: it begins again.
        shutil.rmtree(bloomery.run_dir)
        code = bloomery.run_until(moment, signal.SIGINT, *words)
    assert code == 75
    assert isinstance(bloomery.events()[-1], RunEnded)


@pytest.mark.parametrize(
    "moments", ["starting saving", pytest.param("stepping evaluating", marks=pytest.mark.soak)]
)
def test_one_ctrl_c_costs_nothing(bloomery: Bloomery, undisturbed: Bloomery, moments: str) -> None:
    saving = bloomery.run_dir / "checkpoints"
    when = {
        "starting": (bloomery.run_dir / "plan.json").exists,
        "stepping": bloomery.saw(StepDone, 2),
        "saving": lambda: bloomery.saw(StepDone, 6)() and any(saving.glob(".tmp-*")),
        "evaluating": bloomery.saw(EvalDone, 10),
    }
    for moment in moments.split():
        interrupt(bloomery, when[moment], *bloomery.go_on)
    done = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


@pytest.mark.soak
def test_ctrl_c_while_compiling(bloomery: Bloomery) -> None:
    def compiling() -> bool:
        return any(
            isinstance(event, Phase) and event.name == "compile" for event in bloomery.events()
        )

    interrupt(bloomery, compiling, *TRAIN, "train.compile=true")
    done: subprocess.CompletedProcess[str] = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
