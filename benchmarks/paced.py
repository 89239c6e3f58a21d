"""A training loop that takes a step when another process says so, and tells what the step cost.

Lines on standard input: `step` takes the next step, `watch` takes it with every allocation recorded, the end of input
ends the run. Each step is answered by a line of JSON on standard output; whatever else is printed goes to standard
error.
"""

import gc
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

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
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        resident = peak_resident_bytes()
        self.stack.close()
        self.cost = Cost(wall, cpu, resident, self.held + self.peak() if self.watched else None)

    def tell(
        self,
        loss: float | None,
        learned: int | None = None,
        generation_seconds: float | None = None,
    ) -> None:
        assert self.cost is not None, "a step was told of that never stopped"
        self.cost.loss, self.cost.learned = loss, learned
        self.cost.generation_seconds = generation_seconds
        print(json.dumps(asdict(self.cost)), file=self.answers, flush=True)
        self.cost = None


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
