"""Trackers: Weights & Biases, trackio and MLflow, each through its own library, in a process of its own.

A tracker's library talks to a network, prints, starts threads and sometimes hangs: none of that may reach a run. It is
run as `python -m bloomery.monitor.trackers.worker NAME`, reads events as JSON lines from its standard input, and
answers with lines that are warnings. Where its data goes and with which login is the user's environment alone
(WANDB_*, TRACKIO_*, MLFLOW_*): a recipe holds no secret.
"""

import importlib
import json
import netrc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol, final

from bloomery.core.text import scrub
from bloomery.monitor.events import Event, RunEnded, from_json
from bloomery.monitor.sinks import scalars

LONGEST_PARAMETER = 500  # letters, the least that any MLflow server takes
PARAMETERS_AT_ONCE = 100  # what one MLflow call takes
ORPHAN_SECONDS = 30.0  # to tell the tracker of a run that was killed


class Tracker(Protocol):
    """One run at a tracker. Raises whatever its library raises."""

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None: ...
    def end(self, why: str) -> None: ...


@final
class Wandb:
    """`offline` where nobody has logged in: `wandb sync` sends it later."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        library = importlib.import_module("wandb")
        self.offline = _wandb_mode(os.environ) == "offline"
        settings = {"settings": library.Settings(console="off", silent=True)} if hasattr(library, "Settings") else {}
        self._run = library.init(
            project=os.environ.get("WANDB_PROJECT", job["project"]),
            name=job["name"],
            id=job["id"],
            dir=job["folder"],
            config=job["config"],
            resume="allow",
            mode=_wandb_mode(os.environ),
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
        self._metric, parameter = entities.Metric, entities.Param
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
        known = self._known_run(job)
        self._run_id = known or self._new_run(job)
        parameters = [parameter(key, str(value)[:LONGEST_PARAMETER]) for key, value in job["config"].items()]
        for first in range(0, 0 if known else len(parameters), PARAMETERS_AT_ONCE):  # one of them never changes
            self._client.log_batch(self._run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])

    def _new_run(self, job: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", job["project"])
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"bloomery.id": job["id"]}
        return str(self._client.create_run(experiment, tags=tags, run_name=job["name"]).info.run_id)

    def _known_run(self, job: Mapping[str, Any]) -> str | None:
        """The run of the same id, which goes on."""
        if not job["resumed"]:
            return None
        found = self._client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", job["project"]))
        if found is None:
            return None
        mine = f"tags.`bloomery.id` = '{job['id']}'"
        runs = self._client.search_runs([found.experiment_id], filter_string=mine, max_results=1)
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def log(self, figures: Mapping[str, float], *, step: int, when: float) -> None:
        metrics = [self._metric(key, value, int(when * 1000), step) for key, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, why: str) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED"}.get(why, "FAILED")
        self._client.set_terminated(self._run_id, status=status)


TRACKERS: dict[str, type[Wandb] | type[Trackio] | type[Mlflow]] = {
    "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow,
}  # fmt: skip


def main(name: str) -> None:
    """The first line is the job, each further one an event. Ends when its input does: the run has ended, or died."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what its library, or a program that it starts, prints past Python is no answer either

    def warn(text: str) -> None:
        told.write(json.dumps(scrub(text)[:300]) + "\n")

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with redirect_stdout(sys.stderr):  # what libraries print is not an answer
        _track(name, job, _events(), warn)


def _end_with(parent: int) -> None:
    """A run that was killed closes our input; what hangs in a library does not notice."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def _events() -> Iterator[Event]:
    for line in sys.stdin:
        event = from_json(line)
        if event is not None:
            yield event


def _track(name: str, job: Mapping[str, Any], events: Iterator[Event], warn: Callable[[str], None]) -> None:
    """One warning for a tracker that cannot be had, one for its first failure; it is asked again all the same."""
    why, failed = "killed", False
    try:
        tracker = TRACKERS[name](job)
    except ImportError as error:
        warn(f"{name} is not installed ({error}): this run is not tracked there; mend: pip install {name}")
        return
    except BaseException as error:  # whatever its library raises, SystemExit included
        warn(f"{name} could not be started, this run is not tracked there: {_words(error)}")
        return
    if getattr(tracker, "offline", False):
        place = Path(job["folder"]) / "wandb"
        warn(f"wandb: nobody has logged in here, so the run is kept; later: wandb sync {place}/offline-run-*")
    for event in events:
        why = event.why.partition(":")[0] if isinstance(event, RunEnded) else why
        figures = scalars(event)
        try:
            if figures:
                tracker.log(figures, step=event.step, when=event.time)
        except Exception as error:
            if not failed:
                warn(f"{name} did not take step {event.step}, training goes on: {_words(error)}")
            failed = True
    try:
        tracker.end(why)
    except Exception as error:
        warn(f"{name} did not take the end of the run: {_words(error)}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main(sys.argv[1])
