"""`bloomery watch RUN`: a run on the terminal, while it goes on or after it has ended. It is only ever read."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import find_run
from bloomery.cli.runs import in_use

if TYPE_CHECKING:
    from bloomery.monitor.tally import RunFacts

WIDTH = 100  # of what is printed where there is no terminal
REDRAW_SECONDS = 0.5
SILENT_SECONDS = 120.0  # after which a run that another machine holds counts as dead


@click.command()
@click.argument("run")
@click.option("--once", is_flag=True, help="Print one picture and leave; so it is without a terminal, too.")
def command(run: str, once: bool) -> None:
    """Show RUN (a path, a name under runs/, or `last`): curve, exams, speed, every GPU, samples, what happened.

    Ctrl+C ends the watching and leaves the run alone.

    Example: ssh that-machine bloomery watch last
    """
    folder = find_run(run)
    if once or not sys.stdout.isatty() or not alive(folder):
        for line in _Picture(folder).lines(_width(), None):
            click.echo(line)
        return
    try:
        _follow(folder)
    except KeyboardInterrupt:
        click.echo(f"\nThe run goes on; this only looked. `bloomery stop {run}` would stop it.")


class _Picture:
    """The run as it stands each time that `lines` is asked."""

    def __init__(self, folder: Path) -> None:
        from bloomery.monitor.watch import Seen, Tail

        self._folder, self._seen, self._tail = folder, Seen(), Tail(folder / "events.jsonl")

    def lines(self, width: int, height: int | None) -> list[str]:
        from bloomery.monitor.tally import RunFacts
        from bloomery.monitor.watch import Screen, frame

        running = alive(self._folder)  # before the look: a run that ends meanwhile has told so
        for event in self._tail.read():
            self._seen.add(event)
        plain = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        facts = _facts(self._folder) or RunFacts(name=self._folder.name)
        state = self._state(running)
        told = frame(self._seen, facts, Screen(width, height, plain), state=state, now=time.time())
        return told if running or height is not None else [*told, *self._next(state)]

    def _state(self, running: bool) -> str:
        ended = self._seen.tally.ended
        if running:
            return "paused" if (self._folder / "pause").exists() else "running"
        return "killed" if ended is None else ended.why.partition(":")[0]

    def _next(self, state: str) -> list[str]:
        verb = "report" if state == "done" else "resume"
        return ["", f"{'next':<11}bloomery {verb} {self._folder.name}"]


def _follow(folder: Path) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, picture = Console(highlight=False), _Picture(folder)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while alive(folder):
            size = console.size
            live.update(Text("\n".join(picture.lines(size.width, size.height))), refresh=True)
            time.sleep(REDRAW_SECONDS)
    for line in picture.lines(console.size.width, None):
        click.echo(line)


def _width() -> int:
    return get_terminal_size((WIDTH, 40)).columns


def alive(folder: Path) -> bool:
    """Whether a process works on the run: here, or on another machine whose lock shows a sign of life."""
    lock = folder / "lock"
    if in_use(lock):
        return True
    from bloomery.launch.processes import host_name
    from bloomery.launch.run_folder import holder_of

    holder = holder_of(lock) if lock.exists() else {}
    return bool(holder) and holder["host"] != host_name() and time.time() - lock.stat().st_mtime < SILENT_SECONDS


def _facts(folder: Path) -> "RunFacts | None":
    """None while there is no plan, or one that this version cannot read."""
    from bloomery.errors import UserError
    from bloomery.hardware.machine import read_machine
    from bloomery.plan.facts import run_facts
    from bloomery.plan.store import read_plan

    try:
        plan = read_plan(folder / "plan.json")
        machine = read_machine(folder / "machine.json")
    except (UserError, OSError):
        return None
    return replace(run_facts(plan, machine), name=folder.name)
