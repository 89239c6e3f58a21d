"""Times against hand computation and published figures."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, reported

from bloomery.core.units import GIB, MIB
from bloomery.facts.counting import parameter_count
from bloomery.facts.presets import preset
from bloomery.hardware.profile import build_profile
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.operators import SECONDS
from bloomery.plan.estimate.saves import estimate_save
from bloomery.plan.estimate.speed import LAUNCH_SECONDS, device_rate, step_parts, total, work_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.load import load_recipe

LAYERS = 12 * 12 * 768**2  # weights of the Go coder's layers
HEAD = 50_000 * 768


def load(**changes):
    """GPT-2 124M, 16 rows of 1,024 on an RX 6700 XT."""
    usual = StepShape(
        model=TrainedModel(preset("go-coder-small")),
        sequence_length=1024,
        micro_batch_size=16,
        precision="float16",
        optimizer="adamw",
        attention="blockwise",
        checkpointing="none",
        compiled=False,
        score_chunk=1024 * 16,
        context_bytes=300 * MIB,
        on_gpu=True,
    )
    return replace(usual, **changes)


def rate_of(gpu, **facts):
    where = gpu_machine(gpu)
    return device_rate(build_profile(where), where, **({"width": 768, "compiled": True} | facts))


def test_the_operations_of_a_step_by_hand():
    """Products: 6 a weight. Attention: the causal half of 4 T d a layer, and five products of backward for two."""
    work = work_of(load(), tokens=16384)
    assert work.products == 16384 * 6 * (LAYERS + HEAD)
    assert work.attention == 16384 * 12 * 2 * 1024 * 768 * 3.5


def test_chunked_scores_are_computed_again():
    kept, chunked = (
        work_of(load(score_chunk=chunk), tokens=16384).products for chunk in (16384, 1024)
    )
    assert chunked - kept == 16384 * 2 * HEAD


def test_clipping_is_three_passes_over_the_gradient():
    """AdamW reads and writes weight and two states and reads the gradient: 28 bytes a parameter."""
    count = parameter_count(preset("go-coder-small"))
    assert work_of(load(), tokens=16384, clips=False).update == 28 * count
    assert work_of(load(), tokens=16384).update == 40 * count


def test_the_rx_6700_xt_reaches_a_fifth_of_its_peak():
    """As its row of the table assumes: 15, 20 and 30% by the usual count (6 a weight, all T x T scores).

    In the micro-batch of the measurement, whose logits are computed again.
    """
    edits = ["train.attention=blockwise", "train.micro_batch_size=16"]
    recipe = load_recipe("go-coder-125m", edits)
    report = reported(recipe, gpu_machine("RX 6700 XT"))
    plan = report.plan
    counted = 16384 * (6 * (LAYERS + HEAD) + 12 * 12 * 1024 * 768)
    shares = [
        counted / seconds / 26.43e12
        for seconds in (plan.step_seconds.high, plan.step_seconds.value, plan.step_seconds.low)
    ]
    assert shares == pytest.approx([0.15, 0.20, 0.30], abs=0.01)
    assert report.energy_kwh == pytest.approx(0.230 * plan.seconds.value / 3600)
    assert sum(part.value for part in report.step_parts.values()) == pytest.approx(
        plan.step_seconds.value
    )


@pytest.mark.parametrize(("precision", "measured"), [("float32", 196), ("bfloat16", 341)])
def test_measured_rates_of_a_processor_fall_inside(precision, measured):
    """GPT-2 124M, uncompiled, two Zen 4 cores, by a program that kept the logits of forward for backward."""
    where = machine()
    rate = device_rate(build_profile(where), where, precision=precision, width=768, compiled=False)
    here = load(
        on_gpu=False, precision=precision, attention="sdpa", micro_batch_size=2, score_chunk=2048
    )
    found = total(step_parts(work_of(here, tokens=2048, loss="kept"), rate)).inverse(2048)
    assert found.low <= measured <= found.high
    assert found.value == pytest.approx(measured, rel=0.10)


def test_recomputing_runs_the_layers_forward_once_more():
    none, full = (work_of(load(checkpointing=mode), tokens=1024) for mode in ("none", "full"))
    assert full.products - none.products == 1024 * 2 * LAYERS
    assert full.attention / none.attention == pytest.approx(4.5 / 3.5)


def test_fused_kernels_move_fewer_bytes():
    eager, compiled = (
        work_of(load(attention="sdpa", compiled=way), tokens=1024).between for way in (False, True)
    )
    assert compiled < eager / 1.4


def test_scores_that_are_kept_cost_bandwidth():
    """64 bytes a score and head uncompiled: 12 heads x 1,024 keys x 12 layers."""
    config = replace(preset("go-coder-small"), attention_dropout=0.0)
    ways = (load(model=TrainedModel(config), attention=way) for way in ("math", "sdpa"))
    math, fused = (work_of(way, tokens=1024).between for way in ways)
    assert math - fused == 1024 * 12 * 12 * 1024 * 64


def test_a_tiny_batch_waits_for_launches():
    rate = rate_of("H200", precision="bfloat16", compiled=False)
    parts = step_parts(
        work_of(load(micro_batch_size=1, precision="bfloat16", attention="sdpa"), tokens=1024), rate
    )
    assert parts["kernel launches"].value > 0
    busy = sum(
        parts[name].value for name in ("matmul", "attention", "memory-bound", "kernel launches")
    )
    assert busy == pytest.approx(110 * 12 * LAUNCH_SECONDS)
    full = step_parts(
        work_of(load(micro_batch_size=64, precision="bfloat16", attention="sdpa"), tokens=65536),
        rate,
    )
    assert "kernel launches" not in full


def test_an_unknown_device_has_no_speed():
    where = machine(flags=())
    assert (
        device_rate(build_profile(where), where, precision="float32", width=768, compiled=False)
        is None
    )
    where = gpu_machine("RX 6700 XT")
    assert (
        device_rate(build_profile(where), where, precision="bfloat16", width=768, compiled=False)
        is None
    )


def test_disk_and_energy():
    dataset = DatasetFacts(sequences_per_epoch=1_040_000, tokens=1_064_960_000, vocab_size=50_000)
    report = reported(
        load_recipe("go-coder-125m", ["checkpoint.every=1000 steps"]), machine(), dataset=dataset
    )
    assert report.disk["shards"] / GIB == pytest.approx(1.98, abs=0.01)
    assert report.disk["checkpoint"] == 12 * 124_242_432
    # Evaluations come between checkpoints: the best weights as of each of the three that are kept.
    assert report.disk["best_weights"] == 4 * 124_242_432
    assert (
        report.disk["checkpoints"]
        == 5 * report.disk["checkpoint"] + 3 * report.disk["best_weights"]
    )
    assert report.energy_kwh is None


def test_a_save_takes_a_copy_of_the_rows_and_the_time_of_the_disk():
    report = reported(load_recipe("go-coder-125m"), machine())
    size = report.disk["checkpoint"]
    assert report.save.host_bytes == size  # one device copies all of it, and makes no tensor whole
    assert report.save.stall_seconds.value == pytest.approx(size / 10e9)
    assert report.save.seconds.value == pytest.approx(size / 1e9)
    # 96 GB on 64 hosts of 8 devices, whose largest tensor has 2 GB.
    spread = estimate_save(96e9, 2e9, ranks=512, hosts=64, copies=True)
    assert spread.host_bytes == 96e9 / 512 + 2e9
    assert (spread.stall_seconds.value, spread.seconds.value) == (0.15, 1.5)
    waiting = estimate_save(96e9, 2e9, ranks=512, hosts=64, copies=False)
    assert (waiting.host_bytes, waiting.stall_seconds) == (2e9, waiting.seconds)


def test_keys_of_a_window_are_those_that_causal_queries_see():
    """Counted query by query: `attention` is 14 width times the keys of a token, in each layer."""
    width, layers, length, window = 768, 12, 4096, 512
    counted = sum(min(query + 1, window) for query in range(length)) / length
    config = replace(preset("go-coder-small"), sliding_window=(window,) * layers)
    work = work_of(load(model=TrainedModel(config), sequence_length=length), tokens=1)
    assert work.attention == pytest.approx(14 * layers * width * counted, rel=0.002)
    every = work_of(
        load(model=TrainedModel(config), sequence_length=length, attention="math"), tokens=1
    )
    assert every.attention == 12 * layers * width * length


def on_cpu(**changes):
    """The same model and tokens on a CPU."""
    return load(on_gpu=False, precision="bfloat16", attention="sdpa", **changes)


def lora(rank, *, names=("up_proj",), **changes):
    """GPT-2 124M with an adapter on the first matrix of each layer's MLP, 768 to 3,072, or on others of it."""
    targets = tuple(
        (f"model.layers.{layer}.mlp.{name}", rank) for layer in range(12) for name in names
    )
    mode = TrainingMode(target_modules=targets, **changes)
    return TrainedModel(preset("go-coder-small"), mode)


def test_a_cpu_computes_the_logits_of_a_large_vocabulary_again():
    """Of 50,000 entries 4,096 exist at once; of 4,096 all do, and backward has them."""
    kept, again = (work_of(load(on_gpu=on_gpu), tokens=1024).products for on_gpu in (True, False))
    assert again - kept == 1024 * 2 * HEAD
    small = TrainedModel(replace(preset("go-coder-small"), vocab_size=4096))
    kept, same = (
        work_of(load(model=small, on_gpu=on_gpu), tokens=1024).products for on_gpu in (True, False)
    )
    assert same == kept


def test_narrow_products_of_an_adapter_take_a_cpu_longer():
    """Rank 16 reaches 16 / 26 of the rate, so that its three passes take 26 / 16 of the time."""
    gpu, cpu = (
        work_of(load(model=lora(16), on_gpu=on_gpu, score_chunk=1), tokens=1024)
        for on_gpu in (True, False)
    )
    values = 12 * 16 * (768 + 3072)
    assert cpu.products - gpu.products == pytest.approx(1024 * 2 * 3 * values * 10 / 16)
    # Its output is added to that of the matrix, and the gradients of their input to each other: 6 bytes a value each.
    # Autocast copies its float32 matrices once a micro-batch, of which 1,024 tokens are a sixteenth.
    one, both = (
        work_of(on_cpu(model=lora(16, names=names)), tokens=1024).between
        for names in (("up_proj",), ("up_proj", "down_proj"))
    )
    assert both - one == pytest.approx(1024 * 12 * 6 * (768 + 3072) + 6 * values / 16)


def test_dequantizing_takes_a_cpu_far_more_than_its_bytes():
    """14 bytes a weight of nf4 and 7 of int8, in forward and in backward of each micro-batch."""
    plain, nf4, int8 = (
        work_of(on_cpu(model=lora(16, quantize_kind=kind)), tokens=16384).between
        for kind in ("none", "nf4", "int8")
    )
    assert nf4 - plain == pytest.approx(2 * 14 * LAYERS)
    assert int8 - plain == pytest.approx(2 * 7 * LAYERS)


def test_muons_products_are_a_cpus_work():
    """Five iterations: two products of the smaller side's square with the matrix, one of it with itself."""
    adamw, muon = (work_of(on_cpu(optimizer=kind), tokens=1024) for kind in ("adamw", "muon"))
    square = 4 * 768**3 + 2 * 768**3
    wide = 4 * 768**2 * 3072 + 2 * 768**3
    assert muon.update_products == 12 * 5 * (4 * square + 2 * wide)
    assert (
        adamw.update_products == 0 == work_of(load(optimizer="muon"), tokens=1024).update_products
    )
    assert muon.with_shard_of_update(4).update_products == muon.update_products / 4


def test_operators_add_to_the_time_of_a_cpu_alone():
    """Two micro-batches call them twice. On a GPU they are launches, which its work hides."""
    where = machine()
    rate = device_rate(build_profile(where), where, precision="bfloat16", width=768, compiled=False)
    step = on_cpu(micro_batch_size=1, score_chunk=1024)
    once, twice = (work_of(step, tokens=tokens) for tokens in (1024, 2048))
    assert twice.operators == 2 * once.operators > 0
    parts = step_parts(once, rate)
    assert parts["operators"].value == pytest.approx(once.operators * SECONDS[1])
    # No other rank of the machine shares the time of its Python.
    shared = step_parts(once, rate.shared(2))
    assert shared["operators"] == parts["operators"]
    assert shared["matmul"].value == pytest.approx(2 * parts["matmul"].value)
    gpu = work_of(load(), tokens=1024)
    assert gpu.operators == 0
