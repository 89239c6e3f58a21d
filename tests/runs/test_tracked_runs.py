"""A whole run with trackers: one that hangs, one that records, and one that is not installed."""

import json
import os
import signal

from runs_of_bloomery import Bloomery, assert_bitwise_equal

from bloomery.monitor.events import Phase, RunEnded, StepDone, Warned

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")
RECORD = """
import json, os
def told(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def init(**words): told(id=words["id"]); return Run()
class Run:
    def define_metric(self, *words, **more): pass
    def log(self, figures): told(step=figures["step"])
    def finish(self, exit_code): told(code=exit_code)
"""
FAIL = """
def init(**words): pass
def log(*words, **more): raise OSError("the disk is full")
def finish(): raise OSError("too late")
"""


def libraries(bloomery: Bloomery, monkeypatch, **sources: str) -> None:
    folder = bloomery.folder / "libraries"
    folder.mkdir()
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("TOLD", str(bloomery.folder / "told"))


def test_a_tracker_follows_a_run_over_a_stop_and_changes_nothing(
    bloomery: Bloomery, undisturbed, monkeypatch
):
    libraries(bloomery, monkeypatch, wandb=RECORD, trackio=FAIL)
    words = (*TRAIN, "logging.trackers=[wandb, trackio]", "logging.every=1 steps")
    assert bloomery.run_until(bloomery.saw(StepDone, 2), signal.SIGTERM, *words) == 75
    phases = [event.name for event in bloomery.events() if isinstance(event, Phase)]
    assert phases[-1] == "stopping"
    done = bloomery.run("resume", "one")
    assert done.returncode == 0, done.stderr
    assert "trackio failed at the end of the run: OSError: too late" in done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)
    told = [json.loads(line) for line in (bloomery.folder / "told").read_text().splitlines()]
    assert len({one["id"] for one in told if "id" in one}) == 1
    assert [one["code"] for one in told if "code" in one] == [0, 0]
    assert {one["step"] for one in told if "step" in one} >= set(range(1, 17))
    warned = [event.reason for event in bloomery.events() if isinstance(event, Warned)]
    assert sum("the disk is full" in reason for reason in warned) == 2  # once each time that it ran
    assert [event.status for event in bloomery.events() if isinstance(event, RunEnded)] == [
        "stopped",
        "done",
    ]


def test_a_tracker_that_is_not_installed_is_said_before_there_is_a_run(bloomery: Bloomery):
    done = bloomery.run(*TRAIN, "logging.trackers=[trackio]")
    assert done.returncode == 1 and "trackio is not installed" in done.stderr
    assert "-m pip install trackio" in done.stderr and not bloomery.run_dir.exists()
