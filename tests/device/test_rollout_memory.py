"""The peak of the device's allocator while ranks sample, against the bytes that the plan of their layout has."""

import pytest
from rollouts_for_tests import plan_of, write_recipe

from bloomery.core.device import reset_peak_memory
from bloomery.plan.types import NOT_TENSORS
from ranks import ranks, train_here

MODEL = ("model.num_layers=4", "model.hidden_size=256", "model.intermediate_size=512")
# Of the planned bytes: rounding of the allocator, and numbers of a few bytes that no plan counts.
ABOVE = 1.01
BELOW = 0.95
HEADS = ("model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=64")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("rl"), *MODEL, *HEADS)


def peaks_of_sampling(plan_json, folder):
    """On every rank: the largest bytes of tensors in each rollout of a run."""
    import simulated

    from bloomery.train.rl.sampler import Sampler

    plain = Sampler.completions
    peaks = []

    def noting(*words, **named):
        reset_peak_memory("cuda")
        completions = plain(*words, **named)
        peaks.append(simulated.stats().peak)
        return completions

    Sampler.completions = noting
    try:
        train_here(plan_json, folder, None, None)
    finally:
        Sampler.completions = plain
    return peaks


@pytest.mark.parametrize("axis", ["pipeline", "shard", "replicate"])
def test_ranks_sample_within_what_the_plan_has(recipe, tmp_path, axis):
    sizes = {"replicate": 1, "shard": 1, "pipeline": 1, axis: 2}
    edits = [f"parallel.{key}={size}" for key, size in sizes.items()]
    plan = plan_of(recipe, *MODEL, *HEADS, *edits, "train.max_steps=3", "eval.every=9 steps")
    planned = plan.rollout.memory.parts
    expected = sum(size for name, size in planned.items() if name not in NOT_TENSORS)
    by_rank = ranks(2).call(peaks_of_sampling, plan.model_dump_json(), str(tmp_path))
    # The first rollout comes before the first update, which makes the optimizer's states.
    peak = max(max(peaks[1:]) for peaks in by_rank)
    assert BELOW * expected < peak < ABOVE * expected
