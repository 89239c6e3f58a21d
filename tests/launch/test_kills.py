"""A run that was killed at any moment ends, once resumed, equal to the undisturbed one to the last bit."""

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable

import pytest
from runs_of_bloomery import (
    KINDS,
    PATIENCE_SECONDS,
    Bloomery,
    assert_bitwise_equal,
    wait_for,
    why_no_strace,
    write_workshop,
)
from test_flow import worker_of

from bloomery.monitor.events import Phase, RunEnded, StepDone, Warned

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")


def saving(bloomery: Bloomery) -> bool:
    return any((bloomery.run_dir / "checkpoints").glob(".tmp-*"))


def finish(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


def test_kills_from_set_up_to_saving_and_at_system_calls_leave_no_trace(
    bloomery: Bloomery, undisturbed: Bloomery
) -> None:
    """Eight of the ten kills of `make test`; two more are in test_flow."""
    for moment in (
        (bloomery.run_dir / "recipe.yaml").exists,
        bloomery.saw(Phase),
        (bloomery.run_dir / "plan.json").exists,
        bloomery.saw(StepDone, 4),
        lambda: bloomery.saw(StepDone, 8)() and saving(bloomery),
    ):
        bloomery.kill_when(moment, *bloomery.go_on)
    for call in ("fsync:signal=SIGKILL:when=5", "?rename:signal=SIGKILL:when=2", "unlinkat:signal=SIGKILL:when=4"):
        strike(bloomery, call)
    finish(bloomery, undisturbed)


def strike(bloomery: Bloomery, fault: str, *words: str) -> None:
    told = bloomery.faulted(fault, *bloomery.go_on, *(words if "train" in bloomery.go_on else ()))
    assert told.returncode in ((-signal.SIGKILL, 1) if "SIGKILL" in fault else (0, 1)), (fault, told.stderr)
    assert "Traceback" not in told.stderr and "stumbled" not in told.stderr


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bloomery]:
    """The run of a kind, never disturbed; look, do not touch."""

    @functools.cache
    def of(kind: str, *words: str) -> Bloomery:
        folder = tmp_path_factory.mktemp(kind)
        write_workshop(folder, kind)
        bloomery = Bloomery(folder)
        done = bloomery.run(*TRAIN, *words)
        assert done.returncode == 0, done.stderr
        return bloomery

    return of


SHORT = ("train.max_steps=8", "eval.every=4 steps")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "faults"), [
    ("dpo", ["fsync:signal=SIGKILL:when=12", "?rename:signal=SIGKILL:when=4", "fsync:error=ENOSPC:when=8"]),
    ("qlora", ["?rename:signal=SIGKILL:when=2", "?rename:signal=SIGKILL:when=5"]),
])  # fmt: skip
def test_faults_at_system_calls_leave_no_trace(kind: str, faults: list[str], tmp_path, calm) -> None:
    write_workshop(tmp_path, kind)
    bloomery = Bloomery(tmp_path)
    for fault in faults:
        strike(bloomery, fault, *SHORT)
    done = bloomery.run("resume", "one")
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm(kind, *SHORT).run_dir, step=8)


LONG = ("train.max_steps=60", "checkpoint.every=2 steps", "eval.every=7 steps")
CALLED = {"fsync": 40, "?rename": 8, "unlinkat": 12, "?unlink": 8, "?rmdir": 6, "?mkdir": 8}  # how often at most
EFFECTS = ("signal=SIGKILL", "signal=SIGKILL", "signal=SIGKILL", "error=EIO", "error=ENOSPC")
FAULTS = 10  # a chain


def random_fault(bloomery: Bloomery, draw: random.Random) -> bool:
    """One at a system call, or a SIGKILL of the launcher or of its training process; whether it struck."""
    words = bloomery.go_on if "resume" in bloomery.go_on else (*bloomery.go_on, *LONG)
    if draw.random() < 0.5 and not why_no_strace():
        call = draw.choice([*CALLED])
        fault = f"{call}:{draw.choice(EFFECTS)}:when={draw.randint(1, CALLED[call])}"
        told = bloomery.faulted(fault, *words)
        assert told.returncode in (0, 1, -signal.SIGKILL), (fault, told.returncode, told.stderr)
        assert "Traceback" not in told.stderr and "stumbled" not in told.stderr, (fault, told.stderr)
        warned = [event for event in bloomery.events() if isinstance(event, Warned)]
        return told.returncode != 0 or any("not saved" in event.reason for event in warned)
    reached = max((event.step for event in bloomery.events() if isinstance(event, StepDone)), default=0)
    target, delay, saves = reached + draw.randrange(4), draw.uniform(0, 0.1), draw.random() < 0.4
    events = bloomery.run_dir / "events.jsonl"
    size = events.stat().st_size if events.exists() else 0

    def moment() -> bool:
        nonlocal size
        if not events.exists() or events.stat().st_size == size:
            return False
        size = events.stat().st_size
        if not bloomery.saw(StepDone, target)() or (saves and not saving(bloomery)):
            return False
        time.sleep(0 if saves else delay)
        return True

    if draw.random() < 0.5:
        return bloomery.run_until(moment, signal.SIGKILL, *words) == -signal.SIGKILL
    with bloomery.start(*words) as process:
        wait_for(lambda: moment() or process.poll() is not None)
        worker = worker_of(bloomery.run_dir)
        if worker is not None:
            os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode == 1


@pytest.mark.soak
@pytest.mark.parametrize("chain", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_faults_of_each_kind_of_run_leave_no_trace(kind: str, chain: int, tmp_path, calm) -> None:
    """Two hundred in all, in chains of ten, each of which ends equal to the undisturbed run."""
    draw, struck = random.Random(f"{kind} {chain}"), 0
    write_workshop(tmp_path, kind)
    bloomery = Bloomery(tmp_path)
    while struck < FAULTS:
        struck += random_fault(bloomery, draw)
        if any(isinstance(event, RunEnded) and event.status == "done" for event in bloomery.events()):  # another run
            assert_bitwise_equal(bloomery.run_dir, calm(kind, *LONG).run_dir, step=60)
            shutil.rmtree(bloomery.run_dir)
    done = bloomery.run(*bloomery.go_on, *(LONG if "train" in bloomery.go_on else ()))
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm(kind, *LONG).run_dir, step=60)
