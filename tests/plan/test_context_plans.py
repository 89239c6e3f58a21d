"""Devices that share sequences: what is refused, memory and communication against hand computation."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.facts.presets import preset
from bloomery.hardware.profile import build_profile
from bloomery.plan.estimate.activations import activation_bytes
from bloomery.plan.estimate.fabric import communication_seconds, fabric_of
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import RunPlan
from bloomery.runs.devices import device_count

# Eight query heads for four key/value heads of eight numbers.
MODEL = {"num_heads": 8, "num_kv_heads": 4}


def plan_of(gpus: int, *, model: dict[str, object] | None = None, **parallel: object) -> RunPlan:
    sections = {"model": MODEL | (model or {}), "parallel": parallel}
    return planned(loaded(**sections), machine(), gpus=gpus)


REFUSED = {
    "key heads": (
        4,
        {"context": 4, "model": {"num_kv_heads": 2}},
        "4 devices cannot share the model's 2 key/value heads",
        "set parallel.context=2",
    ),
    "one key head": (
        2,
        {"context": 2, "model": {"num_kv_heads": 1}},
        "2 devices cannot share the model's 1 key/value head",
        "set parallel.context=1",
    ),
    "a state": (
        2,
        {"context": 2, "model": {"preset": None, "family": "qwen3_5_text"}},
        "each layer with a delta net reads whole sequences, which devices cannot share",
        "set parallel.context=1, and parallel.shard for memory",
    ),
    "a pipeline": (
        4,
        {"context": 2, "pipeline": 2},
        "a pipeline does not share sequences between devices",
        "set parallel.context=1, or parallel.pipeline=1",
    ),
    "devices": (
        6,
        {"context": 4, "replicate": 6, "shard": 1},
        "6 devices cannot be divided into groups of 4 that share sequences",
        "set parallel.context=2, or train on a multiple of 4",
    ),
    "one device": (
        1,
        {"context": 2, "replicate": 1, "shard": 1},
        "1 device cannot be divided into groups of 2 that share sequences",
        "set parallel.context=1, or train on a multiple of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_in_a_sentence(case):
    gpus, sections, problem, fix = REFUSED[case]
    with pytest.raises(UserError) as refused:
        plan_of(gpus, **sections)
    assert (refused.value.problem, refused.value.fix) == (problem, fix)
    assert refused.value.where == f"parallel.context={sections['context']}"


def test_sequences_must_divide():
    recipe = loaded(
        model=MODEL | {"max_positions": 256},
        data={"sequence_length": 130},
        train={"tokens_per_step": 1300},
        parallel={"context": 4},
    )
    with pytest.raises(UserError, match="sequences of 130 tokens cannot be divided among 4") as no:
        planned(recipe, machine(), gpus=4)
    assert no.value.fix == "set data.sequence_length=132"


@pytest.mark.parametrize(
    ("gpus", "parallel", "sizes"),
    [
        (1, {"context": 2}, (2, 1, 2)),  # as many devices as share a sequence
        (4, {"context": 2, "shard": 4}, (1, 4, 2)),
        (1, {"context": 4, "shard": 2}, (2, 2, 4)),
        (4, {"context": 4, "replicate": 4, "shard": 1}, (4, 1, 4)),
    ],
)
def test_the_batch_stays_and_groups_share_it_out(gpus, parallel, sizes):
    plan = plan_of(gpus, **parallel)
    train = plan.train
    assert (train.replicate, train.shard, train.context) == sizes
    assert train.ranks == sizes[0] * sizes[1]
    assert train.data_parallel == train.ranks // train.context
    assert train.tokens_per_step == plan_of(1).train.tokens_per_step
    assert train.sequences_per_step == 8
    assert plan.parallel.layout.pipeline == 1


def test_open_sizes_take_the_devices_that_are_there():
    recipe = loaded(parallel={"context": 2}).recipe
    assert device_count(recipe, machine(), 4)[1] == 4
    with pytest.raises(UserError, match="parallel asks for 2 devices, and there are 3"):
        device_count(recipe, machine(), 3)


def step_of(context: int, **changes: object) -> StepShape:
    step = StepShape(
        model=TrainedModel(replace(preset("go-coder-small"), num_heads=12, num_kv_heads=4)),
        sequence_length=4096,
        micro_batch_size=2,
        precision="bfloat16",
        optimizer="adamw",
        attention="varlen",
        checkpointing="none",
        compiled=False,
        score_chunk=1024,
        context=context,
        context_bytes=0.0,
        on_gpu=True,
    )
    return replace(step, **changes)


def test_a_device_holds_its_share_of_the_activations():
    """And the output of attention twice: of its heads, and of its tokens."""
    alone, shared = step_of(1), step_of(4)
    tokens = 2 * 4096 // 4
    assert shared.tokens_per_micro_batch == tokens
    output_bytes = 2 * tokens * 12 * shared.config.head_dim
    added = output_bytes * shared.config.num_layers
    assert activation_bytes(shared) == pytest.approx(activation_bytes(alone) / 4 + added)


@pytest.mark.parametrize(
    ("checkpointing", "passes"), [("none", 2), ("full", 3), ("selective", 2), ("every-2", 2.5)]
)
def test_heads_are_exchanged_forward_and_backward(checkpointing, passes):
    """Queries, keys, values and the output: 2 (H + K) E numbers of a token, of which a rank keeps its own quarter."""
    gpu = build_profile(gpu_machine("MI300X")).gpu
    fabric = fabric_of(gpu.link, per_node=8, nodes=1)
    step = step_of(4, checkpointing=checkpointing)
    seconds = communication_seconds(fabric, MeshSplit(replicate=8, context=4), step, 6)
    num_layers = step.config.num_layers
    sent = 2 * (12 + 4) * step.config.head_dim * 2 * (2 * 1024) * num_layers * passes * 3 / 4
    calls = 2 * passes * num_layers
    assert seconds["context"] == pytest.approx(3 * (sent / 310e9 + calls * 5e-6))


def test_between_nodes_their_network_decides():
    gpu = build_profile(gpu_machine("MI250X")).gpu
    fabric = fabric_of(gpu.link, per_node=2, nodes=2)
    step = step_of(4)
    seconds = communication_seconds(fabric, MeshSplit(shard=4, context=4), step, 2)["context"]
    amount = 2 * (12 + 4) * step.config.head_dim * 2 * (2 * 1024) * step.config.num_layers * 2
    calls = 4 * step.config.num_layers
    assert seconds == pytest.approx(2 * amount / 2 / 70e9 + calls * 20e-6)


def test_a_sequence_too_long_for_a_device_is_suggested_to_be_shared():
    """Two key/value heads: four devices cannot share it."""
    recipe = loaded(
        model={
            "hidden_size": 2048,
            "num_layers": 16,
            "num_heads": 16,
            "num_kv_heads": 2,
            "max_positions": 131072,
            "vocab_size": 32000,
        },
        data={"sequence_length": 131072},
        train={"tokens_per_step": 4 * 131072, "activation_checkpointing": "full"},
    )
    report = reported(recipe, gpu_machine("RTX 4090"), gpus=4)
    assert not report.plan.fits
    edits = {fix.edit: fix.saves for fix in report.suggestions}
    assert "same training" in edits["parallel.context=2"]
    assert "parallel.context=4" not in edits
