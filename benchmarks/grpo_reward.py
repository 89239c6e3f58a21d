"""What training with rewards gains on held-out prompts, in standard errors of the difference.

    python benchmarks/grpo_reward.py [--model tiny|smollm2] [--seeds 0 1 2] [--steps N] [--work FOLDER]

`tiny`: models of random weights, one per seed, are rewarded for the letter e; the same run with the rewards of other
completions of the rollout is the control. `smollm2`: SmolLM2-135M-Instruct with LoRA answers in JSON, judged by the
verifier `json_schema`; samples are printed. Held-out rewards are those of one completion of each held-out prompt, drawn
with the same random numbers before and after.
"""

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turns import machine

HERE = Path(__file__).parent
NEEDED = 3.0  # standard errors
SAMPLES = 8  # that are printed
LONGEST_MESSAGE = 80  # characters of a message that SmolLM2 answers

REWARDS = '''
"""The share of a completion's letters that are an e, and the same numbers given to other completions."""

import random


def share_of_e(completions, **_):
    return [text.count("e") / max(1, len(text)) for text in completions]


def shuffled(completions, **_):
    rewards = share_of_e(completions)
    random.Random("".join(completions)).shuffle(rewards)
    return rewards
'''
TINY = """
model: {from: INIT}
data: {path: prompts.jsonl, sequence_length: 64, validation: 40%, prepared: prepared-SEED}
objective: {kind: grpo, num_generations: 8, max_completion_length: 16}
rewards: [{python: "my_rewards.py:REWARD"}]
optimizer: {kind: adamw, learning_rate: 5e-3, warmup: 5 steps}
train: {max_steps: STEPS, batch_size: 64, seed: SEED}
eval: {every: none}
sample: {prompts: []}
logging: {trackers: []}
"""
INSTRUCTION = (
    "Is this message happy, sad or neutral? Reply with JSON only, like "
    '{"mood": "happy", "reply": "I am glad to hear that!"}.\n\nMessage: '
)
SMOLLM2 = """
model: {from: INIT}
data: {path: prompts.jsonl, sequence_length: 160, validation: 5%, prepared: prepared-SEED}
adapter: {kind: lora, rank: 16, alpha: 32, target_modules: all-linear}
objective: {kind: grpo, num_generations: 8, max_completion_length: 40}
rewards:
  - verifier: json_schema
    json_schema:
      type: object
      properties: {mood: {type: string}, reply: {type: string}}
      required: [mood, reply]
      additionalProperties: false
optimizer: {kind: adamw, learning_rate: 5e-4, warmup: 2 steps, schedule: constant}
train: {max_steps: STEPS, batch_size: 32, seed: SEED}
eval: {every: none}
sample: {prompts: []}
logging: {trackers: []}
"""
STEPS = {"tiny": 40, "smollm2": 14}


@dataclass(frozen=True)
class HeldOut:
    """Of each held-out prompt: its text, a completion and the reward of this."""

    prompts: list[Any]
    completions: list[str]
    rewards: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rewards)


def gain(before: HeldOut, after: HeldOut) -> dict[str, float]:
    """The difference of the means, and its standard error as if the completions were of different prompts."""
    variance = sum(
        statistics.variance(held_out.rewards) / len(held_out.rewards)
        for held_out in (before, after)
    )
    difference = after.mean - before.mean
    error = variance**0.5
    return {
        "difference": difference,
        "standard_error": error,
        "standard_errors": difference / error if error else float("inf"),
    }


@dataclass(frozen=True)
class Trained:
    """A finished run. `cpu_seconds`: of its processes; None where an earlier call of this script trained it."""

    folder: Path
    seconds: float
    cpu_seconds: float | None


def trained(folder: Path, recipe: str, name: str) -> Trained:
    """The run of a recipe of the folder; one that is finished there already is not repeated."""
    import bloomery
    from bloomery.monitor.events import RunEnded

    path = folder / f"{name}.yaml"
    run_dir = folder / "runs" / name
    is_finished = (run_dir / "metrics.json").is_file() and path.read_text() == recipe
    path.write_text(recipe)
    before = os.times()
    run = (
        bloomery.api.Run(run_dir, 0)
        if is_finished
        else bloomery.train(str(path), run_dir=run_dir, quiet=True)
    )
    after = os.times()
    if run.code != 0:
        raise SystemExit(f"{run.folder} ended with code {run.code}")
    events = run.events()
    ended = next(event for event in events if isinstance(event, RunEnded))
    cpu_seconds = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    return Trained(run.folder, ended.time - events[0].time, None if is_finished else cpu_seconds)


def held_out(run_dir: Path, plan_dir: Path, model: Path | None = None) -> HeldOut:
    """Of the run's last checkpoint, or of `model`; prompts and rewards are those of `plan_dir`, a run, too."""
    from bloomery.data.prompts import Prompts
    from bloomery.evals.rewards import complete_as_trained
    from bloomery.infer.generate import Model
    from bloomery.model.io.weights import load_decoder
    from bloomery.parallel.mesh import SINGLE_RANK
    from bloomery.plan.store import read_plan
    from bloomery.train.rl.reward_models import RewardModels
    from bloomery.train.rl.rewards import Rewards, worker_rewards
    from bloomery.train.rl.scoring import reward_entries, score_entries

    plan = read_plan(plan_dir / "plan.json")
    loaded = Model.load(run_dir, step="last")
    decoder = loaded.decoder if model is None else load_decoder(model).float().eval()
    split = Prompts(plan.data.prepared, seed=plan.train.seed, split="validation")
    prompts = [split[number] for number in range(len(split))]
    completions = complete_as_trained(decoder, loaded.tokenizer, plan, prompts)
    entries = reward_entries(loaded.tokenizer, prompts, completions)
    with (
        RewardModels(plan, SINGLE_RANK, device="cpu") as models,
        Rewards(worker_rewards(plan.rewards), columns=list(entries.columns)) as rewards,
    ):
        values, skipped = models.score(entries.prompts, entries.texts)
        scored = score_entries(entries, rewards, values, skipped)
    return HeldOut(entries.prompts, entries.texts, list(scored.totals))


def make_tiny(folder: Path, seed: int) -> Path:
    """Prompts, rewards, and a model of random weights."""
    from bloomery.data.tokenizer.training import train_tokenizer
    from bloomery.model.configs import build_config
    from bloomery.model.io.weights import fresh_decoder, model_state, write_model
    from bloomery.recipe.schema import Model, TrainTokenizer

    prompts = [f"def f{number}(x): return" for number in range(320)]
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    init = folder / f"init-{seed}"
    init.mkdir(exist_ok=True)
    source = (HERE / "turns.py").read_text().splitlines()
    tokenizer = train_tokenizer(iter(source), TrainTokenizer(vocab_size=300), init)
    model = Model(
        family="qwen3",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_positions=64,
        tie_embeddings=True,
    )
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
    config = build_config(model, vocab_size=tokenizer.vocab_size, **ids)
    write_model(model_state(fresh_decoder(config, seed=seed)), config, init)
    return init


def tiny(folder: Path, seeds: list[int], steps: int) -> dict[str, Any]:
    """A run and its control for each seed."""
    by_seed = []
    for seed in seeds:
        init = make_tiny(folder, seed)
        runs = {}
        for reward in ("share_of_e", "shuffled"):
            recipe = filled(TINY, INIT=init.name, REWARD=reward, STEPS=steps, SEED=seed)
            run = trained(folder, recipe, f"{reward}-{seed}")
            runs[reward] = run.folder
        true_rewards = runs["share_of_e"]
        start = held_out(true_rewards, true_rewards, init)
        end = held_out(true_rewards, true_rewards)
        control = held_out(runs["shuffled"], true_rewards)
        result = {
            "seed": seed,
            "prompts": len(start.rewards),
            "start": start.mean,
            "end": end.mean,
            "shuffled": control.mean,
            "above_start": gain(start, end),
            "above_shuffled": gain(control, end),
        }
        by_seed.append(result)
        print(
            f"seed {seed}: held-out reward {start.mean:.3f} -> {end.mean:.3f} "
            f"({result['above_start']['standard_errors']:.1f} standard errors), shuffled rewards {control.mean:.3f} "
            f"({result['above_shuffled']['standard_errors']:.1f}); {run.seconds:.0f} s",
            flush=True,
        )
    least = min(
        result[name]["standard_errors"]
        for result in by_seed
        for name in ("above_start", "above_shuffled")
    )
    return {"seeds": by_seed, "least_standard_errors": least, "met": least >= NEEDED}


def smollm2(folder: Path, seeds: list[int], steps: int) -> dict[str, Any]:
    """One run with LoRA per seed, and samples before and after it."""
    runpy.run_path(str(HERE.parent / "scripts" / "smollm2.py"))["make"](folder / "smollm2")
    messages = [
        json.loads(line)["messages"][0]["content"]
        for line in (folder / "smollm2" / "train.jsonl").read_text().splitlines()
    ]
    rows = [
        {"prompt": [{"role": "user", "content": INSTRUCTION + message}]}
        for message in messages
        if len(message) <= LONGEST_MESSAGE
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_seed = []
    for seed in seeds:
        recipe = filled(SMOLLM2, INIT="smollm2/model", STEPS=steps, SEED=seed)
        run = trained(folder, recipe, f"smollm2-{seed}")
        start = held_out(run.folder, run.folder, folder / "smollm2" / "model")
        end = held_out(run.folder, run.folder)
        result = {
            "seed": seed,
            "prompts": len(start.rewards),
            "start": start.mean,
            "end": end.mean,
            "above_start": gain(start, end),
            "seconds": run.seconds,
            "cpu_seconds": run.cpu_seconds,
            "samples": [
                {
                    "prompt": start.prompts[number][-1]["content"],
                    "before": start.completions[number],
                    "after": end.completions[number],
                    "rewards": [start.rewards[number], end.rewards[number]],
                }
                for number in range(SAMPLES)
            ],
        }
        by_seed.append(result)
        for sample in result["samples"]:
            print(
                f"\n{sample['prompt']!r}\n  before: {sample['before']!r}\n  after:  {sample['after']!r}"
            )
        print(
            f"\nseed {seed}: held-out reward {start.mean:.3f} -> {end.mean:.3f} "
            f"({result['above_start']['standard_errors']:.1f} standard errors), {steps} steps in "
            f"{run.seconds / 60:.1f} minutes"
            + (f", {run.cpu_seconds / 60:.1f} of processor time" if run.cpu_seconds else ""),
            flush=True,
        )
    least = min(result["above_start"]["standard_errors"] for result in by_seed)
    return {"seeds": by_seed, "least_standard_errors": least, "met": least >= NEEDED}


def filled(recipe: str, **values: object) -> str:
    for name, value in values.items():
        recipe = recipe.replace(name, str(value))
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(STEPS), default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--work", type=Path, help="keeps prompts, runs and models here")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun = time.perf_counter()
    steps = given.steps or STEPS[given.model]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.work or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if given.model == "tiny":
            result = tiny(folder, given.seeds or [0, 1, 2], steps)
        else:
            result = smollm2(folder, given.seeds or [0], steps)
    verdict = "met" if result["met"] else "NOT MET"
    print(
        f"at least {result['least_standard_errors']:.1f} standard errors (>= {NEEDED:g}: {verdict})"
    )
    report = {
        "machine": machine(),
        "steps": steps,
        "recipe": TINY if given.model == "tiny" else SMOLLM2,
        **result,
        "seconds": time.perf_counter() - begun,
    }
    suffix = "" if given.model == "tiny" else f"_{given.model}"
    out = given.out or HERE / "results" / f"grpo_reward{suffix}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['seconds']:.0f} s in all; written to {out}")
    sys.exit(0 if result["met"] else 1)


if __name__ == "__main__":
    main()
