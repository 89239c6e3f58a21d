"""`bloomery stop RUN` and `bloomery save RUN`: ask the process of a run, and wait for the result. No torch"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import click
from rich.console import Console

from bloomery.cli.common import echo, literal, run_argument
from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.run_folder import RunFolder, existing, find_run, find_sweep, is_sweep
from bloomery.core.run_lock import alive, beats, holder_of, host_name, start_mark
from bloomery.core.signals import SAVE_SIGNAL
from bloomery.core.units import counted, format_bytes
from bloomery.infer.model_folder import NOT_SAVED, saved_steps, step_folder
from bloomery.launch.launchers import message_in
from bloomery.monitor.events import (
    Event,
    Phase,
    Recovered,
    RunEnded,
    Saved,
    StepDone,
    Warned,
    follow_events,
    read_events,
)
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.runs.event_hub import last_step
from bloomery.train.diagnostics.profile_request import NOT_RECORDED, PROFILE, PROFILE_ASKED
from bloomery.view.incidents import KILLED

POLL_SECONDS = 0.2


@final
@dataclass(frozen=True)
class Runner:
    """The process that runs a training, identified by the lock; a later process with the same pid is not it.

    `slurm_job`: its job, when it is on another host and Slurm takes the signals there.
    """

    folder: RunFolder
    entry: dict[str, Any]
    slurm_job: str = ""

    @property
    def pid(self) -> int:
        return int(self.entry["pid"])

    @property
    def working(self) -> bool:
        """Whether the process still holds the lock; it may outlive the run."""
        lives = beats(self.folder.lock) if self.slurm_job else alive(self.entry)
        return holder_of(self.folder.lock) == self.entry and lives

    def send(self, signal_number: int) -> None:
        """Sends a signal. Raises UserError when the process has ended, or belongs to another user."""
        if self.slurm_job:
            _signal_job(self.slurm_job, signal.Signals(signal_number))
            return
        try:
            with ExitStack() as stack:
                # An open handle prevents that the pid is reused between check and signal.
                handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
                if handle is not None:
                    stack.callback(os.close, handle)
                if start_mark(self.pid) != self.entry["started"]:
                    raise ProcessLookupError
                if handle is None:
                    os.kill(self.pid, signal_number)
                else:
                    signal.pidfd_send_signal(handle, signal_number)
        except ProcessLookupError as error:
            raise _idle(self.folder) from error
        except PermissionError as error:
            problem = f"permission denied: process {self.pid} belongs to another user"
            fix = "run this command as that user"
            raise UserError(problem, where=str(self.folder.path), fix=fix) from error


def runner_of(folder: RunFolder) -> Runner:
    """The process of the run, on this host. Raises UserError when there is none, or it cannot receive signals."""
    entry = holder_of(folder.lock) if folder.lock.exists() else {}
    # The lock of another machine is believed only while that machine updates it.
    on_other_host = bool(entry) and entry["host"] != host_name()
    if on_other_host and beats(folder.lock):
        if (job := slurm_job_of(folder)) and shutil.which("scancel"):
            return Runner(folder, entry, job)
        problem = f"the run is on another machine: process {entry['pid']} on {entry['host']}"
        fix = f"run the same command on {entry['host']}"
        raise UserError(problem, where=str(folder.path), fix=fix)
    if on_other_host or not alive(entry):
        raise _idle(folder)
    if not entry.get("receives_signals", False):
        process = f"process {entry['pid']} trains outside its main thread"
        problem = f"{process}, where Python receives no signals"
        raise UserError(problem, where=str(folder.path), fix="stop it in that program")
    return Runner(folder, entry)


def slurm_job_of(folder: RunFolder) -> str:
    """The number of the Slurm job that trains this run; "" where another launcher or none started it."""
    message = message_in(folder)
    if message is None:  # one rank alone, from a job script of `bloomery slurm`
        named = re.search(r"-slurm-(\d+)\.\d+$", folder.path.name)
        return "" if named is None else named[1]
    launcher, _, step = message.job.partition("-")
    return step.partition(".")[0] if launcher == "slurm" else ""


def _signal_job(job: str, number: signal.Signals) -> None:
    """Sends a signal to the ranks of a Slurm job, as its time limit does. Raises UserError with Slurm's own words."""
    from bloomery.launch.job_script import SLURM_SECONDS

    name = number.name.removeprefix("SIG")
    try:
        answer = subprocess.run(
            ["scancel", f"--signal={name}", job],
            capture_output=True,
            text=True,
            timeout=SLURM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"scancel did not answer within {SLURM_SECONDS:g} s"
        fix = f"check with `squeue --job {job}` whether Slurm answers, then run this again"
        raise UserError(problem, where=f"job {job}", fix=fix) from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        problem = f"Slurm did not pass on the request: {reason.removeprefix('scancel: error: ')}"
        raise UserError(problem, where=f"job {job}", fix=f"check it with `squeue --job {job}`")


def _idle(folder: RunFolder) -> UserError:
    if is_sweep(folder.path):
        fix = f"bloomery report {folder.name}"
        return UserError("no process trains this sweep", where=str(folder.path), fix=fix)
    fix = f"bloomery resume {folder.name}"
    if (job := slurm_job_of(folder)) and shutil.which("scancel"):
        fix = f"if its job waits in the queue (`squeue --job {job}`): scancel {job}; else {fix}"
    return UserError("no process is training this run", where=str(folder.path), fix=fix)


def stop_run(runner: Runner, *, on_event: Callable[[Event], None]) -> RunEnded | None:
    """Requests a save and a stop; returns the final event. None when the process exited without one."""
    final_event = None
    for event in _events_after(runner, partial(_send_stop, runner)):
        on_event(event)
        if isinstance(event, RunEnded):
            final_event = event
    if final_event is not None:
        return final_event

    # A run that was about to end had written its final event before the request.
    start_time = runner.entry.get("since", math.inf)
    for event in deque(read_events(runner.folder.events), maxlen=1):
        if isinstance(event, RunEnded) and event.time >= start_time:
            return event
    return None


def _send_stop(runner: Runner) -> None:
    """Asks the run to save and stop. Raises UserError.

    A Slurm job gets the same signal at its time limit, and then returns to the queue: a file says that it must not.
    """
    request = runner.folder.stop_request
    if not slurm_job_of(runner.folder):
        runner.send(signal.SIGTERM)
        return
    try:
        request.touch()
        runner.send(signal.SIGTERM)
    except UserError:
        request.unlink(missing_ok=True)
        raise
    except OSError as error:
        problem = f"cannot write the request file to the run folder: {error.strerror}"
        fix = "correct its permissions or free disk space, then run this again"
        raise UserError(problem, where=str(request), fix=fix) from error


def save_run(runner: Runner, *, on_event: Callable[[Event], None]) -> Saved:
    """Requests a checkpoint after the current step; returns when it is saved.

    Ignores an older checkpoint that was still being written. Raises UserError when the checkpoint cannot be written,
    or the run ends before.
    """
    step = last_step(runner.folder)
    for event in _events_after(runner, partial(runner.send, SAVE_SIGNAL)):
        on_event(event)
        if isinstance(event, Recovered):  # maybe at an earlier step
            step = min(step, event.step)
        if isinstance(event, Saved) and event.step >= step and not event.weights_only:
            return event
        if isinstance(event, Warned) and NOT_SAVED in event.reason and event.step >= step:
            fix = "free disk space or correct the folder's permissions, then run this again"
            raise UserError(event.reason, where=str(runner.folder.checkpoints), fix=fix)
    raise _ended_before(runner)


def profile_run(runner: Runner, steps: int, *, on_event: Callable[[Event], None]) -> Path:
    """Requests a profile of the next steps; returns the path of its files without their suffixes.

    Raises UserError when they cannot be written, or the run ends before.
    """
    # The number of steps does not fit into a signal: the training process looks for this file.
    request_file = runner.folder.path / PROFILE_ASKED
    try:
        for event in _events_after(runner, lambda: write_durably(request_file, str(steps))):
            on_event(event)
            if isinstance(event, Phase) and event.name == PROFILE:
                if event.total and event.done >= event.total:
                    # The files are named after the first profiled step.
                    first_step = event.step - int(event.total) + 1
                    return runner.folder.path / PROFILE / f"step-{first_step:08d}"
            elif isinstance(event, Warned) and NOT_RECORDED in event.reason:
                fix = "free disk space or correct the folder's permissions, then run this again"
                raise UserError(event.reason, where=str(runner.folder.path), fix=fix)
    except OSError as error:
        problem = f"cannot write the request file to the run folder: {error.strerror}"
        fix = "correct its permissions or free disk space, then run this again"
        raise UserError(problem, where=str(runner.folder.path), fix=fix) from error
    finally:
        with suppress(OSError):
            request_file.unlink(missing_ok=True)
    raise _ended_before(runner)


def _ended_before(runner: Runner) -> UserError:
    fix = f"`bloomery resume {runner.folder.name}`; `bloomery runs` lists how each run ended"
    return UserError("the run ended before its next step", where=str(runner.folder.path), fix=fix)


def _events_after(runner: Runner, send_request: Callable[[], None]) -> Iterator[Event]:
    """Sends the request; yields the events after it until the process ends."""
    events = runner.folder.events
    size = events.stat().st_size if events.exists() else 0
    send_request()
    yield from follow_events(events, lambda: not runner.working, start=size)


@click.command()
@run_argument
def stop_command(run: str) -> int:
    """Save a running run after its current step, then stop it.

    Of a sweep all its runs; the command that began the sweep continues it.

    Example: bloomery stop last
    """
    sweep = find_sweep(run)
    if sweep is not None:
        _stop_sweep(sweep)
        return 0
    folder = existing(find_run(run))
    runner = runner_of(folder)
    echo(f"requested  process {runner.pid} saves and stops after its current step")
    with waiting(folder.path) as on_event:
        final_event = stop_run(runner, on_event=on_event)

    # The run may also have been done, or have failed, before the request reached it.
    if final_event is None or final_event.status == "failed":
        reason = KILLED
        if final_event is not None:
            reason = final_event.error
        problem = f"the run failed before it stopped: {reason}"
        raise UserError(problem, where=str(folder.log), fix=f"bloomery resume {folder.name}")
    steps = saved_steps(folder.checkpoints)
    checkpoint = "no checkpoint yet"
    if steps:
        checkpoint = f"saved in {step_folder(folder.checkpoints, steps[-1])}"
    echo(f"{final_event.status:<11}at step {final_event.step:,}; {checkpoint}")
    if final_event.status == "stopped":
        echo(f"next       bloomery resume {folder.name}")
    return 0


def _stop_sweep(sweep: Path) -> None:
    """Asks the process of a sweep to save and stop its runs, and waits until it has ended. Raises UserError."""
    from bloomery.sweep.table import read_sweep

    runner = runner_of(RunFolder(sweep.absolute()))
    runner.send(signal.SIGTERM)
    echo(f"requested  process {runner.pid} saves and stops the runs that train")
    with waiting(sweep):
        while runner.working:
            time.sleep(POLL_SECONDS)
    table = read_sweep(sweep, noise=False)
    echo(f"{table.state:<11}{len(table.finished)} of {counted(len(table.runs), 'runs')} finished")
    if table.command and table.state == "stopped":
        echo(f"next       {shlex.join(['bloomery', *table.command])}")


@click.command()
@run_argument
@click.option(
    "--profile",
    "steps",
    type=click.IntRange(1, LONGEST_PROFILE),
    metavar="STEPS",
    help="Instead profile the next STEPS steps.",
)
def save_command(run: str, steps: int | None) -> int:
    """Save a checkpoint of a running run after its current step.

    Example: bloomery save last
    """
    folder = existing(find_run(run))
    runner = runner_of(folder)
    if steps is not None:
        echo(f"requested  process {runner.pid} profiles its next {steps} steps")
        with waiting(folder.path) as on_event:
            profile = profile_run(runner, steps, on_event=on_event)
        viewers = "open in https://ui.perfetto.dev or chrome://tracing"
        echo(f"trace      {profile}.trace.json.gz ({viewers})")
        echo(f"tables     {profile}.operators.txt, {profile.name}.memory.txt")
        return 0

    echo(f"requested  process {runner.pid} saves after its current step")
    with waiting(folder.path) as on_event:
        saved = save_run(runner, on_event=on_event)
    echo(f"saved      step {saved.step:,}, {format_bytes(saved.bytes)}: {saved.path}")
    return 0


@contextmanager
def waiting(folder: Path) -> Iterator[Callable[[Event], None]]:
    """Inside the block a status line on a terminal shows the run's progress, from the events passed to the callback."""
    text = f"waiting for {folder.name}"
    with Console(stderr=True).status(literal(text)) as status:

        def on_event(event: Event) -> None:
            match event:
                case StepDone():
                    status.update(literal(f"{text}: step {event.step:,} done"))
                case Saved():
                    status.update(literal(f"{text}: step {event.step:,} saved"))
                case Phase():
                    status.update(literal(f"{text}: {event.name}"))

        yield on_event
