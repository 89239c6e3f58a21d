"""The deadline of a rank: without progress it writes its stack into the run folder, and ends. No torch."""

import faulthandler
import os
import statistics
from collections import deque
from pathlib import Path
from typing import final

from bloomery.core.files import open_regular
from bloomery.launch.stage_ends import STACKS
from bloomery.launch.supervisor import STACK_SIGNAL
from bloomery.monitor.events import Event, StepDone

LEAST_SECONDS = 120.0
STEPS = 20  # of the median time: a longer step hangs
MEET_SECONDS = (
    900.0  # until all ranks have arrived (`process_group.JOIN_SECONDS`) and are connected
)
FIRST_SECONDS = 1800.0  # before the first step: a compilation, a slow file system, the other ranks
SAVE_SECONDS = 1800.0
# The variable that replaces LEAST_SECONDS; the other limits become ten times as long.
OVERRIDE = "BLOOMERY_HANG_SECONDS"


@final
class Deadline:
    """Armed before each step, each batch of an evaluation and each save; the timer needs no Python thread."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        folder = run_dir / STACKS
        folder.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.fdopen(open_regular(folder / f"rank-{rank}.txt", flags), "w")
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True)
        override = float(os.environ.get(OVERRIDE, "0"))
        self._least = override or LEAST_SECONDS
        self._first, self._save = (
            (10 * override, 10 * override) if override else (FIRST_SECONDS, SAVE_SECONDS)
        )
        self._meet = 10 * override or MEET_SECONDS
        self._seconds = deque[float](maxlen=50)  # of the last steps

    def meet(self) -> None:
        """Before this rank meets the others."""
        self._set(self._meet)

    def arm(self) -> None:
        """There is progress: from now on a step may take its time."""
        step_seconds = STEPS * statistics.median(self._seconds) if self._seconds else self._first
        self._set(
            max(
                self._least,
                step_seconds if self._least == LEAST_SECONDS or not self._seconds else 0.0,
            )
        )

    def extend(self) -> None:
        """A save or a rewind may follow."""
        self._set(max(self._save, self._least))

    def note(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._seconds.append(event.step_seconds)

    def _set(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def close(self) -> None:
        """Without the timer from here on."""
        faulthandler.cancel_dump_traceback_later()
