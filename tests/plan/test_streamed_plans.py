"""Plans of weights that live in the host's memory: what fits, what it costs, and where the host has no room."""

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from plan_help import gpu_machine, loaded, machine, planned, reported
from torch import nn

from bloomery.cli.plan import command
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.facts.counting import parameter_shapes
from bloomery.hardware.host_links import host_link
from bloomery.hardware.profile import build_profile, with_gpu, with_host_memory
from bloomery.hardware.specs import find_gpu
from bloomery.model.configs import build_config
from bloomery.parallel.streamed import LayerRing, layer_of
from bloomery.plan.estimate.queues import Queues
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.streaming import forward_bytes, loads_of, sent_bytes, streamed_by_layer
from bloomery.plan.fallback import roomier
from bloomery.plan.page import page
from bloomery.plan.resolve import step_shape
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

LORA = {"kind": "lora", "rank": 16, "alpha": 32, "target_modules": ["all-linear"]}
LEAN = {
    "train": {"precision": "bfloat16-pure", "max_steps": 10, "tokens_per_step": 65536},
    "optimizer": {"state_dtype": "int8", "stochastic_rounding": True},
}


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")


def plan_of(model: str, gpu: str, host_gib: int, *, gpus: int = 1, **sections) -> RunPlan:
    """Of published shapes, at sequences of 1,024 tokens and 65,536 tokens per step."""
    settings = {
        "data": {"path": "chats.jsonl", "sequence_length": 1024},
        "objective": {"kind": "sft"},
        "train": {"max_steps": 10, "tokens_per_step": 65536},
        **sections,
    }
    recipe = loaded(**settings)
    fields = {"model": type(recipe.recipe.model)(**{"from": model})}
    recipe = type(recipe)(recipe.recipe.model_copy(update=fields), "streamed", {})
    there = with_host_memory(with_gpu(machine(), find_gpu(gpu)), host_gib * GIB)
    return planned(recipe, there, gpus=gpus)


# A model larger than the GPU fits, with its layers on the host.
@pytest.mark.parametrize(
    ("model", "gpu", "host_gib", "sections", "on_host"),
    [
        ("Qwen/Qwen3-14B", "RX 6700 XT", 32, {"adapter": LORA}, (24, 28)),
        ("meta-llama/Llama-3.1-8B", "RTX 4090", 64, LEAN, (45, 52)),
        (
            "Qwen/Qwen3-32B",
            "RTX 4080",
            32,
            {"adapter": LORA, "quantize": {"kind": "nf4"}},
            (16, 20),
        ),
    ],
    ids=["14B LoRA on 12 GB", "8B in full on 24 GB", "32B nf4 on 16 GB"],
)
def test_a_model_larger_than_the_gpu_streams(model, gpu, host_gib, sections, on_host):
    plan = plan_of(model, gpu, host_gib, **sections)
    assert plan.fits and plan.train.stream == "layers" and plan.stream is not None
    assert plan.train.activation_checkpointing == "full" and not plan.train.compile
    choices = {choice.key: choice for choice in plan.choices}
    assert choices["parallel.stream"].reason.startswith("all weights do not fit on the device")
    assert choices["train.activation_checkpointing"].reason.startswith("weights stream")
    low, high = on_host
    assert low < sum(plan.stream.host_bytes.values()) / GIB < high
    assert plan.stream.hidden
    resident = plan_of(model, gpu, host_gib, parallel={"stream": "off"}, **sections)
    assert not resident.fits and resident.stream is None


def test_what_fits_stays_on_the_device():
    plan = plan_of("Qwen/Qwen3-1.7B", "RTX 4090", 64, adapter=LORA)
    assert plan.train.stream == "off" and plan.stream is None
    reasons = {choice.key: choice.reason for choice in plan.choices}
    assert reasons["parallel.stream"] == "all weights fit on the device"


def test_a_host_without_room_is_named_before_anything_is_read():
    with pytest.raises(UserError) as raised:
        plan_of("meta-llama/Llama-3.1-8B", "RTX 4090", 16, parallel={"stream": "layers"}, **LEAN)
    assert "51.2 GiB of host memory, of 16.0 GiB, as set, 14.4 GiB free" in raised.value.problem
    assert "adapter.kind=lora" in raised.value.fix


def test_a_disk_that_is_too_slow_is_named_with_its_seconds():
    """One micro-batch per load: a GPU waits most of the time for files."""
    alone = {"stream": "layers", "stream_micro_batches": 1}
    one = {"max_steps": 10, "tokens_per_step": 65536, "micro_batch_size": 1}
    with pytest.raises(UserError) as raised:
        plan_of("Qwen/Qwen3-14B", "RTX 4090", 16, adapter=LORA, parallel=alone, train=one)
    assert "27.0 GiB of host memory" in raised.value.problem
    assert "reading files in each step would take" in raised.value.problem
    assert "quantize.kind=nf4" in raised.value.fix


def test_a_slow_gpu_hides_a_disk():
    """A host of 16 GiB holds no 26 GiB of weights: files are read while the GPU computes."""
    plan = plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 16, adapter=LORA)
    assert plan.fits and plan.train.stream_host == plan.stream.host == "mapped"
    assert plan.stream.waiting_share < 0.05
    assert "weights" not in plan.stream.host_bytes
    reasons = {choice.key: choice.reason for choice in plan.choices}
    assert "3 GB/s as assumed" in reasons["parallel.stream_host"]


def test_what_cannot_be_pinned_is_staged():
    plan = plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 32, adapter=LORA)
    assert plan.train.stream_host == "staged"  # 24.6 of 32 GiB
    assert plan.stream.pinned_bytes < GIB
    assert plan.stream.link.startswith("13.2 GB/s through pinned buffers")
    assert plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 64, adapter=LORA).train.stream_host == "pinned"


def test_an_update_on_the_host_has_its_time():
    """Eight threads of compiled AdamW, or the bytes of the host's memory, whichever takes longer."""
    plan = plan_of("meta-llama/Llama-3.1-8B", "RTX 4090", 64, **LEAN)
    parameters = 8.03e9
    assert plan.stream.update_seconds == pytest.approx(parameters * 16.06 / 35e9, rel=0.05)
    assert plan.stream.update_seconds > parameters / (8 * 459e6)
    assert 1.0 < plan.stream.update_over_link_seconds < 3.0
    assert plan_of("Qwen/Qwen3-14B", "RTX 4090", 64, adapter=LORA).stream.update_seconds is None


def test_auto_says_what_the_host_lacks():
    recipe = loaded(
        data={"path": "chats.jsonl", "sequence_length": 1024},
        objective={"kind": "sft"},
        parallel={"stream_micro_batches": 1},
        train={"max_steps": 10, "tokens_per_step": 65536, "micro_batch_size": 1},
        adapter=LORA,
    )
    model = type(recipe.recipe.model)(**{"from": "Qwen/Qwen3-14B"})
    recipe = type(recipe)(recipe.recipe.model_copy(update={"model": model}), "x", {})
    there = with_host_memory(gpu_machine("RTX 4070"), 16 * GIB)
    report = reported(recipe, there)
    assert not report.plan.fits
    [warning] = [text for text in report.warnings if "host memory" in text]
    assert "weights that stream need 27.0 GiB" in warning
    assert "quantize.kind=nf4" in report.plan.suggestions


@pytest.mark.parametrize(
    ("sections", "gpu", "problem"),
    [
        ({}, None, "host's memory already"),
        ({}, "Ryzen AI Max+ 395 64GB", "one memory"),
        (
            {"optimizer": {"fused_backward": True}, "train": {"batch_size": 8}},
            "T4",
            "inside backward",
        ),
        ({"train": {"activation_checkpointing": "none"}}, "T4", "computed again"),
        ({"train": {"compile": True}}, "T4", "another buffer"),
        ({"adapter": {"kind": "peft", "method": "ia3"}}, "T4", "change the modules"),
    ],
)
def test_what_excludes_streaming_is_an_error_where_it_is_asked_for(sections, gpu, problem):
    there = machine() if gpu is None else gpu_machine(gpu)
    with pytest.raises(UserError, match="weights cannot stream") as raised:
        planned(loaded(parallel={"stream": "layers"}, **sections), there)
    assert problem in raised.value.problem
    # `auto` leaves them where they are.
    plan = planned(loaded(**sections), there)
    assert plan.train.stream == "off"


def test_loads_are_shared_where_there_are_any():
    parallel = {"stream": "off", "stream_micro_batches": 4}
    with pytest.raises(UserError, match="micro-batches could share"):
        planned(loaded(parallel=parallel), gpu_machine("T4"))


@pytest.mark.parametrize("axis", ["shard", "pipeline", "context"])
def test_devices_with_parts_of_a_model_stream_none(axis):
    parallel = {"stream": "layers", axis: 2}
    with pytest.raises(UserError) as raised:
        planned(loaded(parallel=parallel, adapter=LORA), gpu_machine("T4"), gpus=2)
    assert raised.value.code == 2 and raised.value.fix


def test_a_plan_that_streams_names_the_faster_one_in_4_bits():
    """A GPU with 24 GB holds 14 B weights in 4 bits: no layer is copied, and fewer are computed again."""
    recipe = loaded(
        data={"path": "chats.jsonl", "sequence_length": 1024},
        objective={"kind": "sft"},
        train={"max_steps": 10, "tokens_per_step": 65536},
        adapter=LORA,
    )
    model = type(recipe.recipe.model)(**{"from": "Qwen/Qwen3-14B"})
    recipe = type(recipe)(recipe.recipe.model_copy(update={"model": model}), "x", {})
    there = with_host_memory(gpu_machine("RTX 4090"), 64 * GIB)
    report = reported(recipe, there)
    assert report.plan.stream is not None
    edits = {suggestion.edit: suggestion.saves for suggestion in report.suggestions}
    assert "some accuracy" in edits["quantize.kind=nf4"]


def test_out_of_memory_moves_no_states_that_are_on_the_host():
    plan = plan_of("meta-llama/Llama-3.1-8B", "RTX 4090", 64, **LEAN)
    train = plan.train.model_copy(update={"stream_micro_batches": 4})
    plan = plan.model_copy(update={"train": train})
    actions = []
    while (fallback := roomier(plan, "out of memory")) is not None:
        plan = fallback.plan
        actions.append(fallback.action)
    assert plan.train.micro_batch_size == plan.train.stream_micro_batches == 1
    assert not plan.optimizer.offload
    assert [text for text in actions if "per load" in text] == [
        "micro-batches per load of streamed weights 4 -> 2; same training",
        "micro-batches per load of streamed weights 2 -> 1; same training",
    ]


# Copies.


def small_step(num_layers: int = 2, **changes) -> StepShape:
    """A step in full whose layers stream."""
    recipe = loaded(model={"num_layers": num_layers}).recipe
    profile = build_profile(gpu_machine("RTX 4090"))
    model = TrainedModel.of(recipe, build_config(recipe.model, vocab_size=256))
    step = step_shape(recipe, model, profile, None, None, precision="bfloat16", attention="varlen")
    return replace(step, stream="layers", checkpointing="full", **changes)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_copies_are_those_of_the_ring(num_layers, passes):
    """The plan's own order of loads against `LayerRing`, asked as forward and backward of a step ask it."""
    step = small_step(num_layers)
    layers = []
    for _ in range(num_layers):
        layer = layer_of(nn.Linear(4, 4), in_full=True)
        layer.live_in(torch.zeros(layer.num_bytes, dtype=torch.uint8))
        layers.append(layer)
    ring = LayerRing(layers, torch.device("cpu"), 2)
    for _ in range(passes):
        for layer in range(num_layers):
            ring.load(layer, layer + 1 if layer + 1 < num_layers else None)
        for layer in reversed(range(num_layers)):
            ring.load(layer, layer - 1 if layer > 0 else None)
    assert sum(loads_of(step, passes)) == ring.num_loads


@pytest.mark.parametrize(("together", "passes", "sent"), [(1, 4, 4), (4, 1, 1), (2, 2, 3)])
def test_gradients_leave_once_while_the_host_has_none(together, passes, sent):
    """Later ones leave micro-batch by micro-batch, so that sums are formed in their order."""
    step = small_step(stream_micro_batches=together)
    layers = sum(
        step.model.layer_trainable_bytes(layer, step.precision) for layer in step.model.layers
    )
    outer = step.model.trainable_bytes(step.precision) - layers
    assert sent_bytes(step, passes) == sent * layers + outer


def test_micro_batches_share_a_load_until_it_hides():
    """A GPU with a fast matmul and 4 sequences of 512 tokens at most per micro-batch waits for its link."""
    sections = {
        "adapter": LORA,
        "data": {"path": "chats.jsonl", "sequence_length": 512},
        "parallel": {"stream": "layers"},
        "train": {"max_steps": 10, "tokens_per_step": 65536, "micro_batch_size": 4},
    }
    plan = plan_of("Qwen/Qwen3-14B", "RTX 4090", 64, **sections)
    assert plan.train.stream_micro_batches == plan.stream.micro_batches > 1 and plan.stream.hidden
    alone = {"stream": "layers", "stream_micro_batches": 1}
    waiting = plan_of("Qwen/Qwen3-14B", "RTX 4090", 64, **sections | {"parallel": alone})
    assert waiting.train.stream_micro_batches == 1 and not waiting.stream.hidden
    assert waiting.step_seconds.value > 1.2 * plan.step_seconds.value
    assert waiting.memory.total < plan.memory.total
    assert waiting.stream.loaded_bytes == pytest.approx(2 * plan.stream.loaded_bytes, rel=0.01)


def test_experts_stream_alone_where_they_are_frozen():
    """A mixture of 30 B parameters in 4 bits: all but its experts stays on a GPU of 12 GB."""
    nf4 = {"adapter": LORA | {"target_modules": ["q_proj", "v_proj"]}, "quantize": {"kind": "nf4"}}
    plan = plan_of("Qwen/Qwen3-30B-A3B", "RX 6700 XT", 32, **nf4)
    assert plan.fits and plan.train.stream == "experts"
    assert 4 * GIB < plan.memory.total < 10 * GIB
    assert 13 * GIB < plan.stream.host_bytes["weights"] < 17 * GIB
    layers = plan_of("Qwen/Qwen3-30B-A3B", "RX 6700 XT", 32, parallel={"stream": "layers"}, **nf4)
    assert layers.stream.host_bytes["weights"] > plan.stream.host_bytes["weights"]


SAMPLED = {
    "objective": {"kind": "grpo", "num_generations": 8, "max_completion_length": 256},
    "rewards": [{"verifier": "exact_match", "column": "answer"}],
    "train": {"max_steps": 10, "batch_size": 16},
    "quantize": {"kind": "nf4"},
    "adapter": LORA | {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.parametrize("stream", ["layers", "experts"])
def test_each_forward_of_sampling_waits_for_its_copies(stream):
    """Sixteen tokens may choose 128 of 128 experts: all come. One token brings eight."""
    plan = plan_of("Qwen/Qwen3-30B-A3B", "RX 6700 XT", 32, parallel={"stream": stream}, **SAMPLED)
    assert plan.train.stream == stream and plan.rollout.slots == 16
    profile = build_profile(with_gpu(machine(), find_gpu("RX 6700 XT")))
    model = TrainedModel.of(plan, plan.model.config)
    resident = step_shape(
        plan, model, profile, None, None, precision=plan.train.precision, attention="triton"
    )
    step = replace(resident, stream=stream)
    whole = sum(streamed_by_layer(step))
    assert forward_bytes(step, plan.rollout.slots) == pytest.approx(whole)
    of_one_token = whole * 8 / 128 if stream == "experts" else whole
    assert forward_bytes(step, 1) == pytest.approx(of_one_token)
    seconds = plan.rollout.completion_tokens.value * whole / 24e9
    assert seconds < plan.rollout.seconds["generation"].value < 4 * seconds


def test_replicas_share_the_copy_of_their_host():
    """Two GPUs of 12 GB: each streams the layers of a 14B out of the same 26 GiB."""
    streams = {"adapter": LORA, "parallel": {"stream": "layers"}}
    one = plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 64, **streams)
    two = plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 64, gpus=2, **streams)
    assert two.fits and two.train.stream == "layers" and not two.train.compile
    assert (two.train.replicate, two.train.shard, two.train.pipeline) == (2, 1, 1)
    # PyTorch pins blocks, of which the ends of some stay empty; what is shared is pinned as it is.
    shared_bytes = two.stream.host_bytes["weights"]
    assert shared_bytes <= one.stream.host_bytes["weights"] < 1.03 * shared_bytes
    assert two.stream.host_bytes["runtime"] == 2 * one.stream.host_bytes["runtime"]
    assert two.step_seconds.value < 0.6 * one.step_seconds.value
    sharded = {"adapter": LORA, "parallel": {"stream": "layers", "shard": 2}}
    with pytest.raises(UserError, match="as the layers of a whole model"):
        plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 64, gpus=2, **sharded)
    with pytest.raises(UserError, match="a copy of all weights, gradients and states"):
        plan_of("Qwen/Qwen3-14B", "RX 6700 XT", 512, gpus=2, parallel={"stream": "layers"})


def test_queues_wait_for_each_other():
    queues = Queues()
    first_copy = queues.run("copy", 2.0)
    first_product = queues.run("device", 3.0, first_copy)
    second_copy = queues.run("copy", 2.0)
    assert (first_copy, first_product, second_copy) == (2.0, 5.0, 4.0)
    assert queues.run("device", 1.0, second_copy) == 6.0
    third_copy = queues.run("copy", 4.0, first_product)
    assert third_copy == 9.0
    assert queues.run("device", 1.0, third_copy) == 10.0 == queues.end
    assert queues.busy == {"copy": 8.0, "device": 5.0}


# The table of bounds: F of a GPU, its link, tokens from which bfloat16 layers are hidden, and tokens/s.
BOUNDS = [
    ("RX 7900 XTX", 46.7e12, 28.4, 1643),
    ("RX 6700 XT", 7.92e12, 24.0, 330),
    ("RTX 4090", 99.1e12, 23.9, 4147),
    ("RTX 3060 12GB", 15.3e12, 24.0, 640),
]


@pytest.mark.parametrize(("gpu", "flops", "link_gbs", "tokens"), BOUNDS)
def test_copies_hide_from_as_many_tokens_as_the_bound_says(gpu, flops, link_gbs, tokens):
    """n = (bytes / 2) F / R. The plan also counts what is no matmul, which hides more, and its own share of the peak.

    The table takes 38, 30, 60 and 60% of the peak, gpus.toml the typical share of each architecture.
    """
    plan = plan_of("Qwen/Qwen3-14B", gpu, 64, adapter=LORA, parallel={"stream": "layers"})
    profile = build_profile(gpu_machine(gpu))
    link = host_link(profile, gpu_machine(gpu))
    assert link is not None and link.to_device_gbs == pytest.approx(link_gbs, rel=0.01)
    assert flops / (link_gbs * 1e9) == pytest.approx(tokens, rel=0.01)
    typical = profile.gpu.peak_flops(plan.train.precision) * profile.arch.efficiency[1]
    bound = typical / (link.to_device_gbs * 1e9)
    assert 0.6 * bound < plan.stream.hidden_from < 1.02 * bound
    planned_tokens = f"{plan.stream.hidden_from:,} planned, {bound:,.0f} by matmuls alone"
    print(f"{gpu}: {planned_tokens}, {tokens:,} in the table")


@pytest.mark.parametrize(("gpu", "flops", "link_gbs", "tokens"), BOUNDS)
def test_four_bits_hide_from_a_quarter_of_the_tokens_and_speed_is_bound_by_products(
    gpu, flops, link_gbs, tokens
):
    """The table's 462, 93, 1166 and 180 tokens take 0.5625 bytes a weight; here double quantization leaves 0.516.

    A token of LoRA costs 6 P operations: forward, forward again, and the gradient of the input, 2 P each; in the table
    that bounds 14B to 589, 100, 1250 and 193 tokens/s.
    """
    settings = {"adapter": LORA, "parallel": {"stream": "layers"}}
    plain = plan_of("Qwen/Qwen3-14B", gpu, 64, **settings)
    quantize = {"kind": "nf4", "double_quant": True}
    lean = plan_of("Qwen/Qwen3-14B", gpu, 64, quantize=quantize, **settings)
    share = lean.stream.hidden_from / plain.stream.hidden_from
    assert share == pytest.approx(0.516 / 2, rel=0.15)

    num_layer_weights = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(plain.model.config).items()
        if name.startswith("model.layers.")
    )
    by_table = {"RX 7900 XTX": 589, "RX 6700 XT": 100, "RTX 4090": 1250, "RTX 3060 12GB": 193}
    assert flops / (6 * num_layer_weights) == pytest.approx(by_table[gpu], rel=0.01)
    profile = build_profile(gpu_machine(gpu))
    typical = profile.gpu.peak_flops(plain.train.precision) * profile.arch.efficiency[1]
    speed = plain.train.tokens_per_step / plain.step_seconds.value
    assert 0.55 < speed * 6 * num_layer_weights / typical < 1


# The command.


def test_the_command_takes_the_memory_of_a_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str):
        argv = ["--model", "Qwen/Qwen3-14B", "--gpu", "RX 6700 XT", *words]
        return CliRunner().invoke(command, argv, standalone_mode=False)

    document = json.loads(run("--host-memory", "32GiB", "--json").stdout)
    assert document["fits"] and document["stream"]["hidden"]
    assert document["stream"]["host_limit_gib"] == pytest.approx(28.8)
    [choice] = [choice for choice in document["choices"] if choice["key"] == "parallel.stream"]
    assert choice["value"] == "layers" and "on the host" in choice["reason"]
    text = run("-v").stdout
    assert "assumed: --host-memory sets it" in text and "hidden behind computing" in text
    wrong = run("--host-memory", "plenty").exception
    assert isinstance(wrong, UserError) and wrong.code == 2 and "32GiB" in wrong.fix


def test_the_page_prints_device_host_and_link():
    there = with_host_memory(gpu_machine("RTX 4090"), 64 * GIB)
    recipe = loaded(
        model={"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "max_positions": 1024},
        data={"sequence_length": 1024},
        train={"max_steps": 10, "tokens_per_step": 65536, "precision": "bfloat16-pure"},
        parallel={"stream": "layers"},
    )
    lines = page(reported(recipe, there), there, source="x", commands=[])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    for words in (
        "layer buffers",
        "of memory of 57.6 GiB free (as set)",
        "tokens per load",
        "back",
    ):
        assert words in text


@pytest.mark.parametrize("gpu", ["RX 6700 XT", "RTX 4070"])
def test_the_recipe_of_experts_on_the_host_fits_twelve_gigabytes(gpu):
    there = with_host_memory(gpu_machine(gpu), 32 * GIB)
    plan = planned(load_recipe("qwen3-30b-a3b-qlora-12gb"), there)
    assert plan.fits and plan.train.stream == "experts" and plan.stream.hidden
    assert sum(plan.stream.host_bytes.values()) < 17.5 * GIB  # pinned in blocks of powers of two
    resident = load_recipe("qwen3-30b-a3b-qlora-12gb", ["parallel.stream=off"])
    assert not planned(resident, there).fits


def test_a_frozen_copy_of_the_start_streams_with_its_policy():
    """GRPO of all weights of an 8B: two rings on the device, two copies of its layers on the host."""
    sections = LEAN | {
        "objective": {
            "kind": "grpo",
            "beta": 0.1,
            "num_generations": 8,
            "max_completion_length": 256,
        },
        "rewards": SAMPLED["rewards"],
        "parallel": {"stream": "layers"},
    }
    sections["train"] = LEAN["train"] | {"tokens_per_step": "auto", "batch_size": 16}
    plan = plan_of("meta-llama/Llama-3.1-8B", "RTX 4090", 128, **sections)
    assert plan.train.stream == "layers" and plan.fits
    layers = 8.03e9 * 2 - 2 * 128256 * 4096 * 2
    assert plan.stream.host_bytes["reference model"] == pytest.approx(layers, rel=0.01)
    on_device = plan.memory.parts["reference model"]
    assert on_device == pytest.approx(2 * 128256 * 4096 * 2 + layers / 16, rel=0.01)
