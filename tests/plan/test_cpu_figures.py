"""Plans of CPU runs beside what a run took: two cores of an Intel Xeon with AMX, `benchmarks/plan_cpu.py`."""

from dataclasses import replace

import pytest
from plan_help import machine

from bloomery.core.units import MIB
from bloomery.facts.config import ModelConfig
from bloomery.facts.hf_config import config_from_hf
from bloomery.hardware.machine import CpuCheck, ProductRates
from bloomery.hardware.profile import build_profile
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.speed import device_rate, step_parts, total, work_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import Estimate

SMOLLM2 = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    tie_embeddings=True,
)
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL_LINEAR = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FULL = StepShape(
    model=TrainedModel(SMOLLM2),
    sequence_length=512,
    micro_batch_size=4,
    precision="bfloat16",
    optimizer="adamw",
    attention="compiled",
    checkpointing="none",
    compiled=False,
    score_chunk=2048,
    context_bytes=0.0,
    on_gpu=False,
    fills_freed=True,
    loss_share=0.4,  # of the conversations: tokens of answers
)


def lora(modules: tuple[str, ...]) -> TrainedModel:
    targets = tuple((f"model.layers.{layer}.{name}", 16) for layer in range(30) for name in modules)
    return TrainedModel(SMOLLM2, TrainingMode(target_modules=targets))


LORA_1 = replace(FULL, model=lora(ALL_LINEAR), sequence_length=1024, micro_batch_size=1)
LORA_4 = replace(FULL, model=lora(ATTENTION))


@pytest.mark.parametrize(
    ("step", "peak_mib"),
    [
        (FULL, 3513),
        (replace(FULL, checkpointing="full"), 2618),
        (LORA_1, 1300),
        (replace(LORA_1, checkpointing="full"), 843),
        (LORA_4, 1520),
    ],
    ids=["full", "full-checkpointing", "lora", "lora-checkpointing", "lora-4"],
)
def test_memory_of_smollm2_is_what_the_process_held(step, peak_mib):
    total = estimate_memory(step, limit=16e9).total / MIB
    assert total == pytest.approx(peak_mib, rel=0.06)


def rates(width: int, forward: float, inputs: float, weights: float, narrow: float) -> ProductRates:
    return ProductRates(width=width, forward=forward, inputs=inputs, weights=weights, narrow=narrow)


# What `cpu_check` found there.
AMX = CpuCheck(
    gflops={"float32": 155.2, "bfloat16": 986.3},
    copy_gbs=26.2,
    python_seconds=0.000969,
    products={
        "bfloat16": (
            rates(64, 388.6, 421.1, 260.2, 94.43),
            rates(192, 1172.0, 1234.0, 525.9, 144.9),
            rates(576, 1046.0, 1136.0, 680.4, 157.2),
            rates(1536, 928.3, 760.8, 560.4, 140.9),
        )
    },
)


def planned(step: StepShape, tokens: int, check: CpuCheck) -> Estimate:
    where = machine(cores=1).model_copy(update={"cpu_check": check})
    rate = device_rate(
        build_profile(where), where, precision=step.precision, width=576, compiled=False
    )
    assert rate is not None
    return total(step_parts(work_of(step, tokens=tokens), rate))


# Processor seconds while other programs used both cores (load 6 to 9): the fastest of four steps.
@pytest.mark.parametrize(
    ("step", "tokens", "seconds"),
    [(FULL, 2048, 4.58), (LORA_1, 1024, 2.05), (LORA_4, 2048, 2.57)],
    ids=["full", "lora", "lora-4"],
)
def test_seconds_of_smollm2_are_what_a_core_with_amx_took(step, tokens, seconds):
    """One figure for all products, and the passes of PyTorch between them, said 10.1, 4.8 and 8.0 s."""
    estimate = planned(step, tokens, AMX)
    assert estimate.value == pytest.approx(seconds, rel=0.25)
    assert estimate.low < seconds < estimate.high


def test_products_that_were_timed_are_counted_by_kind():
    def matmul(step: StepShape, **changes: float) -> float:
        by_width = [row.model_copy(update=changes) for row in AMX.products["bfloat16"]]
        check = AMX.model_copy(update={"products": {"bfloat16": tuple(by_width)}})
        return planned(step, 2048, check).value

    quick = {"forward": 1000.0, "inputs": 1000.0, "weights": 1000.0, "narrow": 1000.0}
    as_fast = matmul(FULL, **quick)
    # A third of the products of full training are gradients of weights: half as fast, they take as long as two thirds.
    slower = matmul(FULL, **quick | {"weights": 500.0}) - as_fast
    assert slower == pytest.approx(2048 * 2 * 117.5e6 / 1e12 / 0.65, rel=0.02)
    assert matmul(FULL, **quick | {"narrow": 10.0}) == as_fast
    # LoRA has no gradients of wide weights, and its own matrices are narrow.
    assert matmul(LORA_4, **quick | {"weights": 500.0}) == matmul(LORA_4, **quick)
    assert matmul(LORA_4, **quick | {"narrow": 100.0}) > matmul(LORA_4, **quick)


def test_a_width_between_two_that_were_timed_has_a_rate_between_theirs():
    where = machine(cores=2).model_copy(update={"cpu_check": AMX})
    rate = device_rate(
        build_profile(where), where, precision="bfloat16", width=333, compiled=False
    )  # the root of 192 times 576
    assert rate is not None and rate.products is not None
    assert rate.products.weights == pytest.approx(2e9 * (525.9 * 680.4) ** 0.5, rel=0.01)
    widest = device_rate(
        build_profile(where), where, precision="bfloat16", width=8192, compiled=False
    )
    assert widest is not None and widest.products is not None
    assert widest.products.weights == pytest.approx(2e9 * 560.4)
    # A check that timed one product, and another precision, have one rate for all.
    for check, precision in (
        (AMX.model_copy(update={"products": {}}), "bfloat16"),
        (AMX, "float32"),
    ):
        other = machine().model_copy(update={"cpu_check": check})
        one = device_rate(
            build_profile(other), other, precision=precision, width=333, compiled=False
        )
        assert one is not None and one.products is None


HYBRIDS = {  # of benchmarks/mixers_cpu.py
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "vocab_size": 65536,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 640,
        "intermediate_size": 1664,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 14,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12) else "conv" for layer in range(14)
        ],
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize(("name", "seconds"), [("qwen3.5", 3.27), ("lfm2", 1.94)])
def test_seconds_of_hybrids_are_what_a_core_with_amx_took(name, seconds):
    """A sequence of 1,024 tokens, all scored; load 8 to 11."""
    step = replace(
        FULL,
        model=TrainedModel(config_from_hf(HYBRIDS[name])),
        sequence_length=1024,
        micro_batch_size=1,
        score_chunk=1024,
        loss_share=1.0,
    )
    estimate = planned(step, 1024, AMX)
    assert estimate.value == pytest.approx(seconds, rel=0.2)
    assert estimate.low < seconds < estimate.high


def test_a_core_without_matrix_units_reaches_more_of_its_rates():
    """The same machine without AMX, by ONEDNN_MAX_CPU_ISA: LoRA took 8.2 s, where the share of AMX said 14.3."""
    vectors = CpuCheck(
        gflops={"float32": 155.1, "bfloat16": 83.56},
        copy_gbs=27.8,
        python_seconds=0.000948,
        products={
            "bfloat16": (
                rates(64, 78.99, 77.86, 75.93, 38.87),
                rates(192, 74.69, 75.52, 70.28, 62.97),
                rates(576, 83.0, 82.33, 81.33, 45.39),
                rates(1536, 78.97, 78.52, 78.71, 55.45),
            )
        },
    )
    estimate = planned(LORA_1, 1024, vectors)
    assert estimate.low < 8.2 < estimate.high
