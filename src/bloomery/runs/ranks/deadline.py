"""The deadline of a rank: without progress it writes its stack into the run folder, and ends. No torch."""

import faulthandler
import os
import statistics
from collections import deque
from pathlib import Path
from typing import final

from bloomery.monitor.events import Event, StepDone
from bloomery.runs.supervisor import STACK_SIGNAL, STACKS

LEAST_SECONDS = 120.0
STEPS = 20  # of the median time: a longer step hangs
MEET_SECONDS = 900.0  # until all ranks have arrived (`mesh.JOIN_SECONDS`) and are connected
FIRST_SECONDS = 1800.0  # before the first step: a compilation, a slow file system, the other ranks
SAVE_SECONDS = 1800.0
OVERRIDE = "BLOOMERY_HANG_SECONDS"  # variable: replaces LEAST_SECONDS; the others become ten times as long


@final
class Deadline:
    """Armed before each step, each batch of an evaluation and each save; the timer needs no Python thread."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        folder = run_dir / STACKS
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"rank-{rank}.txt").open("w", encoding="utf-8")
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True)
        given = float(os.environ.get(OVERRIDE, "0"))
        self._least = given or LEAST_SECONDS
        self._first, self._save = (10 * given, 10 * given) if given else (FIRST_SECONDS, SAVE_SECONDS)
        self._meet = 10 * given or MEET_SECONDS
        self._seconds = deque[float](maxlen=50)  # of the last steps

    def meet(self) -> None:
        """Before this rank meets the others."""
        self._set(self._meet)

    def arm(self) -> None:
        """There is progress: from now on a step may take its time."""
        wanted = STEPS * statistics.median(self._seconds) if self._seconds else self._first
        self._set(max(self._least, wanted if self._least == LEAST_SECONDS or not self._seconds else 0.0))

    def extend(self) -> None:
        """A save may follow."""
        self._set(max(self._save, self._least))

    def note(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._seconds.append(event.step_seconds)

    def _set(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def close(self) -> None:
        """Without the timer from here on."""
        faulthandler.cancel_dump_traceback_later()
