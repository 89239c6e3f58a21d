"""Commands about runs: `runs` lists them, `stop` and `save` ask a running one, `watch` shows one. No torch.

`stop` and `save` send a request to the process of the run, and wait for the result. `watch` only reads.
"""

import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, final

import click
from rich.console import Console
from rich.live import Live

from bloomery.cli.cleaning import clean_command, rm_command
from bloomery.cli.common import echo, json_option, literal, print_json, run_argument
from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.units import format_bytes
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import (
    Event,
    Phase,
    Recovered,
    RunEnded,
    Saved,
    StepDone,
    Tail,
    Warned,
    follow,
    read_events,
)
from bloomery.monitor.screen import Screen, WatchedRun, frame, picture
from bloomery.monitor.sinks import metrics_of
from bloomery.monitor.summary import RunFacts, RunSummary, summary_of
from bloomery.plan.explained import run_facts
from bloomery.plan.store import read_plan
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.runs.event_hub import last_step
from bloomery.runs.folder import (
    RunFolder,
    alive,
    all_runs,
    beats,
    find_run,
    holder_of,
    host_name,
    start_mark,
    worked_on,
)
from bloomery.runs.signals import SAVE_SIGNAL
from bloomery.train.model_folder import NOT_SAVED
from bloomery.train.run import NOT_RECORDED, PROFILE, PROFILE_ASKED, name_of


@final
@dataclass(frozen=True)
class Runner:
    """The process that runs a training, identified by the lock; a later process with the same pid is not it."""

    folder: RunFolder
    entry: dict[str, Any]

    @property
    def pid(self) -> int:
        return int(self.entry["pid"])

    @property
    def working(self) -> bool:
        """Whether it still holds the lock; the process itself may outlive the run."""
        return holder_of(self.folder.lock) == self.entry and alive(self.entry)

    def send(self, number: int) -> None:
        """Raises UserError when the process has ended, or belongs to another user."""
        try:
            with ExitStack() as stack:
                # An open handle prevents that the pid is reused between check and signal.
                handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
                if handle is not None:
                    stack.callback(os.close, handle)
                if start_mark(self.pid) != self.entry["started"]:
                    raise ProcessLookupError
                if handle is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(handle, number)
        except ProcessLookupError as error:
            raise _idle(self.folder) from error
        except PermissionError as error:
            raise UserError(
                f"permission denied: process {self.pid} belongs to another user",
                where=str(self.folder.path),
                fix="run this command as that user",
            ) from error


def runner_of(folder: RunFolder) -> Runner:
    """The process of the run, on this host. Raises UserError when there is none, or it cannot receive signals."""
    entry = holder_of(folder.lock) if folder.lock.exists() else {}
    elsewhere = bool(entry) and entry["host"] != host_name()
    if elsewhere and beats(folder.lock):
        raise UserError(
            f"the run is on another machine: process {entry['pid']} on {entry['host']}",
            where=str(folder.path),
            fix=f"run the same command on {entry['host']}",
        )
    if elsewhere or not alive(entry):
        raise _idle(folder)
    if not entry.get("receives_signals", False):
        raise UserError(
            f"process {entry['pid']} trains outside its main thread, where Python receives no signals",
            where=str(folder.path),
            fix="stop it in that program",
        )
    return Runner(folder, entry)


def _idle(folder: RunFolder) -> UserError:
    return UserError(
        "no process is training this run",
        where=str(folder.path),
        fix=f"bloomery resume {folder.name}",
    )


def stop_run(runner: Runner, *, on_event: Callable[[Event], None]) -> RunEnded | None:
    """Requests a save and a stop; returns the final event. None when the process exited without one."""
    ended = None
    for event in _events_after(runner, partial(runner.send, signal.SIGTERM)):
        on_event(event)
        ended = event if isinstance(event, RunEnded) else ended
    if ended is None:  # a run that was about to end had already written its final event
        for event in deque(read_events(runner.folder.events), maxlen=1):
            mine = event.time >= runner.entry.get("since", math.inf)
            ended = event if mine and isinstance(event, RunEnded) else None
    return ended


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
            raise UserError(
                event.reason,
                where=str(runner.folder.checkpoints),
                fix="free disk space or correct the folder's permissions, then run this again",
            )
    raise _ended_before(runner)


def profile_run(runner: Runner, steps: int, *, on_event: Callable[[Event], None]) -> Path:
    """Requests a profile of the next steps; returns the path of its files without their suffixes.

    Raises UserError when they cannot be written, or the run ends before.
    """
    asked = runner.folder.path / PROFILE_ASKED
    try:
        for event in _events_after(runner, lambda: write_durably(asked, str(steps))):
            on_event(event)
            if (
                isinstance(event, Phase)
                and event.name == PROFILE
                and event.total
                and event.done >= event.total
            ):
                return (
                    runner.folder.path / PROFILE / f"step-{event.step - int(event.total) + 1:08d}"
                )
            if isinstance(event, Warned) and NOT_RECORDED in event.reason:
                raise UserError(
                    event.reason,
                    where=str(runner.folder.path),
                    fix="free disk space or correct the folder's permissions, then run this again",
                )
    except OSError as error:
        raise UserError(
            f"cannot write the request file to the run folder: {error.strerror}",
            where=str(runner.folder.path),
            fix="correct its permissions or free disk space, then run this again",
        ) from error
    finally:
        with suppress(OSError):
            asked.unlink(missing_ok=True)
    raise _ended_before(runner)


def _ended_before(runner: Runner) -> UserError:
    return UserError(
        "the run ended before its next step",
        where=str(runner.folder.path),
        fix=f"`bloomery resume {runner.folder.name}`; `bloomery runs` lists how each run ended",
    )


def _events_after(runner: Runner, ask: Callable[[], None]) -> Iterator[Event]:
    """Sends the request by `ask`; yields the events after it until the process ends."""
    events = runner.folder.events
    size = events.stat().st_size if events.exists() else 0
    ask()
    yield from follow(events, lambda: not runner.working, start=size)


_HEAD = ("run", "state", "step", "loss", "val bpb", "on disk")


@dataclass(frozen=True)
class RunLine:
    """`state`: running, done, stopped, failed, killed, unreadable. `command` resumes it; None when it is done."""

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    bits_per_byte: float | None
    bytes: int
    command: str | None


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the runs in runs/, newest last, and the commands that resume them.

    Example: bloomery runs --json
    """
    if context.invoked_subcommand is not None:
        return
    lines = [describe(folder) for folder in all_runs()]
    if as_json:
        print_json({"runs": [asdict(line) for line in lines]})
        return
    if not lines:
        echo("no runs in runs/; start one with `bloomery demo` or `bloomery train RECIPE`")
        return
    rows = [_HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    room = shutil.get_terminal_size((sum(widths) + 2 * len(widths), 24)).columns
    # a narrow terminal shows fewer columns
    while sum(widths) + 2 * (len(widths) - 1) > room and len(widths) > 3:
        widths.pop()
    for row in rows:
        name, state, *figures = (
            cell.rjust(width) for cell, width in zip(row, widths, strict=False)
        )
        echo(
            "  ".join(
                [name.strip().ljust(widths[0]), state.strip().ljust(widths[1]), *figures]
            ).rstrip()
        )
    for number, resume in enumerate([line.command for line in lines if line.command][-3:]):
        echo(f"{'' if number else 'next':<11}{resume}")


command.add_command(rm_command)
command.add_command(clean_command)


def describe(folder: Path) -> RunLine:
    """Read from the run's events and its lock."""
    from bloomery.runs.folder import worked_on
    from bloomery.train.run import contradicted, name_of

    try:
        summary = summary_of(read_events(folder / "events.jsonl"))
        unknown = "killed"
    except UserError:
        summary = RunSummary()
        unknown = "unreadable"
    state = "running" if worked_on(folder) else unknown
    if (
        state != "running"
        and summary.ended is not None
        and not contradicted(folder, summary.ended, summary.step)
    ):
        state = summary.ended.status
    return RunLine(
        name=folder.name,
        state=state,
        step=summary.step,
        steps=summary.steps,
        loss=summary.smoothed,
        bits_per_byte=summary.evaluation.bits_per_byte if summary.evaluation else None,
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        command=None
        if state in ("running", "done")
        else f"bloomery resume {name_of(folder.absolute())}",
    )


def _cells(line: RunLine) -> tuple[str, ...]:
    return (
        line.name,
        line.state,
        f"{line.step:,}" + (f"/{line.steps:,}" if line.steps else ""),
        "" if line.loss is None else f"{line.loss:.3f}",
        "" if line.bits_per_byte is None else f"{line.bits_per_byte:.3f}",
        format_bytes(line.bytes),
    )


@click.command()
@run_argument
def stop_command(run: str) -> int:
    """Save a running run after its current step, then stop it.

    Example: bloomery stop last
    """
    from bloomery.runs.supervisor import existing
    from bloomery.train.model_folder import saved_steps, step_folder

    folder = existing(find_run(run))
    runner = runner_of(folder)
    echo(f"requested  process {runner.pid} saves and stops after its current step")
    with waiting(folder.path) as on_event:
        ended = stop_run(runner, on_event=on_event)
    if ended is None or ended.status == "failed":
        reason = "process killed without a final event" if ended is None else ended.error
        fix = f"bloomery resume {folder.name}"
        raise UserError(
            f"the run failed before it stopped: {reason}", where=str(folder.log), fix=fix
        )
    steps = saved_steps(folder.checkpoints)
    saved = (
        f"saved in {step_folder(folder.checkpoints, steps[-1])}" if steps else "no checkpoint yet"
    )
    echo(f"{ended.status:<11}at step {ended.step:,}; {saved}")
    if ended.status == "stopped":
        echo(f"next       bloomery resume {folder.name}")
    return 0


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
    from bloomery.core.units import format_bytes
    from bloomery.runs.supervisor import existing

    folder = existing(find_run(run))
    runner = runner_of(folder)
    if steps is not None:
        echo(f"requested  process {runner.pid} profiles its next {steps} steps")
        with waiting(folder.path) as on_event:
            files = profile_run(runner, steps, on_event=on_event)
        echo(
            f"trace      {files}.trace.json.gz (open in https://ui.perfetto.dev or chrome://tracing)"
        )
        echo(f"tables     {files}.operators.txt, {files.name}.memory.txt")
        return 0
    echo(f"requested  process {runner.pid} saves after its current step")
    with waiting(folder.path) as on_event:
        saved = save_run(runner, on_event=on_event)
    echo(f"saved      step {saved.step:,}, {format_bytes(saved.bytes)}: {saved.path}")
    return 0


@contextmanager
def waiting(folder: Path) -> Iterator[Callable[[Event], None]]:
    """Inside the block a status line on a terminal shows the run's progress, from the events passed to the callback."""
    from rich.console import Console

    with Console(stderr=True).status(literal(f"waiting for {folder.name}")) as status:

        def on_event(event: Event) -> None:
            if isinstance(event, StepDone | Saved):
                done = "done" if isinstance(event, StepDone) else "saved"
                status.update(literal(f"waiting for {folder.name}: step {event.step:,} {done}"))
            elif isinstance(event, Phase):
                status.update(literal(f"waiting for {folder.name}: {event.name}"))

        yield on_event


WIDTH = 100  # without a terminal
REDRAW_SECONDS = 0.5


@click.command()
@run_argument
@click.option(
    "--once", is_flag=True, help="Print one picture, then exit (default without a terminal)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def watch_command(run: str, once: bool, as_json: bool) -> None:
    """Show loss, evaluations, speed, GPUs, samples and warnings of a run.

    RUN is a path, a name under runs/, or `last`. Ctrl+C closes the view; training continues.

    Example: ssh -t that-machine 'cd my-models && bloomery watch last'
    """
    folder = find_run(run)
    watched = _Watch(folder)
    if as_json:
        print_json(watched.document())
        return
    if not once and sys.stdout.isatty() and worked_on(folder):
        try:
            watched.follow()
        except KeyboardInterrupt:
            echo(f"Training continues. Stop it with `bloomery stop {watched.name}`.")
            return
    watched.print()


class _Watch:
    """The run in its present state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = WatchedRun()
        self._tail = Tail(folder / "events.jsonl")
        self._plain = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        self._facts: RunFacts | None = None
        self.name = name_of(folder.absolute())  # as an argument of commands

    def print(self) -> None:
        status, facts = self._read()
        screen = Screen(get_terminal_size((WIDTH, 40)).columns, None, self._plain)
        for line in frame(self._run, facts, screen, state=status, now=time.time()):
            echo(line)
        tail = self._tail
        if tail.unknown_lines > 1:  # a kill truncates one line
            unknown = f"{tail.unknown_lines:,} of {tail.read_lines:,} lines of events.jsonl"
            echo(f"\n{unknown} are damaged or of another version")
        again = f"bloomery watch {self.name}     in a terminal: live view"
        commands = {
            "done": f"bloomery report {self.name}",
            "running": again,
            "paused": again,
            "stopping": f"bloomery resume {self.name}   after it has stopped",
        }
        echo(f"\n{'next':<11}{commands.get(status, f'bloomery resume {self.name}')}")

    def follow(self) -> None:
        """Redraws the view until the process of the run ends."""
        console = Console(highlight=False)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while worked_on(self._folder):
                status, facts = self._read()
                screen = Screen(console.size.width, console.size.height, self._plain)
                live.update(
                    picture(self._run, facts, screen, state=status, now=time.time()), refresh=True
                )
                time.sleep(REDRAW_SECONDS)

    def document(self) -> dict[str, Any]:
        """For programs: the keys of metrics.json and the present state."""
        status, facts = self._read()
        run = self._run
        summary = self._run.summary
        running = status == "running"
        return {
            "run": facts.name,
            "folder": str(self._folder),
            **metrics_of(summary),
            "status": status,
            "phase": summary.phase.name if summary.phase is not None and running else None,
            "max_steps": summary.steps or facts.steps,
            "eta_seconds": summary.eta_seconds if running else None,
            "learning_rate": summary.last.learning_rate if summary.last else None,
            "grad_norm": summary.last.grad_norm if summary.last else None,
            "mfu": facts.utilization(summary.tokens_per_second or 0.0) if summary.last else None,
            "memory_limit_gib": facts.memory_limit_gib,
            "checkpoint_step": run.saved.step if run.saved else None,
            "device_stats": [asdict(device.latest) for device in summary.devices.all],
            "incidents": [
                {"step": event.step, "time": event.time, "text": text}
                for event, text in run.incidents
            ],
            "unreadable_lines": self._tail.unknown_lines,
        }

    def _read(self) -> tuple[str, RunFacts]:
        """Reads new events. Returns the status of the run, and figures of its plan once there is a readable one."""
        from bloomery.train.model_folder import best_on_disk

        folder = self._folder
        summary = self._run.summary
        working = worked_on(folder)  # before the read, so that the last events are not missed
        for event in self._tail.read():
            self._run.add(event)
        summary.best_saved = None if working else best_on_disk(folder / "checkpoints")
        if not working:
            status = "killed" if summary.ended is None else summary.ended.status
        else:
            status = (
                "stopping"
                if summary.stopping
                else "paused"
                if (folder / "pause").exists()
                else "running"
            )
        if self._facts is None:
            try:
                plan = read_plan(folder / "plan.json")
                machine = read_machine(folder / "machine.json")
                self._facts = replace(run_facts(plan, machine), name=folder.name)
            except (UserError, OSError):  # no plan yet, or one of another version
                return status, RunFacts(name=folder.name)
        return status, self._facts
