"""A run that was killed at any moment ends, once resumed, equal to the undisturbed one to the last bit."""

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs_of_bloomery import (
    DEVICES,
    KINDS,
    PATIENCE_SECONDS,
    Bloomery,
    assert_bitwise_equal,
    ranks_of,
    wait_for,
    why_no_strace,
    write_workshop,
)

from bloomery.monitor.events import Phase, RunEnded, StepDone


def saving(bloomery: Bloomery) -> bool:
    return any((bloomery.run_dir / "checkpoints").glob(".tmp-*"))


def finish(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


def test_kills_from_set_up_to_saving_and_at_system_calls_leave_no_trace(
    bloomery: Bloomery, undisturbed: Bloomery
) -> None:
    """Some kills of each kind; `make soak` has them by the hundred, in every phase of a run."""
    for moment in (
        bloomery.saw(Phase),
        (bloomery.run_dir / "plan.json").exists,
        lambda: bloomery.saw(StepDone, 4)() and saving(bloomery),
    ):
        bloomery.kill_when(moment, *bloomery.go_on)
    for call in ("?rename:signal=SIGKILL:when=2", "unlinkat:signal=SIGKILL:when=4"):
        strike(bloomery, call)
    finish(bloomery, undisturbed)


@pytest.mark.soak
def test_kills_of_two_stages_leave_no_trace_on_them_or_on_one_device(tmp_path, calm) -> None:
    """Of the launcher in set-up, of whichever process renames a second file, of each stage while it saves."""
    bloomery = workshop_of("pipeline", tmp_path)
    bloomery.kill_when(bloomery.saw(Phase), *bloomery.go_on)
    strike(bloomery, "?rename:signal=SIGKILL:when=2")
    for rank, step in ((1, 5), (0, 8)):
        assert kill_rank_when(
            bloomery,
            lambda step=step: bloomery.saw(StepDone, step)() and saving(bloomery),
            lambda ranks, rank=rank: ranks[rank],
            *bloomery.go_on,
        )
    done = bloomery.run("resume", "one", *ONE_DEVICE)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm("pipeline").run_dir)


def strike(bloomery: Bloomery, fault: str, *words: str) -> None:
    told = bloomery.faulted(fault, *bloomery.go_on, *(words if "train" in bloomery.go_on else ()))
    assert told.returncode in ((-signal.SIGKILL, 1) if "SIGKILL" in fault else (0, 1)), (
        fault,
        told.stderr,
    )
    assert "Traceback" not in told.stderr and "stumbled" not in told.stderr


def workshop_of(kind: str, folder: Path) -> Bloomery:
    write_workshop(folder, kind)
    return Bloomery(folder, DEVICES.get(kind, ()))


def no_rank_lives(bloomery: Bloomery) -> bool:
    return not ranks_of(bloomery.run_dir)


def kill_rank_when(
    bloomery: Bloomery,
    moment: Callable[[], bool],
    choose: Callable[[list[int]], int],
    *words: str,
) -> bool:
    """Kills one of the run's ranks when the moment has come; whether the run failed by that.

    `choose`: from the processes of the ranks, rank 0 first. None of them is left.
    """
    with bloomery.start(*words) as process:
        wait_for(lambda: moment() or process.poll() is not None)
        if ranks := sorted(ranks_of(bloomery.run_dir)):
            os.kill(choose(ranks), signal.SIGKILL)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert no_rank_lives(bloomery)
    return process.returncode == 1


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bloomery]:
    """The run of a kind, never disturbed; look, do not touch."""

    @functools.cache
    def of(kind: str, *words: str) -> Bloomery:
        bloomery = workshop_of(kind, tmp_path_factory.mktemp(kind))
        done = bloomery.run(*bloomery.go_on, *words)
        assert done.returncode == 0, done.stderr
        return bloomery

    return of


ONE_DEVICE = ("-d", "cpu", "parallel.pipeline=1")
SHORT = ("train.max_steps=8", "eval.every=4 steps")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        (
            "dpo",
            [
                "fsync:signal=SIGKILL:when=12",
                "?rename:signal=SIGKILL:when=4",
                "fsync:error=ENOSPC:when=8",
            ],
        ),
        ("qlora", ["?rename:signal=SIGKILL:when=2", "?rename:signal=SIGKILL:when=5"]),
    ],
)
def test_faults_at_system_calls_leave_no_trace(
    kind: str, faults: list[str], tmp_path, calm
) -> None:
    bloomery = workshop_of(kind, tmp_path)
    for fault in faults:
        strike(bloomery, fault, *SHORT)
    done = bloomery.run("resume", "one")
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm(kind, *SHORT).run_dir, step=8)


STEPS = 40
LONG = (f"train.max_steps={STEPS}", "checkpoint.every=2 steps", "eval.every=7 steps")
# How often a thread calls it: in every process of a run (each checkpoint is a thread), and in the busiest.
CALLED = {
    "fsync": (9, 18),
    "?rename": (2, 8),
    "?renameat": (3, 3),
    "unlinkat": (8, 8),
    "?unlink": (4, 16),
    "?mkdir": (2, 5),
}
# By kind of run: what it never calls. Safetensors renames the files that it has written; ranks write their own.
NEVER_CALLED = {"pipeline": ("?renameat",)}
MISSES = 20  # in a row: a fault that strikes no run of so many does not occur
PROCESSES = ("launcher", "launcher while saving", "worker", "worker while saving")
EFFECTS = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
Struck = list[tuple[str, str]]  # the kind of run, and what struck it


@pytest.fixture(scope="module")
def struck(request: pytest.FixtureRequest) -> Iterator[Struck]:
    """What struck, reported on the terminal after the last chain: `make soak` shows what was killed where."""
    found: Struck = []
    yield found
    plugins = request.config.pluginmanager
    lines = [f"{len(found)} faults struck", f"{'':<32}" + "".join(f"{kind:>10}" for kind in KINDS)]
    for what in sorted({what for _, what in found}):
        lines.append(f"{what:<32}" + "".join(f"{found.count((kind, what)):>10}" for kind in KINDS))
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


def planned_faults(kind: str, draw: random.Random) -> list[str]:
    """Ten: a SIGKILL of each process, and six different system calls with their effects; in any order."""
    called = [call for call in CALLED if call not in NEVER_CALLED.get(kind, ())]
    calls = draw.sample([f"{call}:{effect}" for call in called for effect in EFFECTS], 6)
    return draw.sample([*PROCESSES, *calls], 10)


def strike_at_random(bloomery: Bloomery, what: str, draw: random.Random) -> bool:
    """Begins or resumes the run with that fault, at a moment that `draw` decides; whether it struck."""
    words = bloomery.go_on if "resume" in bloomery.go_on else (*bloomery.go_on, *LONG)
    if ":" not in what:
        return kill_at_random(bloomery, what, draw, words)
    call = what.partition(":")[0]
    fault = f"{what}:when={draw.randint(1, draw.choice(CALLED[call]))}"
    told = bloomery.faulted(fault, *words)
    assert told.returncode in (0, 1, -signal.SIGKILL), (fault, told.returncode, told.stderr)
    assert "Traceback" not in told.stderr and "stumbled" not in told.stderr, (fault, told.stderr)
    return told.returncode != 0 or bloomery.injected()


def kill_at_random(
    bloomery: Bloomery, what: str, draw: random.Random, words: tuple[str, ...]
) -> bool:
    reached = max(
        (event.step for event in bloomery.events() if isinstance(event, StepDone)), default=0
    )
    target, delay, saves = reached + draw.randrange(4), draw.uniform(0, 0.1), "saving" in what
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

    if "launcher" in what:
        killed = bloomery.run_until(moment, signal.SIGKILL, *words) == -signal.SIGKILL
        wait_for(lambda: no_rank_lives(bloomery))
        return killed
    return kill_rank_when(bloomery, moment, draw.choice, *words)


@pytest.mark.soak
@pytest.mark.parametrize("chain", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_faults_of_each_kind_of_run_leave_no_trace(
    kind: str, chain: int, tmp_path, calm, struck: Struck
) -> None:
    """Chains of ten, each of which ends equal to the undisturbed run; those of a pipeline in turn on one device."""
    if why := why_no_strace():
        pytest.skip(why)
    draw = random.Random(f"{kind} {chain}")
    bloomery = workshop_of(kind, tmp_path)
    for what in planned_faults(kind, draw):
        misses = 0
        while not strike_at_random(bloomery, what, draw):
            misses += 1
            assert misses < MISSES, f"{what} strikes no run of {kind}"
            if any(
                isinstance(event, RunEnded) and event.status == "done"
                for event in bloomery.events()
            ):
                assert_bitwise_equal(bloomery.run_dir, calm(kind, *LONG).run_dir, step=STEPS)
                shutil.rmtree(bloomery.run_dir)  # it came too late: another run
        struck.append((kind, what))
    words = bloomery.go_on
    if kind == "pipeline" and chain % 2:
        words = ("resume", "one", *ONE_DEVICE)
    done = bloomery.run(*words, *(LONG if "train" in words else ()))
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(bloomery.run_dir, calm(kind, *LONG).run_dir, step=STEPS)
