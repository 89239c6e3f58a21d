"""What steps of streamed weights hold on the device and pin on the host, against what a plan counts from shapes."""

import gc
from typing import Any

import pytest
from steps_for_tests import counted, load_of, small_plan
from test_device_host_memory import pinned_by
from test_device_memory import peak_bytes_of

from bloomery.plan.estimate.streaming import host_memory
from bloomery.plan.types import RunPlan

# Of the planned bytes, on either side.
TOLERANCE = 0.03
SIZES = {
    "hidden_size": 512,
    "num_layers": 5,
    "num_heads": 4,
    "vocab_size": 2048,
    "max_positions": 1024,
}
QUICK = {"lora nf4"}
LORA = {"kind": "lora", "rank": 8, "alpha": 16, "target_modules": ["all-linear"]}
BFLOAT16 = {
    "precision": "bfloat16-pure",
    "lean": {"state_dtype": "int8", "stochastic_rounding": True},
}
CASES: dict[str, dict[str, Any]] = {
    "lora bfloat16": {"precision": "bfloat16", "adapter": LORA},
    "lora nf4": {"precision": "bfloat16", "adapter": LORA, "base": "nf4"},
    "full bfloat16, int8 states": BFLOAT16,
    "full float32": {},
    "accumulated": {**BFLOAT16, "micro_batches": 4},
    "longer rows": {**BFLOAT16, "rows": 4},
}


def plan_of(case: str) -> RunPlan:
    settings = {"rows": 2, "attention": "blockwise", "device": "cuda", "sizes": SIZES}
    plan = small_plan(**({"activation_checkpointing": "full"} | settings | CASES[case]))
    return plan.model_copy(update={"train": plan.train.model_copy(update={"stream": "layers"})})


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in CASES],
)
def test_the_device_holds_and_the_host_pins_what_the_plan_counts(case: str) -> None:
    plan = plan_of(case)
    gc.collect()
    peak = peak_bytes_of(plan)
    gc.collect()
    pinned = pinned_by(plan)
    planned_pinned = host_memory(load_of(plan)).pinned
    print(
        f"{case}: device {peak / counted(plan) - 1:+.2%}, pinned {pinned / planned_pinned - 1:+.2%}"
    )
    assert peak == pytest.approx(counted(plan), rel=TOLERANCE)
    assert pinned == pytest.approx(planned_pinned, rel=TOLERANCE)
