"""Ranks on several hosts of which one fails: gloo processes that pretend to be on other hosts, one rank on each."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, rank_process, ranks_of, wait_for, write_workshop

from bloomery.monitor.events import RunEnded, StepDone

SECONDS = 15.0  # from the fault until all processes have ended
STEP = 3  # after which the fault comes
START = "import sys; from bloomery.launch import supervisor; supervisor.WORKER = 'dying_worker'; import runpy; "
START += "runpy.run_module('bloomery', run_name='__main__', alter_sys=True)"


@pytest.fixture
def bloomery(tmp_path, monkeypatch) -> Bloomery:
    write_workshop(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/deaths.json").write_text("[]")
    return Bloomery(tmp_path)


@contextmanager
def two_hosts(
    bloomery: Bloomery, *overrides: str, namespaces: Sequence[str] = ("", ""), **variables: str
) -> Iterator[list["subprocess.Popen[str]"]]:
    """The processes of rank 0 on n1 and rank 1 on n2, a few steps into their run or at its end.

    `namespaces`: of the network, by rank, for hosts that can lose each other.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("train", "tiny.yaml", "--run-dir", "runs/one", "-d", "cpu", *overrides)
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    } | variables
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                bloomery.start(
                    *words,
                    command=(
                        *(("ip", "netns", "exec", namespace) if namespace else ()),
                        *(sys.executable, "-c", START),
                    ),
                    RANK=str(rank),
                    SLURMD_NODENAME=host,
                    **variables,
                )
            )
            for rank, (host, namespace) in enumerate(zip(("n1", "n2"), namespaces, strict=True))
        ]
        wait_for(lambda: bloomery.run_dir.exists() or processes[0].poll() is not None)
        has_begun = bloomery.saw(StepDone, STEP)
        wait_for(lambda: has_begun() or processes[0].poll() is not None)
        yield processes
    assert ranks_of(bloomery.run_dir) == []


def lose(bloomery: Bloomery, rank: int, parent: int) -> None:
    """Kills all processes of a rank."""
    worker = rank_process(bloomery.run_dir, rank)
    os.kill(parent, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)


def ended_with_fault(
    bloomery: Bloomery,
    fault: Callable[[int], None] = lambda _: None,
    *,
    hang_seconds: float = 0.0,
    restarts: int = 0,
) -> tuple[str, RunEnded]:
    """What rank 0 on n1 says, and the last event, where something happens to rank 1 on n2 after a few steps.

    `fault`: gets the id of the process that supervises rank 1. Every process ends in time, with exit code 1.
    """
    variables = {"BLOOMERY_HANG_SECONDS": str(hang_seconds)} if hang_seconds else {}
    with two_hosts(bloomery, **variables) as (first, second):
        fault(second.pid)
        since = time.monotonic()
        _, told = first.communicate(timeout=60)
        second.communicate(timeout=60)
        assert time.monotonic() - since < (1 + restarts) * SECONDS + hang_seconds
        assert first.returncode == 1, told
        assert second.returncode in (1, -signal.SIGKILL)
    assert "Traceback" not in told
    ended = bloomery.events()[-1]
    assert isinstance(ended, RunEnded) and ended.status == "failed"
    return told, ended


def excluded_hosts(bloomery: Bloomery) -> list[str]:
    file = bloomery.run_dir / "excluded-hosts.txt"
    return file.read_text().split() if file.exists() else []


@pytest.mark.soak
def test_a_rank_that_is_held_before_a_collective_is_named_with_its_host(bloomery) -> None:
    deaths = [[{"rank": 1}, STEP + 1, "hold"]]
    (bloomery.folder / "runs/deaths.json").write_text(json.dumps(deaths))
    told, ended = ended_with_fault(bloomery, hang_seconds=3.0)
    assert "rank 1 on n2 hangs in step (dying_worker.py:" in told, told
    assert "and the others wait for it in collective" in ended.error
    assert ended.host == "n2" and excluded_hosts(bloomery) == ["n2"]
    notes = (bloomery.run_dir / "stacks/collectives.txt").read_text().splitlines()
    assert "rank 0 on n1: " in notes[0] and "it waits in" in notes[0]
    assert "rank 1 on n2: " in notes[1] and "it waits in" not in notes[1]


@pytest.mark.soak
def test_a_lost_host_ends_all_and_is_named(bloomery) -> None:
    told, ended = ended_with_fault(bloomery, lambda parent: lose(bloomery, 1, parent))
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
    told, ended = ended_with_fault(bloomery, restarts=restarts)
    assert problem in told and "rank 1" in told and "n2" in told, told
    assert ended.host == "n2" and excluded_hosts(bloomery) == ["n2"]


@pytest.mark.soak
def test_a_bug_on_one_rank_names_its_host_and_leaves_none_out(bloomery) -> None:
    deaths = [[{"rank": 1}, STEP + 1, "a wrong sample"]]
    (bloomery.folder / "runs/deaths.json").write_text(json.dumps(deaths))
    told, ended = ended_with_fault(bloomery)
    assert "rank 1 of training on n2 failed" in told and "a wrong sample" in told, told
    assert ended.host == "" and excluded_hosts(bloomery) == []


@pytest.mark.soak
def test_the_others_end_when_the_host_of_rank_0_is_lost(bloomery) -> None:
    with two_hosts(bloomery) as (first, second):
        lose(bloomery, 0, first.pid)
        since = time.monotonic()
        _, told = second.communicate(timeout=60)
        assert time.monotonic() - since < SECONDS
        assert second.returncode == 1
    assert "rank 0 has ended without a message to rank 1" in told


@pytest.fixture
def networks():
    """Two namespaces with a cable between them: 10.77.0.1 and 10.77.0.2 on `wire`."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("only root may make a network, with the command ip")
    names = [f"bloomery-{os.getpid()}-{number}" for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.decode()[:100]}")
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = names
        ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "wire", "netns", second)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield names


@pytest.mark.soak
def test_a_host_that_is_cut_off_ends_both_sides(bloomery, networks) -> None:
    """No connection is closed, as when a node loses its power: only silence tells."""
    variables = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "wire"}
    endless = ("train.max_steps=20000", "checkpoint.every=20000", "eval.every=20000")
    with two_hosts(bloomery, *endless, namespaces=networks, **variables) as (first, second):
        subprocess.run(["ip", "-n", networks[1], "link", "set", "wire", "down"], check=True)
        since, cut = time.monotonic(), time.time()
        _, told = first.communicate(timeout=60)
        _, told_by_second = second.communicate(timeout=60)
        assert time.monotonic() - since < SECONDS + 5  # to leave, on a crowded machine
        assert (first.returncode, second.returncode) == (1, 1)
    assert "rank 1 of training on n2 is gone" in told, told
    assert "rank 0 has ended without a message to rank 1" in told_by_second
    ended = bloomery.events()[-1]
    assert isinstance(ended, RunEnded) and ended.host == "n2" and ended.time - cut < SECONDS
