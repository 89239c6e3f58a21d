"""Asking a run that another process works on to stop or to save, and waiting until it has. No torch."""

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
from bloomery.train.run import NOT_RECORDED, PROFILE, PROFILE_ASKED
from bloomery.train.sealed import NOT_SAVED


@final
@dataclass(frozen=True)
class Runner:
    """The process that works on a run, as its lock tells: never a later one of the same number."""

    folder: RunFolder
    entry: dict[str, Any]

    @property
    def pid(self) -> int:
        return int(self.entry["pid"])

    @property
    def working(self) -> bool:
        """Whether it still holds the run; its process may live on when the run was a part of a larger program."""
        return holder_of(self.folder.lock) == self.entry and alive(self.entry)

    def send(self, number: int) -> None:
        """Raises UserError when it has ended meanwhile, or belongs to somebody else."""
        try:
            with ExitStack() as stack:
                # What is opened first keeps its number from passing to another process between look and signal.
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
                f"process {self.pid} belongs to another user, who alone may stop it or let it save",
                where=str(self.folder.path),
                fix="ask that user, or use their account",
            ) from error


def runner_of(folder: RunFolder) -> Runner:
    """Who works on the run, on this host and listening. Raises UserError when nobody is, or nobody who could hear."""
    entry = holder_of(folder.lock) if folder.lock.exists() else {}
    elsewhere = bool(entry) and entry["host"] != host_name()
    if elsewhere and beats(folder.lock):
        raise UserError(
            f"this run goes on on another machine: process {entry['pid']} on {entry['host']}",
            where=str(folder.path),
            fix=f"run the same command on {entry['host']}",
        )
    if elsewhere or not alive(entry):
        raise _idle(folder)
    if not entry.get("hears", False):
        raise UserError(
            f"process {entry['pid']} runs this training outside its main thread, where Python hears no signals",
            where=str(folder.path),
            fix="stop it from inside that program",
        )
    return Runner(folder, entry)


def _idle(folder: RunFolder) -> UserError:
    return UserError(
        "no process is working on this run",
        where=str(folder.path),
        fix=f"`bloomery resume {folder.name}` goes on with it; `bloomery runs` says how each run ended",
    )


def stop_run(runner: Runner, *, on_event: Callable[[Event], None]) -> RunEnded | None:
    """Asks it to save and stop; returns when it has ended, with how. None when it died without a word."""
    ended = None
    for event in _heard(runner, partial(runner.send, signal.SIGTERM)):
        on_event(event)
        ended = event if isinstance(event, RunEnded) else ended
    if ended is None:  # a run that was about to leave when it was asked had already told how it ends
        for event in deque(read_events(runner.folder.events), maxlen=1):
            mine = event.time >= runner.entry.get("since", math.inf)
            ended = event if mine and isinstance(event, RunEnded) else None
    return ended


def save_run(runner: Runner, *, on_event: Callable[[Event], None]) -> Saved:
    """Asks for a checkpoint after the step that it is taking; returns when it stands.

    An older one, which was still being written when this was asked, is no answer. Raises UserError when it could not
    be written, or the run ended before.
    """
    step = last_step(runner.folder)
    for event in _heard(runner, partial(runner.send, SAVE_SIGNAL)):
        on_event(event)
        if isinstance(event, Recovered):  # it may have gone back
            step = min(step, event.step)
        if isinstance(event, Saved) and event.step >= step:
            return event
        if isinstance(event, Warned) and NOT_SAVED in event.reason and event.step >= step:
            raise UserError(
                event.reason,
                where=str(runner.folder.checkpoints),
                fix="make room on the disk or mend the folder's permissions, then ask again",
            )
    raise _ended_before(runner)


def profile_run(runner: Runner, steps: int, *, on_event: Callable[[Event], None]) -> Path:
    """Asks for the next steps to be recorded; returns the files' path without their endings when they stand.

    Raises UserError when they could not be written, or the run ended before.
    """
    asked = runner.folder.path / PROFILE_ASKED
    try:
        for event in _heard(runner, lambda: write_durably(asked, str(steps))):
            on_event(event)
            if isinstance(event, Phase) and event.name == PROFILE and event.total and event.done >= event.total:
                return runner.folder.path / PROFILE / f"step-{event.step - int(event.total) + 1:08d}"
            if isinstance(event, Warned) and NOT_RECORDED in event.reason:
                raise UserError(
                    event.reason,
                    where=str(runner.folder.path),
                    fix="make room there or mend its permissions, then ask again",
                )
    except OSError as error:
        raise UserError(
            f"a wish cannot be left in the run's folder: {error.strerror}",
            where=str(runner.folder.path),
            fix="mend its permissions or make room on its disk, then ask again",
        ) from error
    finally:
        with suppress(OSError):  # nobody waits for it any more
            asked.unlink(missing_ok=True)
    raise _ended_before(runner)


def _ended_before(runner: Runner) -> UserError:
    return UserError(
        "the run ended before it took another step",
        where=str(runner.folder.path),
        fix=f"`bloomery resume {runner.folder.name}` goes on with it; `bloomery runs` says how it ended",
    )


def _heard(runner: Runner, ask: Callable[[], None]) -> Iterator[Event]:
    """What the run tells from the request on, until nobody works on it any more."""
    events = runner.folder.events
    seen = events.stat().st_size if events.exists() else 0
    ask()
    yield from follow(events, lambda: not runner.working, start=seen)
