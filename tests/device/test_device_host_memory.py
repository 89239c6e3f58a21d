"""Pinned host memory, which the simulated device rounds up as PyTorch does, against what a plan counts."""

import pytest
import simulated
import torch
from steps_for_tests import _batch, load_of, small_plan

from bloomery.facts.limits import PINNED_CHUNK, pinned_together
from bloomery.parallel.owner_exchange import HostBuffer
from bloomery.plan.estimate.activations import kept_by_layer, last_norm_bytes
from bloomery.plan.estimate.pinned import pinned_parts
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step

MIB = 2**20


def test_a_save_pins_the_planned_blocks() -> None:
    """One request for all of it would pin 16 MiB. The blocks serve the next save and a smaller one."""
    tensors = {
        ("model", f"{number}"): torch.full((rows, 256), float(number), device="cuda")
        for number, rows in enumerate([3000, 1500, 1500, 1200, 700, 700, 300, 50, 1])
    }
    assert sum(tensor.nbytes for tensor in tensors.values()) > 8.7 * MIB
    simulated.empty_pinned_cache()
    before = simulated.stats().pinned
    buffer = HostBuffer("cuda")
    copies = buffer.copy(tensors)
    planned = pinned_together([tensor.nbytes for tensor in tensors.values()])
    assert simulated.stats().pinned - before == planned <= 10 * MIB
    for key, tensor in tensors.items():
        assert torch.equal(copies[key].view(torch.float32).view(tensor.shape), tensor.cpu())

    few = dict(list(tensors.items())[2:])
    for again in (few, tensors):
        copies = buffer.copy(again)
        for key, tensor in again.items():
            assert torch.equal(copies[key].view(torch.float32).view(tensor.shape), tensor.cpu())
    assert simulated.stats().pinned - before == planned


def pinned_by(plan: RunPlan) -> int:
    """Bytes that two production steps pin at most, those of nothing else."""
    simulated.empty_pinned_cache()
    before = simulated.reset_pinned_peak()
    model_and_optimizer = build_state(plan).model_and_optimizer
    objective = build_objective(plan)
    batches = [_batch(plan) for _ in range(min(2, plan.train.accumulation))]
    for _ in range(2):
        train_step(model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)
    torch.cuda.synchronize()
    return simulated.stats().pinned_peak - before


# Tensors of a little more than a power of two, each of which PyTorch alone would round up to nearly twice as much.
SIZES = {
    "hidden_size": 260,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 4200,
    "max_positions": 260,
}


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_offloaded_states_pin_what_the_plan_counts(state_dtype: str) -> None:
    lean = {"offload": True, "state_dtype": state_dtype}
    plan = small_plan("gpt2", sizes=SIZES, device="cuda", lean=lean, rows=1, attention="blockwise")
    planned = pinned_parts(load_of(plan))
    assert list(planned) == ["optimizer states"]
    model = TrainedModel.of(plan, plan.model.config)
    assert pinned_by(plan) == planned["optimizer states"]
    assert planned["optimizer states"] < 1.1 * model.optimizer_bytes("adamw", "float32")


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_activations_pin_what_the_plan_counts(checkpointing: str) -> None:
    rows = 33 if checkpointing == "full" else 9
    plan = small_plan(
        "gpt2",
        sizes=SIZES,
        device="cuda",
        rows=rows,
        attention="blockwise",
        activation_checkpointing=checkpointing,
        offload_activations=True,
    )
    planned = pinned_parts(load_of(plan))
    assert list(planned) == ["activations"]
    # A plan counts the normalized input of the head as well, and tensors that are too small to leave.
    assert 0 <= planned["activations"] - pinned_by(plan) <= PINNED_CHUNK
    shape = load_of(plan)
    kept_bytes = sum(kept_by_layer(shape)) + last_norm_bytes(shape)
    assert planned["activations"] < kept_bytes + PINNED_CHUNK
