"""Runs of PPO: resume, ranks, micro-batches, what a checkpoint holds. Oracles: the uninterrupted run, its own files."""

import json
import time

import pytest
import torch
from rollouts_for_tests import (
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
    write_recipe,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bloomery.train.rl.policy_scores import PolicyScores
from bloomery.train.rl.ppo import TokenRewarding
from ranks import fields, losses, on_ranks, train

PPO = ["objective={kind: ppo, num_generations: 1, max_completion_length: 8, num_iterations: 2}"]
FULL = [*PPO, "objective.kl_coef=0"]
LORA = [*PPO, "adapter={kind: lora, rank: 4, dropout: 0.1}"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("ppo"))


# By name: the edits, and the step of the stop that every run of the tests tries; 0: none.
CASES = {
    "every weight": (FULL, 2),
    "lora, whitened, two steps a pass": (
        [*LORA, "objective.whiten_rewards=true", "objective.steps_per_generation=2"],
        3,
    ),
    "one pass": ([*FULL, "objective.num_iterations=1"], 0),
    "bfloat16, averaged": ([*FULL, "train.precision=bfloat16", "train.ema_decay=0.9"], 0),
    "fused into backward": (
        [*FULL, "optimizer.fused_backward=true", "train.micro_batch_size=16"],
        0,
    ),
    "nf4, float16": ([*LORA, "quantize.kind=nf4", "train.precision=float16"], 0),
    "bfloat16-pure": ([*FULL, "train.precision=bfloat16-pure"], 0),
    "peft": (
        [*FULL, "adapter={kind: peft, method: adalora, init_r: 4, target_r: 2}"],
        0,
    ),
}


@pytest.mark.parametrize(
    ("case", "stop_after"),
    [
        pytest.param(case, stop_after, marks=[] if stop_after == quick else [pytest.mark.soak])
        for case, (_, quick) in CASES.items()
        for stop_after in (2, 3)
    ],
)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case, stop_after):
    """Also where the stop is in the middle of a rollout, and the value head has been trained."""
    plan = plan_of(recipe, *CASES[case][0])
    events = assert_resumes_to_the_same_bits(plan, tmp_path, stop_after=stop_after)
    assert len(fields(events, "EvalDone")) == 2


def test_the_files_of_a_run_have_what_its_advantages_are_made_of(recipe, tmp_path):
    """From scores, log-probabilities and values: the second rollout has values that were trained."""
    plan = plan_of(recipe, *FULL, "objective.lam=0.9")
    events = train(plan, tmp_path)
    rows = completions(tmp_path)["step-00000003.jsonl"]
    assert len(rows) == 16 and "advantage" not in rows[0]
    assert any(value for row in rows for value in row["values"])
    again = TokenRewarding(kl_coef=0.0, lam=0.9)(
        [row["reward"] for row in rows],
        [row["truncated"] for row in rows],
        logps=[row["logps"] for row in rows],
        reference_logps=None,
        values=[row["values"] for row in rows],
    )
    for row, targets in zip(rows, again.targets, strict=True):
        assert len(row["values"]) == len(row["completion_ids"])
        assert row["advantages"] == pytest.approx(targets.advantages, abs=1e-6)
        assert row["returns"] == pytest.approx(targets.returns, abs=1e-6)

    third = metrics(events)[3]
    assert third["objective/scores"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
    assert third["reward"] == pytest.approx(third["objective/scores"])
    assert third["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    names = {"loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg"}
    assert names | {"val/clipfrac_avg", "entropy", "reward_std"} <= third.keys()
    # With one completion a prompt no group is without variance, and nothing may advise about it.
    assert "frac_reward_zero_std" not in third and third["reward_std"] > 0
    loss = losses(events)[3]
    expected = third["loss/policy_avg"] + plan.objective.vf_coef * third["loss/value_avg"]
    assert loss == pytest.approx(expected, abs=1e-6)


def test_a_step_does_not_wait_for_data_while_completions_are_scored(recipe, tmp_path, monkeypatch):
    """The forwards of the model and of its reference before the first step of a rollout are none of the dataset's."""
    rows_of_head = PolicyScores.rows_of_head

    def slow_rows_of_head(*arguments, **named):
        time.sleep(1.0)
        return rows_of_head(*arguments, **named)

    monkeypatch.setattr(PolicyScores, "rows_of_head", slow_rows_of_head)
    events = train(plan_of(recipe, *LORA, "train.max_steps=1"), tmp_path)
    (step,) = fields(events, "StepDone")
    assert step["step_seconds"] > 2.0
    assert step["data_wait_seconds"] < 1.0


def test_the_divergence_is_from_the_base_model(recipe, tmp_path):
    """The first rollout is the base model's own: its divergence is 0, and that of later ones is not."""
    plan = plan_of(recipe, *LORA, "optimizer.learning_rate=0.02", "objective.kl_estimator=k3")
    noted = metrics(train(plan, tmp_path))
    assert noted[1]["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert noted[5]["objective/kl"] > 1e-4
    assert noted[5]["objective/rlhf_reward"] == pytest.approx(
        noted[5]["objective/scores"] - 0.05 * noted[5]["objective/kl"], abs=1e-6
    )


def test_the_value_head_is_no_part_of_the_model(recipe, tmp_path):
    train(plan_of(recipe, *FULL), tmp_path / "full")
    folder = tmp_path / "full" / "checkpoints" / "step-00000006"
    weight = load_file(folder / "value_head.safetensors")["value_head.weight"]
    assert weight.shape == (1, 64) and weight.abs().max() > 0
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    names = load_file(folder / "optimizer.safetensors").keys()
    assert "value_head.weight.exp_avg" in names

    train(plan_of(recipe, *LORA), tmp_path / "lora")
    folder = tmp_path / "lora" / "checkpoints" / "step-00000006"
    assert load_file(folder / "value_head.safetensors")["value_head.weight"].abs().max() > 0
    adapter = load_file(folder / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter)
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] is None


@pytest.mark.parametrize(
    "edits",
    [pytest.param(FULL, id="full", marks=pytest.mark.soak), pytest.param(LORA, id="lora")],
)
def test_micro_batches_do_not_change_the_training(recipe, tmp_path, edits):
    runs = [
        train(plan_of(recipe, *edits, f"train.micro_batch_size={size}"), tmp_path / str(size))
        for size in (1, 4)
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "edits"),
    [
        pytest.param({"replicate": 2}, FULL, id="copies", marks=pytest.mark.soak),
        pytest.param({"shard": 2}, FULL, id="shards"),
        pytest.param({"shard": 2}, LORA, id="shards of lora", marks=pytest.mark.soak),
        pytest.param({"replicate": 2, "shard": 2}, FULL, id="both", marks=pytest.mark.soak),
    ],
)
def test_ranks_train_as_one_does(recipe, tmp_path, layout, edits):
    plan = plan_of(recipe, *edits)
    one = train(plan, tmp_path / "one")
    many = train(on_ranks(plan, **layout), tmp_path / "many")
    assert losses(many) == pytest.approx(losses(one), abs=1e-5)
    alone = completions(tmp_path / "one")["step-00000003.jsonl"]
    together = completions(tmp_path / "many")["step-00000003.jsonl"]
    for name in ("prompt_ids", "completion_ids", "reward"):
        assert [row[name] for row in together] == [row[name] for row in alone]
    for name in ("advantages", "values", "returns"):
        for row, other in zip(together, alone, strict=True):
            assert row[name] == pytest.approx(other[name], abs=1e-3)
    heads = [
        load_file(tmp_path / run / "checkpoints" / "step-00000006" / "value_head.safetensors")
        for run in ("one", "many")
    ]
    torch.testing.assert_close(
        heads[1]["value_head.weight"], heads[0]["value_head.weight"], rtol=0, atol=1e-3
    )


def test_a_run_of_shards_goes_on_as_one_of_copies(recipe, tmp_path):
    plan = plan_of(recipe, *FULL)
    whole = train(plan, tmp_path / "whole")
    folder = tmp_path / "moved"
    train(on_ranks(plan, shard=2), folder, stop_after=3)
    rest = train(plan, folder, resume_from=folder / "checkpoints" / "step-00000003")
    expected = {step: loss for step, loss in losses(whole).items() if step > 3}
    assert losses(rest) == pytest.approx(expected, abs=1e-5)


@pytest.mark.soak
def test_rewards_rise(recipe, tmp_path):
    plan = plan_of(
        recipe,
        *FULL,
        "train.batch_size=64",
        "train.max_steps=120",
        "objective.num_iterations=4",
        "optimizer.learning_rate=0.005",
    )
    events = train(plan, tmp_path)
    rewards = [step["reward"] for step in metrics(events).values() if "reward" in step]
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:5]) / 5
