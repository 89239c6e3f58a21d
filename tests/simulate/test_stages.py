"""The stages of a pipeline: counted and on fake tensors, and what 1F1B has under way."""

import pytest
from plan_help import gpu_machine, loaded, planned
from steps_for_tests import both_of_stage, laid, simulated, small_plan, some

from bloomery.hardware.profile import build_profile
from bloomery.recipe.load import load_recipe
from bloomery.simulate.run import MeshSplit, SimulationResult, notes_of, simulate
from bloomery.simulate.step import StagePosition, simulated_stage, stage_positions

GPU = {
    "attention": "varlen",
    "device": "cuda",
    "rows": 2,
    "micro_batches": 8,
    "sizes": {"num_layers": 4},
}
SMALL = {
    "GPT-2's shape, tied": {"family": "gpt2", "dropout": 0.1, "precision": "bfloat16"},
    "a head of its own, float16": {"family": "llama", "precision": "float16"},
    "bfloat16-pure": {"family": "qwen3", "precision": "bfloat16-pure"},
    "checkpointed": {"precision": "bfloat16", "activation_checkpointing": "full"},
    "compiled": {"precision": "bfloat16", "compile": True},
    "Muon": {"precision": "float32", "optimizer": "muon"},
    "two micro-batches": {"precision": "bfloat16", "micro_batches": 2},
}
RECIPES = [
    ("go-coder-125m", "RX 6700 XT", 4),
    ("go-coder-125m", "MI250X", 8),
    ("go-coder-medium", "RX 6700 XT", 2),
    ("go-coder-medium", "MI300X", 4),
]


@pytest.mark.parametrize("case", some(SMALL, {"GPT-2's shape, tied"}))
def test_shapes_and_fake_tensors_agree_on_every_kind_of_stage(case):
    plan = small_plan(**(GPU | SMALL[case]))
    for place in stage_positions(4):
        counted, fake = both_of_stage(plan, place)
        assert counted == pytest.approx(fake, rel=0.08), place


@pytest.mark.parametrize(("recipe", "gpu", "stages"), some(RECIPES, set()))
def test_they_agree_on_packaged_recipes(recipe, gpu, stages):
    here = gpu_machine(gpu)
    plan = planned(load_recipe(recipe), here, gpus=8)
    (layout,) = [layout for layout in plan.parallel.layouts if layout.pipeline == stages]
    for place in stage_positions(stages):
        counted, fake = both_of_stage(
            laid(plan, layout), place, fused=build_profile(here).attention.value == "fused"
        )
        assert counted == pytest.approx(fake, rel=0.03), place


def test_the_stages_hold_the_whole_model_and_the_tied_head_twice():
    plan = small_plan(**GPU, family="gpt2")
    weights = [
        simulated_stage(plan, StagePosition(index, 4), fused=True)["weights"] for index in range(4)
    ]
    config = plan.model.config
    model = sum(4 * p.numel() for p in _model(config).parameters())
    assert config.tie_embeddings
    assert sum(weights) == model + 4 * config.vocab_size * config.hidden_size


def _model(config):
    from bloomery.model.decoder import Decoder

    return Decoder(config)


def test_a_stage_holds_a_micro_batch_for_each_that_follows():
    plan = small_plan(**GPU, activation_checkpointing="none")
    shallow, deep = (
        sum(simulated_stage(plan, StagePosition(1, stages), fused=True).values())
        for stages in (4, 8)
    )
    # what a micro-batch keeps of one layer is many tensors of the residual stream
    one = 2 * 256 * 128 * 4
    assert shallow < deep  # one layer each: 3 micro-batches under way, and 7
    assert deep - shallow > 4 * one
    assert [place.under_way(plan) for place in stage_positions(8)] == [8, 7, 1]


def pipelined():
    here = gpu_machine("MI300X")
    plan = planned(loaded(train={"tokens_per_step": 4096, "compile": False}), here, gpus=2)
    (index,) = [index for index, layout in enumerate(plan.parallel.layouts) if layout.pipeline == 2]
    chosen = plan.parallel.layouts[index]
    mesh = plan.parallel.model_copy(update={"chosen": index})
    rows = chosen.micro_batch_size * plan.data.sequence_length
    # all logits at once, as the layout was counted
    model = plan.model.model_copy(update={"score_chunk": rows})
    return laid(plan, chosen).model_copy(
        update={"parallel": mesh, "model": model, "memory": chosen.memory}
    ), here


def test_the_page_and_json_have_the_fullest_stage_and_each():
    plan, here = pipelined()
    found = SimulationResult(plan, simulate(plan, here))
    told = found.document()
    assert [stage["stage"] for stage in told["stages"]] == [1, 2]
    assert told["peak"] == max(stage["peak"] for stage in told["stages"])
    assert told["counted"] == pytest.approx(told["peak"], rel=0.08)
    text = " ".join(found.lines())
    assert "the fullest of 2 stages" in text
    assert "with 1 micro-batch " in text


def test_notes_say_that_stages_stand_alone():
    assert "one by one" in notes_of(small_plan(), fused=False, split=MeshSplit(pipeline=4))[0]
    assert (
        "one of 2 copies"
        in notes_of(small_plan(), fused=False, split=MeshSplit(replicate=2, pipeline=4))[0]
    )


@pytest.mark.soak
def test_a_stage_holds_less_than_the_whole():
    plan = small_plan(**GPU)
    assert sum(simulated_stage(plan, StagePosition(1, 4), fused=True).values()) < simulated(plan)
