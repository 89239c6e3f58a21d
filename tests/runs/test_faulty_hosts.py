"""Ranks on several hosts of which one fails: gloo processes that pretend to be on other hosts, one rank on each."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, rank_process, ranks_of, wait_for, write_workshop

from bloomery.monitor.events import RunEnded, StepDone

SECONDS = 15.0  # from the fault until all processes have ended
STEP = 3  # after which the fault comes
START = "import sys; from bloomery.runs import supervisor; supervisor.WORKER = 'dying_worker'; import runpy; "
START += "runpy.run_module('bloomery', run_name='__main__', alter_sys=True)"


@pytest.fixture
def bloomery(tmp_path, monkeypatch) -> Bloomery:
    write_workshop(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/deaths.json").write_text("[]")
    return Bloomery(tmp_path)


def ended_with_fault(
    bloomery: Bloomery,
    fault: Callable[[int], None],
    *,
    hang_seconds: float = 0.0,
    restarts: int = 0,
) -> tuple[str, RunEnded]:
    """What rank 0 on n1 says, and the last event, where something happens to rank 1 on n2 after a few steps.

    `fault`: gets the id of the process that supervises rank 1. Every process ends in time, with exit code 1.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("train", "tiny.yaml", "--run-dir", "runs/one", "-d", "cpu")
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if hang_seconds:
        variables["BLOOMERY_HANG_SECONDS"] = str(hang_seconds)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                bloomery.start(
                    *words,
                    command=(sys.executable, "-c", START),
                    RANK=str(rank),
                    SLURMD_NODENAME=host,
                    **variables,
                )
            )
            for rank, host in enumerate(("n1", "n2"))
        )
        wait_for(
            lambda: (
                bloomery.run_dir.exists()
                and (bloomery.saw(StepDone, STEP)() or first.poll() is not None)
            )
        )
        fault(second.pid)
        since = time.monotonic()
        _, told = first.communicate(timeout=60)
        second.communicate(timeout=60)
        assert time.monotonic() - since < (1 + restarts) * SECONDS + hang_seconds
        assert first.returncode == 1, told
        assert second.returncode in (1, -signal.SIGKILL)
    assert ranks_of(bloomery.run_dir) == []
    assert "Traceback" not in told
    ended = bloomery.events()[-1]
    assert isinstance(ended, RunEnded) and ended.status == "failed"
    return told, ended


def excluded_hosts(bloomery: Bloomery) -> list[str]:
    file = bloomery.run_dir / "excluded-hosts.txt"
    return file.read_text().split() if file.exists() else []


def test_a_rank_that_is_held_before_a_collective_is_named_with_its_host(bloomery) -> None:
    deaths = [[{"rank": 1}, STEP + 1, "hold"]]
    (bloomery.folder / "runs/deaths.json").write_text(json.dumps(deaths))
    told, ended = ended_with_fault(bloomery, lambda _: None, hang_seconds=3.0)
    assert "rank 1 on n2 hangs in step (dying_worker.py:" in told, told
    assert "and the others wait for it in collective" in ended.error
    assert ended.host == "n2" and excluded_hosts(bloomery) == ["n2"]
    notes = (bloomery.run_dir / "stacks/collectives.txt").read_text().splitlines()
    assert "rank 0 on n1: " in notes[0] and "it waits in" in notes[0]
    assert "rank 1 on n2: " in notes[1] and "it waits in" not in notes[1]


def test_a_lost_host_ends_all_and_is_named(bloomery) -> None:
    def lose(parent: int) -> None:
        worker = rank_process(bloomery.run_dir, 1)
        os.kill(parent, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

    told, ended = ended_with_fault(bloomery, lose)
    assert re.search(r"rank 1 of training on n2 is gone after step \d+ without a word", told), told
    assert "or leave the host out: start the ranks on other hosts than n2" in told
    assert ended.host == "n2" and excluded_hosts(bloomery) == ["n2"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "problem", "restarts"),
    [
        pytest.param("HIP error: unspecified launch failure", "n2 failed", 0, id="a dead GPU"),
        # It restarts with safer settings first, as often as these help nothing.
        pytest.param("memory", "out of memory", 3, id="out of memory"),
        pytest.param(signal.SIGKILL, "n2 process killed from outside", 0, id="killed"),
    ],
)
def test_a_rank_that_dies_of_its_device_or_memory_has_its_host_left_out(
    bloomery, how, problem, restarts
) -> None:
    (bloomery.folder / "runs/deaths.json").write_text(json.dumps([[{"rank": 1}, STEP + 1, how]]))
    told, ended = ended_with_fault(bloomery, lambda _: None, restarts=restarts)
    assert problem in told and "rank 1" in told and "n2" in told, told
    assert ended.host == "n2" and excluded_hosts(bloomery) == ["n2"]


@pytest.mark.soak
def test_a_bug_on_one_rank_names_its_host_and_leaves_none_out(bloomery) -> None:
    deaths = [[{"rank": 1}, STEP + 1, "a wrong sample"]]
    (bloomery.folder / "runs/deaths.json").write_text(json.dumps(deaths))
    told, ended = ended_with_fault(bloomery, lambda _: None)
    assert "rank 1 of training on n2 failed" in told and "a wrong sample" in told, told
    assert ended.host == "" and excluded_hosts(bloomery) == []
