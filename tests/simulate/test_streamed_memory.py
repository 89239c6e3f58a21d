"""Memory of a device whose layers stream: the plan's figure against the step itself on fake tensors."""

from typing import Any

import pytest
import torch
from plan_help import gpu_machine, loaded, planned

from bloomery.core.units import GIB
from bloomery.hardware.profile import with_host_memory
from bloomery.simulate.step import simulated_step

MODEL = {
    "family": "llama",
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 512,
    "max_positions": 512,
}
LORA = {"kind": "lora", "rank": 16, "alpha": 32, "target_modules": ["all-linear"]}
PURE = {"micro_batch_size": 1, "precision": "bfloat16-pure"}
CASES: dict[str, dict[str, Any]] = {
    "full": {"train": {"micro_batch_size": 4}},
    "full in bfloat16": {"train": PURE},
    "lora": {"train": {"micro_batch_size": 4}, "adapter": LORA},
    "lora, micro-batches share loads": {
        "train": {"micro_batch_size": 4},
        "adapter": LORA,
        "parallel": {"stream_micro_batches": 2},
    },
}


@pytest.mark.parametrize(
    "name",
    [name if name == "lora" else pytest.param(name, marks=pytest.mark.soak) for name in CASES],
)
def test_shapes_and_fake_tensors_agree_on_streamed_layers(name: str) -> None:
    torch.set_num_threads(1)
    sections: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"builtin": "stdlib-code", "sequence_length": 512},
        "train": {"max_steps": 10, "tokens_per_step": 8192},
        "parallel": {"stream": "layers", "stream_micro_batches": 1},
    }
    for key, fields in CASES[name].items():
        sections[key] = {**sections.get(key, {}), **fields}
    plan = planned(loaded(**sections), with_host_memory(gpu_machine("RTX 4090"), 64 * GIB))
    parts = simulated_step(plan, fused=True).parts
    # The host's weights, gradients and states are in none of them.
    assert plan.memory.allocated == pytest.approx(sum(parts.values()), rel=0.05)
