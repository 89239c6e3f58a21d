"""`bloomery runs`: what lies under runs/."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bloomery.cli.common import print_json, say
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.monitor.events import read_events
from bloomery.monitor.summary import RunSummary, summary_of
from bloomery.runs.names import all_runs

_HEAD = ("run", "state", "step", "loss", "bits/byte", "on disk")


@dataclass(frozen=True)
class RunLine:
    """`state`: running, done, stopped, failed, killed, unreadable. `command` resumes it, None when nothing is left."""

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    bits_per_byte: float | None
    bytes: int
    command: str | None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(as_json: bool) -> None:
    """List the runs under runs/, newest last: how far each came, and how to go on.

    Example: bloomery runs --json
    """
    lines = [describe(folder) for folder in all_runs()]
    if as_json:
        print_json({"runs": [asdict(line) for line in lines]})
        return
    if not lines:
        say("there are no runs here yet; `bloomery demo` makes one")
        return
    rows = [_HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        name, state, *figures = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        say("  ".join([name.strip().ljust(widths[0]), state.strip().ljust(widths[1]), *figures]).rstrip())
    unfinished = [line.command for line in lines if line.command]
    for offered in unfinished[-3:]:
        say(f"{'goes on' if offered == unfinished[-3:][0] else '':<11}{offered}")


def describe(folder: Path) -> RunLine:
    """From the run's events and its lock."""
    from bloomery.runs.folder import worked_on
    from bloomery.train.run import contradicted, name_of

    try:
        summary, unknown = summary_of(read_events(folder / "events.jsonl")), "killed"
    except UserError:
        summary, unknown = RunSummary(), "unreadable"
    state = "running" if worked_on(folder) else unknown
    if state != "running" and summary.ended is not None and not contradicted(folder, summary.ended, summary.step):
        state = summary.ended.status
    exam = summary.evaluation
    return RunLine(
        name=folder.name,
        state=state,
        step=summary.step,
        steps=summary.steps,
        loss=summary.smoothed,
        bits_per_byte=exam.bits_per_byte if exam else None,
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
