"""`bloomery runs`: the runs and sweeps of this folder, and the commands that resume them. No torch"""

import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.cleaning import clean_command, rm_command
from bloomery.cli.common import echo, json_option, print_json
from bloomery.cli.notes import note_command
from bloomery.core.errors import UserError
from bloomery.core.files import size_of
from bloomery.core.run_folder import all_runs, all_sweeps, every_run, is_sweep, resume_argument
from bloomery.core.run_lock import worked_on
from bloomery.core.run_notes import read_notes
from bloomery.core.units import format_bytes
from bloomery.monitor.events import read_events
from bloomery.view.reader import status_at_end
from bloomery.view.summary import RunSummary, summary_of

if TYPE_CHECKING:
    from bloomery.sweep.table import SweepTable


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
