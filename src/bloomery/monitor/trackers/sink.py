"""The run's end of a tracker's process: events go in, warnings come out, and nobody waits for a network."""

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably
from bloomery.core.text import scrub
from bloomery.monitor.events import Event, RunEnded, to_json, without_secrets
from bloomery.monitor.sinks import paced, scalars

MODULE = "bloomery.monitor.trackers.worker"
FINISH_SECONDS = 20.0  # to send what is left at the end
WAITING_EVENTS = 5_000  # kept for a tracker that is slow; what comes then is left out
_LONGEST_ANSWER = 2**14  # bytes of a line
_MOST_WARNINGS = 10  # of one tracker in a run
NAMES = ("wandb", "trackio", "mlflow")


@final
class TrackerSink:
    """One tracker of `monitor.to`. Its process gets what has figures, at the pace of `monitor.every`."""

    def __init__(self, name: str, run_dir: Path, warn: Callable[[str], None], every_steps: int = 1) -> None:
        self._name, self._warn, self._every = name, warn, every_steps
        self._lost = self._left = False
        self._lines: queue.Queue[bytes | None] = queue.Queue(WAITING_EVENTS)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, name],  # -P: what lies in the working folder is no library
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C is for the run, which still wants to tell how it ended
        )
        self._lines.put(json.dumps(job_of(run_dir)).encode() + b"\n")
        self._threads = [
            threading.Thread(target=work, name=f"{name} {work.__name__}", daemon=True)
            for work in (self._feed, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def write(self, event: Event) -> None:
        wanted = isinstance(event, RunEnded) or (scalars(event) and paced(event, self._every))
        if not wanted or self._process.poll() is not None:
            return
        try:
            self._lines.put_nowait(to_json(without_secrets(event)).encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            if not self._lost:
                self._warn(f"{self._name} is too slow: it does not get every step; events.jsonl holds them all")
            self._lost = True

    def close(self) -> None:
        """Gives it a while to send the rest. What it has kept on the disk stays there."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        try:
            self._process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            self._left = True
            self._warn(f"{self._name} did not finish sending within {FINISH_SECONDS:.0f} s and was left behind")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join(1.0)

    def _feed(self) -> None:
        """The only one that writes to its input: a pipe that is full holds this thread alone."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError), self._process.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        told = 0
        while line := self._process.stdout.readline(_LONGEST_ANSWER):
            with suppress(ValueError, RecursionError):
                warning = str(json.loads(line))
                told += 1
                if told <= _MOST_WARNINGS:
                    self._warn(warning)
        code = self._process.wait()
        if code and not self._left:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._warn(f"{self._name} has crashed ({how}): it gets no more of this run, training goes on")


def require(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose library is not installed here. Nothing is imported."""
    for name in names:
        if name in NAMES and not _installed(name):
            raise UserError(
                f"{name} is not installed in this environment",
                where=f"monitor.to={name}",
                remedy=f"{sys.executable} -m pip install {name}\n       or take it out of monitor.to",
            )


def _installed(name: str) -> bool:
    """A folder `wandb/` in the working folder, which its offline runs make, is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def job_of(run_dir: Path) -> dict[str, Any]:
    """What a tracker must know of a run; its id is made once, so that a resumed run goes on at the tracker, too."""
    known = run_dir / "tracked.json"
    resumed = known.is_file()
    if not resumed:
        write_durably(known, json.dumps({"id": uuid.uuid4().hex[:16]}) + "\n")
    plan = _read(run_dir / "plan.json")
    return {
        "id": _read(known).get("id") or run_dir.name,
        "name": run_dir.name,
        "project": str(plan.get("name") or "bloomery"),
        "folder": str(run_dir),
        "config": {key: _told(value) if isinstance(value, str) else value for key, value in _flat(plan)},
        "resumed": resumed,
    }


_TOLD = ("model", "data", "optimizer", "train", "checkpoint", "eval")  # sections of a plan that a run is compared by


def _flat(plan: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for section in _TOLD:
        values = plan.get(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            found += [(f"{section}.{key}.{name}".rstrip("."), item) for name, item in inner]
    return [(key, value) for key, value in found if isinstance(value, str | int | float | bool)]


def _told(value: str) -> str:
    """Without secrets, and of a path on this machine its end alone: the rest names people and projects."""
    return scrub(Path(value).name if Path(value).is_absolute() else value)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_whole(path))
    except (OSError, ValueError, UserError):
        return {}
    return found if isinstance(found, dict) else {}
