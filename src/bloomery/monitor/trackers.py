"""Trackers: TensorBoard, Weights & Biases, trackio and MLflow, each through its own library, each in a thread.

A tracker's library talks to a network, prints, fails and sometimes hangs: none of that may reach a run. Nobody waits
for one but `close`, and that not for long. Where its data goes and with which login is the user's environment alone
(WANDB_*, TRACKIO_*, MLFLOW_*): a recipe holds no secret.
"""

import atexit
import importlib
import importlib.util
import json
import netrc
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO, cast, final

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably
from bloomery.core.text import redact_secrets
from bloomery.monitor.events import (
    CPU_DEVICE,
    DeviceStats,
    EvalDone,
    Event,
    Resumed,
    RunEnded,
    StepDone,
    StepHealth,
    without_secrets,
)
from bloomery.recipe.schema import IF_INSTALLED

FINISH_SECONDS = 20.0  # to send what is left at the end
WAITING_EVENTS = 5_000  # kept for a tracker that is slow; what comes then is left out
LONGEST_PARAMETER = 500  # letters, the least that any MLflow server takes
PARAMETERS_AT_ONCE = 100  # what one MLflow call takes
INSTALLED_BY_THE_USER = ("wandb", "trackio", "mlflow")
_DEVICE_FIGURES = (
    "utilization", "memory_gib", "temperature", "power", "clock_mhz", "allocated_gib", "reserved_gib", "fragmentation",
)  # fmt: skip
_JOB = threading.Lock()  # the first tracker of a run makes its id
_COMPARED = (
    "model",
    "data",
    "optimizer",
    "train",
    "checkpoint",
    "eval",
    "sample",
)  # sections that runs differ by


def paced(event: Event, every_steps: int) -> bool:
    """Whether a sink that follows `logging.every` shows this event; only steps are thinned."""
    return not isinstance(event, StepDone) or event.step % every_steps == 0 or event.loss is None


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under the names that charts show; what is None is absent."""
    match event:
        case StepDone():
            figures: dict[str, float | None] = {
                "train/loss": event.loss,
                "train/learning_rate": event.learning_rate,
                "train/grad_norm": event.grad_norm,
                "speed/tokens_per_second": event.tokens_per_second,
                "speed/sequences_per_second": event.sequences_per_second,
                "speed/step_seconds": event.step_seconds,
                "speed/data_wait_seconds": event.data_wait_seconds,
                "memory/gib": event.memory_gib,
                **{f"train/{name}": value for name, value in event.metrics.items()},
            }
        case StepHealth():
            figures = {"train/update_ratio": event.update_ratio, "train/unchanged_share": event.unchanged_share}
        case EvalDone():
            figures = {
                "eval/loss": event.loss,
                "eval/perplexity": event.perplexity,
                "eval/bits_per_byte": event.bits_per_byte,
                **{f"eval/{name}": value for name, value in event.metrics.items()},
            }
        case DeviceStats():
            folder = "processor" if event.device == CPU_DEVICE else f"gpu{event.device}"
            figures = {f"{folder}/{name}": getattr(event, name) for name in _DEVICE_FIGURES}
        case _:
            figures = {}
    return {name: value for name, value in figures.items() if value is not None}


class Tracker(Protocol):
    """One run at a tracker. Raises whatever its library raises."""

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None: ...
    def end(self, why: str) -> None: ...


@final
class TrackerSink:
    """One tracker of `logging.trackers`, opened and fed by a thread of its own, at the pace of `logging.every`.

    `warn` gets one sentence for a tracker that cannot be had, and one for the first record that it does not take; it is
    asked again all the same. `IF_INSTALLED` is TensorBoard without a warning where it is not installed.
    """

    def __init__(self, name: str, run_dir: Path, warn: Callable[[str], None], every_steps: int = 1) -> None:
        self._name = "tensorboard" if name == IF_INSTALLED else name
        self._asked_for, self._run_dir, self._every = name != IF_INSTALLED, run_dir, every_steps
        self._warn: Callable[[str], None] = lambda text: warn(redact_secrets(text)[:300])
        self._events: queue.Queue[Event | None] = queue.Queue(WAITING_EVENTS)
        self._lost = False
        self._thread = threading.Thread(target=self._track, name=self._name, daemon=True)
        self._stdout, self._muted = sys.stdout, cast(TextIO, _Muted(sys.stdout, self._thread))
        sys.stdout = self._muted
        self._thread.start()

    def write(self, event: Event) -> None:
        wanted = isinstance(event, RunEnded | Resumed) or (scalars(event) and paced(event, self._every))
        if not wanted or not self._thread.is_alive():
            return
        try:
            self._events.put_nowait(without_secrets(event))
        except queue.Full:
            if not self._lost:
                self._warn(f"{self._name} is too slow: it does not get every step; events.jsonl holds them all")
            self._lost = True

    def close(self) -> None:
        """Gives it a while to send the rest. What it has kept on the disk stays there."""
        deadline = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):
            self._events.put(None, timeout=FINISH_SECONDS if self._thread.is_alive() else 0.0)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if sys.stdout is self._muted:
            sys.stdout = self._stdout
        if self._thread.is_alive():
            atexit.register(atexit._clear)  # its library's own last wish may hang, too: registered last, called first
            self._warn(f"{self._name} did not finish sending within {FINISH_SECONDS:.0f} s and was left behind")

    def _track(self) -> None:
        name, why, failed = self._name, "killed", False
        try:
            with _JOB:
                job = {"folder": str(self._run_dir)} if name == "tensorboard" else job_of(self._run_dir)
            tracker: Tracker = TRACKERS[name](job)
        except ImportError as error:
            package = "'bloomery[track]'" if name == "tensorboard" else name
            if self._asked_for:
                self._warn(
                    f"{name} is not installed ({error}): this run is not tracked there; fix: pip install {package}"
                )
            return
        except BaseException as error:  # whatever its library raises, SystemExit included
            self._warn(f"{name} could not be started, this run is not tracked there: {_words(error)}")
            return
        if isinstance(tracker, Wandb) and tracker.offline:
            kept = self._run_dir / "wandb/offline-run-*"
            self._warn(f"wandb: nobody has logged in here, so the run is kept; later: wandb sync {kept}")
        while (event := self._events.get()) is not None:
            why = event.status if isinstance(event, RunEnded) else why
            figures = scalars(event)
            try:
                if isinstance(event, Resumed) and isinstance(tracker, TensorBoard):
                    tracker.go_back(event)
                elif figures:
                    tracker.log(figures, step=event.step, when=event.time)
            except Exception as error:
                if not failed:
                    self._warn(f"{name} did not take step {event.step}, training goes on: {_words(error)}")
                failed = True
        try:
            tracker.end(why)
        except Exception as error:
            self._warn(f"{name} did not take the end of the run: {_words(error)}")


@final
class _Muted:
    """Standard output while a tracker works: what its thread prints is no answer of Bloomery's, and goes nowhere."""

    def __init__(self, stream: TextIO, thread: threading.Thread) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread() is self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@final
class TensorBoard:
    """Event files in the run's folder, written without importing torch."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._proto, self._summary = event_pb2, summary_pb2.Summary
        self._writer = EventFileWriter(str(Path(job["folder"]) / "tensorboard"))

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(self._proto.Event(wall_time=when, step=step, summary=self._summary(value=values)))

    def go_back(self, event: Resumed) -> None:
        """TensorBoard drops what lies at or after this step, so that repeated steps are drawn once."""
        session = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.add_event(self._proto.Event(wall_time=event.time, step=event.step + 1, session_log=session))

    def end(self, why: str) -> None:
        del why
        self._writer.close()


@final
class Wandb:
    """`offline` where nobody has logged in: `wandb sync` sends it later."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        library, mode = importlib.import_module("wandb"), _wandb_mode(os.environ)
        self.offline = mode == "offline"
        settings = {"settings": library.Settings(console="off", silent=True)} if hasattr(library, "Settings") else {}
        self._run = library.init(
            project=os.environ.get("WANDB_PROJECT", job["project"]),
            name=job["name"],
            id=job["id"],
            dir=job["folder"],
            config=job["config"],
            resume="allow",
            mode=mode,
            **settings,
        )
        # Its own step may only grow; after a resume ours goes back, and the last telling of a step is drawn last.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None:
        del when
        self._run.log({"step": step, **figures})

    def end(self, why: str) -> None:
        self._run.finish(exit_code=0 if why in ("done", "stopped") else 1)


def _wandb_mode(environment: Mapping[str, str]) -> str | None:
    """None: as its own settings say. Without a login it would ask a terminal that is not there."""
    if environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY"):
        return None
    try:
        known = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        known = {}
    server = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].strip("/")
    return None if server in known else "offline"


@final
class Trackio:
    """Local, below ~/.cache/huggingface/trackio; on a Space where TRACKIO_SPACE_ID names one."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._library = importlib.import_module("trackio")
        self._library.init(
            project=os.environ.get("TRACKIO_PROJECT", job["project"]),
            name=job["name"],
            config=job["config"],
            resume="allow",
        )

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None:
        del when
        self._library.log(dict(figures), step=step)

    def end(self, why: str) -> None:
        del why
        self._library.finish()


@final
class Mlflow:
    """Where MLFLOW_TRACKING_URI says, else where MLflow itself keeps its runs in the working folder."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", job["project"])
        found = self._client.get_experiment_by_name(name)
        if found is not None and job["resumed"]:  # the run of the same id goes on; its parameters never change
            mine = f"tags.`bloomery.id` = '{job['id']}'"
            for run in self._client.search_runs([found.experiment_id], filter_string=mine, max_results=1):
                self._run_id = str(run.info.run_id)
                self._client.update_run(self._run_id, status="RUNNING")
                return
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"bloomery.id": job["id"]}
        self._run_id = str(self._client.create_run(experiment, tags=tags, run_name=job["name"]).info.run_id)
        parameters = [entities.Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in job["config"].items()]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None:
        metrics = [self._metric(key, value, int(when * 1000), step) for key, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, why: str) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED"}.get(why, "FAILED")
        self._client.set_terminated(self._run_id, status=status)


TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow,
}  # fmt: skip


def require(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose library is not installed here. Nothing is imported."""
    for name in names:
        if name not in INSTALLED_BY_THE_USER:
            continue
        found = None
        with suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder `wandb/` here, which its offline runs make, is none
            raise UserError(
                f"{name} is not installed in this environment",
                where=f"logging.trackers={name}",
                fix=f"{sys.executable} -m pip install {name}\n       or take it out of logging.trackers",
            )


def job_of(run_dir: Path) -> dict[str, Any]:
    """What a tracker must know of a run; its id is made once, so that a resumed run goes on at the tracker, too.

    The plan's figures are its settings: without secrets, and of a path on this machine its end alone, as the rest names
    people and projects.
    """
    known = run_dir / "tracked.json"
    resumed = known.is_file()
    if not resumed:
        write_durably(known, json.dumps({"id": uuid.uuid4().hex[:16]}) + "\n")
    plan, settings = _read(run_dir / "plan.json"), dict[str, Any]()
    for section in _COMPARED:
        values = plan.get(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            for name, item in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(item, str):
                    item = redact_secrets(Path(item).name if Path(item).is_absolute() else item)
                if isinstance(item, str | int | float | bool):
                    settings[f"{section}.{key}.{name}".rstrip(".")] = item
    return {
        "id": _read(known).get("id") or run_dir.name,
        "name": run_dir.name,
        "project": str(plan.get("name") or "bloomery"),
        "folder": str(run_dir),
        "config": settings,
        "resumed": resumed,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_whole(path))
    except (OSError, ValueError, UserError):
        return {}
    return found if isinstance(found, dict) else {}
