"""The memory of a device that shares its sequences: counted from shapes, on fake tensors, and on real ranks."""

import pytest
from steps_for_tests import counted, measured_ranks, simulated, small_plan, some

from bloomery.facts.counting import layers
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.simulate.step import simulated_step
from ranks import on_ranks

SHARED = {
    "float32": {},
    "grouped queries": {"family": "qwen3", "precision": "bfloat16"},
    "checkpointed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective", "precision": "bfloat16"},
    "mask": {"attention": "mask"},
    "LoRA": {"adapter": {"kind": "lora", "rank": 8}, "precision": "bfloat16"},
}


@pytest.mark.parametrize("case", some(SHARED, {"selective"}))
def test_shapes_fake_tensors_and_real_ranks_agree(case):
    plan = on_ranks(small_plan(rows=8, **SHARED[case]), replicate=2, context=2)
    fake = simulated(plan, split=MeshSplit(replicate=2, context=2))
    assert counted(plan) == pytest.approx(fake, rel=0.08)
    # gloo's threads let go of what they have sent a moment later: some exchanges of queries, keys and values.
    config = plan.model.config
    element_bytes = 2 if plan.train.precision == "bfloat16" else 4
    layer = layers(config)[0]
    exchanged = element_bytes * 8 * 128 * (layer.query_width + 2 * layer.key_width)
    for real in measured_ranks(plan):
        assert 0.99 * fake < real < 1.02 * fake + 4 * exchanged


def test_what_a_device_exchanges_is_counted():
    """Each of two ranks has half of 4 x 256 tokens, and sends half of that: q, k, v and the output, twice."""
    plan = on_ranks(small_plan(), replicate=2, context=2)
    sent = simulated_step(plan, fused=True, split=MeshSplit(replicate=2, context=2)).sent
    config = plan.model.config
    numbers = 2 * 4 * 128 * sum(layer.query_width + layer.key_width for layer in layers(config))
    assert sent == {"context": pytest.approx(4 * numbers * 2 / 2)}
