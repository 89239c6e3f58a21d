"""What a run's surroundings may do to it: no room, a folder that goes away, requests that come at the wrong moment."""

import resource
import shutil
import signal
import subprocess
import sys

import pytest
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery, assert_bitwise_equal, wait_for
from test_lifecycle import is_gone, worker_of

from bloomery.infer.model_folder import saved_steps
from bloomery.monitor.events import RunEnded, Saved, StepDone, Warned, read_events
from bloomery.monitor.sinks import LogFile

LONG = (
    "train",
    "tiny.yaml",
    "--run-dir",
    "runs/one",
    "train.max_steps=4000",
    "checkpoint.every=5 steps",
)
SHORT = ("train", "tiny.yaml", "--run-dir", "runs/one")


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("away", [pytest.param("deleted", marks=pytest.mark.soak), "moved"])
def test_a_run_whose_folder_goes_away_ends_and_does_not_come_back(
    bloomery: Bloomery, away: str
) -> None:
    """It used to train on where nobody could see or stop it, and wrote checkpoints into a folder made anew."""
    with bloomery.start(*LONG) as process:
        wait_for(bloomery.saw(Saved))
        worker = worker_of(bloomery.run_dir)
        assert worker is not None
        elsewhere = bloomery.folder / "elsewhere"
        shutil.rmtree(
            bloomery.run_dir, ignore_errors=True
        ) if away == "deleted" else bloomery.run_dir.rename(elsewhere)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "moved or deleted" in flat(err)
    assert "Traceback" not in err
    assert is_gone(worker)
    assert away == "deleted" or not bloomery.run_dir.exists()


@pytest.mark.soak
def test_a_disk_without_room_for_an_event_ends_the_run_and_resuming_makes_it_whole(
    bloomery: Bloomery, undisturbed: Bloomery
) -> None:
    limit = 11_000  # bytes a file: recipe, plan and machine fit, the events of all steps do not
    code = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    )
    assert bloomery.run("prepare", "tiny.yaml").returncode == 0
    words = [
        sys.executable,
        "-c",
        code + "runpy.run_module('bloomery', run_name='__main__')",
        *SHORT,
    ]
    full = subprocess.run(
        words, cwd=bloomery.folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert full.returncode == 1
    assert "cannot write an event: File too large" in flat(full.stderr)
    assert f"bloomery resume {bloomery.run_dir}" in flat(full.stderr)
    assert "Traceback" not in full.stderr
    assert (bloomery.run_dir / "events.jsonl").stat().st_size <= limit
    done = bloomery.run("resume", "one")
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


def test_a_folder_that_cannot_be_written_any_more_is_what_the_last_line_is_about(
    bloomery: Bloomery,
) -> None:
    """The checkpoint that is missing matters; metrics.json, which cannot be written either, does not."""
    with bloomery.start(*SHORT, "train.max_steps=60", "checkpoint.every=10 steps") as process:
        wait_for(bloomery.saw(Saved))
        shutil.move(bloomery.run_dir / "checkpoints", bloomery.folder / "aside")
        (bloomery.run_dir / "checkpoints").write_text("in the way")
        (bloomery.run_dir / "metrics.json").mkdir()
        saved = bloomery.run("save", "one")
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert saved.returncode == 1
    assert "was not saved, training continues" in flat(
        saved.stderr
    ) or "the run ended before" in flat(saved.stderr)
    assert process.returncode == 1
    assert "cannot write the checkpoint" in flat(err)
    assert "Traceback" not in err
    events = bloomery.events()
    assert any(
        isinstance(event, Warned) and "training continues" in event.reason for event in events
    )
    assert [event.step for event in events if isinstance(event, StepDone)][-1] == 60
    assert isinstance(events[-1], RunEnded)
    assert events[-1].error.startswith("cannot write the checkpoint")
    assert events[-1].fix and flat(events[-1].fix) in flat(err)  # as on the terminal
    assert events[-1].where and flat(events[-1].where) in flat(err)


def test_two_stops_and_a_save_at_once_are_all_answered(bloomery: Bloomery) -> None:
    with bloomery.start(*LONG) as process:
        wait_for(bloomery.saw(StepDone, 3))
        asked = [
            bloomery.start("stop", "one"),
            bloomery.start("stop", "one"),
            bloomery.start("save", "one"),
        ]
        told = [each.communicate(timeout=PATIENCE_SECONDS) for each in asked]
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75
    events = bloomery.events()
    assert [event.status for event in events if isinstance(event, RunEnded)] == ["stopped"]
    saved = [event.step for event in events if isinstance(event, Saved)]
    for each, (out, err) in zip(asked, told, strict=True):
        # a save may have been answered before the stops are
        answers = saved if each is asked[2] else saved[-1:]
        late = "no process is training this run" in flat(err) or "the run ended before" in flat(err)
        assert (each.returncode == 0 and any(f"step {step:,}" in out for step in answers)) or (
            each.returncode == 1 and late
        ), (out, err)
        assert "Traceback" not in err
    assert asked[0].returncode == 0 or asked[1].returncode == 0


@pytest.mark.soak
def test_the_same_signal_many_times_is_one_stop(bloomery: Bloomery) -> None:
    with bloomery.start(*LONG) as process:
        wait_for(bloomery.saw(StepDone, 3))
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGUSR2)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    steps = [
        event.step
        for event in read_events(bloomery.run_dir / "events.jsonl")
        if isinstance(event, StepDone)
    ]
    assert saved_steps(bloomery.run_dir / "checkpoints")[-1] == steps[-1]


def test_a_log_that_cannot_grow_stops_nobody(tmp_path) -> None:
    log = LogFile(tmp_path / "log.txt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    log.text("first")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        log.text("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.text("third")
    log.close()
    assert [line.split("  ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "first",
        "third",
    ]
