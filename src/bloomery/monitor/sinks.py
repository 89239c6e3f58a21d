"""Sinks for the events of a run: log.txt, hook commands, trackers, metrics.json."""

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
from bloomery.monitor.events import DeviceStats, Event, read_events, to_json, without_secrets
from bloomery.monitor.summary import JOULES_IN_KWH, RunSummary, device_figures, summary_of
from bloomery.monitor.trackers import TrackerSink, on_schedule
from bloomery.monitor.words import log_line

Warn = Callable[[str], None]
_HOOK_SECONDS = 10.0
_POLL_MILLISECONDS = 20  # while a hook runs
_CHUNK = 2**14  # bytes of a hook's standard error
_SAMPLE_SECONDS = 60.0
_HOOK_FAILURES = 3  # in a row, after which the hook is not called again


class Sink(Protocol):
    """Receives every event in order. A receiver that is gone is a warning, never an exception."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


@final
class Schedule:
    """As `on_schedule`, and one sample of each device per minute."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        self._sampled: dict[int, float] = {}

    def accepts(self, event: Event) -> bool:
        if not isinstance(event, DeviceStats):
            return on_schedule(event, self._every)
        due = event.time - self._sampled.get(event.device, -math.inf) >= _SAMPLE_SECONDS
        if due and event.seconds:
            self._sampled[event.device] = event.time
        return due and bool(event.seconds)


@final
class LogFile:
    """`log.txt`: one line per event with its time, and full tracebacks; no secrets. A full disk is no error."""

    def __init__(self, path: Path, every_steps: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a failed write is not repeated.
        self._file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        self._schedule = Schedule(every_steps)

    def write(self, event: Event) -> None:
        if self._schedule.accepts(event):
            self.text(log_line(event), event.time)

    def text(self, text: str, when: float | None = None) -> None:
        """Any text, with the time before each line."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
        for line in map(harmless, redact_secrets(text).splitlines() or [""]):
            with suppress(OSError):
                self._file.write(f"{stamp}  {line}\n".encode("utf-8", errors="backslashreplace"))

    def close(self) -> None:
        self._file.close()


@final
class CommandSink:
    """Runs your program with the JSON of each event on its standard input; a hook that fails never stops a run.

    Its output is ignored, except the last line of standard error when it fails.
    """

    def __init__(self, command: str, folder: Path, warn: Warn, every_steps: int = 1) -> None:
        self._command, self._folder, self._warn = shlex.split(command), folder, warn
        self._schedule, self._failures = Schedule(every_steps), 0

    def write(self, event: Event) -> None:
        if self._failures >= _HOOK_FAILURES or not self._schedule.accepts(event):
            return
        problem = self._run(to_json(without_secrets(event)).encode(errors="backslashreplace") + b"\n")
        self._failures = self._failures + 1 if problem else 0
        if problem:
            more = "; not called again" if self._failures == _HOOK_FAILURES else ""
            self._warn(f"the hook {self._command[0]} {problem}{more}")

    def _run(self, line: bytes) -> str:
        """The problem, or "". The event is a file, so a hook that does not read it blocks nothing."""
        try:
            with TemporaryFile() as event:
                event.write(line)
                event.seek(0)
                process = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    stdin=event,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # so that a kill reaches its children
                )
        except (OSError, ValueError) as error:
            return f"cannot be started: {getattr(error, 'strerror', None) or error}"
        assert process.stderr is not None
        with process.stderr as pipe:
            output = _last_output(process, pipe.fileno(), time.monotonic() + _HOOK_SECONDS)
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"timed out after {_HOOK_SECONDS:.0f} s"
        last = harmless(output.decode(errors="replace")).strip().splitlines()[-1:] or [""]
        return f"failed with exit code {process.returncode}: {last[0]}"[:300] if process.returncode else ""

    def close(self) -> None:
        """No resource is open between events."""


def _last_output(process: "subprocess.Popen[bytes]", pipe: int, deadline: float) -> bytes:
    """The last bytes that a process writes before it ends or times out, without waiting for its children."""
    output, total, ended = b"", 0, False
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while time.monotonic() < deadline:
        ended = ended or process.poll() is not None  # before the poll, so that its output is in the pipe
        if not ready.poll(0 if ended else _POLL_MILLISECONDS):
            if ended:
                break
            continue
        chunk = os.read(pipe, _CHUNK)
        output, total = (output + chunk)[-_CHUNK:], total + len(chunk)
        if not chunk:  # closed, the process may still run
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            break
        if total > MIB:
            time.sleep(_POLL_MILLISECONDS / 1000)  # throttle endless output
    return output


def open_sinks(
    run_dir: Path, names: Sequence[str], commands: Sequence[str], *, every_steps: int, folder: Path, warn: Warn
) -> list[Sink]:
    """The sinks of `logging.trackers`; `warn` gets a line for each that fails. Hooks run in `folder`."""
    return [
        LogFile(run_dir / "log.txt", every_steps),
        *(TrackerSink(name, run_dir, warn, every_steps) for name in names),
        *(CommandSink(command, folder, warn, every_steps) for command in commands),
    ]


def write_metrics(run_dir: Path, planned: Mapping[str, float | None] | None = None) -> Path:
    """Writes `metrics.json`: the figures of the run, computed from its events, and those `planned`."""
    summary = summary_of(read_events(run_dir / "events.jsonl"))
    path = run_dir / "metrics.json"
    write_durably(path, json.dumps({**metrics_of(summary), "planned": dict(planned or {})}, indent=2) + "\n")
    return path


def metrics_of(summary: RunSummary) -> dict[str, Any]:
    """Figures of the run so far, for programs."""
    joules, last, ended = summary.devices.joules, summary.last, summary.ended
    return {
        "status": ended.status if ended else None,
        "error": redact_secrets(ended.error) if ended and ended.error else None,
        "step": summary.step,
        "max_steps": summary.steps,
        "tokens": summary.tokens,
        "loss": last.loss if last else None,
        "smoothed_loss": summary.smoothed,
        "eval": asdict(summary.evaluation) if summary.evaluation else None,
        "best_eval": asdict(summary.best) if summary.best else None,
        "tokens_per_second": summary.tokens_per_second,
        "seconds": summary.seconds,
        "train_seconds": summary.trained_seconds,
        "peak_memory_gib": summary.peak_gib,
        "energy_kwh": None if joules is None else joules / JOULES_IN_KWH,
        "energy_seconds": round(summary.devices.covered_seconds, 1),
        "joules_per_token": summary.joules_per_token,
        "devices": [device_figures(device) for device in summary.devices.all],
        "skipped_steps": summary.skipped,
        "resumes": summary.resumes,
        "recoveries": summary.recoveries,
        "warnings": [redact_secrets(text) for text in summary.warnings],
    }
