"""A sweep of six runs that is killed three times ends as one that nothing disturbed, bit by bit."""

import functools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs_of_bloomery import (
    PATIENCE_SECONDS,
    Bloomery,
    assert_bitwise_equal,
    wait_for,
    write_workshop,
)

from bloomery.monitor.events import StepDone, read_events

RATES = "optimizer.learning_rate=1e-2,1e-3"
SEEDS = "train.seed=1,2,3"
STEPS = 6
SWEEP = (
    "sweep",
    "tiny.yaml",
    RATES,
    SEEDS,
    f"train.max_steps={STEPS}",
    "--json",
    "--run-dir",
    "runs/s",
)
KILLS = 3
LONGEST_DELAY_SECONDS = 0.4


@pytest.fixture(scope="module")
def calm_sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the document of the sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    write_workshop(folder)
    done = Bloomery(folder).run(*SWEEP)
    assert done.returncode == 0, done.stderr
    return folder / "runs/s", document_of(done.stdout)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 16))]
)
def test_six_runs_killed_three_times_end_with_the_same_table(
    bloomery: Bloomery, calm_sweep: tuple[Path, dict[str, Any]], seed: int
) -> None:
    """Killed twice or more while a run is scored, and else in training, at moments that the seed draws."""
    calm, expected = calm_sweep
    folder = bloomery.folder / "runs/s"
    draw = random.Random(seed)
    runs = [Path(run["run"]).name for run in expected["runs"]]
    in_order = sorted(runs, key=lambda name: (calm / name / "recipe.yaml").stat().st_mtime)
    killed_runs = sorted(draw.sample(range(len(in_order)), KILLS))
    scored = set(draw.sample(killed_runs, 2))
    while_scoring = 0
    for index in killed_runs:
        run = folder / in_order[index]
        with bloomery.start(*SWEEP, stdout=subprocess.DEVNULL) as process:
            moment: Callable[[], bool] = functools.partial(
                took_step, run, draw.randint(1, STEPS - 1)
            )
            if index in scored:
                moment = functools.partial(scores, process.pid, folder, run.name)
            wait_for(lambda moment=moment: moment() or process.poll() is not None)
            time.sleep(draw.uniform(0, LONGEST_DELAY_SECONDS) if index not in scored else 0)
            assert process.poll() is None, "the sweep ended before it was killed"
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=PATIENCE_SECONDS)
        while_scoring += index in scored and not score_file(folder, run.name).exists()
    assert while_scoring, "no kill hit a run while it was scored"

    done = bloomery.run(*SWEEP)
    assert done.returncode == 0, done.stderr
    assert document_of(done.stdout) == expected
    for name in runs:
        assert_bitwise_equal(folder / name, calm / name, step=STEPS)
        assert score_file(folder, name).read_bytes() == score_file(calm, name).read_bytes()


def document_of(text: str) -> dict[str, Any]:
    """The document of --json without the folder, which differs between two workshops."""
    document = json.loads(text)
    runs = [run | {"run": Path(run["run"]).name} for run in document["runs"]]
    return document | {"runs": runs, "folder": "", "winner": Path(document["winner"] or "").name}


def took_step(run: Path, step: int) -> bool:
    path = run / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return any(isinstance(event, StepDone) and event.step >= step for event in events)


def scores(pid: int, folder: Path, name: str) -> bool:
    """Whether a child of the process scores this run, or has."""
    if score_file(folder, name).exists():
        return True
    if not (folder / name / "metrics.json").exists():
        return False
    try:
        children = psutil.Process(pid).children(recursive=True)
        return any("scoring_worker" in " ".join(child.cmdline()) for child in children)
    except psutil.NoSuchProcess:
        return False


def score_file(folder: Path, name: str) -> Path:
    return folder / "scores" / f"{name}.json"
