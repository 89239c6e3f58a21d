"""Many ranks without a model on one machine: start, a save, a rank's end; and how often they ask the run folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from plans_of_runs import plan_of
from runs_of_bloomery import wait_for, why_no_strace

from bloomery.core.run_folder import RunFolder
from bloomery.plan.store import write_plan

SIZES = [
    pytest.param(8, id="8 ranks"),
    pytest.param(16, id="16 ranks", marks=pytest.mark.soak),
    pytest.param(64, id="64 ranks", marks=pytest.mark.soak),
]
CALLS_PER_SECOND = 2.0
CALLS_OF_START_AND_END = 24  # of a rank; 19 were counted
QUIET_SECONDS = 4.0  # of training, in which calls are counted


class Ranks:
    """The processes of a launch, traced. They end with this one."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = RunFolder(folder / "run")
        self.meeting = folder
        self.ranks = ranks
        self.folder.path.mkdir()
        self.folder.recipe.touch()
        write_plan(plan_of(replicate=ranks), self.folder.plan)
        program = Path(__file__).with_name("many_ranks.py")
        trace = ("strace", "-f", "-qq", "-ttt", "--seccomp-bpf", "-e", "trace=%file")
        self.process = subprocess.Popen(
            [
                *trace,
                "-o",
                folder / "strace.txt",
                sys.executable,
                program,
                self.folder.path,
                f"{ranks}",
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(program.parent), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def began(self) -> bool:
        assert self.process.poll() is None
        return len(list(self.meeting.glob("began-*"))) == self.ranks

    def ends(self) -> dict[int, tuple[int, float]]:
        assert self.process.stdout is not None
        self.process.wait(timeout=100)
        ends = json.loads(self.process.stdout.read())
        return {int(rank): (code, at) for rank, (code, at) in ends.items()}

    def parent(self, rank: int) -> int:
        return int((self.meeting / f"parent-{rank}").read_text())

    def calls(self, since: float, until: float) -> Counter[str]:
        """Calls on the run folder in a stretch of time, by process."""
        calls = Counter[str]()
        for line in (self.meeting / "strace.txt").open(errors="replace"):
            found = re.match(r"(\d+)\s+(\d+\.\d+) (\w+)\(", line)
            if found and since < float(found[2]) < until and f'"{self.folder.path}' in line:
                calls[found[1]] += 1
        return calls


@pytest.mark.skipif(bool(why_no_strace()), reason="strace is not installed, or cannot trace here")
@pytest.mark.parametrize("ranks", SIZES)
def test_many_ranks_save_and_stop_and_hardly_ask_the_run_folder(tmp_path, ranks) -> None:
    launch = Ranks(tmp_path, ranks)
    started = time.time()
    wait_for(launch.began)
    began = time.time()
    time.sleep(QUIET_SECONDS)
    asked = time.time()
    os.kill(launch.parent(0), signal.SIGTERM)
    ends = launch.ends()
    assert {code for code, _ in ends.values()} == {75}, ends
    calls = launch.calls(began, asked)
    # While all train only rank 0 asks, which reads the events.
    (calls,) = launch.calls(began, asked).values()
    assert calls <= CALLS_PER_SECOND * (asked - began)
    # With the start and the end, too, which read the plan and write how each rank ended.
    # These are so many for a rank, however long it takes to start.
    whole = sum(launch.calls(started, time.time()).values())
    assert whole <= ranks * CALLS_OF_START_AND_END + CALLS_PER_SECOND * (asked - began)
    print(f"{ranks} ranks: {calls / (asked - began):.1f} calls a second of rank 0 in training")


@pytest.mark.skipif(bool(why_no_strace()), reason="strace is not installed, or cannot trace here")
@pytest.mark.parametrize("ranks", SIZES)
def test_the_end_of_one_of_many_ranks_ends_all(tmp_path, ranks) -> None:
    launch = Ranks(tmp_path, ranks)
    wait_for(launch.began)
    struck = time.time()
    os.kill(launch.parent(3), signal.SIGKILL)
    ends = launch.ends()
    assert ends.pop(3)[0] == -signal.SIGKILL
    assert {code for code, _ in ends.values()} == {1}, ends
    assert max(at for _, at in ends.values()) - struck < 15
    assert "rank 3 of training is gone" in (tmp_path / "error.txt").read_text()
