"""`bloomery watch` as a process: in a pipe, on a terminal, and interrupted."""

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import chdir
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bloomery.cli.runs import command as runs_command
from bloomery.cli.watch import command as watch_command
from bloomery.core.errors import UserError
from bloomery.core.run_lock import host_name, start_mark, worked_on
from bloomery.monitor.events import EventLog, Phase, RunEnded
from runs_for_tests import made_up_run, step_done

PATIENCE_SECONDS = 120.0  # the machine may be busy
WATCH = [sys.executable, "-m", "bloomery", "watch", "last"]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs/one"
    with EventLog(folder / "events.jsonl") as emit:
        for event in [*made_up_run()][:-1]:
            emit(event)
    (folder / "recipe.yaml").write_text("{}")
    (folder / "lock").touch()
    return folder


@pytest.fixture
def held(run):
    """The run while a process works on it."""
    with (run / "lock").open("r+") as lock:
        flock(lock, LOCK_EX)
        yield run


def watched(run: Path, *words: str, columns: int = 100, name: str = "last") -> Result:
    """`bloomery watch` without a terminal, in this process."""
    with chdir(run.parents[1]):
        return CliRunner().invoke(watch_command, [name, *words], env={"COLUMNS": str(columns)})


def test_in_a_pipe_it_prints_one_picture_and_leaves(held):
    done = watched(held)
    assert done.exit_code == 0 and done.stdout.startswith("one · running · step 40 of 40")
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
    assert max(map(len, watched(held, "--once", columns=80).stdout.splitlines())) <= 80


def test_what_it_says_to_type_works_for_a_run_elsewhere_and_for_a_name_with_blanks(run):
    for place in ("elsewhere/one", "runs/my run"):
        folder = run.parents[1] / place
        folder.parent.mkdir(exist_ok=True)
        run.rename(folder)
        told = watched(run, name=place).stdout
        typed = shlex.split(told.rstrip().rpartition("bloomery resume ")[2])
        assert typed == [str(folder) if place.startswith("elsewhere") else "my run"]
        folder.rename(run)


def test_a_run_that_nobody_works_on_was_killed_and_goes_on_with_resume(run):
    told = watched(run).stdout
    assert told.startswith("one · killed · ") and told.rstrip().endswith("bloomery resume one")
    with EventLog(run / "events.jsonl") as emit:
        emit(RunEnded(status="done", step=40))
    told = watched(run).stdout
    assert told.startswith("one · done · ") and told.rstrip().endswith("bloomery report one")


def test_another_encoding_gets_ascii(held):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        WATCH, cwd=held.parents[1], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout.startswith("one - running")
    done.stdout.encode("ascii")


def test_it_needs_no_torch():
    code = "import sys, bloomery.cli.watch, bloomery.view.screen; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_programs_get_one_document(held):
    told = json.loads(watched(held, "--json").stdout)
    assert (told["status"], told["step"], told["max_steps"], told["run"]) == (
        "running",
        40,
        40,
        "one",
    )
    assert (
        told["eval"]["step"] == 40 and told["learning_rate"] > 0 and told["checkpoint_step"] == 40
    )
    assert {"step", "time", "text"} == told["incidents"][0].keys()


def test_what_state_a_run_is_in(held):
    with EventLog(held / "events.jsonl") as emit:
        (held / "pause").touch()
        assert watched(held).stdout.startswith("one · paused · ")
        emit(Phase(name="stopping", step=40))
        assert watched(held).stdout.startswith("one · stopping · ")


def test_a_run_on_another_machine_runs_while_its_lock_shows_a_sign_of_life(run):
    (run / "lock").write_text(json.dumps({"pid": 1, "started": "x", "host": "another-machine"}))
    assert watched(run).stdout.startswith("one · running")
    with chdir(run.parents[1]):
        assert "running" in CliRunner().invoke(runs_command).stdout
    os.utime(run / "lock", (time.time() - 600, time.time() - 600))
    assert watched(run).stdout.startswith("one · killed")
    (run / "lock").write_text(
        json.dumps({"pid": 2**22 + 1, "started": "x", "host": socket.gethostname()})
    )
    assert watched(run).stdout.startswith("one · killed")


@pytest.mark.parametrize("problem", [PermissionError(13, "denied"), OSError(38, "no locks here")])
def test_where_the_lock_cannot_be_asked_its_text_tells(run, monkeypatch, problem):
    def refuse(*words):
        raise problem

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not worked_on(run)
    mine = {"pid": os.getpid(), "started": start_mark(os.getpid()), "host": host_name()}
    (run / "lock").write_text(json.dumps(mine))
    assert worked_on(run)


def test_a_run_that_has_told_nothing_yet(tmp_path):
    folder = tmp_path / "runs/new"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    told = watched(folder)
    assert told.exit_code == 0 and told.stdout.startswith("new · killed · step 0")
    (folder / "events.jsonl").write_text('{"event": "Tomorrow"}\n' * 3 + '{"torn": ')
    (folder / "plan.json").write_text('{"format": 99}')
    told = watched(folder)
    assert told.exit_code == 0 and "3 of 3 lines of events.jsonl" in told.stdout
    assert json.loads(watched(folder, "--json").stdout)["unreadable_lines"] == 3


def test_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "runs/other").mkdir(parents=True)
    done = watched(tmp_path / "runs/other")
    assert isinstance(done.exception, UserError) and done.exception.code == 2 and not done.stdout
    assert "no run" in done.exception.problem


class Terminal:
    """`bloomery watch` on a terminal of its own."""

    def __init__(self, run: Path) -> None:
        ours, theirs = pty.openpty()
        self.said = b""
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "90", "LINES": "30"}
        self.process = subprocess.Popen(
            WATCH,
            cwd=run.parents[1],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._ours = ours
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 65536):
                self.said += piece
        except OSError:
            return

    def until(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in self.said:
            assert time.monotonic() < deadline and self.process.poll() is None, self.said[-2000:]
            time.sleep(0.02)

    def ended(self) -> int:
        """Its exit code, once all that it drew is in `said`."""
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert not self._reader.is_alive()
        return code


def test_on_a_terminal_it_follows_and_ctrl_c_leaves_the_run_alone(held):
    before = (held / "events.jsonl").read_bytes()
    terminal = Terminal(held)
    terminal.until("step 40 of 40")
    with EventLog(held / "events.jsonl") as emit:
        emit(step_done(41, time=50.0))
    terminal.until("step 41 of 40")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ended() == 0
    # screen restored
    assert "Training continues" in terminal.said.decode() and b"\x1b[?1049l" in terminal.said
    assert (held / "events.jsonl").read_bytes().startswith(before)
    assert sorted(path.name for path in held.iterdir()) == ["events.jsonl", "lock", "recipe.yaml"]


def test_when_the_run_ends_the_last_picture_stays(run):
    with (run / "lock").open("r+") as lock:
        flock(lock, LOCK_EX)
        terminal = Terminal(run)
        terminal.until("running")
        with EventLog(run / "events.jsonl") as emit:
            emit(RunEnded(status="done", step=40))
    assert terminal.ended() == 0
    after = terminal.said.rpartition(b"\x1b[?1049l")[2].decode()
    assert "one · done" in after and "bloomery report one" in after
