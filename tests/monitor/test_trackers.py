"""Trackers: what they are told, and that nothing they do reaches a run. The libraries are stand-ins here."""

import json
import sys
import time
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.monitor import sinks as tracking
from bloomery.monitor.events import Resumed, RunEnded
from bloomery.monitor.sinks import TrackerSink, _wandb_mode, require_libraries
from runs_for_tests import made_up_run, step_done

CANARY = "hf_abcdefghijklmnopqrstuvwxyz012345"
RECORD = """
import json, os
def told(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
WANDB = """
from record import told
class Settings(dict):
    def __init__(self, **words): super().__init__(words)
class Run:
    def define_metric(self, name, **words): told(metric=name)
    def log(self, figures): told(log=figures)
    def finish(self, exit_code): told(finish=exit_code)
def init(**words):
    print("a library that prints")
    told(init=words)
    return Run()
"""
TRACKIO = """
from record import told
def init(**words): told(init=words)
def log(figures, step): told(log=figures, step=step)
def finish(): told(finish=True)
"""
MLFLOW = """
from collections import namedtuple
from record import told
import types, sys
entities, tracking = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow.tracking")
entities.Metric = namedtuple("Metric", "key value timestamp step")
entities.Param = namedtuple("Param", "key value")
Info = namedtuple("Info", "run_id")
Run = namedtuple("Run", "info")
Experiment = namedtuple("Experiment", "experiment_id")
import os
class MlflowClient:
    def get_experiment_by_name(self, name): return Experiment("7") if os.environ.get("KNOWN") else None
    def create_experiment(self, name): told(experiment=name); return "7"
    def create_run(self, experiment, tags, run_name): told(run=run_name, tags=tags); return Run(Info("r1"))
    def search_runs(self, experiments, filter_string, max_results): told(search=filter_string); return [Run(Info("r1"))]
    def update_run(self, run, status): told(update=status)
    def log_batch(self, run, metrics=(), params=()): told(metrics=[*metrics], params=[*params])
    def set_terminated(self, run, status): told(end=status)
tracking.MlflowClient = MlflowClient
sys.modules["mlflow.entities"], sys.modules["mlflow.tracking"] = entities, tracking
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Installs a stand-in; the run's folder is `run`."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "record.py").write_text(RECORD)
    run = tmp_path / "run"
    run.mkdir()
    plan = {
        "name": "tiny",
        "train": {"steps": 40},
        "data": {"path": "/x?token=" + CANARY},
        "model": {"layers": 2},
    }
    (run / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.syspath_prepend(str(folder))

    def install(name: str, source: str) -> Path:
        (folder / f"{name}.py").write_text(source)
        forget()
        return run

    def forget() -> None:
        for name in ("wandb", "trackio", "mlflow", "mlflow.entities", "mlflow.tracking", "record"):
            sys.modules.pop(name, None)

    yield install
    forget()


def told(run: Path) -> list[dict]:
    path = run.parent / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tracked(name, run, events, every=1):
    warnings: list[str] = []
    sink = TrackerSink(name, run, warnings.append, every)
    for event in events:
        sink.write(event)
    sink.close()
    return warnings


def test_a_tracker_is_told_where_nothing_lies_on_this_machine(tmp_path):
    plan = {
        "name": "tiny",
        "data": {"prepared": "/lustre/orion/PROJ123/jane/prepared/tiny-0a1b", "layout": "packed"},
        "model": {"source": "/home/jane/models/Qwen2.5", "attention": "mask"},
        "checkpoint": {"hub": "Qwen/Qwen2.5-1.5B"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    config = tracking.run_info_of(tmp_path)["config"]
    assert config == {
        "data.prepared": "tiny-0a1b",
        "data.layout": "packed",
        "model.source": "Qwen2.5",
        "model.attention": "mask",
        "checkpoint.hub": "Qwen/Qwen2.5-1.5B",
    }


def test_wandb_gets_the_figures_at_the_pace_of_the_recipe_and_how_the_run_ended(library):
    run = library("wandb", WANDB)
    assert (
        tracked(
            "wandb",
            run,
            [step_done(9), step_done(10, 1.5), RunEnded(status="stopped", step=10)],
            every=10,
        )
        == []
    )
    first, *_, log, finish = told(run)
    init = first["init"]
    assert init["name"] == "run" and init["project"] == "tiny" and init["resume"] == "allow"
    assert init["config"]["train.steps"] == 40 and init["config"]["model.layers"] == 2
    assert CANARY not in json.dumps(told(run))
    assert log["log"]["step"] == 10 and log["log"]["train/loss"] == 1.5
    assert finish == {"finish": 0}
    assert sum("log" in one for one in told(run)) == 1


def test_what_its_library_prints_goes_nowhere_and_what_others_print_stays(library, capsys):
    run, before = library("wandb", WANDB), sys.stdout
    sink = TrackerSink("wandb", run, [].append)
    print("an answer")
    sink.close()
    assert capsys.readouterr().out == "an answer\n" and sys.stdout is before


def test_a_run_that_is_killed_is_told_as_failed(library):
    run = library("wandb", WANDB)
    tracked("wandb", run, [step_done(1)])
    assert told(run)[-1] == {"finish": 1}


def test_a_resumed_run_goes_on_in_the_same_tracker_run(library, monkeypatch):
    run = library("wandb", WANDB)
    tracked("wandb", run, [step_done(1)])
    tracked(
        "wandb", run, [Resumed(path="x", step=0), step_done(1), RunEnded(status="done", step=1)]
    )
    first, second = (one["init"]["id"] for one in told(run) if "init" in one)
    assert first == second and len(first) == 16

    library("mlflow", MLFLOW)
    (run.parent / "told").unlink()
    tracked(
        "mlflow", run, [RunEnded(status="failed", error="x", step=1)]
    )  # tracked.json is there, the run at MLflow is not
    assert [one for one in told(run) if "run" in one] and told(run)[-1] == {"end": "FAILED"}
    monkeypatch.setenv("KNOWN", "1")
    (run.parent / "told").unlink()
    tracked("mlflow", run, [step_done(2), RunEnded(status="done", step=2)])
    search, update, metrics, end = told(run)
    assert (
        first in search["search"] and update == {"update": "RUNNING"} and end == {"end": "FINISHED"}
    )
    assert metrics["metrics"][0] == ["train/loss", 2.0, 2000, 2]  # name, value, milliseconds, step


def test_trackio(library):
    run = library("trackio", TRACKIO)
    assert tracked("trackio", run, made_up_run(steps=5)) == []
    assert told(run)[0]["init"]["name"] == "run" and told(run)[-1] == {"finish": True}
    assert [one["step"] for one in told(run) if "train/loss" in one.get("log", {})] == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('half installed')", "trackio is not installed"),
        (
            "def init(**words): raise PermissionError('who are you? " + CANARY + "')",
            "PermissionError: who are you?",
        ),
        ("def init(**words): raise SystemExit(3)", "cannot be started"),
        (
            TRACKIO + "\ndef log(*words, **more): raise OSError('no route to host')",
            "OSError: no route to host",
        ),
    ],
)
def test_whatever_a_library_does_is_one_warning(library, source, words):
    run = library("trackio", source)
    warnings: list[str] = []
    sink = TrackerSink("trackio", run, warnings.append)
    for step in range(20):
        sink.write(step_done(step))
        time.sleep(0.01)
    sink.close()
    assert len(warnings) == 1 and words in warnings[0] and CANARY not in warnings[0], warnings


def test_a_library_that_hangs_stalls_nothing_and_is_left_behind(library, monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.5)
    monkeypatch.setattr(tracking, "WAITING_EVENTS", 50)
    last_wishes = []
    monkeypatch.setattr(tracking.atexit, "register", last_wishes.append)
    run = library("trackio", "import time\ndef init(**words): time.sleep(600)")
    warnings: list[str] = []
    begun = time.monotonic()
    sink = TrackerSink("trackio", run, warnings.append)
    for step in range(5_000):  # more than a pipe and the queue hold
        sink.write(step_done(step))
    sink.close()
    assert time.monotonic() - begun < 60  # the library would take 600
    slow, timed_out = warnings
    assert slow.startswith("trackio is too slow") and "timed out" in timed_out
    assert len(last_wishes) == 1  # what its library has registered to do at the exit is not done


def test_a_missing_library_is_said_before_the_run_with_the_line_that_installs_it(
    library, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "libraries")])
    (tmp_path / "libraries/wandb").mkdir()  # of an offline run, and no library
    with pytest.raises(UserError) as error:
        require_libraries(["tensorboard", "wandb"])
    assert "wandb is not installed" in error.value.problem
    assert error.value.fix and "pip install wandb" in error.value.fix
    (tmp_path / "libraries/wandb").rmdir()
    library("wandb", WANDB)
    require_libraries(["wandb"])


def test_wandb_asks_nobody_for_a_login(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _wandb_mode({}) == "offline"
    assert (
        _wandb_mode({"WANDB_MODE": "disabled"}) is None
        and _wandb_mode({"WANDB_API_KEY": "x"}) is None
    )
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert _wandb_mode({}) is None
