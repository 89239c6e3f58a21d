"""`parallel.expert`: layouts that divide the experts, their memory and links by hand, and what is refused in words."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.facts.config import Experts
from bloomery.facts.counting import is_expert_stack, layers, parameter_shapes
from bloomery.facts.published import published_config
from bloomery.hardware.profile import build_profile
from bloomery.plan import stages
from bloomery.plan.estimate.experts import read_bytes
from bloomery.plan.estimate.fabric import communication_seconds, fabric_of
from bloomery.plan.estimate.mesh import MeshSplit, mesh_memory
from bloomery.plan.estimate.states import TrainedModel, count_values
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import RunPlan

MIXTURE = {
    "preset": None,
    "family": "qwen3_moe",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "experts": {"count": 8, "per_token": 2, "width": 32},
}
QWEN = published_config("Qwen/Qwen3-30B-A3B")
STACKED = 3 * 128 * 2048 * 768  # numbers of the experts of a layer


def plan_of(gpus: int, sections: dict | None = None, **parallel: object) -> RunPlan:
    given = {"model": MIXTURE, "parallel": parallel} | (sections or {})
    return planned(loaded(**given), machine(), gpus=gpus)


@pytest.mark.parametrize(
    ("gpus", "parallel", "sizes"),
    [
        (2, {"expert": 2, "replicate": 2}, (2, 1, 2)),
        (4, {"expert": 2, "replicate": 4}, (4, 1, 2)),
        (4, {"expert": 4, "shard": 4}, (1, 4, 4)),
        (4, {"expert": 2, "shard": 2}, (2, 2, 2)),
        (1, {"expert": 2, "shard": 2}, (1, 2, 2)),  # as many devices as the recipe names
    ],
)
def test_the_recipe_names_who_divides_the_experts(gpus, parallel, sizes) -> None:
    train = plan_of(gpus, **parallel).train
    assert (train.replicate, train.shard, train.expert) == sizes
    assert not train.compile


def test_an_open_split_is_one_that_can_divide_the_experts() -> None:
    plan = plan_of(4, expert=2)
    layouts = {(layout.replicate, layout.shard) for layout in plan.parallel.layouts}
    assert layouts == {(4, 1), (2, 2)}  # four shards would hold the experts of two
    assert plan.train.expert == 2
    assert plan.train.tokens_per_step == plan_of(1).train.tokens_per_step


REFUSED = {
    "experts": (3, {"expert": 3, "replicate": 3}, {}, "8 experts cannot be divided over 3 devices"),
    "devices": (
        3,
        {"expert": 2, "replicate": 3, "shard": 1},
        {},
        "3 devices cannot be divided into groups of 2 that divide the experts",
    ),
    "shards": (
        4,
        {"expert": 2, "shard": 4},
        {},
        "the 4 devices of a sharded copy divide the experts",
    ),
    "dense": (
        2,
        {"expert": 2, "replicate": 2},
        {"model": {"preset": "go-coder-tiny"}},
        "there are no experts to divide",
    ),
    "compile": (2, {"expert": 2, "replicate": 2}, {"train": {"compile": True}}, "train.compile"),
    "adafactor": (
        2,
        {"expert": 2, "replicate": 2},
        {"optimizer": {"kind": "adafactor", "stochastic_rounding": True}},
        "optimizer.stochastic_rounding",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_in_a_sentence(case) -> None:
    gpus, parallel, sections, problem = REFUSED[case]
    with pytest.raises(UserError) as refused:
        plan_of(gpus, sections, **parallel)
    assert problem in refused.value.problem
    assert refused.value.where == f"parallel.expert={parallel['expert']}"
    assert "parallel.expert=" in refused.value.fix


def step_of(**changes: object) -> StepShape:
    step = StepShape(
        model=TrainedModel(QWEN),
        sequence_length=4096,
        micro_batch_size=1,
        precision="bfloat16",
        optimizer="adamw",
        attention="varlen",
        checkpointing="full",
        compiled=False,
        score_chunk=1024,
        context_bytes=0.0,
        on_gpu=True,
    )
    return replace(step, **changes)


def memory_of(split: MeshSplit) -> dict[str, float]:
    step = step_of(expert=split.expert)
    return mesh_memory(step, split, vendor="amd", limit=1e15).parts


def test_a_device_holds_its_share_of_the_experts() -> None:
    """Weights, gradients and AdamW's states, in float32; the rest of the model in full."""
    stacks = count_values(s for n, s in parameter_shapes(QWEN).items() if is_expert_stack(n))
    assert stacks == 48 * STACKED
    whole, divided = memory_of(MeshSplit(replicate=8)), memory_of(MeshSplit(replicate=8, expert=8))
    for part, value_bytes in {"weights": 4, "optimizer": 8}.items():
        # Its router has the rows of as many experts: 5 million numbers of 30 billion.
        saved = whole[part] - divided[part]
        assert saved == pytest.approx(value_bytes * stacks * 7 / 8, rel=1e-3), part


def test_shards_do_not_gather_experts_that_are_divided() -> None:
    """A layer of experts, gathered in bfloat16, is 1.2 GB: two layers at once, and gradients in float32."""
    gathered, divided = memory_of(MeshSplit(shard=8)), memory_of(MeshSplit(shard=8, expert=8))
    assert divided["weights"] == gathered["weights"]
    saved = gathered["gathered layers"] - divided["gathered layers"]
    assert saved >= 2 * 2 * STACKED


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("full", 3), ("selective", 2)])
def test_rows_travel_to_experts_and_back(checkpointing, passes) -> None:
    """8 rows of 2,048 numbers of each token, there and back, of which an eighth stays."""
    gpu = build_profile(gpu_machine("MI300X")).gpu
    fabric = fabric_of(gpu.link, per_node=8, nodes=1)
    step = step_of(expert=8, checkpointing=checkpointing)
    seconds = communication_seconds(fabric, MeshSplit(shard=8, expert=8), step, 3)
    sent = 48 * 4096 * 8 * 2048 * 2 * 2 * passes * 7 / 8
    calls = 48 * 4 * passes
    assert seconds["expert"] == pytest.approx(3 * (sent / 310e9 + calls * 5e-6))
    gathering = communication_seconds(fabric, MeshSplit(shard=8), step_of(), 3)
    assert seconds["shard"] < 0.2 * gathering["shard"]


def test_the_tokens_of_all_reach_the_experts_of_each() -> None:
    layer = layers(QWEN)[0]
    alone = read_bytes(step_of(sequence_length=8), layer, is_trained=False, passes=1)
    divided = read_bytes(step_of(sequence_length=1, expert=8), layer, is_trained=False, passes=1)
    assert divided == pytest.approx(alone / 8)


def test_the_cut_of_a_pipeline_counts_experts() -> None:
    """Half of the layers have 64 experts and half an MLP: the stage with experts takes fewer layers."""
    experts = Experts(
        count=64, per_token=8, width=768, normalize=True, layers=(False,) * 12 + (True,) * 12
    )
    config = replace(QWEN, num_layers=24, intermediate_size=2048, experts=experts)
    dense = replace(config, experts=None)
    step = step_of(model=TrainedModel(config))
    device = stages.Device("", None, 1e15)
    groups = []
    for cut in (config, dense):
        split = stages.cut_layers(
            replace(step, model=TrainedModel(cut)),
            MeshSplit(pipeline=2),
            (device, device),
            vendor="amd",
            micro_batches=8,
        )
        groups.append(split.layers)
    with_experts, alike = groups
    assert sum(with_experts) == sum(alike) == 24
    assert with_experts[0] > alike[0]


def test_the_fullest_shard_holds_whole_experts() -> None:
    """Of 128 experts over 256 devices half of these have one: as much as a device of 128."""
    few, many = memory_of(MeshSplit(shard=128)), memory_of(MeshSplit(shard=256))
    total = count_values(parameter_shapes(QWEN).values())
    for part, value_bytes in {"weights": 4, "optimizer": 8}.items():
        rest = value_bytes * (total - 48 * STACKED)
        assert few[part] == pytest.approx(value_bytes * total / 128)
        assert many[part] == pytest.approx(value_bytes * 48 * STACKED / 128 + rest / 256)


def test_a_mixture_too_large_for_copies_is_suggested_to_be_divided() -> None:
    recipe = loaded(
        model=MIXTURE
        | {"hidden_size": 1024, "num_layers": 16, "max_positions": 2048}
        | {"experts": {"count": 64, "per_token": 4, "width": 512}},
        data={"sequence_length": 2048},
        train={"tokens_per_step": 16 * 2048},
        parallel={"replicate": 4, "shard": 1},
    )
    report = reported(recipe, gpu_machine("RTX 4090"), gpus=4)
    assert not report.plan.fits
    edits = {fix.edit: fix.saves for fix in report.suggestions}
    assert "same training" in edits["parallel.expert=4"]
