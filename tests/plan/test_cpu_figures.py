"""Plans of CPU runs beside what a run took: two cores of an Intel Xeon with AMX, `benchmarks/plan_cpu.py`."""

from dataclasses import replace

import pytest

from bloomery.core.units import MIB
from bloomery.facts.config import ModelConfig
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape

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
