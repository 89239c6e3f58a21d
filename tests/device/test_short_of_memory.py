"""A run whose device has too little memory for its micro-batches. Oracle: the same run with enough of it."""

import gc
import time
from pathlib import Path

import pytest
import simulated
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import prepared_corpus

from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from ranks import fields, losses, train


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """Without dropout, which draws for each micro-batch."""
    corpus = prepared_corpus(tmp_path_factory.mktemp("corpus"))
    train_section = {"steps": 3, "tokens_per_step": 256, "micro_batch_size": 8, "accumulation": 1}
    return tiny_plan(
        corpus,
        config=tiny_config(vocab_size=300),
        train=train_section,
        model={"score_chunk": 256},
        eval={"every_steps": 99},
    )


@pytest.fixture(scope="module")
def with_enough(
    plan: RunPlan, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[int, float]]:
    """The bytes that the run takes at most, and its losses."""
    begin_again()
    events = train(plan, tmp_path_factory.mktemp("enough") / "run")
    return simulated.stats().peak, losses(events)


def begin_again() -> None:
    """Without what other runs of this process left for the garbage collector, or in the allocator's cache."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("share", [0.8, pytest.param(0.6, marks=pytest.mark.soak), 0.4])
def test_it_takes_smaller_micro_batches(
    plan: RunPlan, with_enough: tuple[int, dict[int, float]], tmp_path: Path, share: float
) -> None:
    peak_bytes, expected_losses = with_enough
    limit = round(share * peak_bytes)
    short_plan = plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit": limit})})
    begin_again()
    events = train(short_plan, tmp_path / "short")
    assert fields(events, "Recovered")
    assert simulated.stats().reserved_peak <= limit
    assert read_plan(tmp_path / "short/plan.json").train.micro_batch_size < 8
    assert losses(events) == pytest.approx(expected_losses, rel=2**-20)


def test_memory_that_is_taken_again_all_the_time_has_no_long_history() -> None:
    """Of a device that nobody waits for. Histories of 4,000 tensors once took gigabytes and minutes."""
    sizes = torch.randint(1, 40, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    tensors: list[torch.Tensor] = []
    begun = time.process_time()
    for number, size in enumerate(sizes):
        tensors.append(torch.empty(256 * size, device="cuda").fill_(1))
        if len(tensors) > 20:
            tensors.pop(number * 7 % 20)
    assert time.process_time() - begun < 5
