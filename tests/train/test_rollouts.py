"""Runs that train on their own completions: resume, ranks, and that rewards rise. Oracle: the uninterrupted run."""

import json
from pathlib import Path

import pytest

from bloomery.data.prepare.prepare import prepare
from bloomery.hardware.detect import detect
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.recipe.load import load_recipe
from ranks import fields, losses, on_ranks, train

STEPS = 6
REWARDS = """
def spaces(completions, **_):
    return [text.count("e") / max(1, len(text)) for text in completions]
"""
RECIPE = """
extends: demo
name: rl
model: {hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 32}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: prompts.jsonl, sequence_length: 48, validation: 0.1}
objective: {kind: grpo, num_generations: 4, max_completion_length: 8}
rewards: [{python: "my_rewards.py:spaces"}]
sample: {prompts: []}
train: {max_steps: 6, batch_size: 16, micro_batch_size: 2, precision: float32}
optimizer: {kind: adamw, learning_rate: 1e-3, warmup: 1 steps}
eval: {every: 3 steps}
checkpoint: {every: 3 steps}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "rl.yaml").write_text(RECIPE)
    prepare(load_recipe(str(folder / "rl.yaml")), folder / "prepared")
    return folder


def plan_of(folder, *edits):
    loaded = load_recipe(str(folder / "rl.yaml"), [*edits, "train.compile=false"])
    facts = gather(loaded, detect(), prepared=folder / "prepared")
    return resolve(loaded, facts)


def completions(folder: Path) -> dict[str, list[dict]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "completions").iterdir())
    }


CASES = {
    "one step a rollout": [],
    "several steps a rollout": ["objective.num_iterations=2", "objective.steps_per_generation=2"],
    "rloo": ["objective.kind=rloo", "objective.num_iterations=2", "objective.beta=0"],
}


@pytest.mark.parametrize("stop_after", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case, stop_after):
    """Also where the stop is in the middle of a rollout: completions, losses and metrics bit for bit."""
    plan = plan_of(recipe, *CASES[case])
    whole = train(plan, tmp_path / "whole")
    folder = tmp_path / "stopped"
    first = train(plan, folder, stop_after=stop_after)
    checkpoint = folder / "checkpoints" / f"step-{stop_after:08d}"
    rest = train(plan, folder, resume_from=checkpoint)
    assert losses(whole).keys() == set(range(1, STEPS + 1))
    assert losses(first) | losses(rest) == losses(whole)
    assert completions(folder) == completions(tmp_path / "whole")
    metrics = [
        {event["step"]: event["metrics"] for event in fields(events, "StepDone")}
        for events in (whole, [*first, *rest])
    ]
    assert metrics[0] == metrics[1]
    rewards = [event["metrics"]["reward"] for event in fields(whole, "EvalDone")]
    assert len(rewards) == 2


def test_the_events_have_the_metrics_of_the_rewards(recipe, tmp_path):
    plan = plan_of(recipe, "objective.steps_per_generation=2")
    events = train(plan, tmp_path)
    first, second, *_ = fields(events, "StepDone")
    names = {"reward", "reward_std", "frac_reward_zero_std", "rewards/spaces/mean", "entropy"}
    assert names | {"clip_ratio/region_mean", "completions/mean_length"} <= first["metrics"].keys()
    assert "reward" not in second["metrics"]  # of the same rollout
    rows = completions(tmp_path)["step-00000001.jsonl"]
    assert len(rows) == 32
    assert first["metrics"]["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 32)
    assert 0 < first["metrics"]["entropy"] < 6
    gap = first["metrics"]["sampling/sampling_logp_difference/mean"]
    assert gap < 1e-4
    lengths = [len(row["completion_ids"]) for row in rows]
    assert first["metrics"]["completions/max_length"] == max(lengths)
    assert sum(event["tokens"] for event in fields(events, "StepDone")[-1:]) < STEPS * 16 * 48


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_copies_draw_and_train_as_one_rank_does(recipe, tmp_path, world):
    plan = plan_of(recipe, "objective.num_iterations=2")
    one = train(plan, tmp_path / "one")
    many = train(on_ranks(plan, replicate=world), tmp_path / "many")
    assert losses(many) == pytest.approx(losses(one), abs=1e-5)
    alone = completions(tmp_path / "one")["step-00000001.jsonl"]
    together = completions(tmp_path / "many")["step-00000001.jsonl"]
    for name in ("prompt_ids", "completion_ids", "reward", "logps"):
        assert [row[name] for row in together] == [row[name] for row in alone]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_rise(recipe, tmp_path, kind):
    plan = plan_of(
        recipe,
        f"objective.kind={kind}",
        "objective.beta=0",
        "objective.num_generations=8",
        "train.batch_size=64",
        "train.max_steps=40",
        "optimizer.learning_rate=0.005",
    )
    events = train(plan, tmp_path)
    rewards = [event["metrics"]["reward"] for event in fields(events, "StepDone")]
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:5]) / 5
