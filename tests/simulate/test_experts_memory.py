"""Memory of mixtures of experts: from shapes, on fake tensors, measured."""

import pytest
from steps_for_tests import counted, measured, simulated, small_plan, some

ATTENTION = {"kind": "lora", "rank": 8, "target_modules": ["q_proj", "o_proj"]}
EVERY = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}
SIZES = {
    "num_layers": 3,
    "hidden_size": 128,
    "num_heads": 4,
    "experts": {"count": 8, "per_token": 2, "width": 192},
}
CASES = {
    "full training": {},
    "bfloat16": {"precision": "bfloat16"},
    "recomputed": {"precision": "bfloat16", "activation_checkpointing": "full"},
    "selective": {"precision": "bfloat16", "activation_checkpointing": "selective"},
    "frozen experts": {"precision": "bfloat16", "adapter": ATTENTION},
    "frozen, recomputed": {
        "precision": "bfloat16",
        "adapter": ATTENTION,
        "activation_checkpointing": "full",
    },
    "LoRA": {"precision": "bfloat16", "adapter": EVERY},
    "LoRA, recomputed": {
        "precision": "bfloat16",
        "adapter": EVERY,
        "activation_checkpointing": "full",
    },
    "LoRA on nf4": {
        "precision": "bfloat16",
        "adapter": EVERY,
        "quantize": {"kind": "nf4"},
    },
    "many experts": {
        "precision": "bfloat16",
        "sizes": SIZES | {"experts": {"count": 64, "per_token": 6, "width": 64}},
    },
}
QUICK = {("bfloat16",), ("frozen, recomputed",)}


@pytest.mark.parametrize("case", some([(case,) for case in CASES], QUICK))
def test_shapes_fake_tensors_and_measured_bytes_agree(case: str) -> None:
    plan = small_plan("qwen3_moe", **({"sizes": SIZES, "rows": 2} | CASES[case]))
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.05)
