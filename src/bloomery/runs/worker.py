"""The child process of a run: `python -m bloomery.runs.worker prepare|train RUN_DIR --parent PID --report FD [...]`.

Torch is imported only after the signal handlers stand, so that a request to stop is heard from the first moment on.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from bloomery.core.child import die_with_parent, loading
from bloomery.core.errors import UserError, of_the_system
from bloomery.monitor.events import Emit, Event, EventLog, Phase, Resumed, StepDone, Warned
from bloomery.runs.folder import RunFolder
from bloomery.runs.signals import SAVE_SIGNAL, STOP_SIGNALS
from bloomery.runs.telemetry import PAUSE, Waiting
from bloomery.train.run import Diverged, OutOfMemory, Unsound

DONE, FAILED, STOPPED = 0, 1, 75
UNSOUND, MEMORY_FULL, DIVERGED = 3, 4, 5  # failures that a safer plan may prevent


@final
@dataclass
class StopFlag:
    """Set by signals. Before the first step of this process there is nothing to save: a request to stop ends it."""

    asked: bool = False
    step: int = 0  # the last that this process finished
    save_asked: bool = False
    emit: Emit | None = None

    def install(self) -> None:
        for number in (*STOP_SIGNALS, SAVE_SIGNAL):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE_SIGNAL})  # a request that came before is heard now

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self.save_asked = self.save_asked, False
        return asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            self.save_asked = True
            return
        first, self.asked = not self.asked, True
        if not self.step:
            os._exit(STOPPED)
        if first and self.emit is not None:
            with suppress(UserError):  # a full disk stops the run in its own place
                self.emit(Phase(step=self.step, name="stopping"))

    def watching(self, emit: Emit) -> Emit:
        """`emit`, noting each step; a request to stop is told at once, as a step may take a minute."""
        self.emit = emit

        def told(event: Event) -> None:
            self.step = event.step if isinstance(event, StepDone) else self.step
            emit(event)

        return told


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 done, 75 stopped and saved; of what the parent was told 1, or 3 (wrong kernel), 4 (memory full),
    5 (not finite).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("prepare", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--resumed", action="store_true")
    words = parser.parse_args(arguments)
    flag = StopFlag()
    if words.stage == "train":
        flag.install()
    die_with_parent(words.parent)
    folder = RunFolder(words.folder)
    try:
        with EventLog(folder.events) as emit:
            if words.stage == "prepare":
                return _prepare(folder, words.data, emit)
            return _train(folder, emit, flag, resumed=words.resumed)
    except (UserError, OSError) as failed:
        error = failed if isinstance(failed, UserError) else of_the_system(failed)
        if error is None:
            raise
        report = {"problem": error.problem, "where": error.where, "fix": error.fix, "code": error.code}
        os.write(words.report, json.dumps(report).encode())
        kinds = ((Unsound, UNSOUND), (OutOfMemory, MEMORY_FULL), (Diverged, DIVERGED))
        return next((code for kind, code in kinds if isinstance(error, kind)), FAILED)


def _prepare(folder: RunFolder, data: Path, emit: Emit) -> int:
    with loading():
        from bloomery.data.prepare.prepare import prepare
        from bloomery.data.prepare.workers import fewer_workers
        from bloomery.recipe.load import load_recipe

    loaded = load_recipe(folder.recipe)
    if (told := fewer_workers(loaded.recipe.data.num_proc)) is not None:
        emit(Warned(reason=told))
    prepare(loaded, data, report=paced(emit))
    return DONE


def paced(emit: Emit, seconds: float = 0.25) -> Callable[[str, float, float], None]:
    """Phases as events: the beginning and the end of each, and in between no more often than people can read."""
    told: dict[str, float] = {}

    def report(name: str, done: float, total: float) -> None:
        now = time.monotonic()
        if name not in told or done >= total > 0 or now - told[name] >= seconds:
            told[name] = now
            emit(Phase(name=name, done=done, total=total))

    return report


def _train(folder: RunFolder, emit: Emit, flag: StopFlag, *, resumed: bool) -> int:
    began = time.perf_counter()  # a length in wall time counts the import of torch
    with loading():
        from bloomery.plan.store import read_plan
        from bloomery.train.checkpoint import newest_valid
        from bloomery.train.length import Timer
        from bloomery.train.loop import run
        from bloomery.train.process import out_of_memory

    plan = read_plan(folder.plan)
    checkpoint = newest_valid(folder.checkpoints, on_damage=lambda told: emit(Warned(reason=told)))
    if resumed and checkpoint is None:
        emit(Resumed(path=""))
    waiting = Waiting(folder.path / PAUSE, flag.watching(emit))
    try:
        outcome = run(
            plan,
            run_dir=folder.path,
            emit=waiting.emit,
            stop=lambda: waiting.until(lambda: flag.asked),
            save_asked=flag.take_save,
            resume_from=checkpoint,
            timer=Timer(began),
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(  # memory ran out before there was a step: nothing can be cut smaller
            f"the device's memory is full: {str(error).partition('.')[0]}",
            where=f"train.micro_batch_size={plan.train.micro_batch_size}",
            fix="end what else uses it, or start again with a smaller model or optimizer.kind=adafactor",
        ) from error
    return DONE if outcome == "done" else STOPPED


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # everything is saved; taking torch and a driver down costs seconds, and some crash in it
