"""Runs with rewards whose training child is `killed_worker`, and what is the same once they have been resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runs_of_bloomery import Bloomery, assert_bitwise_equal, wait_for

from bloomery.monitor.events import EvalDone, RunEnded, StepDone, last_per_step

# `bloomery`, whose training child is `killed_worker`.
COMMAND = """
from bloomery.launch import supervisor

supervisor.WORKER = "killed_worker"
from bloomery.__main__ import main

main()
"""
FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
PATHS = (FOLDER, TESTS, TESTS / "train", TESTS.parent)  # of what that child imports
SECONDS = 240.0  # for a run or the rest of one, on a crowded machine


@dataclass(frozen=True)
class Kill:
    """What `kill.json` says: see `killed_worker`."""

    moment: str = ""  # never
    call: int = 0
    victim: str = "worker"
    delay: float = 0.0
    rank: int = 0
    cut: int = 0
    tool: str | None = None


def run_until_killed(
    bloomery: Bloomery, kill: Kill, *words: str
) -> "subprocess.CompletedProcess[str]":
    """Begins or resumes the run, and kills. `words`: of its beginning."""
    wanted = {name: value for name, value in asdict(kill).items() if value is not None}
    (bloomery.folder / "runs/kill.json").write_text(json.dumps(wanted))
    (bloomery.folder / "runs/fell.json").unlink(missing_ok=True)
    paths = [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]
    command = bloomery.go_on
    if "train" in command:
        command += words
    with bloomery.start(
        *command,
        command=(sys.executable, "-c", COMMAND),
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
    ) as process:
        output, errors = process.communicate(timeout=SECONDS)
    # Those of a launcher that was killed end by themselves, and so do those of tools, rewards and chat templates.
    wait_for(lambda: not processes_in(bloomery.folder))
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def processes_in(folder: Path) -> list[int]:
    """Those that work in the folder."""
    processes = list[int]()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or is another user's
            if link.readlink() == folder:
                processes.append(int(link.parent.name))
    return processes


def was_killed(done: "subprocess.CompletedProcess[str]", victim: str) -> bool:
    """Whether SIGKILL came before the end of the run."""
    assert done.returncode in (0, -signal.SIGKILL if victim == "launcher" else 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode != 1 or "SIGKILL" in done.stderr, done.stderr
    return done.returncode != 0


def killed(
    bloomery: Bloomery,
    undisturbed: Bloomery,
    kill: Kill,
    most_calls: int,
    draw: random.Random,
    *words: str,
) -> dict[str, Any]:
    """What the run was in when the kill came. One that ended before is compared, deleted and begun again.

    `most_calls`: within which the place is drawn again. `words`: of the beginning of a run.
    """
    while not was_killed(run_until_killed(bloomery, kill, *words), kill.victim):
        # It came too late: another run.
        events = bloomery.events()
        assert any(isinstance(event, RunEnded) and event.status == "done" for event in events)
        assert_same_run(bloomery, undisturbed)
        shutil.rmtree(bloomery.run_dir)
        kill = replace(kill, call=draw.randint(1, most_calls))
    fell: dict[str, Any] = json.loads((bloomery.folder / "runs/fell.json").read_text())
    return fell


def assert_same_run(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    """Also what was repeated after a kill is what it was before."""
    steps = {event.step: event for event in undisturbed.events() if isinstance(event, StepDone)}
    assert len(steps) == max(steps)
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir, step=max(steps))
    for event in bloomery.events():
        if isinstance(event, StepDone):
            whole = steps[event.step]
            names = ("loss", "grad_norm", "learning_rate", "tokens", "loss_tokens", "metrics")
            for name in names:
                assert getattr(event, name) == getattr(whole, name), (event.step, name)
    rewards = [
        [(event.step, event.metrics) for event in last_per_step(run.events(), EvalDone)]
        for run in (bloomery, undisturbed)
    ]
    assert rewards[0] == rewards[1]
    ours, theirs = (
        {path.name: path.read_bytes() for path in (run.run_dir / "completions").glob("*.jsonl")}
        for run in (bloomery, undisturbed)
    )
    assert theirs
    assert ours == theirs
