"""A kill at any moment of a run that saves by time loses at most one interval."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery, wait_for, write_workshop

from bloomery.monitor.events import Resumed, Saved, StepDone

# Of the test: what a checkpoint takes until it is on the disk, and the step that is running when the time is over.
SLACK_SECONDS = 1.5


@dataclass(frozen=True)
class Loss:
    """What a kill cost. `seconds`: of training, from the restored step to the last one; all but the first in steps."""

    killed_after: float
    seconds: float
    last_step: int
    restored_step: int
    saves: int


def kill_once(folder: Path, seconds: float, *edits: str) -> Loss:
    """Trains, kills the whole process group `seconds` after the first step, and resumes for one step."""
    write_workshop(folder, "lora")
    bloomery = Bloomery(folder)
    words = ("train", "tiny.yaml", "--run-dir", "runs/one", "train.max_steps=1000000", *edits)
    with bloomery.start(*words) as process:
        began = bloomery.saw(StepDone)
        wait_for(lambda: began() or process.poll() is not None)
        time.sleep(seconds)
        assert process.poll() is None, "the run ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_SECONDS)
    events = bloomery.events()
    steps = {event.step: event.time for event in events if isinstance(event, StepDone)}
    saves = [event for event in events if isinstance(event, Saved) and not event.weights_only]
    last = max(steps)

    # The run itself tells where it goes on: a checkpoint may be on the disk whose event is not.
    done = bloomery.run("resume", "one", f"train.max_steps={last + 1}")
    assert done.returncode == 0, done.stderr
    restored = next(event for event in bloomery.events() if isinstance(event, Resumed)).step
    # Before the first step nothing is lost.
    start = steps.get(restored, min(steps.values()))
    return Loss(seconds, steps[last] - start, last, restored, len(saves))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))]
)
def test_a_kill_loses_at_most_one_interval(tmp_path, seed):
    """Of a second, in a run that is killed in its first four; nothing else than the clock saves."""
    interval = 1.0
    seconds = random.Random(seed).uniform(interval + SLACK_SECONDS, 4 * interval)
    loss = kill_once(tmp_path, seconds, f"checkpoint.every={interval:g}s", "eval.every=none")
    assert loss.seconds <= interval + SLACK_SECONDS, loss
    assert loss.restored_step > 0 and loss.saves >= 1, loss


def test_a_kill_after_a_best_evaluation_loses_what_follows_it(tmp_path):
    """An adapter's checkpoint is cheap: with the default interval of 15 minutes the evaluations alone save."""
    loss = kill_once(tmp_path, 2.0, "checkpoint.every=15m", "eval.every=5 steps", "eval.tokens=500")
    assert loss.restored_step > 0 and loss.restored_step % 5 == 0, loss
