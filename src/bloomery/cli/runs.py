"""`bloomery runs`: the runs in runs/"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bloomery.cli.common import echo, json_option, print_json
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.monitor.events import read_events
from bloomery.monitor.summary import RunSummary, summary_of
from bloomery.runs.names import all_runs

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


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List the runs in runs/, newest last, and the commands that resume them.

    Example: bloomery runs --json
    """
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
    while sum(widths) + 2 * (len(widths) - 1) > room and len(widths) > 3:  # a narrow terminal shows fewer columns
        widths.pop()
    for row in rows:
        name, state, *figures = (cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        echo("  ".join([name.strip().ljust(widths[0]), state.strip().ljust(widths[1]), *figures]).rstrip())
    for number, resume in enumerate([line.command for line in lines if line.command][-3:]):
        echo(f"{'' if number else 'next':<11}{resume}")


def describe(folder: Path) -> RunLine:
    """Read from the run's events and its lock."""
    from bloomery.runs.folder import worked_on
    from bloomery.train.run import contradicted, name_of

    try:
        summary, unknown = summary_of(read_events(folder / "events.jsonl")), "killed"
    except UserError:
        summary, unknown = RunSummary(), "unreadable"
    state = "running" if worked_on(folder) else unknown
    if state != "running" and summary.ended is not None and not contradicted(folder, summary.ended, summary.step):
        state = summary.ended.status
    return RunLine(
        name=folder.name,
        state=state,
        step=summary.step,
        steps=summary.steps,
        loss=summary.smoothed,
        bits_per_byte=summary.evaluation.bits_per_byte if summary.evaluation else None,
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        command=None if state in ("running", "done") else f"bloomery resume {name_of(folder.absolute())}",
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
