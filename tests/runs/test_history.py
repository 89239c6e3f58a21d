"""Lost history is said, and an end that somebody appended is not believed."""

import shutil
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery

from bloomery.monitor.events import EventLog, RunEnded, StepDone, Warned, from_json
from bloomery.view.recorded_run import read_log_check

LAST = 16


@pytest.fixture
def copied(undisturbed: Bloomery, tmp_path: Path) -> Bloomery:
    shutil.copytree(undisturbed.folder, tmp_path / "copy")
    return Bloomery(tmp_path / "copy")


def keep_lines(bloomery: Bloomery, kept) -> None:
    path = bloomery.run_dir / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if kept(from_json(line.decode()))))


def test_a_whole_history_has_no_problem(undisturbed: Bloomery) -> None:
    found = read_log_check(undisturbed.run_dir)
    assert (found.problem, found.last_step) == (None, LAST)
    assert found.end is not None and found.end.status == "done"


def test_an_end_that_was_appended_is_not_believed_and_missing_steps_are_named(
    copied: Bloomery, undisturbed: Bloomery
) -> None:
    checkpoints = copied.run_dir / "checkpoints"
    shutil.rmtree(checkpoints / f"step-{LAST:08d}")
    keep_lines(
        copied,
        lambda event: (
            event.step < LAST and not (isinstance(event, StepDone) and 5 <= event.step <= 9)
        ),
    )
    with EventLog(copied.run_dir / "events.jsonl") as emit:
        emit(RunEnded(step=LAST, status="done"))
    assert "one" in copied.here("runs").stdout and "done" not in copied.here("runs").stdout
    report = copied.here("report", "one")
    assert report.returncode == 0, report.stderr
    page = (copied.run_dir / "report.html").read_text()
    assert "events.jsonl has no event of steps 5 to 9" in page and "state unfinished" in page
    done = copied.run("resume", "one")
    assert done.returncode == 0, done.stderr
    told = [event.reason for event in copied.events() if isinstance(event, Warned)]
    assert any("status done, but the last checkpoint is missing" in text for text in told)
    assert any("no event of steps 5 to 9" in text for text in told)
    assert f"step-{LAST:08d}" in {path.name for path in checkpoints.iterdir()}
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            run / f"checkpoints/step-{LAST:08d}" / name
            for run in (copied.run_dir, undisturbed.run_dir)
        )
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("how", ["emptied", "deleted", "zeroed", "noise"])
def test_a_history_that_is_gone_is_said(copied: Bloomery, how: str) -> None:
    path = copied.run_dir / "events.jsonl"
    size = path.stat().st_size
    content = {"emptied": b"", "zeroed": bytes(size), "noise": bytes(range(256)) * (size // 256)}
    path.unlink() if how == "deleted" else path.write_bytes(content[how])
    report = copied.here("report", "one")
    assert report.returncode == 1
    assert f"events.jsonl has no event of steps 1 to {LAST}" in " ".join(report.stderr.split())
    found = read_log_check(copied.run_dir)
    assert found.problem is not None and found.missing_steps == (range(1, LAST + 1),)


def test_a_changed_line_is_counted(copied: Bloomery) -> None:
    path = copied.run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if '"StepDone"' in line)
    lines[place] = lines[place].replace('"loss": ', '"loss": 1')
    path.write_text("".join(lines))
    problem = read_log_check(copied.run_dir).problem
    assert problem is not None and "steps 1; 1 line of it cannot be read" in problem
