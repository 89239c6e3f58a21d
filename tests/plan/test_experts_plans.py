"""The time of mixtures of experts by hand: an expert is read in full however few tokens reach it."""

import pytest
from plan_help import gpu_machine

from bloomery.core.units import MIB
from bloomery.facts.counting import layers
from bloomery.facts.published import published_config
from bloomery.hardware.profile import build_profile
from bloomery.plan.estimate.experts import filling_tokens, read_bytes, stacked_matrices
from bloomery.plan.estimate.speed import device_rate
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape

QWEN = published_config("Qwen/Qwen3-30B-A3B")
STACKED = 3 * 128 * 2048 * 768  # numbers of the experts of a layer


def step_of(rows: int) -> StepShape:
    return StepShape(
        model=TrainedModel(QWEN),
        sequence_length=1024,
        micro_batch_size=rows,
        precision="bfloat16",
        optimizer="adamw",
        attention="varlen",
        checkpointing="none",
        compiled=True,
        score_chunk=1024,
        context_bytes=300 * MIB,
        on_gpu=True,
    )


def test_every_expert_is_read_in_each_pass_and_its_gradient_written() -> None:
    layer = layers(QWEN)[0]
    assert sum(rows * inputs for rows, inputs in stacked_matrices(layer)) == STACKED
    frozen = read_bytes(step_of(16), layer, is_trained=False, passes=2)
    assert frozen == pytest.approx(2 * 2 * STACKED)  # two passes of two bytes
    trained = read_bytes(step_of(16), layer, is_trained=True, passes=2)
    assert trained - frozen == 2 * 4 * STACKED


def test_a_single_token_reads_the_experts_that_it_meets() -> None:
    step = step_of(1)
    one_token = StepShape(**{**vars(step), "sequence_length": 1})
    moved = read_bytes(one_token, layers(QWEN)[0], is_trained=False, passes=1)
    assert moved == pytest.approx(2 * STACKED * 8 / 128)


def test_tokens_that_fill_a_gpu_take_as_long_to_compute_as_experts_to_read() -> None:
    where = gpu_machine("MI300X")
    rate = device_rate(build_profile(where), where, precision="bfloat16", width=2048, compiled=True)
    assert rate is not None and rate.bandwidth is not None
    flops = rate.peak * 0.4
    tokens = filling_tokens(step_of(1), QWEN.experts, flops=flops, bandwidth=rate.bandwidth)
    reading = 2 * STACKED / rate.bandwidth
    computing = 2 * tokens * 8 / 128 * STACKED / flops
    assert computing == pytest.approx(reading, rel=1e-3)
    # some 100 rows of each expert, 1,600 tokens
    assert 1_000 < tokens < 2_500
