"""Stages of a pipeline that die, stop or run out of memory, as users start them. Oracle: the run of one rank."""

import json
import os
import re
import signal
import sys
import time

import pytest
from runs_of_bloomery import (
    Bloomery,
    losses,
    rank_process,
    ranks_of,
    wait_for,
    write_workshop,
)

from bloomery.monitor.events import Recovered, StepDone
from bloomery.plan.store import read_plan

DYING = (
    "from bloomery.launch import supervisor; supervisor.WORKER = 'dying_worker';"
    "from bloomery.cli import main; main()"
)
PIPELINE = ("tiny.yaml", "--run-dir", "runs/one", "-d", "cpu,cpu", "parallel.pipeline=2")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def bloomery(tmp_path) -> Bloomery:
    write_workshop(tmp_path)
    return Bloomery(tmp_path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Bloomery:
    """The same pipeline, never disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    write_workshop(folder)
    bloomery = Bloomery(folder)
    done = bloomery.run("train", *PIPELINE)
    assert done.returncode == 0, done.stderr
    return bloomery


@pytest.mark.soak
def test_killed_and_stopped_stages_leave_no_trace(dying_workshop, calm) -> None:
    bloomery = Bloomery(dying_workshop)
    deaths = dying_workshop / "runs/deaths.json"
    # A kill in a step: of the last stage, and of the first, which writes checkpoints.
    for rank, layers, step, words in (
        (1, "layer 1", 3, ("train", *PIPELINE)),
        (0, "layer 0", 6, ("resume", "one")),
    ):
        deaths.write_text(json.dumps([[{"rank": rank}, step, signal.SIGKILL]]))
        told = bloomery.here(*words)
        last_step_at = max(event.time for event in bloomery.events() if isinstance(event, StepDone))
        assert told.returncode == 1 and time.time() - last_step_at < 15
        expected = (
            f"rank {rank} ({layers}) of training process killed from outside after step {step - 1}"
        )
        assert expected in told.stderr, told.stderr
        assert "Traceback" not in told.stderr
        assert ranks_of(bloomery.run_dir) == []

    # A stop request to the parent saves, and ends in 75. The run must not end before it: its steps take time.
    deaths.write_text(json.dumps([[{}, 1, "slow"]]))
    begun = len(bloomery.events())
    with bloomery.start("resume", "one", command=(sys.executable, "-c", DYING)) as process:
        wait_for(lambda: any(isinstance(event, StepDone) for event in bloomery.events()[begun:]))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert ranks_of(bloomery.run_dir) == []
    last_step = max(
        event.step for event in bloomery.events()[begun:] if isinstance(event, StepDone)
    )
    assert (bloomery.run_dir / f"checkpoints/step-{last_step:08d}").is_dir()

    done = bloomery.run("resume", "one")
    assert done.returncode == 0, done.stderr
    assert losses(bloomery.run_dir) == losses(calm.run_dir)
    saved, expected = (
        folder / "checkpoints/step-00000016" for folder in (bloomery.run_dir, calm.run_dir)
    )
    for file in expected.glob("*.safetensors"):
        assert (saved / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_stopped_stage_is_named_with_its_layers(bloomery, monkeypatch) -> None:
    monkeypatch.setenv("BLOOMERY_HANG_SECONDS", "3")
    long = ("train.max_steps=100000", "checkpoint.every=1000 steps", "eval.every=1000 steps")
    with bloomery.start("train", *PIPELINE, *long) as process:
        wait_for(bloomery.saw(StepDone, 2))
        os.kill(rank_process(bloomery.run_dir, 1), signal.SIGSTOP)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: rank 1 (layer 1) does not respond: it is stopped" in told, told
    assert "Traceback" not in told
    assert ranks_of(bloomery.run_dir) == []


def test_a_stage_without_memory_is_named_with_its_layers_and_the_run_goes_on(
    dying_workshop, calm
) -> None:
    (dying_workshop / "runs/deaths.json").write_text(
        json.dumps([[{"rank": 1, "rows": 2}, 5, "memory"]])
    )
    bloomery = Bloomery(dying_workshop)
    told = bloomery.here("train", *PIPELINE)
    assert told.returncode == 0, told.stderr
    (recovered,) = [event for event in bloomery.events() if isinstance(event, Recovered)]
    assert recovered.reason.startswith("out of memory on rank 1 (layer 1) after step 4 (2.50 GiB")
    assert "micro-batch 2 -> 1" in recovered.action
    assert ranks_of(bloomery.run_dir) == []
    assert losses(bloomery.run_dir)[:3] == losses(calm.run_dir)[:3]
    assert read_plan(bloomery.run_dir / "plan.json").train.pipeline == 2


def test_the_error_of_a_stage_is_told_and_not_the_connection_that_it_closed(dying_workshop) -> None:
    (dying_workshop / "runs/deaths.json").write_text(
        json.dumps([[{"rank": 1}, 3, "the last stage is broken"]])
    )
    bloomery = Bloomery(dying_workshop)
    told = bloomery.here("train", *PIPELINE)
    assert told.returncode == 1
    assert (
        "error: rank 1 (layer 1) of training failed after step 2:"
        " RuntimeError: the last stage is broken" in told.stderr
    ), told.stderr
    assert ranks_of(bloomery.run_dir) == []
    log = (bloomery.run_dir / "log.txt").read_text()
    assert re.search("Connection (closed|reset) by peer", log), log


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("silent", r"rank 1 \(layer 1\) on (\S+) got no answer from rank 0 \(layer 0\) on \1: "),
        ("wrong", r"rank 1 \(layer 1\) on (\S+) received wrong numbers from rank 0 \(layer 0\) on"),
    ],
)
def test_a_neighbor_whose_link_fails_ends_the_run_before_the_first_step(
    faulty_links_workshop, fault, expected
) -> None:
    bloomery = Bloomery(faulty_links_workshop)
    (bloomery.folder / "runs/link.txt").write_text(fault)
    told = bloomery.here("train", *PIPELINE)
    assert told.returncode == 1
    assert re.search(f"error: {expected}", told.stderr), told.stderr
    assert "doctor --probe" in told.stderr and "Traceback" not in told.stderr
    assert not any(isinstance(event, StepDone) for event in bloomery.events())
    assert ranks_of(bloomery.run_dir) == []


def test_where_gpus_cannot_send_to_each_other_the_run_restarts_over_the_host(
    faulty_links_workshop, calm
) -> None:
    bloomery = Bloomery(faulty_links_workshop)
    (bloomery.folder / "runs/link.txt").write_text("gpus")
    told = bloomery.here("train", *PIPELINE)
    assert told.returncode == 0, told.stderr
    (recovered,) = [event for event in bloomery.events() if isinstance(event, Recovered)]
    assert recovered.reason == "rank 1 received wrong numbers from rank 0"
    assert "parallel.pipeline_link auto -> host" in recovered.action
    assert losses(bloomery.run_dir) == losses(calm.run_dir)
