"""What all pages of studio show: the runs of a folder, and the open ones with their curves. Does not import torch."""

import os
import re
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import final
from urllib.parse import quote

from bloomery.core.errors import UserError, one_line, system_errors_worded
from bloomery.core.files import open_regular, read_whole, size_of
from bloomery.core.run_folder import every_run, is_run, is_sweep
from bloomery.core.run_lock import worked_on
from bloomery.core.run_notes import NOTES_FILE, read_notes
from bloomery.core.text import harmless, redact_secrets
from bloomery.monitor.events import Decode, decode_json, fast_decode
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.view.curves import Points, RunCurves
from bloomery.view.incidents import Incident, incident_of
from bloomery.view.reader import LIVE, RunReader, status_of
from bloomery.view.reader_processes import PIECE_BYTES, ReaderProcesses
from bloomery.view.run_view import RunView
from bloomery.view.step_columns import read_ends
from bloomery.view.summary import RunSummary, status_text, summary_of

END_BYTES = 2**16  # of each end of a long event file, for the list of runs
KEPT_SECONDS = 300.0  # that a run stays in memory after the last page of it was closed
MOST_OPEN = 24
FILE_BYTES = 20_000  # that are shown of a file of a run, from its end
LOCKED_SECONDS = 0.03  # in which events are read before a page may look
MFU = "MFU"  # a curve, in percent
UNREAD = "reading"  # the status of a run before its events have been read once
FIRST_SECONDS = 1.0  # that a page waits for a run to be read before it shows what there is
PAGE_SECONDS = (
    0.1  # that a browser waits for a page: it then loads the program of the page while studio reads
)


@dataclass(frozen=True)
class RunRow:
    """A run in the list of runs; None: unknown. `speed` and `planned_speed`: tokens per second. `progress`: 0 to 1.

    `loss`: the moving average, of a run that is judged by rewards None. `validation_loss`, `bits_per_byte`: of the
    newest evaluation. `sweep`: the name of the sweep that it belongs to; a run of a sweep is named SWEEP/RUN. `bytes`:
    of its folder.
    """

    name: str
    status: str
    reason: str
    model: str = ""
    method: str = ""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    reward: float | None = None
    speed: float | None = None
    planned_speed: float | None = None
    memory_gib: float | None = None
    temperature: float | None = None
    power: float | None = None
    began: float | None = None
    seconds: float = 0.0
    bits_per_byte: float | None = None
    bytes: int = 0
    sweep: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def progress(self) -> float | None:
        return min(self.step / self.steps, 1.0) if self.steps else None


def is_plain(name: str) -> bool:
    """Whether a page shows the name as it is: without control characters, and in UTF-8."""
    return harmless(name) == name


def address_of(name: str) -> str:
    """The page of a run; of a sweep's run, SWEEP/RUN."""
    return f"/run/{quote(name, safe='/')}"


def method_of(plan: RunPlan) -> str:
    """The objective, with the adapter and the quantization: "sft, lora, nf4"."""
    parts = [plan.objective.kind, plan.adapter.kind, plan.quantize.kind]
    return ", ".join(part for part in parts if part != "none")


def model_of(plan: RunPlan) -> str:
    """The model that the run began with, else its architecture."""
    source = plan.model.source
    return plan.model.config.family if source is None else harmless(short_source(str(source)))


def short_source(source: str) -> str:
    """A model by the name that tells it from others: of a run's own folder the run, too ("demo, step 360")."""
    path = Path(source)
    folders = path.parts
    if "runs" not in folders[:-2]:
        return path.name
    inner = Path(*folders[len(folders) - folders[::-1].index("runs") :])
    if step := re.fullmatch(r"(?:step|best)-0*(\d+)", path.name):
        return f"{inner.parent.parent}, step {int(step[1]):,}"
    return str(inner)


def planned_speed(plan: RunPlan | None) -> float | None:
    """Tokens per second of the plan; None where the device is unknown."""
    if plan is None or plan.step_seconds is None or plan.step_seconds.value <= 0:
        return None
    return plan.trained_tokens_per_step / plan.step_seconds.value


def row_of(folder: Path, decode: Decode) -> RunRow:
    """From the plan and the two ends of the events: a long run costs as little as a short one. `RunLine` of `bloomery
    runs` is another list: of whole events, without a plan, with the command that resumes."""
    sweep = folder.parent.name if is_sweep(folder.parent) else ""
    name = f"{sweep}/{folder.name}" if sweep else folder.name
    # Without some of its characters it could be the name of another run.
    if not is_plain(name):
        reason = "rename the folder: no page shows its name"
        return RunRow(f"runs/{one_line(name)}", "unreadable", reason, sweep=one_line(sweep))
    is_running = worked_on(folder)
    try:
        summary = summary_of(read_ends(folder / "events.jsonl", END_BYTES, decode))
    except (UserError, OSError) as error:
        reason = error.problem if isinstance(error, UserError) else str(error)
        return RunRow(name, "unreadable", harmless(reason), sweep=sweep)
    status = status_of(folder, summary, is_running=is_running)
    plan = None
    with suppress(UserError, OSError):  # no plan yet, or one of another version
        plan = read_plan(folder / "plan.json")
    notes = read_notes(folder)
    gpus = [device.latest for device in summary.devices.all if device.latest.device >= 0]
    return RunRow(
        name=name,
        status=status,
        reason=redact_secrets(harmless(status_text(status, summary))),
        model="" if plan is None else model_of(plan),
        method="" if plan is None else method_of(plan),
        step=summary.step,
        steps=summary.planned_steps or (None if plan is None else plan.train.steps),
        loss=None if summary.scores_completions else summary.smoothed,
        validation_loss=_validation_loss(summary),
        reward=summary.judged_reward,
        speed=summary.tokens_per_second,
        planned_speed=planned_speed(plan),
        memory_gib=summary.last_step.memory_gib or None if summary.last_step else None,
        temperature=max((gpu.temperature for gpu in gpus if gpu.temperature), default=None),
        power=sum(gpu.power for gpu in gpus if gpu.power) or None,
        began=summary.began,
        seconds=_seconds(folder, summary, is_live=status in LIVE),
        bits_per_byte=summary.evaluation.bits_per_byte if summary.evaluation else None,
        bytes=size_of(folder),
        sweep=sweep,
        tags=notes.tags,
        note=redact_secrets(notes.note or notes.problem),
    )


def _validation_loss(summary: RunSummary) -> float | None:
    evaluation = summary.evaluation
    return None if evaluation is None or summary.scores_completions else evaluation.loss


def _seconds(folder: Path, summary: RunSummary, *, is_live: bool) -> float:
    """The wall time of the run; of a run that has ended metrics.json knows it, stops in the middle left out."""
    if is_live:
        return summary.clock.until(time.time())
    try:
        seconds = decode_json(read_whole(folder / "metrics.json")).get("seconds")
    except (OSError, UserError, ValueError, AttributeError, RecursionError):
        seconds = None
    return float(seconds) if isinstance(seconds, int | float) else summary.clock.seconds


@final
class OpenRun:
    """A run that pages show: read once, whatever their number. Hold `lock` to look at what has been read."""

    def __init__(
        self, folder: Path, decode: Decode, processes: ReaderProcesses | None = None
    ) -> None:
        self.reader = RunReader(folder, RunView(), decode, processes=processes)
        self.status = UNREAD
        self.problem = ""  # why its events cannot be read
        self.is_replaced = False  # whether another run has its name now
        self.used = time.monotonic()
        self.lock = threading.RLock()
        self._reading = threading.Lock()
        self._locked_at = 0.0

    @property
    def name(self) -> str:
        """Below runs/; SWEEP/RUN of a sweep's run."""
        return self.reader.folder.relative_to("runs").as_posix()

    @property
    def view(self) -> RunView:
        return self.reader.view

    @property
    def summary(self) -> RunSummary:
        return self.view.summary

    @property
    def curves(self) -> RunCurves:
        return self.view.curves

    @property
    def is_reading(self) -> bool:
        return self._reading.locked()

    def points(self, name: str, first: float = 0, last: float | None = None) -> Points:
        """Of a curve, also while its values are read."""
        with self.lock:
            return self.curves.points(name, first, last)

    def smoothed(
        self, name: str, weight: float, first: float = 0, last: float | None = None
    ) -> Points:
        """The moving average of a curve, also while its values are read."""
        with self.lock:
            return self.curves.smoothed(name, weight, first, last)

    def update(self, wait_seconds: float = 0.0) -> None:
        """Reads what is new since the last call; returns after `wait_seconds` while another thread does."""
        self.used = time.monotonic()
        if not self._reading.acquire(timeout=wait_seconds):
            return
        try:
            with self.lock:
                self._locked_at = time.monotonic()
                self._update()
        finally:
            self._reading.release()

    def _update(self) -> None:
        if not is_run(self.reader.folder):
            self.status = "deleted"
            self.problem = "the run folder is gone"
            return
        try:
            self.status = self.reader.read(self._let_pages_look)
            self.problem = ""
            utilization = self.reader.planned.utilization(1.0)
            if utilization is not None:
                self.curves.scaled[MFU] = "tokens per second", 100 * utilization
        except (UserError, OSError) as error:
            self.status = "unreadable"
            self.problem = error.problem if isinstance(error, UserError) else str(error)
            self.is_replaced = self.reader.is_replaced

    def _let_pages_look(self) -> None:
        """Pages show the beginning of a long file while the rest is read."""
        if time.monotonic() - self._locked_at > LOCKED_SECONDS:
            self.lock.release()
            time.sleep(0.001)
            self.lock.acquire()
            self._locked_at = time.monotonic()


@final
@dataclass
class Watching:
    """Mutable: every run of `runs/`, as rows, and the runs that pages have opened."""

    decode: Decode = field(default_factory=fast_decode)
    processes: ReaderProcesses = field(default_factory=ReaderProcesses)
    _rows: dict[Path, tuple[tuple[object, ...], RunRow]] = field(default_factory=dict)
    _open: dict[str, OpenRun] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading_ahead: threading.Lock = field(default_factory=threading.Lock)
    # The newest run to read ahead.
    _pointed_at: deque[str] = field(default_factory=lambda: deque(maxlen=1))

    def rows(self) -> list[RunRow]:
        """The newest run first. A run whose files have not changed is not read again."""
        with self._lock:
            rows: dict[Path, tuple[tuple[object, ...], RunRow]] = {}
            for folder in reversed(every_run()):
                state = _state_of(folder)
                known = self._rows.get(folder)
                if known is not None and known[0] == state and known[1].status not in LIVE:
                    rows[folder] = known
                else:
                    rows[folder] = state, row_of(folder, self.decode)
            self._rows = rows
        return self.known_rows()

    def look_around(self) -> None:
        """Reads the list before a page asks for it, and begins the processes for runs that are long."""
        # The page that asks next words an error.
        with suppress(UserError, OSError):
            self.rows()
            if any(_is_long(folder) for folder in every_run()):
                self.processes.begin()

    def known_rows(self) -> list[RunRow]:
        """The rows of the last call of `rows`, without a look at any file."""
        return [row for _, row in self._rows.values()]

    def run(self, name: str) -> OpenRun:
        """The run with this name, SWEEP/RUN of a sweep. Raises UserError where `runs/` has none."""
        folder = Path("runs") / name
        parts = name.split("/")
        with system_errors_worded():
            is_known = (
                not {"", ".", ".."} & set(parts)
                and "\0" not in name
                and (len(parts) == 1 or (len(parts) == 2 and is_sweep(folder.parent)))
                and is_run(folder)
            )
        if not is_known:
            fix = "choose one of the list"
            raise UserError(f"no run {harmless(name)[:80]!r}", where="runs/", fix=fix)
        with self._lock:
            now = time.monotonic()
            self._open = {
                key: run
                for key, run in sorted(self._open.items(), key=lambda item: -item[1].used)[
                    :MOST_OPEN
                ]
                if key == name or now - run.used < KEPT_SECONDS
            }
            # A page that is opened now shows the run that is there now; a page of a deleted one says that.
            opened = self._open.get(name)
            if opened is None or opened.reader.is_replaced:
                opened = self._open[name] = OpenRun(folder, self.decode, self.processes)
            return opened

    def read_ahead(self, name: str) -> None:
        """Reads a run that somebody points at, before it is opened. Of those that are pointed at meanwhile, the last
        one is the next: a pointer that passes over a list does not read all of it.
        """
        self._pointed_at.append(name)
        while self._pointed_at and self._reading_ahead.acquire(blocking=False):
            try:
                # The run is gone, or another thread has come first.
                with suppress(UserError, IndexError):
                    self.run(self._pointed_at.pop()).update()
            finally:
                self._reading_ahead.release()


def _is_long(folder: Path) -> bool:
    """Whether processes parse the events of a run."""
    with suppress(FileNotFoundError):
        return (folder / "events.jsonl").stat().st_size >= 2 * PIECE_BYTES
    return False


def _state_of(folder: Path) -> tuple[object, ...]:
    """Changes with the events, the plan, the lock and the notes of a run."""
    state: list[object] = []
    for name in ("events.jsonl", "plan.json", "lock", NOTES_FILE):
        try:
            stat = (folder / name).stat()
            state.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            state.append(None)
    return tuple(state)


def timeline_of(run: OpenRun) -> list[Incident]:
    """What happened, in words, with the checkpoints, the newest first. Hold the lock of the run."""
    saves = [incident_of(save, 0.0) for save in run.view.saves]
    incidents = [*run.view.shown_incidents(), *(save for save in saves if save is not None)]
    in_order = sorted(incidents, key=lambda incident: incident.time)
    return [replace(incident, text=_shown_text(incident.text)) for incident in reversed(in_order)]


@lru_cache(maxsize=2048)
def _shown_text(text: str) -> str:
    return redact_secrets(harmless(text))


def end_of(path: Path) -> str:
    """The end of a file of a run; the reason where it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - FILE_BYTES))
            content = file.read(FILE_BYTES)
    except FileNotFoundError:
        return f"The folder of the run has no {path.name}."
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UserError as error:
        return f"cannot be read: {error.problem}"
    return redact_secrets(harmless(content.decode("utf-8", errors="replace")))
