"""Places besides the terminal that the events of a run go to."""

import json
import math
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, final

from bloomery.core.files import open_regular, write_durably
from bloomery.core.text import harmless, redact_secrets
from bloomery.core.units import MIB
from bloomery.monitor.console.words import sentence
from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    read_events,
    to_json,
    without_secrets,
)
from bloomery.monitor.summary import JOULES_IN_KWH, RunSummary, device_figures, summary_of
from bloomery.monitor.trackers import TrackerSink, paced

Warn = Callable[[str], None]
_HOOK_SECONDS = 10.0
_LOOK_MILLISECONDS = 20  # between two looks whether a hook has ended
_CHUNK = 2**14  # of a hook's last words
_SAMPLE_SECONDS = 60.0
_HOOK_FAILURES = 3  # in a row, after which the hook is left alone


class Sink(Protocol):
    """Receives every event in order; must not raise because its receiver is away: that is a warning."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


@final
class Pace:
    """As `paced`, and of each device one sample a minute: for readers to whom an event is more than a point."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        self._sampled: dict[int, float] = {}

    def lets_through(self, event: Event) -> bool:
        if not isinstance(event, DeviceStats):
            return paced(event, self._every)
        due = event.time - self._sampled.get(event.device, -math.inf) >= _SAMPLE_SECONDS
        if due and event.seconds:
            self._sampled[event.device] = event.time
        return due and bool(event.seconds)


@final
class LogFile:
    """`log.txt`: one line an event with its time, and the tracebacks that the terminal did not show; no secrets.

    What a full disk does not take is lost here alone: events.jsonl is the record, and its writers say that it is full.
    """

    def __init__(self, path: Path, every_steps: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what could not be written is not tried again.
        self._file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        self._pace = Pace(every_steps)

    def write(self, event: Event) -> None:
        if self._pace.lets_through(event):
            self.text(sentence(event), event.time)

    def text(self, text: str, when: float | None = None) -> None:
        """Any text, each line stamped."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
        for line in map(harmless, redact_secrets(text).splitlines() or [""]):
            with suppress(OSError):
                self._file.write(f"{stamp}  {line}\n".encode("utf-8", errors="backslashreplace"))

    def close(self) -> None:
        self._file.close()


@final
class CommandSink:
    """Runs the user's program with each event's JSON on its standard input; a hook that fails never stops a run.

    What it prints is passed over, but for the end of its standard error where it fails.
    """

    def __init__(self, command: str, folder: Path, warn: Warn, every_steps: int = 1) -> None:
        self._words, self._folder, self._warn, self._pace = shlex.split(command), folder, warn, Pace(every_steps)
        self._failures = 0

    def write(self, event: Event) -> None:
        if self._failures >= _HOOK_FAILURES or not self._pace.lets_through(event):
            return
        problem = self._run(to_json(without_secrets(event)).encode(errors="backslashreplace") + b"\n")
        self._failures = self._failures + 1 if problem else 0
        if problem:
            more = "; it is not called again" if self._failures == _HOOK_FAILURES else ""
            self._warn(f"the hook {self._words[0]} {problem}{more}")

    def _run(self, line: bytes) -> str:
        """What went wrong, or nothing. The event is a file: a hook that does not read it blocks nobody."""
        try:
            with TemporaryFile() as event:
                event.write(line)
                event.seek(0)
                process = subprocess.Popen(
                    self._words,
                    cwd=self._folder,
                    stdin=event,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # so that what it has started ends with it when it hangs
                )
        except (OSError, ValueError) as error:
            return f"could not be started: {getattr(error, 'strerror', None) or error}"
        assert process.stderr is not None
        with process.stderr as pipe:
            said = _last_words(process, pipe.fileno(), time.monotonic() + _HOOK_SECONDS)
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"did not answer within {_HOOK_SECONDS:.0f} s"
        last = harmless(said.decode(errors="replace")).strip().splitlines()[-1:] or [""]
        return f"failed with exit code {process.returncode}: {last[0]}"[:300] if process.returncode else ""

    def close(self) -> None:
        """Nothing is held open between events."""


def _last_words(process: "subprocess.Popen[bytes]", pipe: int, deadline: float) -> bytes:
    """The end of what a process writes until it ends or the time is up. All else is read and forgotten, and a child
    that it leaves behind with the pipe in its hands is not waited for.
    """
    said, total, ended = b"", 0, False
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while time.monotonic() < deadline:
        ended = ended or process.poll() is not None  # before the look: what it wrote is in the pipe by then
        if not ready.poll(0 if ended else _LOOK_MILLISECONDS):
            if ended:
                break
            continue
        chunk = os.read(pipe, _CHUNK)
        said, total = (said + chunk)[-_CHUNK:], total + len(chunk)
        if not chunk:  # closed; only its end is waited for
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            break
        if total > MIB:
            time.sleep(_LOOK_MILLISECONDS / 1000)  # whoever writes without end waits for us
    return said


def open_sinks(
    run_dir: Path, names: Sequence[str], commands: Sequence[str], *, every_steps: int, folder: Path, warn: Warn
) -> list[Sink]:
    """The sinks of `logging.trackers`; `warn` is told of each that cannot be had. Hooks run in `folder`."""
    return [
        LogFile(run_dir / "log.txt", every_steps),
        *(TrackerSink(name, run_dir, warn, every_steps) for name in names),
        *(CommandSink(command, folder, warn, every_steps) for command in commands),
    ]


def write_metrics(run_dir: Path, planned: Mapping[str, float | None] | None = None) -> Path:
    """`metrics.json`: what the run reached, computed from its events, beside what was `planned`; replaced whole."""
    summary = summary_of(read_events(run_dir / "events.jsonl"))
    path = run_dir / "metrics.json"
    write_durably(path, json.dumps({**reached(summary), "planned": dict(planned or {})}, indent=2) + "\n")
    return path


def reached(summary: RunSummary) -> dict[str, Any]:
    """What a run has come to, under the names that programs read."""
    joules = summary.devices.joules
    return {
        "steps": summary.step,
        "steps_planned": summary.steps,
        "tokens": summary.tokens,
        "loss": summary.last.loss if summary.last else None,
        "smoothed_loss": summary.smoothed,
        "evaluation": _plain(summary.evaluation),
        "best_evaluation": _plain(summary.best),
        "tokens_per_second": summary.tokens_per_second,
        "seconds": summary.seconds,
        "step_seconds_total": summary.trained_seconds,
        "peak_memory_gib": summary.peak_gib,
        "energy_kwh": None if joules is None else joules / JOULES_IN_KWH,
        "energy_seconds": round(summary.devices.covered_seconds, 1),
        "joules_per_token": summary.joules_per_token,
        "devices": [device_figures(device) for device in summary.devices.all],
        "skipped_steps": summary.skipped,
        "resumes": summary.resumes,
        "recoveries": summary.recoveries,
        "warnings": [redact_secrets(text) for text in summary.warnings],
        "status": summary.ended.status if summary.ended else None,
        "error": redact_secrets(summary.ended.error) if summary.ended and summary.ended.error else None,
    }


def _plain(event: EvalDone | None) -> dict[str, Any] | None:
    return asdict(event) if event else None
