"""`bloomery watch RUN`: a run on the terminal, live or finished, as JSON, or in the browser. Only reads. No torch"""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from bloomery.cli.common import echo, print_json, run_argument
from bloomery.cli.runs import repeats_mistake
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run
from bloomery.core.run_lock import worked_on
from bloomery.view.metrics_json import metrics_of
from bloomery.view.reader import RunReader
from bloomery.view.screen import Screen, frame, picture, view_for_screen

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
def command(run: str, print_once: bool, as_json: bool, web: bool) -> None:
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
