"""Weights that stream from the host, with pictures: what they train is that of a model on the device."""

from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import assert_same_tensors
from test_streamed_weights import run
from torch.testing import assert_close

from bloomery.model.configs import read_config
from bloomery.plan.types import RunPlan, VisionPlan
from bloomery.recipe.schema import Lora, NoAdapter
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row

# Some micro-batches have no picture.
ROWS = [row(RED, TEXT), row(TEXT, answer="which?"), row(BLUE, TEXT, answer="blue")] * 6
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj"], "dropout": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "tower with LoRA": ("smolvlm", {}, LORA | {"vision": "all"}),
    "deep features": ("qwen3_vl", {}, LORA),
    "both ways": ("gemma3", {}, None),
    "first stage": ("qwen3_vl", {"train": "projector", "freeze_language_model": True}, None),
    "tower in full": ("smolvlm", {"train": "all"}, LORA),
}


def plan_of(
    folder: Path,
    kind: str,
    vision: dict[str, Any],
    lora: dict[str, Any] | None,
    *,
    together: int,
) -> RunPlan:
    prepared = prepared_rows(folder, ROWS, kind=kind, weights=True)
    train = {"steps": 3, "micro_batch_size": 1, "accumulation": 5, "stream_micro_batches": together}
    plan = tiny_plan(
        prepared,
        config=read_config(folder / "base"),
        model={"source": folder / "base"},
        data={"sequence_length": 256, "layout": "padded"},
        train=train | {"tokens_per_step": 1280},
        eval={"every_steps": None},
    )
    rates = {"learning_rate": 0.005, "projector_learning_rate": 0.01}
    adapter = NoAdapter() if lora is None else Lora(**lora)
    return plan.model_copy(update={"adapter": adapter, "vision": VisionPlan(**rates, **vision)})


def streamed_and_resident(
    plan: RunPlan, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of both checkpoints, after the same losses."""
    simulated.clear()
    streamed_losses, streamed = run(plan, folder / "streamed", "layers")
    assert simulated.report()["problem"] == {}
    losses, resident = run(plan, folder / "resident", "off")
    assert len(losses) == 3
    assert streamed_losses == pytest.approx(losses, rel=1e-6)
    return streamed, resident


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_a_model_on_the_device(name: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *CASES[name], together=1)
    assert_same_tensors(*streamed_and_resident(plan, tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_share_the_loads_of_layers(name: str, tmp_path: Path) -> None:
    """One backward adds up the gradients of the tower in another order."""
    plan = plan_of(tmp_path, *CASES[name], together=2)
    streamed, resident = streamed_and_resident(plan, tmp_path)
    assert streamed.keys() == resident.keys()
    for key, tensor in resident.items():
        assert_close(streamed[key], tensor, atol=1e-6, rtol=1e-4)
