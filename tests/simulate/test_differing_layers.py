"""A model whose layers differ: every second layer has wider and fewer key heads and a wider MLP."""

from dataclasses import replace

import pytest
from steps_for_tests import both_of_stage, counted, load_of, measured, simulated, small_plan

from bloomery.facts.config import LayerSizes
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.speed import product_flops, recompute
from bloomery.plan.estimate.states import TrainedModel

SIZES = {"num_layers": 4, "vocab_size": 1040}
ALL_LINEAR = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}
CASES = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "every second layer": {"precision": "bfloat16", "activation_checkpointing": "every-2"},
    "selective": {"precision": "bfloat16", "activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "two micro-batches": {"precision": "bfloat16", "micro_batches": 2},
    "LoRA": {"precision": "bfloat16", "adapter": ALL_LINEAR},
    "Muon": {"optimizer": "muon"},
}


def uneven_plan(**settings):
    """The plan of `small_plan`, with layers of 4 heads of 32 and 48 numbers in turn."""
    plan = small_plan(**{"sizes": SIZES} | settings)
    config = plan.model.config
    narrow = LayerSizes(
        num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=config.intermediate_size
    )
    wide = replace(
        narrow, num_kv_heads=1, head_dim=48, intermediate_size=3 * narrow.intermediate_size
    )
    sizes = (narrow, wide) * (config.num_layers // 2)
    model = plan.model.model_copy(update={"config": replace(config, layer_sizes=sizes)})
    return plan.model_copy(update={"model": model})


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
def test_counted_simulated_and_measured_bytes_agree(case):
    plan = uneven_plan(**CASES[case])
    layers = TrainedModel.of(plan, plan.model.config).layers
    assert len(layers) == 4
    assert len(set(layers)) == 2
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.03)
    assert counted(plan) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_shards_gather_layers_of_their_own_sizes(precision):
    settings = {"attention": "varlen", "device": "cuda", "precision": precision}
    plan = uneven_plan(sizes=SIZES | {"hidden_size": 512}, rows=1, **settings)
    split = MeshSplit(shard=8)
    assert counted(plan, split=split) == pytest.approx(simulated(plan, split=split), rel=0.08)


def test_a_stage_has_the_layers_that_are_its_own():
    settings = {"attention": "varlen", "device": "cuda", "rows": 2, "micro_batches": 8}
    plan = uneven_plan(sizes=SIZES | {"hidden_size": 512}, **settings)
    by_stage = {}
    for index in (0, 1, 3):
        estimate, simulation = both_of_stage(plan, MeshSplit(pipeline=4), index)
        assert estimate == pytest.approx(simulation, rel=0.08), index
        by_stage[index] = estimate
    assert by_stage[1] > by_stage[0]  # a wide layer, though one micro-batch less


def test_products_are_those_of_each_layer():
    step = load_of(uneven_plan())
    inner = step.config.intermediate_size
    narrow = 128 * (2 * 128 + 2 * 64 + 3 * inner)
    wide = 128 * (2 * 192 + 2 * 48 + 3 * 3 * inner)
    head = 2 * 128 * 1040
    flops = product_flops(step, recompute(step), chunked=False)
    assert flops.wide + flops.weights == 2 * 3 * 2 * (narrow + wide) + 3 * head
    # The first of every two layers is computed again, and it is the narrow one.
    again = recompute(replace(step, checkpointing="every-2"))
    assert again.products == pytest.approx(narrow / (narrow + wide))
