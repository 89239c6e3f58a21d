"""The peak of the device's allocator in production steps, against what the plan counted from shapes."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
from steps_for_tests import _batch, counted, small_plan

from bloomery.core.device import reset_peak_memory
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.build import build_objective
from bloomery.train.process import resident_gib
from bloomery.train.state import build_state
from bloomery.train.step import train_step

# Of the planned bytes: rounding of the allocator, and numbers of a few bytes that no plan counts.
ABOVE = 1.01
BELOW = 0.95
SIZES = {
    "hidden_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 4096,
    "max_positions": 256,
}
LORA = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {},
    "accumulated": {"micro_batches": 2},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every second layer": {"activation_checkpointing": "every-2"},
    "int8 states": {"lean": {"state_dtype": "int8"}},
    "offloaded states": {"lean": {"offload": True}},
    "rms norms": {"family": "llama"},
    # Frozen norms are in half precision, as is what they are given: that is what they keep.
    "lora": {"family": "llama", "adapter": LORA},
    "lora, layer norms": {"adapter": LORA},
}

QUICK = {"float32", "lora"}


def plan_of(case: str) -> RunPlan:
    settings = {"precision": "bfloat16", "attention": "blockwise", "rows": 2, "device": "cuda"}
    return small_plan(**({"family": "gpt2", "sizes": SIZES} | settings | CASES[case]))


def peak_bytes_of(plan: RunPlan, keep: Callable[[], object] = lambda: None) -> int:
    """Of the third step. `keep` runs at its begin; what it returns is held until its end.

    Not counted is what tests before this one have left on the device.
    """
    gc.collect()
    others_bytes = simulated.stats().allocated
    model_and_optimizer = build_state(plan).model_and_optimizer
    objective = build_objective(plan)
    batches = [_batch(plan) for _ in range(min(2, plan.train.accumulation))]

    def step() -> None:
        train_step(model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)

    step()
    step()
    torch.cuda.synchronize()
    reset_peak_memory("cuda")
    kept = keep()
    step()
    torch.cuda.synchronize()
    del kept
    return simulated.stats().peak - others_bytes


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in CASES],
)
def test_the_device_holds_what_the_plan_counts(case: str) -> None:
    plan = plan_of(case)
    assert BELOW < peak_bytes_of(plan) / counted(plan) < ABOVE


def test_a_tensor_too_many_is_above_the_plan() -> None:
    """One activation of a layer, kept for longer than it is needed."""
    plan = plan_of("float32")
    rows = plan.train.micro_batch_size * plan.data.sequence_length
    intermediate_size = plan.model.config.intermediate_size
    peak = peak_bytes_of(plan, lambda: torch.empty(rows, intermediate_size, device="cuda"))
    assert peak / counted(plan) > ABOVE


def test_an_activation_is_differentiated_by_one_kernel() -> None:
    x = torch.ones(2**18, device="cuda", requires_grad=True)
    y = torch.nn.functional.silu(x)
    gradient = torch.ones_like(y)
    torch.cuda.synchronize()
    reset_peak_memory("cuda")
    before = simulated.stats().allocated
    y.backward(gradient)
    assert simulated.stats().peak - before == x.nbytes


def test_large_freed_blocks_keep_few_pages_of_the_host() -> None:
    before_gib = resident_gib()
    blocks = [torch.ones(2**24, device="cuda") for _ in range(8)]  # 64 MiB each
    # Pages that the library keeps of earlier blocks (`kKept`) are used again.
    assert resident_gib() - before_gib > 0.45 - 0.125
    del blocks
    assert resident_gib() - before_gib < 0.2
    torch.cuda.empty_cache()
    assert resident_gib() - before_gib < 0.1
