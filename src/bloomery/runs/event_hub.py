"""The parent process writes the events of a run and shows them: terminal, log.txt, trackers. No torch."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO, cast, final

from rich.console import Console

from bloomery.core.run_folder import RunFolder
from bloomery.core.streams import ClosableStream
from bloomery.core.text import harmless, redact_secrets
from bloomery.hardware.machine import Machine, read_machine
from bloomery.monitor.diagnosis import Diagnoser
from bloomery.monitor.events import Event, EventLog, RunEnded, Warned, read_events
from bloomery.monitor.sinks import LogFile, Sink, open_sinks
from bloomery.plan.types import RunPlan
from bloomery.runs.consent import noted_commands
from bloomery.view.planned_figures import PlannedFigures, diagnosis_facts, figures_of_plan
from bloomery.view.summary import summary_of
from bloomery.view.terminal import showing


@final
class EventHub:
    """`emit` writes an event of the parent and shows it; `show` shows one that a child has written."""

    def __init__(self, folder: RunFolder, write: EventLog, *, quiet: bool, lines: bool) -> None:
        self._folder = folder
        self._write = write
        self._quiet = quiet
        self._lines = lines
        self._sinks: list[Sink] = []
        self._pending: list[Event] = []  # written before the view opened
        self._log = LogFile(folder.log)
        self._followed = False  # whether events.jsonl is read and its events are shown
        self._diagnosis: Diagnoser | None = None
        self.ended = False  # whether RunEnded is written
        self.began = False  # whether a child was started
        self.hooks = frozenset[str]()  # commands that the user requested; others are shown, not run

    def emit(self, event: Event) -> None:
        """Write and show it. Until the view opens it goes to log.txt alone, and waits."""
        self.ended = self.ended or isinstance(event, RunEnded)
        self._write(event)
        if not self._sinks:
            self._log.write(event)
            self._pending.append(event)
        self.show(event)

    def show(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)
        for warning in self._diagnosis.check(event) if self._followed and self._diagnosis else ():
            self._write(warning)  # read back from events.jsonl and shown then

    def line(self, text: str) -> None:
        """Writes one line of a child's output to log.txt."""
        self._log.text(text)

    @contextmanager
    def shown(self, plan: RunPlan | None, name: str) -> Iterator[None]:
        """Inside the block events go to the terminal and, once there is a plan, to the sinks of `logging.trackers`."""
        self.began = True
        with ExitStack() as stack:
            if not self._quiet:
                planned = (
                    PlannedFigures(name=name, every_steps=1)
                    if plan is None
                    else figures_of_plan(plan, self._machine())
                )
                earlier_events = read_events(self._folder.events) if plan is not None else ()
                stream = cast("IO[str]", ClosableStream(sys.stdout))
                console = Console(file=stream, force_terminal=False if self._lines else None)
                self._sinks.append(stack.enter_context(showing(planned, console, earlier_events)))
            self._sinks += self._opened(plan, stack)
            pending = self._pending
            self._pending = []
            for event in pending if not self._quiet else ():
                self._sinks[0].write(event)
            if plan is not None:
                facts_of = partial(diagnosis_facts, plan, self._machine())
                self._diagnosis = Diagnoser(facts_of, read_events(self._folder.events))
            self._followed = True
            try:
                yield
            finally:
                self._sinks = []
                self._followed = False

    def _machine(self) -> Machine | None:
        path = self._folder.machine
        return read_machine(path) if path.is_file() else None

    def _opened(self, plan: RunPlan | None, stack: ExitStack) -> list[Sink]:
        if plan is None:
            return []
        hooks = self.hooks | noted_commands(self._folder.path, plan.logging.commands)
        for command in plan.logging.commands:
            if command not in hooks:
                fix = f"to run it: bloomery resume {self._folder.name} --trust-code"
                self._warn(
                    f"hook not started, because nothing here notes that you asked for it: {command}; {fix}"
                )
        sinks = open_sinks(
            self._folder.path,
            plan.logging.trackers,
            [command for command in plan.logging.commands if command in hooks],
            every_steps=plan.logging.every_steps,
            folder=self._folder.path,
            warn=self._warn,
        )
        for sink in sinks:
            stack.callback(sink.close)
        return sinks

    def _warn(self, reason: str) -> None:
        """Warns about a sink. While a stage is followed, its reader shows the warning, not the failing sink."""
        warning = Warned(reason=reason)
        if self._followed:
            self._write(warning)
            return
        self.emit(warning)
        if not (self._sinks or self._quiet):  # after the view has closed
            print(f"warning    {harmless(redact_secrets(reason))}", file=sys.stderr)

    def close(self) -> None:
        self._log.close()


@contextmanager
def event_hub(folder: RunFolder, *, quiet: bool, lines: bool = False) -> Iterator[EventHub]:
    """Opens events.jsonl and log.txt of a run. `lines`: never a live picture (mpirun gives its ranks a terminal)."""
    with EventLog(folder.events) as write:
        hub = EventHub(folder, write, quiet=quiet, lines=lines)
        try:
            yield hub
        finally:
            hub.close()


def last_step(folder: RunFolder) -> int:
    """The last step with an event."""
    return summary_of(read_events(folder.events)).step
