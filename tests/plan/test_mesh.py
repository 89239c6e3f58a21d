"""Several devices: communication, memory and pipelines against hand computation; the choice against what is known."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.core.units import GIB, MIB
from bloomery.facts.counting import layers, parameter_count
from bloomery.facts.presets import preset
from bloomery.hardware.profile import build_profile
from bloomery.plan.advise import energy_kwh
from bloomery.plan.estimate.activations import INPUT_BYTES, activation_bytes
from bloomery.plan.estimate.fabric import (
    HIDDEN_SHARES,
    exposed,
    fabric_of,
    gather_seconds,
    reduce_seconds,
)
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.mesh import MeshSplit, mesh_memory
from bloomery.plan.estimate.sharding import gathered_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.mesh import undivided
from bloomery.recipe.load import load_recipe

EIGHT_B = (
    "model.preset=null",
    "model.family=llama",
    "model.vocab_size=128256",
    "model.hidden_size=4096",
    "model.intermediate_size=14336",
    "model.num_layers=32",
    "model.num_heads=32",
    "model.num_kv_heads=8",
    "model.max_positions=8192",
    "tokenizer.train.vocab_size=128256",
    "data.sequence_length=8192",
    "train.tokens_per_step=16M",
    "train.max_tokens=1T",
)


def spec(name):
    return build_profile(gpu_machine(name)).gpu


def eight_b():
    words = [
        word if word != "train.tokens_per_step=16M" else "train.tokens_per_step=16777216"
        for word in EIGHT_B
    ]
    return load_recipe("go-coder-125m", words)


def test_a_gradient_sum_moves_twice_its_bytes_but_for_one_share():
    """2 k N (d-1)/d over 310 GB/s, and seven hops of 5 us each way."""
    fabric = fabric_of(spec("MI300X").link, per_node=8, nodes=1)
    amount = 4 * 124e6
    assert reduce_seconds(amount, fabric) == pytest.approx(2 * (amount * 7 / 8 / 310e9 + 7 * 5e-6))


def test_between_nodes_the_network_of_a_node_decides():
    fabric = fabric_of(spec("MI250X").link, per_node=8, nodes=64)
    amount = 16e9
    assert gather_seconds(amount, fabric) == pytest.approx(
        amount * 63 / 64 / 70e9 + 7 * 5e-6 + 63 * 20e-6
    )
    slow = fabric_of(spec("MI250X").link, per_node=8, nodes=64, assumed_network="tcp")
    assert gather_seconds(amount, slow) == pytest.approx(
        amount * 63 / 64 / 5e9 + 7 * 5e-6 + 63 * 20e-6
    )


def test_what_does_not_fit_behind_computing_is_exposed():
    low, typical, high = HIDDEN_SHARES
    assert exposed(1.0, 100.0, high) == pytest.approx(1 - high)
    assert exposed(1.0, 100.0, typical) == pytest.approx(1 - typical)
    assert exposed(10.0, 1.0, typical) == pytest.approx(10.0 - typical)
    assert exposed(1.0, 100.0, low) == pytest.approx(1 - low)


def test_each_communicator_takes_its_context():
    """RCCL on MI250X: 0.95 GiB, and 0.65 for each further one."""
    one, two = MeshSplit(shard=8), MeshSplit(replicate=2, shard=4)
    splits = MeshSplit(), one, two
    taken = [
        mesh_memory(load(), split, vendor="amd", limit=0).parts["collectives"] for split in splits
    ]
    assert taken == pytest.approx([0.0, 0.95 * GIB, (0.95 + 0.65) * GIB])


def matrix_numbers(config):
    """Of a layer's matrices and their biases."""
    return sum(matrix.size + matrix.outputs * matrix.bias for matrix in layers(config)[0].matrices)


def load():
    return StepShape(
        model=TrainedModel(preset("go-coder-small")),
        sequence_length=1024,
        micro_batch_size=4,
        precision="bfloat16",
        optimizer="adamw",
        attention="sdpa",
        checkpointing="none",
        compiled=True,
        score_chunk=4096,
        context_bytes=300 * MIB,
        on_gpu=True,
    )


def test_shards_divide_states_and_hold_two_layers_whole():
    count = parameter_count(preset("go-coder-small"))
    (layer, *others), root = gathered_bytes(load())
    assert others == [layer] * 11
    assert 12 * layer / 2 + root / 4 == count
    alone = estimate_memory(load(), limit=0).parts
    parts = mesh_memory(load(), MeshSplit(shard=8), vendor="amd", limit=0).parts
    assert parts["weights"] == alone["weights"] / 8
    assert parts["optimizer"] == alone["optimizer"] / 8
    # at the scores: the last layer is not freed yet
    assert parts["gathered layers"] == root + layer
    # that of the embeddings, whole until the end of backward
    assert parts["gradients"] == 4 * 50_000 * 768
    assert parts["collectives"] == pytest.approx(0.95 * GIB)


def test_copies_hold_everything():
    alone = estimate_memory(load(), limit=0).parts
    parts = mesh_memory(load(), MeshSplit(replicate=8), vendor="amd", limit=0).parts
    assert {name: size for name, size in parts.items() if name in alone} == alone
    assert parts["gradient buckets"] == 2 * 25 * 2**20


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    config = replace(load().config, num_layers=3)
    stage = replace(load(), model=TrainedModel(config))
    (layer, *_), root = gathered_bytes(load())
    inputs = stage.tokens_per_micro_batch * INPUT_BYTES
    dropout_masks = stage.tokens_per_micro_batch * 768  # of the embedding
    embeddings = root / 4 - 2 * 768
    parts = mesh_memory(load(), MeshSplit(pipeline=4), vendor="amd", limit=0).parts
    assert parts["activations"] == pytest.approx(
        4 * (activation_bytes(stage) + inputs + dropout_masks)
    )
    # each forward's autocast makes its own
    assert parts["half-precision copies"] == 4 * 3 * 2 * matrix_numbers(config)
    assert parts["logits"] == 0
    assert parts["weights"] == parts["gradients"] == 4 * (3 * layer / 2 + embeddings)


def test_a_step_of_few_micro_batches_does_not_fill_a_pipeline():
    few, many = (
        mesh_memory(load(), MeshSplit(pipeline=4), vendor="amd", limit=0, micro_batches=count).parts
        for count in (2, 16)
    )
    assert few["activations"] < 0.6 * many["activations"]


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    plan = planned(load_recipe("go-coder-125m"), gpu_machine("RX 7900 XTX"), gpus=4)
    assert plan.parallel is not None
    for layout in plan.parallel.layouts:
        if layout.pipeline > 1:
            assert layout.bubble_seconds > 0
            assert layout.replicate * layout.shard * layout.pipeline == 4
        else:
            assert layout.bubble_seconds == 0


def test_the_communication_of_each_axis_is_planned():
    """Copies sum 4 bytes a parameter once a step; shards gather layers twice, the last one and the rest once."""
    plan = planned(
        load_recipe("go-coder-125m", ["train.precision=bfloat16"]), gpu_machine("MI300X"), gpus=8
    )
    assert plan.parallel is not None
    by_name = {layout.name: layout for layout in plan.parallel.layouts}
    count = parameter_count(plan.model.config)
    (layer, *_), root = gathered_bytes(
        StepShape(**vars(load()) | {"model": TrainedModel(plan.model.config)})
    )
    copies, shards = by_name["replicate"], by_name["shard"]
    assert copies.communication_seconds == {
        "replicate": pytest.approx(2 * (4 * count * 7 / 8 / 310e9 + 7 * 5e-6))
    }
    layers = plan.model.config.num_layers
    sent = ((2 * layers - 1) * layer + root + 4 * count) * 7 / 8 / 310e9 + (
        3 * layers + 1
    ) * 7 * 5e-6
    assert shards.communication_seconds == {"shard": pytest.approx(shards.accumulation * sent)}
    for layout in (copies, shards):
        assert 0 < layout.exposed_seconds <= sum(layout.communication_seconds.values())


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes"), [("MI300X", 8, 1), ("MI250X", 8, 4), ("RTX 4090", 2, 1)]
)
def test_every_row_of_a_step_has_a_device(gpu, gpus, nodes):
    recipe = load_recipe("go-coder-125m", ["train.tokens_per_step=524288"])
    plan = planned(recipe, gpu_machine(gpu), gpus=gpus, nodes=nodes)
    assert plan.parallel is not None
    for layout in plan.parallel.layouts:
        assert layout.replicate * layout.shard * layout.pipeline == gpus * nodes
        assert (
            layout.micro_batch_size * layout.accumulation * layout.replicate * layout.shard == 512
        )
    chosen = plan.parallel.layout
    assert (plan.train.micro_batch_size, plan.train.accumulation) == (
        chosen.micro_batch_size,
        chosen.accumulation,
    )
    assert plan.memory == chosen.memory
    assert plan.step_seconds == chosen.step_seconds


def test_an_8b_on_64_nodes_is_sharded():
    """16 bytes a parameter are 120 GiB: no die of 64 GiB holds a copy."""
    plan = planned(eight_b(), gpu_machine("MI250X"), gpus=8, nodes=64)
    assert plan.parallel is not None
    chosen = plan.parallel.layout
    assert chosen.shard > 1
    assert plan.fits
    assert not next(
        layout for layout in plan.parallel.layouts if layout.name == "replicate"
    ).memory.fits
    rate = plan.train.tokens_per_step / plan.step_seconds.value / 512
    assert 300 < rate < 700  # the Frontier guide measured 345 to 537


def test_more_devices_do_not_change_the_training():
    alone = planned(load_recipe("go-coder-125m"), gpu_machine("MI300X"))
    eight = planned(load_recipe("go-coder-125m"), gpu_machine("MI300X"), gpus=8)
    assert (alone.train.tokens_per_step, alone.train.steps) == (
        eight.train.tokens_per_step,
        eight.train.steps,
    )
    assert alone.step_seconds.value / 8 < eight.step_seconds.value < alone.step_seconds.value
    assert energy_kwh(eight, build_profile(gpu_machine("MI300X"))) == pytest.approx(
        8 * 0.750 * eight.seconds.value / 3600
    )


def test_a_step_in_backward_is_of_one_device():
    loaded = load_recipe("llama2-7b-full-24gb")
    assert planned(loaded, gpu_machine("RTX 4090"), gpus=1).train.tokens_per_step == 8192
    with pytest.raises(UserError, match=r"optimizer\.fused_backward") as refused:
        planned(loaded, gpu_machine("RTX 4090"), gpus=2)
    edits = refused.value.fix.removeprefix("set ").split()
    assert "optimizer.fused_backward=false" in edits
    followed = planned(load_recipe("llama2-7b-full-24gb", edits), gpu_machine("RTX 4090"), gpus=2)
    assert (followed.train.replicate, followed.train.shard) == (1, 2)


def test_a_micro_batch_of_the_recipe_is_cut_to_the_sequences_of_a_device():
    alone, two = (planned(load_recipe("demo"), machine(), gpus=count) for count in (1, 2))
    assert (alone.train.micro_batch_size, alone.train.accumulation) == (8, 1)
    assert (two.train.micro_batch_size, two.train.accumulation) == (4, 1)
    assert alone.train.tokens_per_step == two.train.tokens_per_step


def test_sequences_that_do_not_divide_are_filled_up_with_padding():
    """16 sequences: 6 for each of three devices, and two of them are padding; the slowest rank sets the time."""
    recipe, gpu = load_recipe("go-coder-125m"), gpu_machine("RX 7900 XTX")
    three, two = (reported(recipe, gpu, gpus=gpus) for gpus in (3, 2))
    train = three.plan.train
    assert train.micro_batch_size * train.accumulation == 6
    assert (train.empty_sequences, train.sequences_per_step, train.ranks) == (2, 16, 3)
    assert train.tokens_per_step == two.plan.train.tokens_per_step
    computing = [
        sum(
            part.value
            for name, part in report.step_parts.items()
            if name not in ("optimizer", "exposed communication")
        )
        for report in (three, two)
    ]
    assert computing[0] == pytest.approx(computing[1] * 6 / 8, rel=0.02)
    assert not [warning for warning in three.warnings if "padding" in warning]  # an eighth at most


def test_fewer_sequences_than_devices_are_planned_with_a_warning():
    report = reported(load_recipe("go-coder-125m"), gpu_machine("MI300X"), gpus=3, nodes=16)
    assert (report.plan.train.ranks, report.plan.train.empty_sequences) == (48, 32)
    (warning,) = [warning for warning in report.warnings if "padding" in warning]
    assert "67% of what they compute" in warning
    assert "train.batch_size=48" in warning


def test_a_share_without_small_divisors_gets_a_little_more_padding():
    """128 sequences on seven devices are 19 each, a prime: 20 or 21 may be computed in larger micro-batches."""
    words = ["train.tokens_per_step=131072", "train.micro_batch_size=5"]
    train = planned(load_recipe("go-coder-125m", words), gpu_machine("RX 7900 XTX"), gpus=7).train
    assert (train.micro_batch_size, train.accumulation) == (5, 4)
    assert train.empty_sequences == 7 * 20 - 128


def test_int8_states_are_sharded_only_where_no_block_is_divided():
    """Rows of 768 numbers are three blocks; those of 100 are not, and five devices divide them elsewhere."""
    words = [
        "optimizer.state_dtype=int8",
        "model.preset=null",
        "model.family=llama",
        "model.hidden_size=96",
        "model.num_layers=2",
        "model.num_heads=4",
        "model.max_positions=1024",
        "model.vocab_size=50000",
    ]
    plan = planned(load_recipe("go-coder-125m", words), gpu_machine("RX 7900 XTX"), gpus=5)
    assert plan.parallel is not None
    assert [layout.name for layout in plan.parallel.layouts if layout.pipeline == 1] == [
        "replicate"
    ]


def test_a_pipeline_is_chosen_where_it_alone_fits_or_is_much_faster():
    """4-bit weights of 70B parameters are whole on each device of copies; DoRA has no shards: stages hold a part."""
    words = ["model.from=meta-llama/Llama-2-70b-hf", "quantize.kind=nf4", "adapter.kind=dora"]
    plan = planned(load_recipe("llama2-70b-lora-8gpu", words), gpu_machine("RX 7900 XTX"), gpus=4)
    assert plan.parallel is not None
    assert plan.fits
    assert (plan.train.pipeline, plan.train.replicate, plan.train.shard) == (4, 1, 1)
    assert plan.train.pipeline_layers == (20, 20, 20, 20)
    assert plan.train.accumulation >= 4
    assert plan.memory == plan.parallel.layout.memory
    # Shards of a model that fits are simpler, and as fast.
    small = planned(load_recipe("go-coder-125m"), gpu_machine("RX 7900 XTX"), gpus=4)
    assert small.train.pipeline == 1


def test_a_pipeline_that_the_plan_chooses_is_filled_with_the_micro_batch_size_of_the_recipe():
    """Eight sequences of a step in micro-batches of eight: a copy of the pipeline gets four, and two stages wait for
    each other with a micro-batch of four."""
    plan = planned(load_recipe("demo"), gpu_machine("RTX 5070 Ti"), gpus=4)
    assert plan.parallel is not None
    pipelines = [layout for layout in plan.parallel.layouts if layout.pipeline > 1]
    assert pipelines
    for layout in pipelines:
        assert layout.accumulation >= layout.pipeline
        assert layout.sequences == 8


def test_cpus_have_a_pipeline_where_the_recipe_asks_for_it():
    assert planned(load_recipe("demo"), machine(), gpus=2).train.pipeline == 1
    words = ["parallel.pipeline=2", "train.micro_batch_size=auto"]
    plan = planned(load_recipe("demo", words), machine())
    assert (plan.train.pipeline, plan.train.ranks) == (2, 2)
    assert plan.train.accumulation >= 2
    assert plan.train.tokens_per_step == plan.train.sequences_per_step * plan.data.sequence_length


def test_ranks_of_a_cpu_share_its_cores_and_its_memory():
    alone, two = (planned(load_recipe("demo"), machine(), gpus=count) for count in (1, 2))
    assert (two.train.replicate, two.train.shard) == (2, 1)
    assert two.train.threads == max(1, alone.train.threads // 2)
    assert two.memory.limit == pytest.approx(alone.memory.limit / 2)
    with pytest.raises(UserError, match="several nodes without GPUs"):
        planned(load_recipe("demo"), machine(), gpus=2, nodes=2)


@pytest.mark.parametrize(
    ("asked", "flags", "layout"),
    [
        ({"shard": 8}, {}, ("shard", 1, 8, 1)),
        ({"replicate": 4}, {}, ("replicate", 4, 1, 1)),
        ({"replicate": 2, "shard": 4}, {}, ("shard and replicate", 2, 4, 1)),
        ({"shard": 4}, {"gpus": 8, "nodes": 2}, ("shard and replicate", 4, 4, 1)),
        ({"pipeline": 2}, {"gpus": 8}, ("pipeline", 4, 1, 2)),
    ],
)
def test_the_recipe_names_a_layout_as_the_command_line_names_devices(asked, flags, layout):
    plan = planned(
        load_recipe("go-coder-125m", [f"parallel={asked}"]), gpu_machine("MI300X"), **flags
    )
    (only,) = plan.parallel.layouts
    assert (only.name, only.replicate, only.shard, only.pipeline) == layout
    assert plan.parallel.devices == only.replicate * only.shard * only.pipeline


@pytest.mark.parametrize(
    ("asked", "match", "edits"),
    [
        ({"shard": 3}, "splits over 3", ["parallel.shard=auto"]),
        (
            {"replicate": 2, "shard": 2},
            "over 4",
            ["parallel.replicate=auto", "parallel.shard=auto"],
        ),
        ({"context": 3}, "over 3", ["parallel.context=1"]),
        (
            {"shard": 1, "replicate": 1},
            "over 1",
            ["parallel.replicate=auto", "parallel.shard=auto"],
        ),
    ],
)
def test_a_recipe_and_a_command_line_that_name_other_numbers_are_refused(asked, match, edits):
    overrides = [f"parallel={asked}"]
    with pytest.raises(UserError, match=match) as caught:
        planned(load_recipe("go-coder-125m", overrides), gpu_machine("MI300X"), gpus=8)
    assert caught.value.fix.endswith(" ".join(edits))
    planned(load_recipe("go-coder-125m", [*overrides, *edits]), gpu_machine("MI300X"), gpus=8)


def test_one_sequence_is_counted_in_the_singular():
    assert undivided(1, "8 devices") == "1 sequence per step does not divide among 8 devices"
    assert undivided(16, "32 devices") == "16 sequences per step do not divide among 32 devices"
