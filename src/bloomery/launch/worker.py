"""The child process of a run: `python -m bloomery.launch.worker prepare|train RUN_DIR --parent PID --report FD [...]`.

Torch is imported after the signal handlers are installed, so that a stop request works from the start. A rank has a
deadline: without progress it writes its stack into the run folder, and ends.
"""

import argparse
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, final

from bloomery.core.child import die_with_parent, loading
from bloomery.core.errors import UserError, of_the_system
from bloomery.core.files import open_regular, write_durably
from bloomery.core.run_folder import RunFolder
from bloomery.core.signals import SAVE_SIGNAL, STOP_SIGNALS
from bloomery.launch.exit_codes import (
    DIVERGED,
    DONE,
    FAILED,
    KERNEL_FAILED,
    LINK_FAILED,
    OUT_OF_MEMORY,
    STOPPED,
    UNSOUND,
)
from bloomery.launch.pausing import PAUSE, StepPauses
from bloomery.launch.stage_ends import HOSTS_FILE, STACKS
from bloomery.launch.supervisor import STACK_SIGNAL
from bloomery.monitor.events import Emit, Event, EventLog, Phase, Resumed, StepDone, Warned
from bloomery.parallel.environment import (
    LinkFailed,
    allow_descriptors,
    most_sockets,
    node_name,
)
from bloomery.train.failures import Diverged, KernelUnusable, OutOfMemory, Unsound
from bloomery.train.requests import Request, StepRequests

if TYPE_CHECKING:
    from bloomery.recipe.schema import Recipe

# Characters of each text of an error, of up to 6 bytes in JSON. The four of a report must fit into a pipe (64 KiB),
# which nobody reads until this process has ended.
MOST_REPORTED = 2500
LEAST_SECONDS = 120.0
MANY_STEPS = 2**31
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


@final
@dataclass
class StopFlag:
    """Set by signals. Before the first step of this process there is nothing to save: a stop request exits at once."""

    stop_requested: bool = False
    step: int = 0  # the last step that this process finished
    save_asked: bool = False
    emit: Emit | None = None

    def install(self) -> None:
        for number in (*STOP_SIGNALS, SAVE_SIGNAL):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE_SIGNAL})  # an earlier request arrives now

    def take_step(self, step: int) -> None:
        """From here on a stop saves.

        Of several ranks each takes the step before rank 0 reports it. A later rank that took it when it has emitted
        the event could still end without a save, at a stop by whoever has seen that event.
        """
        self.step = step

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        if not self.save_asked:
            return False
        # Reset only what was seen: a signal between a test and a reset in any case would be lost.
        self.save_asked = False
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            self.save_asked = True
            return
        is_first = not self.stop_requested
        self.stop_requested = True
        if not self.step:
            os._exit(STOPPED)
        if is_first and self.emit is not None:
            with suppress(UserError):  # the training loop reports a full disk
                self.emit(Phase(step=self.step, name="stopping"))

    def watching(self, emit: Emit) -> Emit:
        """`emit`, storing each step. A stop request emits an event at once, since a step may take a minute."""
        self.emit = emit

        def emit_event(event: Event) -> None:
            if isinstance(event, StepDone):
                self.take_step(event.step)
            emit(event)

        return emit_event


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 done, 75 stopped and saved; with a report to the parent 1, or 3 (wrong kernel), 4 (out of
    memory), 5 (not finite), 6 (GPUs cannot send to each other), 7 (attention kernel fails).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("prepare", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--notes", type=int)  # where the parent reads the last collectives
    parser.add_argument("--data", type=Path)
    parser.add_argument("--resumed", action="store_true")
    parser.add_argument("--no-check", dest="check_step", action="store_false")
    options = parser.parse_args(arguments)
    flag = StopFlag()
    if options.stage == "train":
        flag.install()
    die_with_parent(options.parent)
    folder = RunFolder(options.folder)
    try:
        with EventLog(folder.events) as emit:
            if options.stage == "prepare":
                return _prepare(folder, options.data, emit)
            return _train(
                folder,
                emit,
                flag,
                resumed=options.resumed,
                check_step=options.check_step,
                notes=options.notes,
            )
    except (UserError, OSError) as failed:
        error = failed if isinstance(failed, UserError) else of_the_system(failed)
        if error is None:
            raise
        texts = {
            "problem": error.problem,
            "where": error.where,
            "fix": error.fix,
            "host": error.host,
        }
        report = {name: text[:MOST_REPORTED] for name, text in texts.items()}
        entry = json.dumps({**report, "code": error.code}, ensure_ascii=False)
        os.write(options.report, entry.encode(errors="replace"))
        kinds = (
            (Unsound, UNSOUND),
            (OutOfMemory, OUT_OF_MEMORY),
            (Diverged, DIVERGED),
            (LinkFailed, LINK_FAILED),
            (KernelUnusable, KERNEL_FAILED),
        )
        return next((code for kind, code in kinds if isinstance(error, kind)), FAILED)


def _prepare(folder: RunFolder, data: Path, emit: Emit) -> int:
    with loading():
        from bloomery.data.prepare.prepare import prepare
        from bloomery.data.prepare.workers import fewer_workers
        from bloomery.recipe.load import load_recipe

    loaded_recipe = load_recipe(folder.recipe)
    _check_peft_settings(loaded_recipe.recipe)
    if (warning := fewer_workers(loaded_recipe.recipe.data.num_proc)) is not None:
        emit(Warned(reason=warning))
    prepare(loaded_recipe, data, report=throttle(emit))
    return DONE


def _check_peft_settings(recipe: "Recipe") -> None:
    """Raises UserError where PEFT refuses the adapter's settings, before hours may go into the dataset.

    PEFT imports torch, so that plans do not ask it.
    """
    if recipe.adapter.kind != "peft":
        return
    from bloomery.model.adapters.peft_methods import method_config
    from bloomery.model.configs import build_config
    from bloomery.plan.gather import planned_vocabulary

    config = build_config(recipe.model, vocab_size=planned_vocabulary(recipe))
    # Epochs are no number of steps before the dataset is counted: AdaLoRA's schedule is then taken to be long.
    steps = recipe.train.max_steps or MANY_STEPS
    method_config(recipe.adapter, config, steps=steps)


def throttle(emit: Emit, seconds: float = 0.25) -> Callable[[str, float, float], None]:
    """Phases as events: the start and the end of each, and between them one per `seconds`."""
    last_times: dict[str, float] = {}

    def report(name: str, units_done: float, total: float) -> None:
        current_time = time.monotonic()
        if (
            name not in last_times
            or units_done >= total > 0
            or current_time - last_times[name] >= seconds
        ):
            last_times[name] = current_time
            emit(Phase(name=name, done=units_done, total=total))

    return report


def _train(
    folder: RunFolder,
    emit: Emit,
    flag: StopFlag,
    *,
    resumed: bool,
    check_step: bool,
    notes: int | None,
) -> int:
    began = time.perf_counter()  # train.max_time includes the import of torch
    if int(os.environ.get("RANK", "0")) == 0:
        emit(Phase(step=flag.step, name="libraries"))
    with loading():
        from bloomery.check.products import product_problem
        from bloomery.check.run_start import checked_plan
        from bloomery.infer.model_folder import clear_drafts
        from bloomery.parallel.preflight import check_binding, check_ranks, meet
        from bloomery.parallel.process_group import leave
        from bloomery.plan.store import read_plan
        from bloomery.train.loop import run
        from bloomery.train.process import out_of_memory
        from bloomery.train.recover import agreed_checkpoint
        from bloomery.train.run_clock import Timer

    plan = read_plan(folder.plan)
    deadline = (
        Deadline(folder.path, int(os.environ.get("RANK", "0"))) if plan.train.ranks > 1 else None
    )
    if deadline is not None:
        deadline.meet()
        rank = int(os.environ.get("RANK", "0"))
        allow_descriptors(most_sockets(plan.train, rank), who=f"rank {rank} on {node_name()}")
    mesh = meet(plan.train)
    if notes is not None:
        mesh.clock.notes.write_to(notes)
    if deadline is not None:
        deadline.arm()
    checked = check_ranks(mesh, plan, folder.path, product_problem=product_problem)
    if checked is not None:
        mesh = replace(mesh, hosts=checked.hosts)
        if checked.link is not None:
            mesh = replace(mesh, sends_from_device=checked.link.transport == "device")
    if mesh.first_rank and checked is not None:
        with suppress(OSError):  # the folder is missing without a deadline, or the disk is full
            write_durably(folder.path / STACKS / HOSTS_FILE, json.dumps(checked.hosts))
        print(f"preflight: {checked} ({checked.seconds:.2f} s)", flush=True)
    emit = emit if mesh.first_rank else _no_event
    binding = check_binding(mesh)
    if mesh.first_rank and binding is not None:
        for line in binding.lines:
            print(f"binding: {line}", flush=True)
        if binding.warning:
            emit(Warned(reason=binding.warning))
    for slow_link in () if checked is None else checked.rates.slow_links():
        emit(Warned(reason=slow_link))
    if mesh.first_rank:
        clear_drafts(folder.checkpoints)
    checkpoint = agreed_checkpoint(
        mesh, folder.checkpoints, lambda reason: emit(Warned(reason=reason))
    )
    if resumed and checkpoint is None:
        emit(Resumed(path=""))
    pause = folder.path / PAUSE

    def own_request() -> Request:
        # One rank looks for the file, as at many ranks all of them would ask one file server at each step.
        is_paused = mesh.first_rank and pause.exists()
        return Request(flag.stop_requested, is_paused, flag.take_save())

    requests = StepRequests(own_request, mesh.all_reduce_max, flag.take_step)
    pauses = StepPauses(flag.watching(emit), requests.now)

    def progress() -> None:
        if deadline is not None:
            deadline.arm()

    def stop() -> bool:
        should_stop = pauses.wait(progress)
        if should_stop and mesh.world > 1:  # for the launcher, which ends ranks that never agree
            emit(Phase(step=flag.step, name="saving"))
        return should_stop

    def emit_event(event: Event) -> None:
        if deadline is not None:
            deadline.note(event)
        pauses.emit(event)

    try:
        ready = checked_plan(
            plan,
            folder.path,
            emit_event,
            mesh,
            resumes=checkpoint is not None,
            check_step=check_step,
        )
        outcome = run(
            ready.plan,
            run_dir=folder.path,
            emit=emit_event,
            stop=stop,
            requests=requests,
            resume_from=checkpoint,
            timer=Timer(began),
            mesh=mesh,
            before_save=lambda: None if deadline is None else deadline.extend(),
            build_seconds=ready.build_seconds,
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).partition(".")[0]  # a MemoryError of Python has none
        raise UserError(  # a smaller micro-batch does not help
            "out of memory outside a training step" + (f": {reason}" if reason else ""),
            where=f"model and data on {plan.train.device}",
            fix="close other programs that use its memory, or use a smaller model or optimizer.kind=adafactor",
        ) from error
    leave(mesh)
    return DONE if outcome == "done" else STOPPED


def _no_event(_event: Event) -> None:
    """One rank writes the events."""


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved; a normal exit of torch and a driver takes seconds, and may crash.
    os._exit(exit_code)
