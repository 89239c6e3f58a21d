"""`bloomery watch RUN`: a run on the terminal, while it goes on or after it has ended. It is only ever read."""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import print_json, say
from bloomery.runs.folder import worked_on
from bloomery.runs.names import find_run

if TYPE_CHECKING:
    from bloomery.monitor.summary import RunFacts

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
    watched = _Watched(folder)
    if as_json:
        print_json(watched.document())
        return
    if not once and sys.stdout.isatty() and worked_on(folder):
        try:
            watched.follow()
        except KeyboardInterrupt:
            say(f"The run goes on; this only looked. `bloomery stop {watched.name}` would stop it.")
            return
    watched.print()


class _Watched:
    """The run as it stands each time that it is asked."""

    def __init__(self, folder: Path) -> None:
        from bloomery.monitor.console.screen import Seen
        from bloomery.monitor.events import Tail
        from bloomery.train.run import name_of

        self._folder, self._seen, self._tail = folder, Seen(), Tail(folder / "events.jsonl")
        self._plain = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        self._known: RunFacts | None = None
        self.name = name_of(folder.absolute())  # as one types it

    def print(self) -> None:
        from bloomery.monitor.console.screen import Screen, frame

        state, facts = self._look()
        screen = Screen(get_terminal_size((WIDTH, 40)).columns, None, self._plain)
        for line in frame(self._seen, facts, screen, state=state, now=time.time()):
            say(line)
        tail = self._tail
        if tail.unknown_lines > 1:  # a line that a kill cut short is nothing, many are of another version
            passed = f"{tail.unknown_lines:,} of {tail.read_lines:,} lines of events.jsonl"
            say(f"\n{passed} are of another version, or damaged")
        again = f"bloomery watch {self.name}     in a terminal it follows the run"
        commands = {
            "done": f"bloomery report {self.name}",
            "running": again,
            "paused": again,
            "stopping": f"bloomery resume {self.name}   once it has stopped",
        }
        say(f"\n{'next':<11}{commands.get(state, f'bloomery resume {self.name}')}")

    def follow(self) -> None:
        """Until nobody works on the run any more."""
        from rich.console import Console
        from rich.live import Live

        from bloomery.monitor.console.screen import Screen, picture

        console = Console(highlight=False)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while worked_on(self._folder):
                state, facts = self._look()
                screen = Screen(console.size.width, console.size.height, self._plain)
                live.update(picture(self._seen, facts, screen, state=state, now=time.time()), refresh=True)
                time.sleep(REDRAW_SECONDS)

    def document(self) -> dict[str, Any]:
        from bloomery.monitor.sinks import reached

        state, facts = self._look()
        seen, summary, running = self._seen, self._seen.summary, state == "running"
        return {
            "run": facts.name,
            "folder": str(self._folder),
            "state": state,
            "phase": summary.phase.name if summary.phase is not None and running else None,
            **reached(summary),
            "steps_planned": summary.steps or facts.steps,
            "seconds_left": summary.seconds_left if running else None,
            "learning_rate": summary.last.learning_rate if summary.last else None,
            "grad_norm": summary.last.grad_norm if summary.last else None,
            "mfu": facts.utilization(summary.tokens_per_second or 0.0) if summary.last else None,
            "memory_limit_gib": facts.memory_limit_gib,
            "saved_step": seen.saved.step if seen.saved else None,
            "now": [asdict(device.latest) for device in summary.devices.all],
            "incidents": [{"step": event.step, "time": event.time, "what": text} for event, text in seen.incidents],
            "unreadable_lines": self._tail.unknown_lines,
        }

    def _look(self) -> tuple[str, "RunFacts"]:
        """Reads what is new; the state of the run, and what its plan tells once there is one that can be read."""
        from bloomery.core.errors import UserError
        from bloomery.hardware.machine import read_machine
        from bloomery.monitor.summary import RunFacts
        from bloomery.plan.explained import run_facts
        from bloomery.plan.store import read_plan

        folder, summary = self._folder, self._seen.summary
        working = worked_on(folder)  # before the look: a run that ends meanwhile has told so
        for event in self._tail.read():
            self._seen.add(event)
        if not working:
            state = "killed" if summary.ended is None else summary.ended.status
        else:
            state = "stopping" if summary.stopping else "paused" if (folder / "pause").exists() else "running"
        if self._known is None:
            try:
                plan, machine = read_plan(folder / "plan.json"), read_machine(folder / "machine.json")
                self._known = replace(run_facts(plan, machine), name=folder.name)
            except (UserError, OSError):  # there is none yet, or one of another version
                return state, RunFacts(name=folder.name)
        return state, self._known
