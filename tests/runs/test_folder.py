"""Run folders: made once, used by one at a time, never overwritten."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.core import __version__, run_lock
from bloomery.core.errors import UserError
from bloomery.core.files import stamped
from bloomery.core.run_folder import RunFolder, propose_folder
from bloomery.core.run_lock import hold_run_lock, start_mark
from bloomery.plan.store import FORMAT, read_identity
from bloomery.recipe.load import load_recipe
from bloomery.runs.new_run import new_run

RECIPE = """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: text}
"""
HOLD = """
import sys, time
from pathlib import Path
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
with hold_run_lock(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def loaded(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return load_recipe(tmp_path / "mine.yaml")


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of `run`."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield folder, process
        process.kill()


def test_the_recipe_stands_from_the_first_moment_and_loads_again(tmp_path: Path, loaded) -> None:
    with new_run(loaded, tmp_path / "a/b/run") as (folder, _):
        assert load_recipe(folder.recipe).recipe == loaded.recipe
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
    assert folder.lock.read_text() == ""


def test_names_hold_recipe_date_and_time_and_are_never_taken_twice(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = propose_folder("go coder/125m ")
    assert re.fullmatch(r"go-coder-125m-\d{8}-\d{6}", first.name)
    assert first.parent == tmp_path / "runs"
    monkeypatch.setattr(time, "strftime", lambda shape: "20260102-030405")
    propose_folder("x").mkdir(parents=True)
    assert propose_folder("x").name == "x-20260102-030405-1"
    assert propose_folder("../..").name == "run-20260102-030405"


def test_a_folder_that_holds_a_run_is_refused_naming_resume(tmp_path: Path, loaded) -> None:
    with new_run(loaded, tmp_path / "run") as (folder, _):
        folder.plan.write_text("{}")
    before = (tmp_path / "run/recipe.yaml").read_text()
    with (
        pytest.raises(UserError, match="already has a run") as caught,
        new_run(loaded, tmp_path / "run"),
    ):
        pass
    assert "bloomery resume" in caught.value.fix
    assert (tmp_path / "run/recipe.yaml").read_text() == before


def test_a_run_that_ended_before_its_plan_is_taken_over(tmp_path: Path, loaded) -> None:
    with new_run(loaded, tmp_path / "run") as (folder, _):
        for name in ("events.jsonl", "log.txt", "metrics.json", "machine.json"):
            (folder.path / name).write_text("of the failed one")
        with pytest.raises(UserError, match="in use"), new_run(loaded, folder.path):
            pass
    with new_run(loaded, tmp_path / "run") as (folder, _):
        assert sorted(path.name for path in folder.path.iterdir()) == [
            "lock",
            "recipe.yaml",
            "run.json",
        ]


@pytest.mark.parametrize(
    "kept",
    [
        ["recipe.yaml"],
        ["lock", "recipe.yaml", "notes.txt"],
        ["lock", "checkpoints"],
        ["lock", "log.txt"],
    ],
)
def test_what_may_be_somebody_s_is_not_taken_over(tmp_path: Path, loaded, kept) -> None:
    for name in kept:
        (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="overwritten"), new_run(loaded, tmp_path / "run"):
        pass
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(kept)


def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path, loaded) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").touch()
    with pytest.raises(UserError, match="not empty"), new_run(loaded, tmp_path / "home"):
        pass
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path, loaded) -> None:
    (tmp_path / "run").mkdir()
    with new_run(loaded, tmp_path / "run") as (folder, _):
        assert folder.recipe.exists()


@pytest.mark.parametrize(
    "name", ["mit Leerzeichen", "ünïcode-名前", "a" * 200, "-d", "'quotes\"", "new\nline"]
)
def test_any_name_that_the_file_system_takes_will_do(tmp_path: Path, loaded, name: str) -> None:
    with new_run(loaded, tmp_path / name) as (folder, _):
        assert folder.recipe.exists()


@pytest.mark.parametrize("place", ["file/run", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, loaded, place: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot write the run folder") as caught,
        new_run(loaded, tmp_path / place),
    ):
        pass
    assert "--run-dir" in caught.value.fix


def test_a_read_only_place_is_one_sentence(tmp_path: Path, loaded, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system", str(tmp_path / "run"))

    monkeypatch.setattr(Path, "mkdir", refuse)  # permissions do not bind root
    with pytest.raises(UserError, match="Read-only file system"), new_run(loaded, tmp_path / "run"):
        pass


def test_two_runs_in_one_folder_are_refused(holder) -> None:
    folder, process = holder
    with pytest.raises(UserError, match=f"process {process.pid} ") as caught, hold_run_lock(folder):
        pass
    assert f"bloomery stop {folder.name}" in caught.value.fix


def test_a_lock_in_this_very_process_holds_too(tmp_path: Path) -> None:
    with (
        hold_run_lock(RunFolder(tmp_path)),
        pytest.raises(UserError, match="in use"),
        hold_run_lock(RunFolder(tmp_path)),
    ):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(holder) -> None:
    folder, process = holder
    process.kill()
    process.wait()
    assert json.loads(folder.lock.read_text())["pid"] == process.pid
    with hold_run_lock(folder):
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()


def test_a_process_with_a_dead_ones_number_holds_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    text = {"pid": os.getpid(), "started": "another boot 17", "host": run_lock.host_name()}
    folder.lock.write_text(json.dumps(text))
    with hold_run_lock(folder):
        pass


@pytest.mark.parametrize("started", [None, "", 5, [], "x"])
def test_a_lock_of_a_dead_process_that_does_not_tell_its_start_is_taken_over(
    tmp_path: Path, started
) -> None:
    """Written where the system hides when it was started; a dead process has no such time, either."""
    folder = RunFolder(tmp_path)
    holder = {"pid": 2**22 - 1, "started": started, "host": run_lock.host_name()}
    folder.lock.write_text(json.dumps(holder))
    with hold_run_lock(folder):
        assert run_lock.holder_of(folder.lock)["pid"] == os.getpid()


def test_a_living_process_that_does_not_tell_its_start_holds_its_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    holder = {"pid": os.getppid(), "started": None, "host": run_lock.host_name()}
    folder.lock.write_text(json.dumps(holder))
    with pytest.raises(UserError, match="in use"), hold_run_lock(folder):
        pass


def test_a_lock_without_kernel_locks_goes_by_its_text(tmp_path: Path, monkeypatch) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(
        "fcntl.flock",
        lambda *_: (_ for _ in ()).throw(OSError(38, "not implemented")),
    )
    parent = os.getppid()
    text = {"pid": parent, "started": start_mark(parent), "host": run_lock.host_name()}
    folder.lock.write_text(json.dumps(text))
    with pytest.raises(UserError, match=f"process {parent}"), hold_run_lock(folder):
        pass


def test_another_host_counts_as_alive_while_it_beats(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock.write_text(json.dumps({"pid": 1, "started": "x", "host": "node17"}))
    with pytest.raises(UserError, match="process 1 on node17"), hold_run_lock(folder):
        pass
    silent = time.time() - 200
    os.utime(folder.lock, (silent, silent))
    with hold_run_lock(folder):
        pass


def test_a_time_far_ahead_is_no_sign_of_life(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock.write_text(json.dumps({"pid": 1, "started": "x", "host": "node17"}))
    with pytest.raises(UserError, match="process 1 on node17") as caught, hold_run_lock(folder):
        pass
    assert f"delete {folder.lock}" in caught.value.fix
    os.utime(folder.lock, (time.time() + 10_000,) * 2)
    with hold_run_lock(folder):
        pass


def test_a_deleted_lock_lets_nobody_in_and_comes_back(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.1)
    folder = RunFolder(tmp_path)
    with hold_run_lock(folder):
        folder.lock.unlink()
        with pytest.raises(UserError, match="in use"), hold_run_lock(folder):
            pass
        time.sleep(0.3)
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
    assert folder.lock.read_text() == ""
    with hold_run_lock(folder):
        pass


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in (".tmp-machine.json-4194999", ".tmp-x", f".tmp-report.html-{os.getpid()}"):
        (tmp_path / name).touch()
    (tmp_path / ".tmp-base-4194999").mkdir()
    (tmp_path / "letter").write_text("mine")
    (tmp_path / ".tmp-plan.json-4194999").symlink_to(tmp_path / "letter")
    with hold_run_lock(folder):
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f".tmp-report.html-{os.getpid()}", "letter", "lock"]


def test_a_kill_while_the_recipe_is_written_leaves_a_folder_that_can_be_used(
    tmp_path: Path, loaded
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("lock", ".tmp-recipe.yaml-4194999"):
        (tmp_path / "run" / name).touch()
    with new_run(loaded, tmp_path / "run") as (folder, _):
        assert sorted(path.name for path in folder.path.iterdir()) == [
            "lock",
            "recipe.yaml",
            "run.json",
        ]


@pytest.mark.parametrize(
    "name", ["lock", "events.jsonl", "plan.json", "checkpoints", ".reference-train.bin.tmp"]
)
def test_a_link_that_leads_out_of_the_folder_is_refused_and_not_followed(
    tmp_path: Path, name: str
) -> None:
    """It used to be truncated, appended to or written through by who resumed a stranger's run."""
    outside = tmp_path / "precious"
    outside.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    with (
        pytest.raises(UserError, match=f"{name} is a link to {outside}"),
        hold_run_lock(RunFolder(tmp_path / "run")),
    ):
        pass
    assert outside.read_text() == "mine"


def test_a_torn_lock_is_nobodys(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock.write_text('{"pid": 17, "sta')
    with hold_run_lock(folder):
        pass


def test_the_beat_shows_that_the_holder_lives(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.02)
    folder = RunFolder(tmp_path)
    with hold_run_lock(folder):
        os.utime(folder.lock, (0, 0))
        time.sleep(0.3)
        assert folder.lock.stat().st_mtime > time.time() - 10


def test_start_marks_tell_processes_apart() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        mark = start_mark(child.pid)
        assert mark is not None
        assert mark != start_mark(os.getpid())
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert start_mark(child.pid) is None


@pytest.mark.parametrize("writer", ["", "0.7.0"])
def test_a_run_of_another_format_is_refused_with_the_version_that_reads_it(
    tmp_path: Path, loaded, writer
) -> None:
    with new_run(loaded, tmp_path / "run"):
        pass
    old = {"run": "ab", "version": writer} if writer else {"run": "ab"}
    (tmp_path / "run/run.json").write_text(stamped(old))
    with pytest.raises(
        UserError, match=f"has format 1; Bloomery {__version__} reads format {FORMAT}"
    ) as caught:
        read_identity(tmp_path / "run")
    assert (f"Bloomery {writer}" if writer else "events.jsonl") in caught.value.fix
