"""A run that keeps one checkpoint, and next to it an export that takes longer than several saves."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs_of_bloomery import wait_for

from bloomery.infer.model_folder import damage, saved_steps, step_folder
from bloomery.monitor.events import Warned, read_events

TRAINING = (
    *("train", "tiny.yaml", "--run-dir", "runs/one", "train.max_steps=1000000"),
    *("checkpoint.every=5 steps", "checkpoint.keep=1", "eval.every=1000000 steps"),
)
# Reads the config, then waits until it may read the weights.
SLOW_EXPORT = """
import time
from pathlib import Path
from bloomery.api import export
from bloomery.export import layouts

copy_weights = layouts._copy_weights

def copy_later(source, *arguments):
    Path("reading").write_text(source.name)
    while not Path("go-on").exists():
        time.sleep(0.02)
    copy_weights(source, *arguments)

layouts._copy_weights = copy_later
export("runs/one", "out", step="last")
"""


@pytest.mark.parametrize("end", ["done", "killed"])
def test_an_export_keeps_its_checkpoint_until_it_ends(bloomery, end):
    checkpoints = bloomery.folder / "runs" / "one" / "checkpoints"
    with bloomery.start(*TRAINING) as training:
        try:
            wait_for(lambda: bool(saved_steps(checkpoints)) or training.poll() is not None)
            held_step = export_beside(bloomery.folder, checkpoints, end)

            # The reader has ended: one of the next saves deletes what it read.
            wait_for(lambda: held_step not in saved_steps(checkpoints))
        finally:
            training.send_signal(signal.SIGTERM)
            _, errors = training.communicate(timeout=120)
    assert training.returncode == 75, errors
    assert len(saved_steps(checkpoints)) == 1

    # It was said once, in the run that goes on.
    events = read_events(checkpoints.parent / "events.jsonl")
    reasons = [event.reason for event in events if isinstance(event, Warned)]
    about_reader = [reason for reason in reasons if "is being read" in reason]
    assert len(about_reader) == 1
    assert step_folder(checkpoints, held_step).name in about_reader[0]


def export_beside(folder: Path, checkpoints: Path, end: str) -> int:
    """Runs the slow export while the run saves several times; returns the step that it read."""
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as export:
        try:
            wait_for(lambda: (folder / "reading").exists() or export.poll() is not None)
            held_folder = checkpoints / (folder / "reading").read_text()
            held_step = int(held_folder.name.removeprefix("step-"))
            for _ in range(3):
                newest = saved_steps(checkpoints)[-1]
                wait_for(lambda newest=newest: saved_steps(checkpoints)[-1] > newest)
            assert saved_steps(checkpoints)[0] == held_step
            assert damage(held_folder) is None
            if end == "killed":
                export.kill()
            (folder / "go-on").touch()
            _, errors = export.communicate(timeout=120)
        finally:
            export.kill()
    assert export.returncode == (0 if end == "done" else -signal.SIGKILL), errors
    assert (folder / "out" / "model.safetensors").exists() == (end == "done")
    return held_step
