"""Commands about runs: `runs` lists them, `stop` and `save` ask a running one, `watch` shows one. No torch.

`stop` and `save` send a request to the process of the run, and wait for the result. `watch` only reads.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, final

import click
from rich.console import Console
from rich.live import Live

from bloomery.cli.cleaning import clean_command, rm_command
from bloomery.cli.common import echo, json_option, literal, print_json, run_argument
from bloomery.cli.notes import note_command
from bloomery.core.errors import UserError
from bloomery.core.files import size_of, write_durably
from bloomery.core.run_folder import (
    RunFolder,
    all_runs,
    all_sweeps,
    every_run,
    existing,
    find_run,
    is_sweep,
    resume_argument,
)
from bloomery.core.run_lock import alive, beats, holder_of, host_name, start_mark, worked_on
from bloomery.core.run_notes import read_notes
from bloomery.core.signals import SAVE_SIGNAL
from bloomery.core.units import format_bytes
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
from bloomery.view.metrics_json import metrics_of
from bloomery.view.reader import RunReader, status_at_end
from bloomery.view.screen import Screen, frame, picture, view_for_screen
from bloomery.view.summary import RunSummary, summary_of

if TYPE_CHECKING:
    from bloomery.sweep.table import SweepTable


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


_COLUMNS = ("run", "state", "step", "loss", "val bpb", "reward", "on disk")


@dataclass(frozen=True)
class RunLine:
    """A run in the list of runs.

    `state`: running, done, stopped, failed, killed, unreadable. `command` resumes the run; None when it is running or
    done, and when it would only repeat a mistake.
    """

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    bits_per_byte: float | None
    reward: float | None  # of held-out prompts, else of the newest rollouts
    bytes: int
    command: str | None
    tags: tuple[str, ...] = ()


PROPOSED_SECONDS = 14 * 86400.0  # a run that has been quiet for longer is listed, and not proposed


@dataclass(frozen=True)
class SweepLine:
    """A sweep in the list of runs.

    `state`: running, done, stopped, unreadable. `judged` of `runs` have a figure. `command` continues it; None when it
    is running or done. `table`: None when it is unreadable.
    """

    name: str
    state: str
    runs: int
    judged: int
    bytes: int
    command: str | None
    table: "SweepTable | None"

    @property
    def best(self) -> str:
        """The best run in words; "" without a figure."""
        run = self.table.best if self.table is not None else None
        if run is None or self.table is None:
            return ""
        return f"{self.table.metric} {run.metric:.4f}: {run.text}"

    def document(self) -> dict[str, Any]:
        """The sweep in the document of --json, its runs with the best first."""
        document = {"name": self.name, "state": self.state, "bytes": self.bytes}
        figures = {} if self.table is None else self.table.document()
        return document | {"command": self.command} | figures


@click.group(invoke_without_command=True)
@json_option
@click.option("--all", "all_of_sweeps", is_flag=True, help="List the runs of sweeps, too.")
@click.option("--tag", metavar="TAG", help="List the runs with this tag, those of sweeps, too.")
@click.pass_context
def command(context: click.Context, as_json: bool, all_of_sweeps: bool, tag: str | None) -> None:
    """List the runs in runs/, newest last, and the commands that resume them.

    A sweep is one line with its best run. `bloomery runs note` gives a run tags and a note.

    Example: bloomery runs --json
    """
    if context.invoked_subcommand is not None:
        return
    sweeps: dict[Path, SweepLine] = {}
    if tag is None:
        sweeps = {folder: describe_sweep(folder, noise=as_json) for folder in all_sweeps()}
        folders = list(every_run() if all_of_sweeps and not as_json else all_runs())
    else:
        folders = [folder for folder in every_run() if tag in read_notes(folder).tags]
    runs = {folder: describe(folder) for folder in folders}
    lines = list(runs.values())
    if as_json:
        documents = [sweep.document() for sweep in sweeps.values()]
        print_json({"runs": [asdict(line) for line in lines], "sweeps": documents})
        return
    if not lines and tag is not None:
        echo(f"no run has the tag {tag!r}; give it with `bloomery runs note RUN --tag {tag}`")
        return
    if not lines and not sweeps:
        echo("no runs in runs/; start one with `bloomery demo` or `bloomery train RECIPE`")
        return

    if lines:
        _print_runs(lines)
    if sweeps:
        _print_sweeps(list(sweeps.values()))

    # Only the newest runs are likely to be resumed: nobody waits for one that failed weeks ago.
    commands = list[str]()
    for described in (runs, sweeps):
        commands += [
            line.command
            for folder, line in described.items()
            if line.command and _is_recent(folder)
        ][-3:]
    for index, next_command in enumerate(commands):
        echo(f"{'' if index else 'next':<11}{next_command}")


def _is_recent(folder: Path) -> bool:
    """Whether this run, or a run of this sweep, wrote an event within `PROPOSED_SECONDS`."""
    logs = [*folder.glob("events.jsonl"), *folder.glob("*/events.jsonl")]
    newest = max((log.stat().st_mtime for log in logs), default=0.0)
    return time.time() - newest < PROPOSED_SECONDS


def _print_runs(lines: list[RunLine]) -> None:
    """A narrow terminal shows fewer columns, but always the run, its state and its step."""
    rows = [_COLUMNS, *(_cells(line) for line in lines)]
    if all(line.reward is None for line in lines):  # nothing here was trained with rewards
        reward_column = _COLUMNS.index("reward")
        rows = [row[:reward_column] + row[reward_column + 1 :] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    max_width = get_terminal_size((sum(widths) + 2 * len(widths), 24)).columns
    while sum(widths) + 2 * (len(widths) - 1) > max_width and len(widths) > 3:
        widths.pop()
    for name, state, *figures in rows:
        cells = [name.ljust(widths[0]), state.ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(figures, widths[2:], strict=False)]
        echo("  ".join(cells).rstrip())


def _print_sweeps(sweeps: list[SweepLine]) -> None:
    """A line for each; what does not fit into it is the end of the settings of its best run."""
    rows = [("sweep", "state", "judged", "on disk", "best")]
    for sweep in sweeps:
        judged = f"{sweep.judged}/{sweep.runs}"
        rows.append((sweep.name, sweep.state, judged, format_bytes(sweep.bytes), sweep.best))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    max_width = get_terminal_size((sum(widths) + 2 * len(widths), 24)).columns
    for name, state, judged, size, best in rows:
        cells = [name.ljust(widths[0]), state.ljust(widths[1])]
        cells += [judged.rjust(widths[2]), size.rjust(widths[3]), best]
        line = "  ".join(cells).rstrip()
        echo(line if len(line) <= max_width else line[: max_width - 3] + "...")


command.add_command(rm_command)
command.add_command(clean_command)
command.add_command(note_command)


def describe_sweep(folder: Path, *, noise: bool = False) -> SweepLine:
    """The line of a sweep. `noise`: with intervals and tests, as in `sweep.table.read_sweep`."""
    from bloomery.sweep.table import read_sweep

    size = size_of(folder)
    try:
        table = read_sweep(folder, noise=noise)
    except UserError:
        return SweepLine(folder.name, "unreadable", 0, 0, size, None, None)
    judged = sum(run.metric is not None for run in table.runs)
    command = None
    if table.state == "stopped" and table.command:
        command = shlex.join(["bloomery", *table.command])
    return SweepLine(folder.name, table.state, len(table.runs), judged, size, command, table)


def describe(folder: Path) -> RunLine:
    """The line of a run, from its events and its lock."""
    try:
        summary = summary_of(read_events(folder / "events.jsonl"))
        state: str = status_at_end(folder, summary)
    except UserError:
        summary = RunSummary()
        state = "unreadable"
    if worked_on(folder):
        state = "running"

    command = None
    if state not in ("running", "done") and not (state == "failed" and repeats_mistake(summary)):
        command = f"bloomery resume {resume_argument(folder.absolute())}"
    return RunLine(
        name=f"{folder.parent.name}/{folder.name}" if is_sweep(folder.parent) else folder.name,
        state=state,
        step=summary.step,
        steps=summary.planned_steps,
        loss=summary.smoothed,
        bits_per_byte=summary.evaluation.bits_per_byte if summary.evaluation else None,
        reward=summary.judged_reward,
        bytes=size_of(folder),
        command=command,
        tags=read_notes(folder).tags,
    )


def repeats_mistake(summary: RunSummary) -> bool:
    """Whether a resume of a failed run would only repeat its error.

    It failed before its first step, in the recipe, the dataset or a reward, and the fix is an edit of those.
    """
    ended = summary.ended
    if ended is None or ended.status != "failed" or summary.step > 0:
        return False
    return bool(ended.fix) and "resume" not in ended.fix and not ended.host


def _cells(line: RunLine) -> tuple[str, ...]:
    return (
        line.name,
        line.state,
        f"{line.step:,}" + (f"/{line.steps:,}" if line.steps else ""),
        "" if line.loss is None else f"{line.loss:.3f}",
        "" if line.bits_per_byte is None else f"{line.bits_per_byte:.3f}",
        "" if line.reward is None else f"{line.reward:.3f}",
        format_bytes(line.bytes),
    )


@click.command()
@run_argument
def stop_command(run: str) -> int:
    """Save a running run after its current step, then stop it.

    Example: bloomery stop last
    """
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


WIDTH = 100  # without a terminal
STUDIO_PORT = 8100
REDRAW_SECONDS = 0.5


@click.command()
@run_argument
@click.option(
    "--once",
    "print_once",
    is_flag=True,
    help="Print one picture, then exit (default without a terminal).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--web", is_flag=True, help="Open the run in the browser (extra studio).")
def watch_command(run: str, print_once: bool, as_json: bool, web: bool) -> None:
    """Show loss, evaluations, speed, GPUs, samples and warnings of a run.

    RUN is a path, a name under runs/, or `last`. Ctrl+C closes the view; training continues.

    Example: ssh -t that-machine 'cd my-models && bloomery watch last'
    """
    folder = find_run(run)
    if web:
        _watch_in_browser(folder)
        return
    view = _TerminalView(folder)
    if as_json:
        print_json(view.document())
        return
    if not print_once and sys.stdout.isatty() and worked_on(folder):
        try:
            view.follow()
        except KeyboardInterrupt:
            echo(f"Training continues. Stop it with `bloomery stop {view.name}`.")
            return
    view.print()


def _watch_in_browser(folder: Path) -> None:
    """Studio at the page of the run, on the usual port or any other. Raises UserError."""
    from bloomery.cli.studio import refuse_without_nicegui, show
    from bloomery.serve.address import LOCAL, bound
    from bloomery.studio.watching import address_of

    refuse_without_nicegui()
    path = folder.resolve()
    if path.parent.name != "runs":
        fix = f"bloomery watch {folder}, or move the run into a folder named runs"
        raise UserError("studio shows the runs of a folder runs/", where=str(path), fix=fix)
    os.chdir(path.parent.parent)  # the folder whose runs studio shows
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(bound(LOCAL[0], STUDIO_PORT))
        except UserError:  # a studio is open already, perhaps in another folder
            listener = stack.enter_context(bound(LOCAL[0], 0))
        show(listener, LOCAL[0], address=address_of(path.name))


class _TerminalView:
    """A run in its present state, on the terminal."""

    def __init__(self, folder: Path) -> None:
        self._reader = RunReader(folder, view_for_screen())
        self._ascii_only = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        self.name = self._reader.name

    def print(self) -> None:
        reader = self._reader
        status = reader.read()
        screen = Screen(get_terminal_size((WIDTH, 40)).columns, None, self._ascii_only)
        for line in frame(reader.view, reader.planned, screen, state=status, now=time.time()):
            echo(line)
        tail = reader.tail
        if tail.unknown_lines > 1:  # a kill truncates one line
            lines = f"{tail.unknown_lines:,} of {tail.read_lines:,} lines of events.jsonl"
            echo(f"\n{lines} are damaged or of another version")
        live_view = f"bloomery watch {self.name}     in a terminal: live view"
        commands = {
            "done": f"bloomery report {self.name}",
            "running": live_view,
            "paused": live_view,
            "stopping": f"bloomery resume {self.name}   after it has stopped",
        }
        command = commands.get(status, f"bloomery resume {self.name}")
        if status == "failed" and repeats_mistake(reader.view.summary):
            command = "`bloomery train` again, with the fix: a resume would repeat the error"
        echo(f"\n{'next':<11}{command}")

    def follow(self) -> None:
        """Redraws the view until the process of the run ends."""
        reader = self._reader
        console = Console(highlight=False)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while worked_on(reader.folder):
                status = reader.read()
                screen = Screen(console.size.width, console.size.height, self._ascii_only)
                view = picture(reader.view, reader.planned, screen, state=status, now=time.time())
                live.update(view, refresh=True)
                time.sleep(REDRAW_SECONDS)

    def document(self) -> dict[str, Any]:
        """The JSON of the run: the keys of metrics.json and the present state."""
        reader = self._reader
        status = reader.read()
        run = reader.view
        planned = reader.planned
        summary = run.summary
        running = status == "running"
        return {
            "run": planned.name,
            "folder": str(reader.folder),
            **metrics_of(summary),
            "status": status,
            "phase": summary.phase.name if summary.phase is not None and running else None,
            "max_steps": summary.planned_steps or planned.steps,
            "eta_seconds": summary.eta_seconds if running else None,
            "learning_rate": summary.last_step.learning_rate if summary.last_step else None,
            "grad_norm": summary.last_step.grad_norm if summary.last_step else None,
            "mfu": planned.utilization(summary.tokens_per_second or 0.0)
            if summary.last_step
            else None,
            "memory_limit_gib": planned.memory_limit_gib,
            "checkpoint_step": run.saved.step if run.saved else None,
            "device_stats": [asdict(device.latest) for device in summary.devices.all],
            "incidents": [
                {"step": incident.step, "time": incident.time, "text": incident.text}
                for incident in run.shown_incidents()
            ],
            "unreadable_lines": reader.tail.unknown_lines,
        }
