"""Sinks for the events of a run: log.txt, hook commands, trackers.

Trackers: TensorBoard, Weights & Biases, trackio and MLflow, each through its own library, each in a thread.

A tracker's library uses the network, prints, fails and sometimes hangs; training is independent of it. Only `close`
waits for it, with a time limit. The environment (WANDB_*, TRACKIO_*, MLFLOW_*) sets server and login: a recipe has no
secrets.
"""

import atexit
import importlib
import importlib.util
import json
import math
import netrc
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, TextIO, cast, final

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra, install_packages
from bloomery.core.files import open_regular, read_whole, write_durably
from bloomery.core.text import harmless, redact_secrets
from bloomery.core.units import MIB
from bloomery.monitor.events import (
    CPU_DEVICE,
    DeviceStats,
    EvalDone,
    Event,
    Resumed,
    RunEnded,
    StepDone,
    StepHealth,
    to_json,
    without_secrets,
)
from bloomery.monitor.words import log_line
from bloomery.recipe.schema import IF_INSTALLED

FINISH_SECONDS = 20.0  # to send what is left at the end
WAITING_EVENTS = 5_000  # buffer for a slow tracker; events above it are dropped
LONGEST_PARAMETER = 500  # characters, the lowest limit of an MLflow server
PARAMETERS_AT_ONCE = 100  # limit of one MLflow call
INSTALLED_BY_THE_USER = ("wandb", "trackio", "mlflow")
_DEVICE_FIGURES = (
    "utilization",
    "memory_gib",
    "temperature",
    "power",
    "clock_mhz",
    "allocated_gib",
    "reserved_gib",
    "fragmentation",
)
_ID_LOCK = threading.Lock()  # the first tracker of a run creates its id
# Sections of the plan that a tracker shows as settings.
_COMPARED = ("model", "data", "optimizer", "train", "checkpoint", "eval", "sample")


def on_schedule(event: Event, every_steps: int) -> bool:
    """Whether a sink that follows `logging.every` shows this event; other events than steps always are."""
    return not isinstance(event, StepDone) or event.step % every_steps == 0 or event.loss is None


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by chart name, without None."""

    def read(folder: str, *names: str) -> dict[str, float | None]:
        return {f"{folder}/{name}": getattr(event, name) for name in names}

    figures: dict[str, float | None] = {}
    match event:
        case StepDone(metrics=metrics):
            figures = read("train", "loss", "learning_rate", "grad_norm")
            figures |= read(
                "speed",
                "tokens_per_second",
                "sequences_per_second",
                "step_seconds",
                "data_wait_seconds",
            )
            figures |= {
                "memory/gib": event.memory_gib,
                **{f"train/{name}": value for name, value in metrics.items()},
            }
        case StepHealth():
            figures = read("train", "update_ratio", "unchanged_share")
        case EvalDone(metrics=metrics):
            figures = read("eval", "loss", "perplexity", "bits_per_byte")
            figures |= {f"eval/{name}": value for name, value in metrics.items()}
        case DeviceStats():
            figures = read(
                "cpu" if event.device == CPU_DEVICE else f"gpu{event.device}", *_DEVICE_FIGURES
            )
    return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class Tracker:
    """A run at a tracker. The functions raise any exception of its library."""

    log: Callable[[dict[str, float], int, float], object]  # figures, step, seconds since 1970
    end: Callable[[str], object]  # with the status of the run
    go_back: Callable[[Resumed], object] = lambda _: None
    warning: str = ""  # printed once


@final
class TrackerSink:
    """A tracker of `logging.trackers`, in its own thread, every `logging.every` steps.

    `warn` gets one line when the tracker cannot start and one for the first event that fails; later events are still
    sent. `IF_INSTALLED` is TensorBoard without a warning where it is not installed.
    """

    def __init__(
        self, name: str, run_dir: Path, warn: Callable[[str], None], every_steps: int = 1
    ) -> None:
        self._name = "tensorboard" if name == IF_INSTALLED else name
        self._asked_for = name != IF_INSTALLED
        self._run_dir = run_dir
        self._every = every_steps
        self._warn: Callable[[str], None] = lambda text: warn(redact_secrets(text)[:300])
        self._events: queue.Queue[Event | None] = queue.Queue(WAITING_EVENTS)
        self._lost = False
        self._thread = threading.Thread(target=self._track, name=self._name, daemon=True)
        self._stdout = sys.stdout
        self._muted = cast(TextIO, _Muted(self._stdout, self._thread))
        sys.stdout = self._muted
        self._thread.start()

    def write(self, event: Event) -> None:
        is_wanted = isinstance(event, RunEnded | Resumed) or (
            scalars(event) and on_schedule(event, self._every)
        )
        if not is_wanted or not self._thread.is_alive():
            return
        try:
            self._events.put_nowait(without_secrets(event))
        except queue.Full:
            if not self._lost:
                self._warn(
                    f"{self._name} is too slow and misses steps; events.jsonl has all of them"
                )
            self._lost = True

    def close(self) -> None:
        """Waits up to FINISH_SECONDS for the remaining events."""
        deadline = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):
            self._events.put(None, timeout=FINISH_SECONDS if self._thread.is_alive() else 0.0)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if sys.stdout is self._muted:
            sys.stdout = self._stdout
        if self._thread.is_alive():
            # Exit handlers of its library may hang, too. What is registered last is called first.
            atexit.register(atexit._clear)
            self._warn(
                f"{self._name} timed out after {FINISH_SECONDS:.0f} s; its last events may be missing"
            )

    def _track(self) -> None:
        name = self._name
        status = "killed"
        failed = False
        try:
            with _ID_LOCK:
                run_info = (
                    {"folder": str(self._run_dir)}
                    if name == "tensorboard"
                    else run_info_of(self._run_dir)
                )
            tracker = TRACKERS[name](run_info)
        except ImportError as error:
            if self._asked_for:
                fix = install_extra("track") if name == "tensorboard" else install_packages(name)
                self._warn(f"{name} is not installed ({error}), the run is not tracked; fix: {fix}")
            return
        except BaseException as error:  # any exception of its library, SystemExit included
            self._warn(f"{name} cannot be started, the run is not tracked: {_message(error)}")
            return
        if tracker.warning:
            self._warn(tracker.warning)
        while (event := self._events.get()) is not None:
            status = event.status if isinstance(event, RunEnded) else status
            figures = scalars(event)
            try:
                if isinstance(event, Resumed):
                    tracker.go_back(event)
                elif figures:
                    tracker.log(figures, event.step, event.time)
            except Exception as error:
                if not failed:
                    self._warn(
                        f"{name} failed at step {event.step}, training continues: {_message(error)}"
                    )
                failed = True
        try:
            tracker.end(status)
        except Exception as error:
            self._warn(f"{name} failed at the end of the run: {_message(error)}")


@final
class _Muted:
    """Standard output that drops the output of a tracker's thread."""

    def __init__(self, stream: TextIO, thread: threading.Thread) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread() is self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def tensorboard(run_info: Mapping[str, Any]) -> Tracker:
    """Event files in the run's folder, written without importing torch."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(Path(run_info["folder"]) / "tensorboard"))

    def log(figures: dict[str, float], step: int, when: float) -> None:
        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()
        ]
        writer.add_event(
            event_pb2.Event(wall_time=when, step=step, summary=summary_pb2.Summary(value=values))
        )

    def go_back(event: Resumed) -> None:
        """Makes TensorBoard drop this and later steps, so that repeated steps are drawn once."""
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(
            event_pb2.Event(wall_time=event.time, step=event.step + 1, session_log=session)
        )

    return Tracker(log, lambda _: writer.close(), go_back)


def wandb(run_info: Mapping[str, Any]) -> Tracker:
    """`offline` without a login: `wandb sync` uploads the run later."""
    library = importlib.import_module("wandb")
    mode = _wandb_mode(os.environ)
    settings = (
        {"settings": library.Settings(console="off", silent=True)}
        if hasattr(library, "Settings")
        else {}
    )
    run = library.init(
        project=os.environ.get("WANDB_PROJECT", run_info["project"]),
        name=run_info["name"],
        id=run_info["id"],
        dir=run_info["folder"],
        config=run_info["config"],
        resume="allow",
        mode=mode,
        **settings,
    )
    # wandb's own step never decreases; the step of a resumed run does.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    later = f"wandb sync {Path(run_info['folder']) / 'wandb/offline-run-*'}"
    return Tracker(
        log=lambda figures, step, _: run.log({"step": step, **figures}),
        end=lambda status: run.finish(exit_code=0 if status in ("done", "stopped") else 1),
        warning=f"wandb: no login, offline mode; later: {later}" if mode == "offline" else "",
    )


def _wandb_mode(environment: Mapping[str, str]) -> str | None:
    """None: from its own settings. Without a login wandb would prompt on a terminal that does not exist."""
    if environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY"):
        return None
    try:
        known_servers = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        known_servers = {}
    server = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].strip("/")
    return None if server in known_servers else "offline"


def trackio(run_info: Mapping[str, Any]) -> Tracker:
    """Local, in ~/.cache/huggingface/trackio, or on the Space of TRACKIO_SPACE_ID."""
    library = importlib.import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", run_info["project"])
    library.init(project=project, name=run_info["name"], config=run_info["config"], resume="allow")
    return Tracker(
        lambda figures, step, _: library.log(figures, step=step), lambda _: library.finish()
    )


def mlflow(run_info: Mapping[str, Any]) -> Tracker:
    """At MLFLOW_TRACKING_URI, else at the default of MLflow in the working folder."""
    importlib.import_module("mlflow")
    entities = importlib.import_module("mlflow.entities")
    client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run_info["project"])
    experiment = client.get_experiment_by_name(name)
    known_runs = []
    if experiment is not None and run_info["resumed"]:
        id_filter = f"tags.`bloomery.id` = '{run_info['id']}'"
        known_runs = client.search_runs(
            [experiment.experiment_id], filter_string=id_filter, max_results=1
        )
    if known_runs:  # the run of the same id; its parameters never change
        run_id = str(known_runs[0].info.run_id)
        client.update_run(run_id, status="RUNNING")
    else:
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        tags = {"bloomery.id": run_info["id"]}
        run_id = str(
            client.create_run(experiment_id, tags=tags, run_name=run_info["name"]).info.run_id
        )
        parameters = [
            entities.Param(key, str(value)[:LONGEST_PARAMETER])
            for key, value in run_info["config"].items()
        ]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            client.log_batch(run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])

    def log(figures: dict[str, float], step: int, when: float) -> None:
        metrics = [
            entities.Metric(key, value, int(when * 1000), step) for key, value in figures.items()
        ]
        client.log_batch(run_id, metrics=metrics)

    ends = {"done": "FINISHED", "stopped": "KILLED"}
    return Tracker(
        log, lambda status: client.set_terminated(run_id, status=ends.get(status, "FAILED"))
    )


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow}


def require_libraries(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose library is not installed. Imports nothing."""
    for name in names:
        if name not in INSTALLED_BY_THE_USER:
            continue
        spec = None
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder `wandb/` of offline runs is no library
            raise UserError(
                f"{name} is not installed in this environment",
                where=f"logging.trackers={name}",
                fix=f"{install_packages(name)}\n       or remove it from logging.trackers",
            )


def run_info_of(run_dir: Path) -> dict[str, Any]:
    """Name, id and settings of a run for a tracker. The id is created once, so that a resumed run continues there.

    The settings are those of the plan, without secrets; of an absolute path only the last part.
    """
    tracked = run_dir / "tracked.json"
    resumed = tracked.is_file()
    if not resumed:
        write_durably(tracked, json.dumps({"id": uuid.uuid4().hex[:16]}) + "\n")
    plan = _read(run_dir / "plan.json")
    settings = dict[str, Any]()
    for section in _COMPARED:
        values = plan.get(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            for name, item in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(item, str):
                    item = redact_secrets(Path(item).name if Path(item).is_absolute() else item)
                if isinstance(item, str | int | float | bool):
                    settings[f"{section}.{key}.{name}".rstrip(".")] = item
    return {
        "id": _read(tracked).get("id") or run_dir.name,
        "name": run_dir.name,
        "project": str(plan.get("name") or "bloomery"),
        "folder": str(run_dir),
        "config": settings,
        "resumed": resumed,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_whole(path))
    except (OSError, ValueError, UserError):
        return {}
    return content if isinstance(content, dict) else {}


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
        """Of sensors one reading per device in _SAMPLE_SECONDS, of steps those on the schedule."""
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
        self._file = os.fdopen(
            open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0
        )
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
        self._command = shlex.split(command)
        self._folder = folder
        self._warn = warn
        self._schedule = Schedule(every_steps)
        self._failures = 0

    def write(self, event: Event) -> None:
        if self._failures >= _HOOK_FAILURES or not self._schedule.accepts(event):
            return
        problem = self._run(
            to_json(without_secrets(event)).encode(errors="backslashreplace") + b"\n"
        )
        self._failures = self._failures + 1 if problem else 0
        if problem:
            ending = "; not called again" if self._failures == _HOOK_FAILURES else ""
            self._warn(f"the hook {self._command[0]} {problem}{ending}")

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
        last_line = harmless(output.decode(errors="replace")).strip().splitlines()[-1:] or [""]
        return (
            f"failed with exit code {process.returncode}: {last_line[0]}"[:300]
            if process.returncode
            else ""
        )

    def close(self) -> None:
        """No resource is open between events."""


def _last_output(process: "subprocess.Popen[bytes]", pipe: int, deadline: float) -> bytes:
    """The last bytes that a process writes before it ends or times out, without waiting for its children."""
    output = b""
    total = 0
    has_ended = False
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while time.monotonic() < deadline:
        # Asked before the poll, so that all of its output is in the pipe.
        has_ended = has_ended or process.poll() is not None
        if not poll.poll(0 if has_ended else _POLL_MILLISECONDS):
            if has_ended:
                break
            continue
        chunk = os.read(pipe, _CHUNK)
        output = (output + chunk)[-_CHUNK:]
        total = total + len(chunk)
        if not chunk:  # closed, the process may still run
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            break
        if total > MIB:
            time.sleep(_POLL_MILLISECONDS / 1000)  # throttle endless output
    return output


def open_sinks(
    run_dir: Path,
    names: Sequence[str],
    commands: Sequence[str],
    *,
    every_steps: int,
    folder: Path,
    warn: Warn,
) -> list[Sink]:
    """The sinks of `logging.trackers`; `warn` gets a line for each that fails. Hooks run in `folder`."""
    return [
        LogFile(run_dir / "log.txt", every_steps),
        *(TrackerSink(name, run_dir, warn, every_steps) for name in names),
        *(CommandSink(command, folder, warn, every_steps) for command in commands),
    ]
