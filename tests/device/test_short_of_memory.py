"""A run whose device has too little memory. Oracle: the run that had the smaller micro-batches from the start."""

from pathlib import Path

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, prepared_corpus

from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from ranks import fields, losses, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


def plan_of(corpus: Path, rows: int) -> RunPlan:
    return tiny_plan(
        corpus,
        config=CONFIG,
        train={
            "steps": 3,
            "tokens_per_step": 256,
            "micro_batch_size": rows,
            "accumulation": 8 // rows,
        },
        model={"score_chunk": rows * 32},
        eval={"every_steps": 99},
    )


def limited(plan: RunPlan, limit: float) -> RunPlan:
    return plan.model_copy(
        update={"memory": plan.memory.model_copy(update={"limit": round(limit)})}
    )


@pytest.fixture(scope="module")
def peak_bytes(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    torch.cuda.reset_peak_memory_stats()
    train(plan_of(corpus, 8), tmp_path_factory.mktemp("peak") / "run")
    return simulated.stats().peak


@pytest.mark.parametrize("share", [0.8, pytest.param(0.6, marks=pytest.mark.soak), 0.4])
def test_it_takes_smaller_micro_batches(
    corpus: Path, peak_bytes: int, tmp_path: Path, share: float
) -> None:
    limit = share * peak_bytes
    torch.cuda.reset_peak_memory_stats()
    short = train(limited(plan_of(corpus, 8), limit), tmp_path / "short")
    assert fields(short, "Recovered")
    assert simulated.stats().peak <= limit
    rows = read_plan(tmp_path / "short/plan.json").train.micro_batch_size
    assert rows < 8
    assert losses(short) == losses(train(plan_of(corpus, rows), tmp_path / "small"))
