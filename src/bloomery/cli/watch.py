"""`bloomery watch RUN`: a run on the terminal, while it goes on or after it has ended. It is only ever read."""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import find_run, print_json, say
from bloomery.cli.runs import alive

if TYPE_CHECKING:
    from bloomery.monitor.console.watch import Screen
    from bloomery.monitor.tally import RunFacts

WIDTH = 100  # of what is printed where there is no terminal
REDRAW_SECONDS = 0.5


@click.command()
@click.argument("run")
@click.option("--once", is_flag=True, help="Print one picture and leave; so it is without a terminal, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(run: str, once: bool, as_json: bool) -> None:
    """Show RUN (a path, a name under runs/, or `last`): curves, exams, speed, every GPU, samples, what happened.

    Ctrl+C ends the watching and leaves the run alone.

    Example: ssh -t that-machine 'cd my-models && bloomery watch last'
    """
    folder = find_run(run)
    picture = _Picture(folder)
    if as_json:
        print_json(picture.document())
        return
    if once or not sys.stdout.isatty() or not alive(folder):
        _print(picture)
        return
    try:
        _follow(folder, picture)
    except KeyboardInterrupt:
        say(f"The run goes on; this only looked. `bloomery stop {_typed(folder)}` would stop it.")
    else:
        _print(picture)


class _Picture:
    """The run as it stands each time that it is asked."""

    def __init__(self, folder: Path) -> None:
        from bloomery.monitor.console.watch import Seen
        from bloomery.monitor.events import Tail

        self._folder, self._seen, self._tail = folder, Seen(), Tail(folder / "events.jsonl")
        self._plain = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        self._known: RunFacts | None = None

    def screen(self, width: int, height: int | None = None) -> "Screen":
        from bloomery.monitor.console.watch import Screen

        return Screen(width, height, self._plain)

    def lines(self, screen: "Screen") -> list[str]:
        from bloomery.monitor.console.watch import frame

        state = self._look()
        told = frame(self._seen, self._facts(), screen, state=state, now=time.time())
        return told if screen.height is not None else [*told, *self._strange(), "", *self._next(state)]

    def document(self) -> dict[str, Any]:
        from bloomery.monitor.sinks import reached

        state = self._look()
        tally, facts = self._seen.tally, self._facts()
        incidents = [{"step": event.step, "time": event.time, "what": text} for event, text in self._seen.incidents]
        return {
            "run": facts.name,
            "folder": str(self._folder),
            "state": state,
            "phase": tally.phase.name if tally.phase is not None and state == "running" else None,
            **reached(tally),
            "steps_planned": tally.steps or facts.steps,
            "seconds_left": tally.seconds_left if state == "running" else None,
            "learning_rate": tally.last.learning_rate if tally.last else None,
            "grad_norm": tally.last.grad_norm if tally.last else None,
            "mfu": facts.utilisation(tally.tokens_per_second or 0.0) if tally.last else None,
            "memory_limit_gib": facts.memory_limit_gib,
            "saved_step": self._seen.saved.step if self._seen.saved else None,
            "now": [asdict(device.latest) for device in tally.devices.all],
            "incidents": incidents,
            "unreadable_lines": self._tail.unknown_lines,
        }

    def _look(self) -> str:
        """Reads what is new; the state of the run."""
        working = alive(self._folder)  # before the look: a run that ends meanwhile has told so
        for event in self._tail.read():
            self._seen.add(event)
        tally = self._seen.tally
        if not working:
            return "killed" if tally.ended is None else tally.ended.why.partition(":")[0]
        if tally.stopping:
            return "stopping"
        return "paused" if (self._folder / "pause").exists() else "running"

    def _facts(self) -> "RunFacts":
        """Of the plan, once there is one that this version can read."""
        from bloomery.monitor.tally import RunFacts

        self._known = self._known or _facts(self._folder)
        return self._known or RunFacts(name=self._folder.name)

    def _strange(self) -> list[str]:
        """What was passed over: a line that a kill cut short is nothing, many are of another version."""
        tail = self._tail
        if tail.unknown_lines < 2:
            return []
        return [
            "",
            f"{tail.unknown_lines:,} of {tail.read_lines:,} lines of events.jsonl are of another version, or damaged",
        ]

    def _next(self, state: str) -> list[str]:
        name = _typed(self._folder)
        commands = {
            "done": f"bloomery report {name}",
            "running": f"bloomery watch {name}     in a terminal it follows the run",
            "paused": f"bloomery watch {name}     in a terminal it follows the run",
            "stopping": f"bloomery resume {name}   once it has stopped",
        }
        return [f"{'next':<11}{commands.get(state, f'bloomery resume {name}')}"]


def _typed(folder: Path) -> str:
    """The run as it is named to a verb."""
    from bloomery.train.run import name_of

    return name_of(folder.absolute())


def _print(picture: _Picture) -> None:
    for line in picture.lines(picture.screen(get_terminal_size((WIDTH, 40)).columns)):
        say(line)


def _follow(folder: Path, picture: _Picture) -> None:
    from rich.console import Console
    from rich.live import Live

    from bloomery.monitor.console.watch import styled

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while alive(folder):
            size = console.size
            rows = picture.lines(picture.screen(size.width, size.height))
            live.update(styled(rows), refresh=True)
            time.sleep(REDRAW_SECONDS)


def _facts(folder: Path) -> "RunFacts | None":
    """None while there is no plan, or one that this version cannot read."""
    from bloomery.core.errors import UserError
    from bloomery.hardware.machine import read_machine
    from bloomery.plan.explained import run_facts
    from bloomery.plan.store import read_plan

    try:
        plan = read_plan(folder / "plan.json")
        machine = read_machine(folder / "machine.json")
    except (UserError, OSError):
        return None
    return replace(run_facts(plan, machine), name=folder.name)
