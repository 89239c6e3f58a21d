"""Every fine-tuning recipe has a twin that trains here in under a minute and predicts what it has not seen better."""

import json
import math
import os
import random

import pytest
from runs_of_bloomery import Bloomery

from bloomery.monitor.events import EvalDone, StepDone, read_events
from bloomery.recipe.load import load_recipe, packaged

TWINS = sorted(
    name
    for name in packaged()
    if f"{name}-tiny" in packaged() and load_recipe(name).recipe.model.from_
)
WHOLE = [pytest.param(name, marks=pytest.mark.soak) for name in TWINS]
# of a model that knows nothing: every token, a coin
FIRST = {"token": math.log(2048), "pair": math.log(2)}
LEARNS_MORE = {"rank", "alpha", "modules_to_save"}  # a random base has nothing to adapt


def test_every_recipe_that_starts_from_a_model_has_a_twin():
    sizes = {
        "qwen2.5-0.5b-lora",
        "qwen2.5-3b-lora",
        "qwen2.5-0.5b-dpo-lora",
        "qwen3-0.6b-lora",
        "qwen3-1.7b-lora",
        "qwen3-8b-qlora",
        "gemma3-1b-lora",
        "llama3.2-1b-lora",
    }
    sizes |= {"llama3.2-3b-qlora"}  # of a family and by a method that other twins have
    asked = {
        name for name in packaged() if (load_recipe(name).recipe.model.from_ or "").count("/") == 1
    }
    # tests/train/test_ranks_recipes.py has theirs
    several = {"llama3.1-8b-full-8gpu", "llama2-70b-lora-8gpu"}
    assert asked - sizes - several == set(TWINS)
    assert len(TWINS) == 48


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_its_recipe_but_for_size_and_data(name):
    recipe, twin = (load_recipe(which).recipe for which in (name, f"{name}-tiny"))
    assert twin.model.from_ is None or twin.model.from_.startswith("random:")
    assert twin.data.builtin is not None
    assert recipe.objective.kind == twin.objective.kind
    assert recipe.quantize == twin.quantize
    assert recipe.vision == twin.vision
    theirs, ours = recipe.adapter.model_dump(), twin.adapter.model_dump()
    assert {key for key in theirs if theirs[key] != ours[key]} <= LEARNS_MORE
    kept = (
        "kind",
        "state_dtype",
        "fused_backward",
        "stochastic_rounding",
        "paged",
        "offload",
        "schedule",
        "weight_decay",
    )
    assert all(getattr(recipe.optimizer, key) == getattr(twin.optimizer, key) for key in kept)
    assert recipe.train.precision == twin.train.precision


@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_names_its_data_with_the_licence_and_how_to_take_other(name):
    text = packaged()[name].read_text(encoding="utf-8")
    comment = text[: text.index("\nmodel:")]
    path = load_recipe(name).recipe.data.path
    assert path.startswith("hub:") and path.removeprefix("hub:") in comment
    assert any(licence in comment for licence in ("Apache-2.0", "MIT", "CC BY"))
    assert f"Your data: bloomery train {name} data.path=" in comment
    assert "Model license: " in comment


def test_a_twin_learns_small_pairs(tmp_path):
    """In place of its own data, which takes as long to prepare as all nine to train for this: `make soak` has that."""
    draw = random.Random(0)
    says = lambda ending: " ".join(draw.choices(["we", "saw", "a", "tree", "there"], k=12)) + ending  # noqa: E731
    rows = [
        {"prompt": says(""), "chosen": says(" yes"), "rejected": says(" no")} for _ in range(200)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "data.builtin=null",
        "data.path=pairs.jsonl",
        "tokenizer.train.vocab_size=300",
        "train.max_steps=8",
        "train.tokens_per_step=1024",
        "train.micro_batch_size=1",
    )
    done = Bloomery(tmp_path).run(
        "train", "qwen2.5-1.5b-reward-lora-tiny", "--run-dir", "run", *words
    )
    assert done.returncode == 0, done.stderr
    exams = [
        event.loss
        for event in read_events(tmp_path / "run/events.jsonl")
        if isinstance(event, EvalDone)
    ]
    assert exams[-1] < FIRST["pair"] - 0.005


@pytest.mark.soak
def test_the_twin_with_rewards_begins_with_digits(tmp_path):
    """On few steps of few completions: the reward of random weights is near the share of digits among all tokens."""
    done = Bloomery(tmp_path).run(
        "train",
        "qwen2.5-1.5b-grpo-tiny",
        "--run-dir",
        "run",
        "train.max_steps=24",
        "train.batch_size=24",
        "optimizer.learning_rate=1e-2",
        "optimizer.warmup=2 steps",
        "data.chat.template=none",
        "data.sequence_length=32",
        "eval.every=6 steps",
        "checkpoint.every=24 steps",
    )
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run/events.jsonl"))
    rewards = [event.metrics["reward"] for event in events if isinstance(event, EvalDone)]
    assert rewards[-1] > 0.5


@pytest.mark.parametrize("name", WHOLE)
def test_a_twin_trains_in_under_a_minute_and_lowers_its_held_out_loss(name, tmp_path):
    began = sum(os.times()[2:4])  # of children
    stages = load_recipe(f"{name}-tiny").recipe.parallel.pipeline
    devices = () if stages == "auto" else ("-d", ",".join(["cpu"] * stages))
    done = Bloomery(tmp_path).run("train", f"{name}-tiny", "--run-dir", "run", *devices)
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run/events.jsonl"))
    exams = [event for event in events if isinstance(event, EvalDone)]
    unit = load_recipe(f"{name}-tiny").recipe.objective.spec.loss_unit
    kind = "token" if unit == "label" else unit  # of distillation, both in nats
    if kind == "completion":
        # Held-out prompts, against the completions of random weights.
        first = next(event for event in events if isinstance(event, StepDone))
        assert exams[-1].metrics["reward"] > first.metrics["reward"] + 0.2
    else:
        assert exams[-1].loss < FIRST[kind] - (0.005 if kind == "pair" else 1.0)
        assert kind == "pair" or exams[-1].loss < exams[0].loss
    assert json.loads((tmp_path / "run/metrics.json").read_text())
    assert sum(os.times()[2:4]) - began < 60


@pytest.mark.soak
def test_the_three_steps_of_rlhf_follow_each_other(tmp_path):
    """The commands of the comment of llama2-7b-rlhf, with small models: fine-tuning, a reward model, PPO."""
    rows = [{"prompt": f"Write a function that adds {number}."} for number in range(80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (
        "data.path=prompts.jsonl",
        "data.validation=10%",
        "data.sequence_length=128",
        "objective.max_completion_length=16",
        "train.max_steps=8",
        "train.batch_size=16",
        "train.micro_batch_size=4",
    )
    commands = (
        ("train", "llama2-7b-lora-qa-tiny", "--run-dir", "runs/rlhf-sft", "train.max_steps=10"),
        ("export", "runs/rlhf-sft", "--to", "merged", "--out", "models/rlhf-sft"),
        (
            *("train", "qwen2.5-1.5b-reward-lora-tiny", "--run-dir", "runs/rlhf-reward"),
            *("train.max_steps=10",),
        ),
        (
            *("train", "llama2-7b-rlhf", "--run-dir", "runs/rlhf", "model.from=models/rlhf-sft"),
            *("rewards=[{model: runs/rlhf-reward}]", *small),
        ),
        ("export", "runs/rlhf", "--to", "adapter", "--out", "adapter"),
    )
    for words in commands:
        done = Bloomery(tmp_path).run(*words)
        assert done.returncode == 0, done.stderr
    events = read_events(tmp_path / "runs/rlhf/events.jsonl")
    metrics = [event.metrics for event in events if isinstance(event, StepDone)]
    # The reward model gives scores, and the first rollout is the fine-tuned model's own.
    assert "rewards/rlhf-reward/mean" in metrics[0]
    assert metrics[0]["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[4]["objective/kl"] != 0
    assert not any("value_head" in path.name for path in (tmp_path / "adapter").iterdir())
