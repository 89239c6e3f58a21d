"""Operators that a CPU calls in a step: against those that PyTorch dispatches, and by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.facts.config import ModelConfig
from bloomery.hardware.machine import CpuCheck
from bloomery.infer.forward import prepare_weights
from bloomery.model.adapters.lora import adapt
from bloomery.model.decoder import Decoder
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.operators import (
    ENDS,
    FORWARD,
    PYTHON_SECONDS,
    SECONDS,
    operator_seconds,
    operators_of_micro_batch,
)
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.recipe.schema import Lora

LLAMA = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
)
STEP = StepShape(
    model=TrainedModel(LLAMA),
    sequence_length=8,
    micro_batch_size=1,
    precision="bfloat16",
    optimizer="adamw",
    attention="sdpa",
    checkpointing="none",
    compiled=False,
    score_chunk=8,
    context_bytes=0.0,
    on_gpu=False,
)
LORA = Lora(kind="lora", rank=4, target_modules=["all-linear"])
MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# What computes nothing: other shapes of the same numbers, memory without numbers, the dtype of a result.
VIEWS = {
    "view",
    "t",
    "transpose",
    "_unsafe_view",
    "slice",
    "detach",
    "alias",
    "unsqueeze",
    "expand",
}
VIEWS |= {"empty", "empty_like", "empty_strided", "new_empty", "promote_types", "squeeze", "split"}


class Dispatched(TorchDispatchMode):
    """Counts what computes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = operator.name().partition("::")[2].partition(".")[0]
        if name not in VIEWS:
            self.counts[name] += 1
        return operator(*args, **(kwargs or {}))


def dispatched(config: ModelConfig, precision: str, adapter: Lora | None) -> int:
    """Operators of forward and backward of 8 tokens, without the loss."""
    model = Decoder(config, attention="sdpa")
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if adapter is not None:
        adapt(model, adapter)
    prepare_weights(model, precision)
    tokens = torch.arange(8)[None]
    with Dispatched() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            total = model(tokens).head.float().sum()
        total.backward()
    return sum(counted.counts.values())


@pytest.mark.parametrize(
    ("facts", "precision", "adapter"),
    [
        ({}, "bfloat16", None),
        ({}, "float32", None),
        ({"qk_norm": "head"}, "bfloat16", None),
        ({}, "bfloat16", LORA),
        (
            {
                "norm": "layer",
                "positions": "learned",
                "gated_mlp": False,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
            },
            "bfloat16",
            None,
        ),
    ],
    ids=["llama", "float32", "qk-norm", "lora", "gpt2"],
)
def test_operators_of_a_layer_are_those_that_pytorch_dispatches(facts, precision, adapter):
    """Two layers more: the difference has neither embedding nor head."""
    config = replace(LLAMA, **facts)
    longer = replace(config, num_layers=4)
    counted = (dispatched(longer, precision, adapter) - dispatched(config, precision, adapter)) / 2
    names = () if adapter is None else tuple((name, 4) for name in MODULES)

    def planned(shape: ModelConfig) -> float:
        targets = tuple(
            (f"model.layers.{layer}.{name}", rank)
            for layer in range(shape.num_layers)
            for name, rank in names
        )
        model = TrainedModel(shape, TrainingMode(target_modules=targets))
        step = replace(STEP, model=model, precision=precision)
        return operators_of_micro_batch(step, recomputed=0.0)

    assert (planned(longer) - planned(config)) / 2 == pytest.approx(counted, rel=0.15)


def test_operators_by_hand():
    """Seven products with two gradients and two casts; two norms of 16, rotation 26, everything else 15."""
    layer = 7 * (2 + 1 + 2) + 2 * 16 + 26 + 15
    assert operators_of_micro_batch(STEP, recomputed=0.0) == 2 * layer + ENDS
    # Recomputed layers have a forward more, as have those of a reference model.
    assert operators_of_micro_batch(STEP, recomputed=1.0) == pytest.approx(
        2 * layer * (1 + FORWARD) + ENDS
    )
    reference = replace(STEP, extra_forwards=1)
    assert operators_of_micro_batch(reference, recomputed=0.0) == pytest.approx(
        2 * layer * (1 + FORWARD) + ENDS
    )


def test_a_core_that_is_twice_as_slow_in_python_takes_twice_as_long():
    check = CpuCheck(gflops={"float32": 50.0}, copy_gbs=50.0, python_seconds=2 * PYTHON_SECONDS)
    assert operator_seconds(check) == tuple(2 * each for each in SECONDS)
    assert operator_seconds(None) == SECONDS
