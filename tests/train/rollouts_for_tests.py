"""A tiny recipe whose runs train on their own completions, and what tests read of such runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from device_for_tests import on_device
from ranks import fields, losses, train

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
train: {max_steps: 6, batch_size: 16, micro_batch_size: 4, precision: float32}
optimizer: {kind: adamw, learning_rate: 1e-3, warmup: 1 steps}
eval: {every: 3 steps}
checkpoint: {every: 3 steps}
"""


def write_recipe(folder: Path, *edits: str) -> Path:
    """The folder with prompts, a reward, a recipe and the prompts as prepared with these edits."""
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "rl.yaml").write_text(RECIPE)
    prepare(load_recipe(str(folder / "rl.yaml"), edits), folder / "prepared")
    return folder


def write_teacher(folder: Path, *edits: str) -> Path:
    """Another model than that of the recipe in `folder` with these edits, with the tokenizer of its dataset."""
    teacher = folder / "teacher"
    teacher.mkdir()
    load_tokenizer(folder / "prepared").save(teacher)
    config = replace(plan_of(folder, *edits).model.config, num_layers=3, initializer_range=0.2)
    write_model(model_state(fresh_decoder(config, seed=7)), config, teacher)
    return teacher


def plan_of(folder: Path, *edits: str, threads: int = 1) -> RunPlan:
    """Of one thread: several wait for each other on a crowded machine."""
    loaded = load_recipe(str(folder / "rl.yaml"), [*edits, "train.compile=false"])
    plan = on_device(resolve(loaded, gather(loaded, detect(), prepared=folder / "prepared")))
    return plan.model_copy(update={"train": plan.train.model_copy(update={"threads": threads})})


def completions(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The completions of each rollout, by the name of its file."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run_dir / "completions").iterdir())
    }


def metrics(events: list[Any]) -> dict[int, dict[str, float]]:
    """Of each step; of one that was repeated, those of the last time."""
    return {event["step"]: event["metrics"] for event in fields(events, "StepDone")}


def assert_same_training(
    run_dir: Path, events: list[Any], other_dir: Path, others: list[Any]
) -> None:
    """To the bit: losses, metrics, held-out rewards, completions, weights and optimizer states."""
    assert losses(events) == losses(others)
    assert metrics(events) == metrics(others)
    held_out = [
        {event["step"]: event["metrics"] for event in fields(run, "EvalDone")}
        for run in (events, others)
    ]
    assert held_out[0] == held_out[1]
    assert completions(run_dir) == completions(other_dir)
    last = max(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    tensors = sorted(
        path.relative_to(run_dir)
        for path in (run_dir / "checkpoints" / last).rglob("*.safetensors")
    )
    assert len(tensors) >= 2
    for path in tensors:
        assert (run_dir / path).read_bytes() == (other_dir / path).read_bytes(), path


def assert_resumes_to_the_same_bits(
    plan: RunPlan,
    folder: Path,
    *,
    stop_after: int = 3,
    undisturbed: tuple[Path, list[Any]] | None = None,
    train: Callable[..., list[Any]] = train,
) -> list[Any]:
    """A run that stops after some steps and resumes is the undisturbed one, whose events are returned.

    `undisturbed`: its folder and its events, where it has been trained already. `train`: as that of `ranks`.
    """
    if undisturbed is None:
        undisturbed = folder / "undisturbed", train(plan, folder / "undisturbed")
    stopped = folder / "stopped"
    before = train(plan, stopped, stop_after=stop_after)
    checkpoint = stopped / "checkpoints" / f"step-{stop_after:08d}"
    after = train(plan, stopped, resume_from=checkpoint)
    assert losses(undisturbed[1]).keys() == set(range(1, plan.train.steps + 1))
    assert_same_training(stopped, [*before, *after], *undisturbed)
    return undisturbed[1]
