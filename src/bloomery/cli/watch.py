"""`bloomery watch RUN`: the live view of a running or finished run. Reads only."""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from bloomery.cli.common import echo, print_json, run_argument
from bloomery.core.errors import UserError
from bloomery.hardware.machine import read_machine
from bloomery.monitor.console.screen import Screen, WatchedRun, frame, picture
from bloomery.monitor.events import Tail
from bloomery.monitor.sinks import metrics_of
from bloomery.monitor.summary import RunFacts
from bloomery.plan.explained import run_facts
from bloomery.plan.store import read_plan
from bloomery.runs.folder import worked_on
from bloomery.runs.names import find_run
from bloomery.train.run import name_of

WIDTH = 100  # without a terminal
REDRAW_SECONDS = 0.5


@click.command()
@run_argument
@click.option("--once", is_flag=True, help="Print one picture, then exit (default without a terminal).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: str, once: bool, as_json: bool) -> None:
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
        self._folder, self._run, self._tail = folder, WatchedRun(), Tail(folder / "events.jsonl")
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
                live.update(picture(self._run, facts, screen, state=status, now=time.time()), refresh=True)
                time.sleep(REDRAW_SECONDS)

    def document(self) -> dict[str, Any]:
        """For programs: the keys of metrics.json and the present state."""
        status, facts = self._read()
        run, summary, running = self._run, self._run.summary, status == "running"
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
            "incidents": [{"step": event.step, "time": event.time, "text": text} for event, text in run.incidents],
            "unreadable_lines": self._tail.unknown_lines,
        }

    def _read(self) -> tuple[str, RunFacts]:
        """Reads new events. Returns the status of the run, and figures of its plan once there is a readable one."""
        folder, summary = self._folder, self._run.summary
        working = worked_on(folder)  # before the read, so that the last events are not missed
        for event in self._tail.read():
            self._run.add(event)
        if not working:
            status = "killed" if summary.ended is None else summary.ended.status
        else:
            status = "stopping" if summary.stopping else "paused" if (folder / "pause").exists() else "running"
        if self._facts is None:
            try:
                plan, machine = read_plan(folder / "plan.json"), read_machine(folder / "machine.json")
                self._facts = replace(run_facts(plan, machine), name=folder.name)
            except (UserError, OSError):  # no plan yet, or one of another version
                return status, RunFacts(name=folder.name)
        return status, self._facts
