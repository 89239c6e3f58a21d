"""Runs that train on their own completions: resume, ranks, and that rewards rise. Oracle: the uninterrupted run."""

import pytest
from rollouts_for_tests import (
    STEPS,
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
    write_recipe,
)

from ranks import fields, losses, on_ranks, train


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("rl"))


CASES = {
    "one step a rollout": [],
    "several steps a rollout": ["objective.num_iterations=2", "objective.steps_per_generation=2"],
    "rloo": ["objective.kind=rloo", "objective.num_iterations=2", "objective.beta=0"],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case, stop_after):
    """Also where the stop is in the middle of a rollout: completions, losses and metrics bit for bit."""
    plan = plan_of(recipe, *CASES[case])
    events = assert_resumes_to_the_same_bits(plan, tmp_path, stop_after=stop_after)
    rewards = [event["metrics"]["reward"] for event in fields(events, "EvalDone")]
    assert len(rewards) == 2


LORA = "adapter={kind: lora, rank: 4, dropout: 0.1}"
# By name: edits, and how far the log-probabilities of generation and training may be apart.
NUMBERS = {
    "lora": ([LORA], 1e-5),
    "lora and norms": (["adapter={kind: lora, rank: 4, modules_to_save: [norms]}"], 1e-5),
    "dora": (["adapter={kind: dora, rank: 4, dropout: 0.1}"], 1e-5),
    "nf4": ([LORA, "quantize.kind=nf4"], 1e-5),
    "int8": ([LORA, "quantize.kind=int8"], 2e-2),
    "int8, bfloat16": ([LORA, "quantize.kind=int8", "train.precision=bfloat16"], 2e-2),
    "bfloat16": (["train.precision=bfloat16"], 2e-2),
    "lora, bfloat16": (["train.precision=bfloat16", LORA], 2e-2),
    "bfloat16-pure": (["train.precision=bfloat16-pure"], 2e-2),
    "float16": (["train.precision=float16"], 2e-3),
    "lora, float16": (["train.precision=float16", LORA], 2e-3),
    "nf4, float16": (["train.precision=float16", LORA, "quantize.kind=nf4"], 2e-3),
}
QUICK = ("int8, bfloat16", "float16", "lora, float16")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in NUMBERS],
)
def test_every_precision_and_adapter_resumes_and_samples_with_its_new_weights(
    recipe, tmp_path, name
):
    """A generator with the weights of an earlier rollout, or with dropout, would be far from the model that trains."""
    edits, near = NUMBERS[name]
    # Steps large enough that the weights of the rollout before would give other probabilities.
    edits = [*edits, "objective.num_iterations=2", "optimizer.learning_rate=0.02"]
    events = assert_resumes_to_the_same_bits(plan_of(recipe, *edits), tmp_path)
    for step in metrics(events).values():
        assert 0 < step["sampling/sampling_logp_difference/mean"] < near
        # Beside int8 weights the generator rounds the head to int8, too: rare tokens move further.
        apart = 1.25 if "int8" in name else 1.1
        assert step["sampling/importance_sampling_ratio/min"] > 1 / apart
        assert step["sampling/importance_sampling_ratio/max"] < apart


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
