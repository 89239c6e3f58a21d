"""A run folder, read once: its events so far, its status and its plan, for whatever shows the run. No torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder, resume_argument
from bloomery.core.run_lock import worked_on
from bloomery.hardware.machine import read_machine
from bloomery.infer.model_folder import best_on_disk
from bloomery.monitor.events import Decode, Event, Tail, decode_json
from bloomery.plan.store import read_identity, read_plan
from bloomery.plan.types import RunPlan
from bloomery.view.planned_figures import PlannedFigures, figures_of_plan
from bloomery.view.reader_processes import ReaderProcesses
from bloomery.view.recorded_run import contradicted
from bloomery.view.run_view import RunView
from bloomery.view.step_columns import read_groups
from bloomery.view.summary import RunSummary, Status, status_of_end

LIVE: tuple[Status, ...] = ("running", "paused", "stopping")  # while a process works on the run


@final
class RunReader:
    """A run in its present state. `read` reads what is new."""

    def __init__(
        self,
        folder: Path,
        view: RunView,
        decode: Decode = decode_json,
        *,
        processes: ReaderProcesses | None = None,
    ) -> None:
        """`view` is brought up to date by each `read`. `processes` parse a long file."""
        self.folder = folder
        self.name = resume_argument(folder.absolute())  # as an argument of commands
        self.view = view
        self.tail = Tail(folder / "events.jsonl", decode=decode)
        self._groups = read_groups if processes is None else processes.groups
        self.plan: RunPlan | None = None
        self._files: tuple[object, object] = (
            None,
            None,
        )  # as `_files_now`, of the run that is read
        self._planned: PlannedFigures | None = None

    @property
    def planned(self) -> PlannedFigures:
        """Figures of the plan, once there is one that this version reads."""
        return self._planned or PlannedFigures(name=self.folder.name)

    @property
    def is_replaced(self) -> bool:
        """Whether the folder has another run than the one that has been read: deleted and made anew, or copied there.

        A run only appends to its events: another file, or one that ends before what has been read, is another run's.
        """
        files = self._files_now()
        for known, now in zip(self._files, files, strict=True):
            if known is not None and now is not None and known != now:
                return True
        self._files = (files[0] or self._files[0], files[1] or self._files[1])
        with suppress(OSError):
            return self.tail.path.stat().st_size < self.tail.whole_lines_end
        return False

    def _files_now(self) -> tuple[object, object]:
        """The run's id, and which file its events are; None for what cannot be read."""
        run = None
        with suppress(UserError, OSError):
            identity = read_identity(self.folder)
            run = None if identity is None else identity.run
        events = None
        with suppress(OSError):
            status = self.tail.path.stat()
            events = status.st_dev, status.st_ino
        return run, events

    def read(self, on_group: Callable[[], None] = lambda: None) -> Status:
        """Reads new events. Returns the status of the run. Raises UserError.

        `on_group` is called after each event, and after consecutive steps together.
        """
        if self.is_replaced:
            raise UserError(
                "another run has this name now",
                where=str(self.folder),
                fix="open it again, to see its figures",
            )

        # The lock is asked before the events are read, so that the last events of a run are not missed.
        is_running = worked_on(self.folder)
        for group in self._groups(self.tail):
            self.view.add_group(group)
            on_group()
        summary = self.view.summary
        summary.best_saved = None if is_running else best_on_disk(self.folder / "checkpoints")

        # The plan does not change: it is read once.
        if self._planned is None:
            with suppress(UserError, OSError):  # no plan yet, or one of another version
                self.plan = read_plan(self.folder / "plan.json")
                machine = read_machine(self.folder / "machine.json")
                self._planned = replace(figures_of_plan(self.plan, machine), name=self.folder.name)
        return status_of(self.folder, summary, is_running=is_running)

    def read_all(self) -> list[Event]:
        """Every event of a run that no process works on, or so far: the last line may lack its end."""
        events = list(self.tail.read(is_complete=True))
        self.view.add_all(events)
        self.view.summary.best_saved = best_on_disk(self.folder / "checkpoints")
        return events


def status_at_end(folder: Path, summary: RunSummary) -> Status:
    """done, stopped, failed or killed.

    A run without a final event was killed. So was one that is done before its planned steps: it was extended.
    """
    if summary.ended is None or contradicted(folder, summary.ended, summary.step):
        return "killed"
    return status_of_end(summary.ended)


def status_of(folder: Path, summary: RunSummary, *, is_running: bool) -> Status:
    """running, paused or stopping; else done, stopped, failed or killed."""
    if not is_running:
        return status_at_end(folder, summary)
    if summary.stopping:
        return "stopping"
    return "paused" if RunFolder(folder).pause_request.exists() else "running"
