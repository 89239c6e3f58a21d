"""A run folder that came from elsewhere: its hooks are shown and not run, its ends and its links lead nowhere."""

import json
import shutil
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery

from bloomery.core.run_folder import RunFolder
from bloomery.monitor.events import RunEnded, Warned, read_events
from bloomery.plan.store import read_plan, write_sealed
from bloomery.runs.consent import note_code, noted_commands
from bloomery.runs.event_hub import event_hub


@pytest.fixture
def hooked(undisturbed: Bloomery, tmp_path: Path) -> tuple[RunFolder, str]:
    """A folder whose plan has a hook that leaves a trace."""
    shutil.copytree(undisturbed.run_dir, tmp_path / "run")
    folder, command = RunFolder(tmp_path / "run"), f"touch {tmp_path / 'trace'}"
    plan = json.loads(folder.plan.read_text())
    plan["logging"]["commands"] = [command]
    # whoever sends a folder can seal it
    write_sealed(folder.path, {folder.plan.name: json.dumps(plan)})
    return folder, command


def show(folder: RunFolder, *, asked: frozenset[str] = frozenset()) -> list[str]:
    """Emits an event to the sinks of the plan; the warnings."""
    plan = read_plan(folder.plan)
    with event_hub(folder, quiet=True) as hub:
        hub.hooks = asked
        with hub.shown(plan, "run"):
            hub.show(RunEnded(status="stopped"))
    reasons = [event.reason for event in read_events(folder.events) if isinstance(event, Warned)]
    # of a small validation set
    return [reason for reason in reasons if "loss tokens" not in reason]


def test_the_hook_of_a_stranger_is_shown_and_not_run(hooked) -> None:
    folder, command = hooked
    (warning,) = show(folder)
    assert command in warning and "not started" in warning
    assert not (folder.path.parent / "trace").exists()


def test_a_hook_that_was_asked_for_runs_again_wherever_its_run_is_moved(
    hooked, tmp_path: Path, monkeypatch
) -> None:
    folder, command = hooked
    trace = folder.path.parent / "trace"
    assert show(folder, asked=frozenset({command})) == [] and trace.exists()
    trace.unlink()
    note_code(folder.path, commands=[command])
    assert show(folder) == [] and trace.exists()
    trace.unlink()
    moved = folder.path.rename(tmp_path / "moved")
    assert show(RunFolder(moved)) == [] and trace.exists()
    trace.unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another user"))
    assert len(show(RunFolder(moved))) == 1 and not trace.exists()


def test_train_notes_the_hooks_of_its_recipe(
    bloomery: Bloomery, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ("train.max_steps=2", "logging.trackers=[{command: 'true'}]")
    done = bloomery.run("train", "tiny.yaml", "--run-dir", "runs/one", *words)
    assert done.returncode == 0, done.stderr
    assert noted_commands(bloomery.run_dir, ["true", "false"]) == {"true"}
    assert not any(
        isinstance(event, Warned) and "hook" in event.reason for event in bloomery.events()
    )
