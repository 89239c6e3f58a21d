"""A run as `watch` and `studio` show it: its events so far, its status and its plan, from the run folder. No torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Decode, Event, Tail, decode_json
from bloomery.monitor.reader_processes import ReaderProcesses
from bloomery.monitor.screen import WatchedRun
from bloomery.monitor.step_columns import StepColumns, read_groups
from bloomery.monitor.summary import RunFacts, RunSummary
from bloomery.plan.explained import run_facts
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.runs.folder import worked_on
from bloomery.train.model_folder import best_on_disk
from bloomery.train.run import name_of

LIVE = ("running", "paused", "stopping")  # while a process works on the run


@final
class RunReader:
    """A run in its present state. `read` reads what is new."""

    def __init__(
        self,
        folder: Path,
        decode: Decode = decode_json,
        *,
        keeps_curves: bool = True,
        processes: ReaderProcesses | None = None,
    ) -> None:
        """`processes` parse a long file."""
        self.folder = folder
        self.name = name_of(folder.absolute())  # as an argument of commands
        self.run = WatchedRun(keeps_curves=keeps_curves)
        self.tail = Tail(folder / "events.jsonl", decode=decode)
        self._groups = read_groups if processes is None else processes.groups
        self.plan: RunPlan | None = None
        self._facts: RunFacts | None = None

    @property
    def facts(self) -> RunFacts:
        """Figures of the plan, once there is one that this version reads."""
        return self._facts or RunFacts(name=self.folder.name)

    def read(self, on_group: Callable[[Event | StepColumns], None] = lambda _: None) -> str:
        """Reads new events. Returns the status of the run. Raises UserError.

        `on_group` gets each event, and consecutive steps together.
        """
        # The lock is asked before the events are read, so that the last events of a run are not missed.
        is_running = worked_on(self.folder)
        for group in self._groups(self.tail):
            if isinstance(group, StepColumns):
                self.run.add_steps(group)
            else:
                self.run.add(group)
            on_group(group)
        summary = self.run.summary
        summary.best_saved = None if is_running else best_on_disk(self.folder / "checkpoints")

        # The plan does not change: it is read once.
        if self._facts is None:
            with suppress(UserError, OSError):  # no plan yet, or one of another version
                self.plan = read_plan(self.folder / "plan.json")
                machine = read_machine(self.folder / "machine.json")
                self._facts = replace(run_facts(self.plan, machine), name=self.folder.name)
        return status_of(self.folder, summary, is_running=is_running)


def status_of(folder: Path, summary: RunSummary, *, is_running: bool) -> str:
    """running, paused or stopping; else done, stopped, failed or killed."""
    if not is_running:
        return "killed" if summary.ended is None else summary.ended.status
    if summary.stopping:
        return "stopping"
    return "paused" if (folder / "pause").exists() else "running"
