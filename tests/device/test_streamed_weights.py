"""Weights that stream from the host: runs on the simulated device are bitwise those of a model that is on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors, prepared_corpus, saved_base
from safetensors.torch import load_file

from bloomery.model.configs import build_config
from bloomery.monitor.events import EvalDone, StepDone
from bloomery.plan.types import RouterPlan, RunPlan
from bloomery.recipe.schema import Lora, Model, Quantize
from device_for_tests import MEMORY_LIMIT
from ranks import train

ADAPTER = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
# A dense layer, then experts that a sigmoid and a bias choose.
BIASED = build_config(
    Model(
        family="glm4_moe",
        hidden_size=32,
        num_layers=3,
        num_heads=2,
        head_dim=16,
        max_positions=64,
        experts={"count": 4, "per_token": 2, "width": 16},
    ),
    vocab_size=CONFIG.vocab_size,
)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, one micro-batch": {"train": {"micro_batch_size": 4, "accumulation": 1}},
    "bfloat16": {"train": {"precision": "bfloat16-pure"}, "optimizer": {"fused": False}},
    "float16": {"train": {"precision": "float16"}},
    "micro-batches in pairs": {
        "config": replace(CONFIG, tie_embeddings=False),
        "train": {"micro_batch_size": 1, "accumulation": 5, "stream_micro_batches": 2},
    },
    "averaged": {"train": {"ema_decay": 0.9}},
    "lora": {"adapter": Lora(**ADAPTER, dropout=0.1)},
    "lora, micro-batches in pairs": {
        "adapter": Lora(**ADAPTER, dropout=0.1),
        "train": {"micro_batch_size": 1, "accumulation": 5, "stream_micro_batches": 2},
    },
    "dora": {"adapter": Lora(**ADAPTER | {"kind": "dora"})},
    "staged": {"train": {"stream_host": "staged", "ema_decay": 0.9}},
    "staged lora": {"adapter": Lora(**ADAPTER, dropout=0.1), "train": {"stream_host": "staged"}},
    "staged nf4": {
        "adapter": Lora(**ADAPTER),
        "quantize": Quantize(kind="nf4"),
        "train": {"stream_host": "staged"},
    },
    "mapped lora": {"adapter": Lora(**ADAPTER, dropout=0.1), "train": {"stream_host": "mapped"}},
    "mapped, float16": {
        "adapter": Lora(**ADAPTER),
        "train": {"precision": "float16", "stream_host": "mapped"},
    },
    "mapped dora": {
        "adapter": Lora(**ADAPTER | {"kind": "dora"}),
        "train": {"stream_host": "mapped"},
    },
    "mapped nf4": {
        "adapter": Lora(**ADAPTER),
        "quantize": Quantize(kind="nf4"),
        "train": {"stream_host": "mapped"},
    },
    "nf4": {"adapter": Lora(**ADAPTER), "quantize": Quantize(kind="nf4")},
    "biases of a choice": {
        "config": BIASED,
        "train": {"router": RouterPlan(bias_update=0.01)},
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return saved_base(CONFIG, corpus, tmp_path_factory.mktemp("base"))


def run(
    plan: RunPlan, folder: Path, stream: str, checkpointing: str = "full"
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The losses by step, and the tensors of the last checkpoint."""
    changes: dict[str, dict[str, Any]] = {
        "train": {"device": "cuda", "stream": stream, "activation_checkpointing": checkpointing},
        "data": {"pin_memory": True},
        "memory": {"limit": MEMORY_LIMIT},
    }
    if stream == "off":
        changes["train"]["stream_micro_batches"] = 1
    sections = {
        name: getattr(plan, name).model_copy(update=fields) for name, fields in changes.items()
    }
    events = train(plan.model_copy(update=sections), folder)
    losses = {
        f"{type(event).__name__} {event.step}": event.loss
        for event in events
        if isinstance(event, StepDone | EvalDone) and event.loss is not None
    }
    newest = max((folder / "checkpoints").glob("step-*"))
    return losses, {
        f"{file.stem}/{name}": tensor
        for file in sorted(newest.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_weights_on_the_device(
    corpus: Path, base: Path, tmp_path: Path, name: str
) -> None:
    sections = dict(CASES[name])
    whole = {key: sections.pop(key) for key in ("adapter", "quantize") if key in sections}
    sections["train"] = {"steps": 4, **sections.get("train", {})}
    if whole:
        sections["model"] = {"source": base}
    config = sections.pop("config", CONFIG)
    plan = tiny_plan(corpus, config=config, **sections).model_copy(update=whole)
    simulated.clear()
    streamed_losses, streamed = run(plan, tmp_path / "streamed", "layers")
    assert simulated.report()["problem"] == {}
    losses, tensors = run(plan, tmp_path / "resident", "off")
    assert len(losses) >= 5
    assert streamed_losses == losses
    assert_same_tensors(streamed, tensors)


def test_the_check_before_the_first_step_knows_weights_that_stream(
    corpus: Path, tmp_path: Path
) -> None:
    """Its small model has its weights on the device: its parts are computed one by one."""
    train = {
        "steps": 1,
        "stream": "layers",
        "stream_micro_batches": 2,
        "activation_checkpointing": "full",
    }
    plan = tiny_plan(corpus, config=CONFIG, train=train)
    assert Run(plan, tmp_path / "run").outcome == "done"


@pytest.mark.parametrize("first", ["layers", "off"])
def test_a_checkpoint_is_resumed_with_and_without_weights_that_stream(
    corpus: Path, tmp_path: Path, first: str
) -> None:
    def plan(stream: str) -> RunPlan:
        train = {"steps": 4, "stream": stream, "activation_checkpointing": "full"}
        return tiny_plan(corpus, config=CONFIG, train=train, checkpoint={"every_steps": 2})

    whole = Run(plan(first), tmp_path / "whole")
    other = "off" if first == "layers" else "layers"
    resumed = Run(plan(other), tmp_path / "resumed", resume_from=whole.checkpoint(2))
    assert resumed.losses() == {step: loss for step, loss in whole.losses().items() if step > 2}
    assert_same_tensors(resumed.tensors(4), whole.tensors(4))
