"""Runs of mixtures: what they report of their experts, and how they resume. Oracle: the run without a stop."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import assert_same_tensors
from safetensors.torch import load_file

from bloomery.model.configs import build_config
from bloomery.monitor.events import EventLog
from bloomery.plan.types import RouterPlan, RunPlan
from bloomery.recipe.schema import Model
from bloomery.report.page import page
from bloomery.report.record import read_run_record
from bloomery.train.step_report import reports_experts
from ranks import fields, losses, train

STEPS, HALF = 4, 2
# A dense layer, then experts that a sigmoid and a bias choose.
GLM = Model(
    family="glm4_moe",
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    head_dim=16,
    max_positions=64,
    experts={"count": 8, "per_token": 2, "width": 16},
)
ROUTER = RouterPlan(loss=0.1, z_loss=0.01, bias_update=0.01)


def plan_of(prepared: Path, **train_changes) -> RunPlan:
    config = build_config(GLM, vocab_size=300)
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, shared_width=16))
    every = {"every_steps": HALF}
    changes = {"router": ROUTER, "steps": STEPS} | train_changes
    return tiny_plan(
        prepared,
        config=config,
        train=changes,
        eval=every,
        checkpoint=every,
        logging={"every_steps": 2},
    )


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = checkpoint(folder, STEPS).glob("*.safetensors")
    return {f"{f.stem}/{name}": tensor for f in files for name, tensor in load_file(f).items()}


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return train(plan_of(prepared), folder), folder


def test_every_step_has_a_summary_and_some_the_load_of_each_expert(whole) -> None:
    events, _ = whole
    steps = fields(events, "StepDone")
    assert all(len([n for n in step["metrics"] if n.startswith("router/")]) == 7 for step in steps)
    loads = fields(events, "ExpertLoad")
    assert [load["step"] for load in loads] == [2, 4]
    for load, step in zip(loads, steps[1::2], strict=True):
        # The first layer has no experts.
        assert list(load["ratios"]) == ["1"]
        assert sum(load["ratios"]["1"]) == pytest.approx(8, rel=0.01)
        highest = step["metrics"]["router/highest_load"]
        assert max(load["ratios"]["1"]) == pytest.approx(highest, rel=0.01)


def test_a_resumed_run_is_the_whole_one_bit_for_bit(prepared, whole, tmp_path) -> None:
    """With biases that the steps before have moved."""
    events, folder = whole
    train(plan_of(prepared), tmp_path, stop_after=HALF)
    rest = train(plan_of(prepared), tmp_path, resume_from=checkpoint(tmp_path, HALF))
    assert losses(rest) == {step: loss for step, loss in losses(events).items() if step > HALF}
    expected = tensors(folder)
    assert_same_tensors(tensors(tmp_path), expected)
    (name,) = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert expected[name].dtype == torch.float32
    assert 0 < expected[name].abs().max() <= 2 * STEPS * ROUTER.bias_update


def test_the_bias_of_a_checkpoint_is_what_transformers_reads(whole) -> None:
    from transformers import AutoModelForCausalLM

    _, folder = whole
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint(folder, STEPS), dtype=torch.float32)
    (name,) = [name for name in tensors(folder) if name.endswith("e_score_correction_bias")]
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(bias, tensors(folder)[name])


def test_the_report_draws_layers_by_experts(whole, tmp_path) -> None:
    events, _ = whole
    folder = tmp_path / "run"
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as emit:
        for event in events:
            emit(event)
    record = read_run_record(folder)
    assert [load.step for load in record.expert_loads] == [2, 4]
    html = page(record, (), "run")
    assert "Load of each expert" in html and "Load over time" in html
    assert "Router/" not in html  # each metric is in a chart with a title of its own
    newest = record.expert_loads[-1].ratios["1"]
    assert html.count('class="heat ') == len({color_of(ratio) for ratio in newest})


def color_of(ratio: float) -> str:
    from bloomery.report.charts import heat_class

    return heat_class(ratio)


def test_long_runs_report_the_load_of_experts_more_seldom() -> None:
    every = 10
    steps = [step for step in range(1, 100_001) if reports_experts(step, every)]
    assert steps[:200] == list(range(10, 2001, 10))
    assert len(steps) < 900
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)


def test_the_loss_evens_the_load_of_each_layer(prepared, tmp_path) -> None:
    """Without it a few experts take most tokens. The mean of the last steps of the same small run."""
    variation = {}
    for name, router in (
        ("without", RouterPlan()),
        ("with", RouterPlan(loss=0.05, pooled=False)),
    ):
        plan = plan_of(prepared, router=router, steps=40, accumulation=1, tokens_per_step=128)
        never = {"every_steps": 40}
        plan = plan.model_copy(
            update={
                "eval": plan.eval.model_copy(update=never),
                "checkpoint": plan.checkpoint.model_copy(update=never),
            }
        )
        steps = fields(train(plan, tmp_path / name), "StepDone")[-10:]
        variation[name] = sum(step["metrics"]["router/load_variation"] for step in steps) / 10
    assert variation["with"] < 0.6 * variation["without"]
    assert variation["with"] < 0.5
