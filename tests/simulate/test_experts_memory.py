"""Memory of mixtures of experts: from shapes, on fake tensors, measured."""

import pytest
from steps_for_tests import counted, measured, measured_ranks, simulated, small_plan, some

from bloomery.plan.estimate.mesh import GRADIENT_BUCKET, MeshSplit
from bloomery.simulate.step import simulated_step
from ranks import on_ranks

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
        "base": "nf4",
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


DIVIDED = {
    "full training": {"precision": "bfloat16"},
    "recomputed": {"precision": "bfloat16", "activation_checkpointing": "full"},
    "LoRA": {"precision": "bfloat16", "adapter": EVERY},
}


# What a rank's process has done before changes its peak by up to 4%: soak has quiet ones.
@pytest.mark.parametrize("case", some([(case,) for case in DIVIDED], set()))
def test_ranks_that_divide_experts_hold_what_shapes_say(case: str) -> None:
    """On average: a rank computes the rows that its experts are chosen for. Buckets are as small as these gradients."""
    split = MeshSplit(replicate=2, expert=2)
    plan = small_plan("qwen3_moe", sizes=SIZES, rows=4, **DIVIDED[case])
    several = on_ranks(plan, replicate=2, expert=2)
    peaks = measured_ranks(several)
    told = counted(several, split=split) - 2 * GRADIENT_BUCKET
    assert told == pytest.approx(sum(peaks) / 2, rel=0.05)
    assert simulated(several, split=split) == pytest.approx(sum(peaks) / 2, rel=0.03)
    assert told < 0.8 * counted(plan)


def test_rows_that_travel_in_a_simulation_are_counted() -> None:
    plan = small_plan("qwen3_moe", sizes=SIZES, rows=2, precision="bfloat16")
    several = on_ranks(plan, replicate=2, expert=2)
    step = simulated_step(several, fused=False, split=MeshSplit(replicate=2, expert=2))
    rows = 256 * 2  # of one sequence on each device
    # Half of them: in each layer there and back, and so their gradients; weights and counts with them.
    numbers = rows * (2 * 2 * 128 * 2 + 2 * 4) + 2 * 8 * 4
    assert step.sent["expert"] == pytest.approx(3 * numbers / 2, rel=0.01)


HYBRIDS = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "ernie4_5_moe")


@pytest.mark.parametrize("family", some([(family,) for family in HYBRIDS], {("qwen3_next",)}))
def test_memory_of_families_with_more_than_routed_experts(family: str) -> None:
    plan = small_plan(family, sizes=SIZES, rows=2, precision="bfloat16")
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.05)
