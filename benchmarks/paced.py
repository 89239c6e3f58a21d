"""A training loop that takes a step when another process says so, and tells what the step cost.

Lines on standard input: `step` takes the next step, `watch` takes it with every allocation recorded, the end of input
ends the run. Each step is answered by a line of JSON on standard output; whatever else is printed goes to standard
error.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import psutil
from memory_tracker import held_bytes, recording


@dataclass
class Cost:
    """Of one optimizer step. `live_bytes` is None unless the step was watched."""

    seconds: float
    cpu_seconds: float
    resident_bytes: int  # the process at its largest during the step
    live_bytes: int | None
    loss: float | None = None
    learned: int | None = None  # labels that the step learned from, where the side counts them
    generation_seconds: float | None = None  # of the step, where it samples what it learns from
    played: dict[str, float] | None = (
        None  # calls and turns of an episode, where the step plays some
    )
    children_bytes: int | None = None  # at their largest, of a step that was watched


class Ended(Exception):
    """Raised out of `begin` when no more steps are wanted."""


class Pace:
    """`begin` waits for leave and starts the clock, `stop` halts it, `tell` answers."""

    def __init__(self) -> None:
        self.answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.watched = False
        self.cost: Cost | None = None

    def begin(self) -> None:
        asked = sys.stdin.readline().strip()
        if not asked:
            raise Ended
        self.stack, self.watched = ExitStack(), asked == "watch"
        gc.collect()
        if self.watched:
            self.held = held_bytes()
            self.peak = self.stack.enter_context(recording())
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of resident memory
        if self.watched:
            self.children = self.stack.enter_context(watched_children())
        self.wall, self.cpu = time.perf_counter(), cpu_seconds()

    def stop(self) -> None:
        wall, cpu = time.perf_counter() - self.wall, cpu_seconds() - self.cpu
        resident = peak_resident_bytes()
        self.stack.close()
        live = self.held + self.peak() if self.watched else None
        self.cost = Cost(wall, cpu, resident, live)
        if self.watched:
            self.cost.children_bytes = self.children.most

    def tell(
        self,
        loss: float | None,
        learned: int | None = None,
        generation_seconds: float | None = None,
        played: dict[str, float] | None = None,
    ) -> None:
        assert self.cost is not None, "a step was told of that never stopped"
        self.cost.loss, self.cost.learned = loss, learned
        self.cost.generation_seconds, self.cost.played = generation_seconds, played
        print(json.dumps(asdict(self.cost)), file=self.answers, flush=True)
        self.cost = None


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def children() -> list[psutil.Process]:
    """All that this process has started and that still run, and theirs."""
    return psutil.Process().children(recursive=True)


def cpu_seconds() -> float:
    """Of this process and its threads, and of all that it has started: those that ended count for who started them."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    for child in children():
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])
    return total


@dataclass
class MostMemory:
    most: int = 0  # bytes


@contextmanager
def watched_children() -> Iterator[MostMemory]:
    """The most memory that children have had at once, shared pages by share, as seen a few times a second."""
    seen, is_over = MostMemory(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            total = 0
            for child in children():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += child.memory_full_info().pss
            seen.most = max(seen.most, total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
