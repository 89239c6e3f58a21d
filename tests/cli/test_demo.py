"""`bloomery demo` as a stranger sees it: signs of life on a terminal, and next steps that work as they are printed."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.cli.demo import Story, _show_next_steps
from bloomery.monitor.events import EventLog, Phase, RunEnded
from bloomery.monitor.words import progress_text
from models_for_tests import make_run

FIRST_SECONDS, NEXT_SECONDS = 3.0, 2.0  # the longest silence
PATIENCE_SECONDS = 120.0  # the machine may be busy
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


class Watched:
    """A command on a terminal of its own: what it wrote, and its longest silence after the first word."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.written, self.silence, self.first_cpu_seconds = b"", 0.0, 0.0
        self._end, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._heard = time.monotonic()

    def read(self, seconds: float) -> bool:
        """Waits that long for the next piece of output; False at the end of the process."""
        if not select.select([self._end], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self._end, 65536)
        except OSError:
            return False
        now = time.monotonic()
        if self.written:
            self.silence = max(self.silence, now - self._heard)
        else:
            self.first_cpu_seconds = self._cpu_seconds()
        self.written, self._heard = self.written + piece, now
        return bool(piece)

    def until(self, text: str, patience: float = PATIENCE_SECONDS) -> None:
        """Until the text was written. Fails when that takes too long or the process ends."""
        deadline = time.monotonic() + patience
        while text.encode() not in self.written:
            assert time.monotonic() < deadline, self.text[-500:]
            assert self.read(1.0), self.text[-500:]

    @property
    def text(self) -> str:
        return ESCAPES.sub(b"", self.written).replace(b"\r\n", b"\n").decode(errors="replace")

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the process with its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                while self.read(10.0):
                    pass
            finally:
                self.process.wait(PATIENCE_SECONDS)
        os.close(self._end)


def test_it_shows_life_at_once_and_while_it_prepares(tmp_path):
    demo = Watched([sys.executable, "-m", "bloomery", "demo"], tmp_path)
    try:
        demo.until("starting")
        demo.until("checking this machine")
        end = time.monotonic() + NEXT_SECONDS + 0.5
        while time.monotonic() < end:
            assert demo.read(NEXT_SECONDS)
    finally:
        demo.close()
    assert demo.first_cpu_seconds < FIRST_SECONDS  # CPU time: other programs may use the cores
    assert demo.silence < NEXT_SECONDS


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (Phase(name="tokenizer", done=1, total=4), "training the tokenizer 25%"),
        (Phase(name="checksums", done=4, total=4), "loading PyTorch and the model"),
        (Phase(name="compile"), "compiling the first step"),
        (Phase(name="model"), "loading the model"),
        (Phase(name="length", done=3, total=240), ""),
    ],
)
def test_the_status_names_what_runs(event, shown):
    assert progress_text(event) == shown


def printed_steps(folder: Path, capsys) -> list[str]:
    """The commands below `next`, without their purpose."""
    capsys.readouterr()
    _show_next_steps(Story(to_stderr=False), folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("next ")
    return [re.split(r"\s{2,}", line[11:])[0] for line in lines]


def workshop(folder: Path) -> dict[str, str]:
    """Go files in ~/my-code, and an environment that has no `bloomery` on its PATH."""
    (folder / "my-code").mkdir()
    for number in range(40):
        body = "".join(f"\tx{line} := {line * number} + {line}\n" for line in range(60))
        (folder / "my-code" / f"file{number}.go").write_text(
            f"package main\n\nfunc f{number}() {{\n{body}}}\n"
        )
    return os.environ | {"HOME": str(folder), "PATH": "/usr/bin:/bin"}


def run_as_printed(steps: list[str], folder: Path, environment: dict[str, str]) -> str:
    """The last command in one shell with those before it; fails when one of them does."""
    done = subprocess.run(
        ["bash", "-ec", "\n".join(steps)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_printed_next_steps_are_found_and_run(tmp_path, monkeypatch, capsys):
    """`demo chat` is tested on its own; the training is planned here, and runs in the soak test."""
    environment = workshop(tmp_path)
    monkeypatch.setenv("PATH", environment["PATH"])
    run = make_run(tmp_path / "runs" / "demo", 1)
    with EventLog(run / "events.jsonl") as emit:
        emit(RunEnded(step=1, status="done"))
    monkeypatch.chdir(tmp_path)
    activate, generate, chat, train, plan = printed_steps(Path("runs/demo"), capsys)
    assert activate.startswith("source ") and chat == "bloomery demo chat" and "my-code" in train
    assert run_as_printed([activate, generate], tmp_path, environment).startswith(
        "def read_json(path):"
    )
    assert "RX 6700 XT" in run_as_printed([activate, plan], tmp_path, environment)
    assert "data.path=~/my-code" in run_as_printed(
        [activate, f"{train} --dry-run"], tmp_path, environment
    )


@pytest.mark.soak
def test_the_whole_demo_is_never_silent_and_all_its_next_steps_run(tmp_path, monkeypatch):
    environment = workshop(tmp_path)
    monkeypatch.setenv("PATH", environment["PATH"])
    demo = Watched([sys.executable, "-m", "bloomery", "demo"], tmp_path)
    try:
        while demo.read(60.0):
            pass
    finally:
        demo.close()
    assert demo.process.returncode == 0, demo.text[-2000:]
    assert demo.silence < NEXT_SECONDS
    below = demo.text.rpartition("\nnext ")[2].splitlines()
    steps = [
        re.split(r"\s{2,}", line[6 if at == 0 else 11 :])[0]
        for at, line in enumerate(below)
        if line.strip()
    ]
    assert len(steps) == 5
    for step in steps[1:]:
        run_as_printed([steps[0], step], tmp_path, environment)
