"""Stop, save or profile a run of another process: send the request, wait for the result. No torch."""

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.monitor.events import Event, Phase, Recovered, RunEnded, Saved, Warned, follow, read_events
from bloomery.runs.event_hub import last_step
from bloomery.runs.folder import RunFolder, alive, beats, holder_of, host_name, start_mark
from bloomery.runs.signals import SAVE_SIGNAL
from bloomery.train.model_folder import NOT_SAVED
from bloomery.train.run import NOT_RECORDED, PROFILE, PROFILE_ASKED


@final
@dataclass(frozen=True)
class Runner:
    """The process that runs a training, identified by the lock; a later process with the same pid is not it."""

    folder: RunFolder
    entry: dict[str, Any]

    @property
    def pid(self) -> int:
        return int(self.entry["pid"])

    @property
    def working(self) -> bool:
        """Whether it still holds the lock; the process itself may outlive the run."""
        return holder_of(self.folder.lock) == self.entry and alive(self.entry)

    def send(self, number: int) -> None:
        """Raises UserError when the process has ended, or belongs to another user."""
        try:
            with ExitStack() as stack:
                # An open handle prevents that the pid is reused between check and signal.
                handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
                if handle is not None:
                    stack.callback(os.close, handle)
                if start_mark(self.pid) != self.entry["started"]:
                    raise ProcessLookupError
                if handle is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(handle, number)
        except ProcessLookupError as error:
            raise _idle(self.folder) from error
        except PermissionError as error:
            raise UserError(
                f"permission denied: process {self.pid} belongs to another user",
                where=str(self.folder.path),
                fix="run this command as that user",
            ) from error


def runner_of(folder: RunFolder) -> Runner:
    """The process of the run, on this host. Raises UserError when there is none, or it cannot receive signals."""
    entry = holder_of(folder.lock) if folder.lock.exists() else {}
    elsewhere = bool(entry) and entry["host"] != host_name()
    if elsewhere and beats(folder.lock):
        raise UserError(
            f"the run is on another machine: process {entry['pid']} on {entry['host']}",
            where=str(folder.path),
            fix=f"run the same command on {entry['host']}",
        )
    if elsewhere or not alive(entry):
        raise _idle(folder)
    if not entry.get("receives_signals", False):
        raise UserError(
            f"process {entry['pid']} trains outside its main thread, where Python receives no signals",
            where=str(folder.path),
            fix="stop it in that program",
        )
    return Runner(folder, entry)


def _idle(folder: RunFolder) -> UserError:
    return UserError("no process is training this run", where=str(folder.path), fix=f"bloomery resume {folder.name}")


def stop_run(runner: Runner, *, on_event: Callable[[Event], None]) -> RunEnded | None:
    """Requests a save and a stop; returns the final event. None when the process exited without one."""
    ended = None
    for event in _events_after(runner, partial(runner.send, signal.SIGTERM)):
        on_event(event)
        ended = event if isinstance(event, RunEnded) else ended
    if ended is None:  # a run that was about to end had already written its final event
        for event in deque(read_events(runner.folder.events), maxlen=1):
            mine = event.time >= runner.entry.get("since", math.inf)
            ended = event if mine and isinstance(event, RunEnded) else None
    return ended


def save_run(runner: Runner, *, on_event: Callable[[Event], None]) -> Saved:
    """Requests a checkpoint after the current step; returns when it is saved.

    Ignores an older checkpoint that was still being written. Raises UserError when the checkpoint cannot be written,
    or the run ends before.
    """
    step = last_step(runner.folder)
    for event in _events_after(runner, partial(runner.send, SAVE_SIGNAL)):
        on_event(event)
        if isinstance(event, Recovered):  # maybe at an earlier step
            step = min(step, event.step)
        if isinstance(event, Saved) and event.step >= step:
            return event
        if isinstance(event, Warned) and NOT_SAVED in event.reason and event.step >= step:
            raise UserError(
                event.reason,
                where=str(runner.folder.checkpoints),
                fix="free disk space or correct the folder's permissions, then run this again",
            )
    raise _ended_before(runner)


def profile_run(runner: Runner, steps: int, *, on_event: Callable[[Event], None]) -> Path:
    """Requests a profile of the next steps; returns the path of its files without their suffixes.

    Raises UserError when they cannot be written, or the run ends before.
    """
    asked = runner.folder.path / PROFILE_ASKED
    try:
        for event in _events_after(runner, lambda: write_durably(asked, str(steps))):
            on_event(event)
            if isinstance(event, Phase) and event.name == PROFILE and event.total and event.done >= event.total:
                return runner.folder.path / PROFILE / f"step-{event.step - int(event.total) + 1:08d}"
            if isinstance(event, Warned) and NOT_RECORDED in event.reason:
                raise UserError(
                    event.reason,
                    where=str(runner.folder.path),
                    fix="free disk space or correct the folder's permissions, then run this again",
                )
    except OSError as error:
        raise UserError(
            f"cannot write the request file to the run folder: {error.strerror}",
            where=str(runner.folder.path),
            fix="correct its permissions or free disk space, then run this again",
        ) from error
    finally:
        with suppress(OSError):
            asked.unlink(missing_ok=True)
    raise _ended_before(runner)


def _ended_before(runner: Runner) -> UserError:
    return UserError(
        "the run ended before its next step",
        where=str(runner.folder.path),
        fix=f"`bloomery resume {runner.folder.name}`; `bloomery runs` lists how each run ended",
    )


def _events_after(runner: Runner, ask: Callable[[], None]) -> Iterator[Event]:
    """Sends the request by `ask`; yields the events after it until the process ends."""
    events = runner.folder.events
    size = events.stat().st_size if events.exists() else 0
    ask()
    yield from follow(events, lambda: not runner.working, start=size)
