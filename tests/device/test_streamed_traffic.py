"""How often layers that stream are copied, and how many bytes: as counted from shapes."""

from dataclasses import dataclass

import pytest
import simulated
import torch
from steps_on_device import CASES, LAYERS, batches_of, streamed_plan

from bloomery.facts.limits import aligned_bytes, buffer_bytes
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step


def layer_tensors(plan: RunPlan) -> list[int]:
    """Bytes of each: the matrices of a layer, its two norms and those of queries and keys."""
    config = plan.model.config
    width, inner = config.hidden_size, config.intermediate_size
    kv_width = config.num_kv_heads * config.head_dim
    matrices = [width * width] * 2 + [kv_width * width] * 2 + [inner * width] * 3
    norms = [width] * 2 + [config.head_dim] * 2
    element_bytes = 2 if plan.train.precision == "bfloat16-pure" else 4
    if plan.quantize.kind == "none":
        return [count * element_bytes for count in matrices + norms]
    codes_and_scales = [
        size
        for count in matrices
        for size in buffer_bytes(count, plan.quantize.kind, plan.quantize.double_quant)
    ]
    return codes_and_scales + [count * element_bytes for count in norms]


@dataclass(frozen=True)
class Traffic:
    """Of a step: how many layers were loaded, and the bytes from the host and to it, without those of tokens."""

    loads: int
    copied_in: int
    copied_out: int


def traffic_of_third_step(case: str, accumulation: int, stream: str) -> Traffic:
    plan = streamed_plan(case, accumulation=accumulation, stream=stream)
    state = build_state(plan).model_and_optimizer
    objective = build_objective(plan)
    weights = state.model.weight_stream
    for step in range(3):
        torch.cuda.synchronize()
        before = simulated.stats()
        loads_before = 0 if weights is None else weights.ring.num_loads
        train_step(state, batches_of(step, plan), objective, plan=plan.train, lr_scale=1.0)
    torch.cuda.synchronize()
    after = simulated.stats()
    return Traffic(
        0 if weights is None else weights.ring.num_loads - loads_before,
        after.copied_in - before.copied_in,
        after.copied_out - before.copied_out,
    )


QUICK = (("full", 4), ("nf4", 1), ("full, two per load", 4))


@pytest.mark.parametrize(
    ("case", "accumulation"),
    [
        pytest.param(
            case,
            accumulation,
            marks=[] if (case, accumulation) in QUICK else pytest.mark.soak,
        )
        for case in CASES
        for accumulation in (1, 4)
    ],
)
def test_a_step_copies_what_shapes_say(case: str, accumulation: int) -> None:
    streamed = traffic_of_third_step(case, accumulation, "layers")
    resident = traffic_of_third_step(case, accumulation, "off")
    plan = streamed_plan(case)
    config = plan.model.config
    tensors = layer_tensors(plan)
    loaded_bytes = sum(map(aligned_bytes, tensors))
    in_full = case.startswith("full")
    element_bytes = 2 if case == "full bfloat16" else 4
    rows = config.vocab_size * (1 if config.tie_embeddings else 2) + 1
    embedding_and_norm = rows * config.hidden_size * element_bytes
    # A pass computes one micro-batch, or several. Its backward begins with the layers that forward ended with. The next
    # forward begins with those that backward ended with, unless their weights have been updated.
    num_passes = -(-accumulation // plan.train.stream_micro_batches)
    loads = 2 * LAYERS - 2 + (num_passes - 1) * (2 * LAYERS - 4)
    assert streamed.loads == loads
    copied_in = streamed.copied_in - resident.copied_in
    copied_out = streamed.copied_out - resident.copied_out
    if in_full:
        assert copied_in == loads * loaded_bytes + embedding_and_norm
        # The gradients of the first pass are added on the device, those of later micro-batches on the host. The norm is
        # computed where the sums are.
        norm_bytes = 4
        first_pass = min(accumulation, plan.train.stream_micro_batches)
        num_sent = 1 + accumulation - first_pass
        sums_bytes = num_sent * LAYERS * sum(tensors) + embedding_and_norm
        assert copied_out == sums_bytes - norm_bytes
    else:
        assert copied_in == loads * loaded_bytes
        assert copied_out == 0
