"""Plans of fine-tuning: against published memory, hand computation, and the edits that make a run fit."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned, reported

from bloomery.core.units import GIB
from bloomery.hardware.calibration import Point
from bloomery.model.configs import published_config
from bloomery.plan.advise import _planned_step
from bloomery.plan.choices import memory_setting
from bloomery.plan.estimate.mode import FULL, TrainingMode
from bloomery.plan.estimate.speed import product_flops, recompute, useful_flops
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.fallback import roomier
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.recipe.load import load_recipe

LLAMA = published_config("meta-llama/Llama-2-7b-hf")


def plan_of(name, gpu, *words):
    return planned(load_recipe(name, words), gpu_machine(gpu))


def test_the_shipped_recipes_keep_to_the_memory_that_was_asked_of_them():
    """22 GiB for every weight of Llama 2 7B at 2,048 tokens, 17 for LoRA on Llama 3.1 8B, 7.5 for QLoRA: allocated."""
    full = plan_of("llama2-7b-full-24gb", "RTX 4090")
    assert full.fits and full.memory.allocated < 22 * GIB
    lora = plan_of(
        "llama3.1-8b-lora",
        "RTX 4090",
        "train.micro_batch_size=2",
        "train.activation_checkpointing=full",
    )
    assert lora.fits and lora.memory.allocated < 17 * GIB
    words = ("quantize.kind=nf4", "train.micro_batch_size=1", "train.activation_checkpointing=full")
    assert plan_of("llama3.1-8b-lora", "RTX 4090", *words).memory.allocated < 7.5 * GIB


@pytest.mark.parametrize("gpu", ["RTX 3090", "RTX 4090", "RX 7900 XTX"])
@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("llama2-7b-pipeline-2gpu", 2),
        ("llama2-30b-pipeline-4gpu", 4),
        ("llama2-30b-pipeline-6gpu-long", 6),
    ],
)
def test_a_pipeline_recipe_fits_its_gpus_at_the_upper_end_of_the_estimate(name, gpus, gpu):
    plan = planned(load_recipe(name), gpu_machine(gpu), gpus=gpus)
    assert plan.train.pipeline == gpus
    assert plan.fits and plan.memory.high <= plan.memory.limit


def test_what_lora_trains_is_counted_by_hand():
    model = TrainedModel.of(load_recipe("llama2-7b-lora").recipe, LLAMA)
    assert model.trainable_count == 32 * 4 * 16 * (4096 + 4096)
    assert not model.trained
    assert len(model.frozen) == 32 * 9 + 3


def test_a_frozen_weight_costs_four_operations_and_a_trained_one_six():
    model = TrainedModel.of(load_recipe("llama2-7b-lora").recipe, LLAMA)
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    adapter, attention = model.trainable_count, 12 * 32 * 2048 * 4096
    assert useful_flops(TrainedModel(LLAMA), 2048) == 6 * matrices + attention
    assert useful_flops(model, 2048) == 4 * matrices + 6 * adapter + attention


def test_a_reference_costs_a_forward_and_half_learned_text_half_the_head():
    load = StepShape(
        model=TrainedModel(LLAMA),
        sequence_length=2048,
        micro_batch_size=1,
        precision="bfloat16",
        optimizer="adamw",
        attention="varlen",
        checkpointing="none",
        compiled=True,
        score_chunk=2048,
        context_bytes=0.0,
        on_gpu=True,
    )

    def flops(step: StepShape) -> float:
        products = product_flops(step, recompute(step), chunked=False)
        return products.wide + products.weights + products.narrow

    alone = flops(load)
    head = 2 * 32000 * 4096
    layers = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert flops(replace(load, extra_forwards=1)) - alone == layers + head
    assert alone - flops(replace(load, loss_share=0.5)) == 1.5 * head


def test_what_does_not_fit_is_told_with_edits_of_fine_tuning():
    length = "data.sequence_length=8192"
    on_device = "parallel.stream=off"
    report = reported(
        load_recipe("qwen2.5-3b-lora", (length, on_device)), gpu_machine("RX 6700 XT")
    )
    assert not report.plan.fits
    edits = [fix.edit for fix in report.suggestions if fix.fit != "does not fit"]
    assert {"parallel.stream=layers", "quantize.kind=nf4", "data.sequence_length=4096"} <= set(
        edits
    )
    for edit in edits:
        assert plan_of("qwen2.5-3b-lora", "RX 6700 XT", length, on_device, edit).fits


def test_the_base_model_may_get_an_adapter_where_all_of_it_does_not_fit():
    recipe = load_recipe("qwen2.5-0.5b-pretrain", ("parallel.stream=off",))
    report = reported(recipe, gpu_machine("RX 6600"))
    assert "adapter.kind=lora" in report.plan.suggestions


@pytest.mark.parametrize(
    "name", ["qwen2.5-1.5b-lora", "qwen2.5-1.5b-dpo-lora", "llama2-7b-full-24gb"]
)
def test_a_measurement_of_full_training_says_nothing_of_another_ways_memory(name):
    plan = plan_of(name, "RTX 4090")
    assert memory_setting(plan) != "" == memory_setting(plan_of("go-coder-125m", "RTX 4090"))
    assert Point.model_fields["setting"].default == ""


def test_an_unusual_way_is_told_from_a_usual_one():
    assert TrainingMode(state_dtype="int8") != FULL
    names = ("qwen2.5-1.5b-dpo-lora", "qwen2.5-1.5b-reward-lora")
    dpo, reward = (memory_setting(plan_of(name, "RTX 4090")) for name in names)
    assert dpo != reward


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3.5-4b-qlora", 256), ("granite4-micro-lora", 512), ("olmo3-7b-qlora", 512)],
)
def test_where_memory_is_short_a_larger_vocabulary_has_smaller_chunks_of_logits(name, tokens):
    """248,320, 100,352 and 100,278 entries: the largest power of two of tokens with at most 2^26 logits."""
    plan = plan_of(name, "RX 6700 XT", "train.micro_batch_size=1")
    assert plan.model.score_chunk == tokens
    vocabulary = plan.model.config.vocab_size
    assert tokens * vocabulary <= 2**26 < 2 * tokens * vocabulary
    roomy = plan_of(name, "MI300X", "train.micro_batch_size=1")
    assert roomy.model.score_chunk == roomy.data.sequence_length


@pytest.mark.parametrize("flags", [("avx2",), ("avx2", "avx512f", "avx512_bf16")])
def test_a_cpu_holds_half_the_activations_where_that_hardly_takes_longer(flags):
    """Over a frozen base activations are most of the memory. All weights: most are states, and gradients add up."""

    def on_cpu(*words):
        short = ("data.sequence_length=512", "train.tokens_per_step=16384")
        where = machine(flags=flags, free_gib=60)
        return planned(load_recipe("qwen3-0.6b-lora", (*short, *words)), where)

    chosen, largest = on_cpu(), on_cpu("train.micro_batch_size=4")
    assert chosen.train.micro_batch_size == 2
    assert chosen.memory.total < 0.8 * largest.memory.total
    assert chosen.step_seconds.value < 1.08 * largest.step_seconds.value
    assert on_cpu("adapter.kind=none").train.micro_batch_size == 4


def test_a_cpu_scores_tiles_of_the_vocabulary_and_needs_no_smaller_chunks():
    where = machine(free_gib=1)
    plan = planned(load_recipe("qwen3.5-0.8b-lora", ("data.sequence_length=2048",)), where)
    assert not plan.fits and plan.model.score_chunk == 1024


def test_out_of_memory_with_one_sequence_first_takes_smaller_chunks_of_logits():
    """The cheapest change for a large vocabulary: it saves what none of the others has to give."""
    loaded = load_recipe("qwen2.5-7b-qlora", ("train.micro_batch_size=1",))
    where = gpu_machine("RX 6800")
    facts = facts_of(loaded, where)
    plan = resolve(loaded, facts)
    assert (plan.train.micro_batch_size, plan.model.score_chunk) == (1, 1024)
    fallback = roomier(plan, "out of memory")
    assert fallback.only_time
    smaller = fallback.plan

    def gib(plan):
        step, measure, _ = _planned_step(plan, facts.model, where, facts.profile, None)
        return measure(step).total / GIB

    assert gib(plan) == pytest.approx(plan.memory.total / GIB)
    # 768 tokens fewer, of 152,064 logits: two numbers of float32 for each.
    assert gib(plan) - gib(smaller) > 768 * 152_064 * 8 / GIB
    others = smaller.model_copy(update={"model": plan.model, "choices": plan.choices})
    assert others == plan
    assert roomier(smaller, "out of memory").plan.train.offload_activations
    little = plan.memory.model_copy(update={"parts": plan.memory.parts | {"logits": 0.1 * GIB}})
    kept = roomier(plan.model_copy(update={"memory": little}), "out of memory")
    assert kept.plan.model.score_chunk == 1024
