"""The memory of the stages of a pipeline: counted, on fake tensors, and on real ranks."""

import pytest
from plan_help import gpu_machine, loaded, planned
from steps_for_tests import (
    both_of_stage,
    laid,
    measured_ranks,
    simulated,
    small_plan,
    some,
)

from bloomery.hardware.profile import build_profile, with_gpus
from bloomery.hardware.specs import find_gpus
from bloomery.recipe.load import load_recipe
from bloomery.simulate.run import (
    MeshSplit,
    SimulatedStage,
    SimulationResult,
    fullest,
    passes_in_flight,
    simulate,
    simulation_notes,
    stages_of_kinds,
)
from bloomery.simulate.step import simulated_micro_batches, simulated_stage
from ranks import on_ranks

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
    "compiled, checkpointed": {
        "precision": "bfloat16",
        "compile": True,
        "activation_checkpointing": "full",
    },
    "Muon": {"precision": "float32", "optimizer": "muon"},
    "two micro-batches": {"precision": "bfloat16", "micro_batches": 2},
}
RECIPES = [
    ("go-coder-125m", "RX 6700 XT", 4),
    ("go-coder-125m", "MI250X", 8),
    ("go-coder-medium", "RX 6700 XT", 2),
    ("go-coder-medium", "MI300X", 4),
]


def test_of_unequal_gpus_every_stage_is_simulated_and_the_tightest_decides():
    on = with_gpus(gpu_machine("T4"), find_gpus("RTX 3090 + 2 x RTX 3060 12GB + RTX 3090"))
    plan = planned(load_recipe("go-coder-125m", ["parallel.pipeline=4"]), on, gpus=4)
    layout = plan.parallel.layout
    assert stages_of_kinds(plan, MeshSplit.of(layout)) == [0, 1, 2, 3]
    assert layout.stage_limits[0] == 2 * layout.stage_limits[1]
    stages = [
        SimulatedStage(number, 1, {"weights": peak}, {}) for number, peak in ((1, 10.0), (2, 8.0))
    ]
    assert fullest(stages, layout.stage_limits).number == 2
    assert fullest(stages, ()).number == 1


@pytest.mark.parametrize("case", some(SMALL, {"GPT-2's shape, tied"}))
def test_shapes_and_fake_tensors_agree_on_every_kind_of_stage(case):
    plan = small_plan(**(GPU | SMALL[case]))
    split = MeshSplit(pipeline=4)
    assert stages_of_kinds(plan, split) == [0, 1, 3]
    for index in stages_of_kinds(plan, split):
        counted, fake = both_of_stage(plan, split, index)
        assert counted == pytest.approx(fake, rel=0.08), index


CUTS = {
    "uneven": MeshSplit(pipeline=2, layers=(5, 3)),
    "GPipe": MeshSplit(pipeline=2, schedule="gpipe"),
    "interleaved": MeshSplit(pipeline=2, schedule="interleaved", chunks=2, layers=(2, 2, 2, 2)),
    "interleaved, uneven": MeshSplit(
        pipeline=2, schedule="interleaved", chunks=2, layers=(2, 3, 2, 1)
    ),
    "shards inside stages": MeshSplit(pipeline=2, shard=4),
    "copies of shards inside stages": MeshSplit(pipeline=2, shard=2, replicate=2),
}
MODELS = {
    "tied": {"family": "gpt2", "precision": "bfloat16"},
    "a head of its own": {"family": "llama", "precision": "bfloat16"},
    "LoRA": {"adapter": {"kind": "lora", "rank": 8}, "precision": "bfloat16"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model", some(MODELS, {"a head of its own"}))
@pytest.mark.parametrize("cut", CUTS)
def test_they_agree_on_every_cut_and_schedule(cut, model):
    """Wide layers: what is not counted exactly is small beside them."""
    sizes = {"num_layers": 8, "hidden_size": 256}
    plan = small_plan(**(GPU | {"sizes": sizes} | MODELS[model]))
    for index in range(2):
        counted, fake = both_of_stage(plan, CUTS[cut], index)
        assert counted == pytest.approx(fake, rel=0.1), index


SMALL_STAGES = {"hidden_size": 256, "num_layers": 4, "intermediate_size": 768}
# 34 M parameters.
WIDE_STAGES = SMALL_STAGES | {"hidden_size": 512, "num_layers": 10, "vocab_size": 4096}
SCHEDULES = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
}


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        pytest.param("1f1b", SMALL_STAGES, id="1f1b"),
        pytest.param("gpipe", SMALL_STAGES, id="gpipe", marks=pytest.mark.soak),
        pytest.param("interleaved", SMALL_STAGES, id="interleaved", marks=pytest.mark.soak),
        pytest.param("1f1b", WIDE_STAGES, id="1f1b, 34 M", marks=pytest.mark.soak),
    ],
)
def test_they_agree_with_what_the_ranks_of_two_stages_hold(schedule, sizes):
    plan = small_plan(rows=1, micro_batches=4, sizes=sizes)
    several = on_ranks(plan, pipeline=2, **SCHEDULES[schedule])
    peaks = measured_ranks(several)
    split = MeshSplit(
        pipeline=2,
        schedule=schedule,
        layers=several.train.pipeline_layers,
        chunks=several.train.pipeline_chunks,
    )
    for index, real in enumerate(peaks):
        counted, fake = both_of_stage(plan, split, index)
        assert counted == pytest.approx(real, rel=0.1), index
        assert fake == pytest.approx(real, rel=0.1), index

    # A copy of the model holds 16 bytes per parameter, half a model 8; GPipe keeps all activations in return.
    if schedule != "gpipe":
        num_parameters = sum(p.numel() for p in _model(plan.model.config).parameters())
        copy = min(measured_ranks(on_ranks(plan, replicate=2)))
        assert copy - max(peaks) > 4 * num_parameters


@pytest.mark.parametrize(("recipe", "gpu", "stages"), some(RECIPES, set()))
def test_they_agree_on_packaged_recipes(recipe, gpu, stages):
    here = gpu_machine(gpu)
    plan = planned(load_recipe(recipe), here, gpus=8)
    (layout,) = [
        layout
        for layout in plan.parallel.layouts
        if layout.pipeline == stages and layout.shard == 1
    ]
    own = laid(plan, layout)
    split = MeshSplit.of(layout)
    for index in stages_of_kinds(own, split):
        counted, fake = both_of_stage(
            own, split, index, fused=build_profile(here).attention.value == "fused"
        )
        assert counted == pytest.approx(fake, rel=0.03), index


def test_the_stages_hold_the_whole_model_and_the_tied_head_twice():
    plan = small_plan(**GPU, family="gpt2")
    weights = [
        simulated_stage(plan, MeshSplit(pipeline=4), index, fused=True).parts["weights"]
        for index in range(4)
    ]
    config = plan.model.config
    model = sum(4 * p.numel() for p in _model(config).parameters())
    assert config.tie_embeddings
    assert sum(weights) == model + 4 * config.vocab_size * config.hidden_size


def _model(config):
    from bloomery.model.decoder import Decoder

    return Decoder(config)


def test_a_stage_holds_a_micro_batch_for_each_that_follows():
    plan = small_plan(**(GPU | {"sizes": {"num_layers": 8}}), activation_checkpointing="none")
    cuts = MeshSplit(pipeline=4, layers=(3, 1, 1, 3)), MeshSplit(pipeline=8)
    shallow, deep = (
        sum(simulated_stage(plan, split, 1, fused=True).parts.values()) for split in cuts
    )
    # what a micro-batch keeps of one layer is many tensors of the residual stream
    one = 2 * 256 * 128 * 4
    assert shallow < deep  # one layer each: 3 micro-batches under way, and 7
    assert deep - shallow > 4 * one
    assert [passes_in_flight(plan, cuts[1], index) for index in (0, 1, 7)] == [8, 7, 1]


def test_few_micro_batches_stand_for_many():
    """As many as are in flight at most, and those after the first backward; GPipe holds all."""
    interleaved = MeshSplit(pipeline=4, schedule="interleaved", chunks=2, layers=(1,) * 8)
    assert [simulated_micro_batches(MeshSplit(pipeline=4), index, 64) for index in range(4)] == [
        5,
        4,
        3,
        2,
    ]
    assert simulated_micro_batches(interleaved, 0, 64) == 12
    assert simulated_micro_batches(MeshSplit(pipeline=4, schedule="gpipe"), 0, 16) == 16
    assert simulated_micro_batches(MeshSplit(pipeline=4), 0, 3) == 3


def pipelined():
    here = gpu_machine("MI300X")
    plan = planned(loaded(train={"tokens_per_step": 4096, "compile": False}), here, gpus=2)
    (index,) = [
        index
        for index, layout in enumerate(plan.parallel.layouts)
        if layout.pipeline == 2 and layout.shard == 1
    ]
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
    (note,) = simulation_notes(small_plan(), fused=False, split=MeshSplit(pipeline=4))
    assert "one by one" in note
    assert (
        "one of 2 copies"
        in simulation_notes(small_plan(), fused=False, split=MeshSplit(replicate=2, pipeline=4))[0]
    )


@pytest.mark.soak
def test_a_stage_holds_less_than_the_whole():
    plan = small_plan(**GPU)
    stage = simulated_stage(plan, MeshSplit(pipeline=4), 1, fused=True)
    assert sum(stage.parts.values()) < simulated(plan)
