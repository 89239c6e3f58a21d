"""Losses, gradient norms and advantages of runs with rewards, recomputed from the run folder alone.

Oracle: transformers reads the checkpoints (with PEFT where they are adapters), and `_compute_loss` of TRL gets their
log-probabilities of completions/*.jsonl. The run folder has a checkpoint of every step.
"""

import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rollouts_for_tests import plan_of, write_recipe
from safetensors.torch import load_file, save_file
from torch import Tensor

from bloomery.data.order import mix
from bloomery.monitor.events import EventLog, StepDone, last_per_step, read_events
from bloomery.plan.store import read_plan, write_plan
from models_for_tests import make_model
from ranks import train

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when one of these is imported
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

NEAR = 1e-5


@dataclass(frozen=True)
class Completions:
    """A rollout as padded rows: prompts on the left, completions on the right."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    sampled_logps: Tensor
    rewards: Tensor

    @classmethod
    def read(cls, file: Path) -> "Completions":
        rows = [json.loads(line) for line in file.read_text().splitlines()]

        def padded(lists, *, left=False):
            longest = max(map(len, lists))
            filled = torch.zeros(len(lists), longest, dtype=torch.tensor(lists[0]).dtype)
            mask = torch.zeros(len(lists), longest)
            for row, values in enumerate(lists):
                span = slice(longest - len(values), longest) if left else slice(0, len(values))
                filled[row, span] = torch.tensor(values)
                mask[row, span] = 1
            return filled, mask

        return cls(
            *padded([row["prompt_ids"] for row in rows], left=True),
            *padded([row["completion_ids"] for row in rows]),
            torch.tensor([row["advantage"] for row in rows]),
            padded([row["logps"] for row in rows])[0],
            torch.tensor([row["reward"] for row in rows]),
        )

    def __getitem__(self, indices: list[int]) -> "Completions":
        return Completions(*(tensor[indices] for tensor in vars(self).values()))


def load(checkpoint: Path):
    """The model of a checkpoint as transformers and PEFT read it, and whether it is an adapter."""
    if not (checkpoint / "adapter_config.json").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        # An untrained model also samples the padding token, whose embedding would have no gradient.
        model.get_input_embeddings().padding_idx = None
        return model.eval(), False
    base = json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, checkpoint, is_trainable=True).eval(), True


def logps_and_entropies(model, texts: Completions, temperature: float) -> tuple[Tensor, Tensor]:
    """Of each token of the completions."""
    ids = torch.cat([texts.prompt_ids, texts.completion_ids], 1)
    mask = torch.cat([texts.prompt_mask, texts.completion_mask], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0).long()
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logits = logits[:, texts.prompt_ids.shape[1] - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    scores = logprobs.gather(2, texts.completion_ids[..., None]).squeeze(2)
    return scores, -(logprobs.exp() * logprobs).sum(-1)


def trl_loss(objective, texts: Completions, model, old: Tensor, reference, *, rollout_tokens):
    """The loss of a step as one micro-batch of TRL, with TRL's defaults for what a recipe does not have."""
    is_rloo = objective.kind == "rloo"
    trainer_class = trl.RLOOTrainer if is_rloo else trl.GRPOTrainer
    names = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": []}
    num_generations = objective.num_generations
    names |= {"num_generations": num_generations, "per_device_train_batch_size": num_generations}
    names |= {"steps_per_generation": objective.steps_per_generation, "beta": objective.beta}
    arguments = (trl.RLOOConfig if is_rloo else trl.GRPOConfig)(**names)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            *logps_and_entropies(model, texts, objective.temperature),
            None,
        ),
        args=arguments,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        epsilon_low=objective.epsilon,
        epsilon_high=objective.epsilon_high or objective.epsilon,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            reduce=lambda tensor, reduction: tensor,
            gather=lambda tensor: tensor,
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        current_gradient_accumulation_steps=1,
        max_completion_length=objective.max_completion_length,
        beta=objective.beta,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=objective.entropy_coef != 0.0,
        entropy_coef=objective.entropy_coef,
        use_adaptive_entropy=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
    )
    inputs = {
        "prompt_ids": texts.prompt_ids,
        "prompt_mask": texts.prompt_mask,
        "completion_ids": texts.completion_ids,
        "completion_mask": texts.completion_mask,
        "advantages": texts.advantages,
        "num_items_in_batch": rollout_tokens,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "old_logps": (old * texts.completion_mask).sum(1),
    }
    if not is_rloo:
        trainer.loss_type = objective.loss_type
        trainer.importance_sampling_level = objective.importance_sampling_level
    return trainer_class._compute_loss(trainer, None, inputs)


def reference_logps(plan, model, is_adapter: bool, texts: Completions):
    """Under the base model: without the adapter, or as TRL's `create_reference_model` has it; None without KL."""
    temperature = plan.objective.temperature
    if not plan.objective.beta:
        return None
    if is_adapter:
        with torch.no_grad(), model.disable_adapter():
            return logps_and_entropies(model, texts, temperature)[0]
    start = transformers.AutoModelForCausalLM.from_pretrained(plan.model.source).eval()
    with torch.no_grad():
        return logps_and_entropies(start, texts, temperature)[0]


def trl_advantages(objective, texts: Completions, old: Tensor, reference) -> Tensor:
    """As `_generate_and_score_completions` of TRL's trainers computes them, by hand."""
    rewards = texts.rewards
    if objective.kind == "rloo" and objective.beta:
        divergences = ((old - reference) * texts.completion_mask).sum(1)
        rewards = rewards - objective.beta * divergences
    groups = rewards.view(-1, objective.num_generations)
    if objective.kind == "rloo":
        others = (groups.sum(1, keepdim=True) - groups) / (objective.num_generations - 1)
        return (groups - others).flatten()
    advantages = groups - groups.mean(1, keepdim=True)
    if objective.scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.flatten()


def assert_folder_agrees_with_trl(run_dir: Path) -> dict[int, float]:
    """Every step whose rollout has a checkpoint before it. The ratios of our loss to TRL's by step."""
    plan = read_plan(run_dir / "plan.json")
    objective = plan.objective
    events = {
        event.step: event
        for event in last_per_step(read_events(run_dir / "events.jsonl"), StepDone)
    }
    checked = {}
    for file in sorted((run_dir / "completions").glob("*.jsonl")):
        # 1. The rollout, under the model that trained when it was drawn.
        first_step = int(file.stem.partition("-")[2])
        checkpoint = run_dir / "checkpoints" / f"step-{first_step - 1:08d}"
        if not checkpoint.exists():
            continue
        rollout = Completions.read(file)
        model, is_adapter = load(checkpoint)
        with torch.no_grad():
            old, _ = logps_and_entropies(model, rollout, objective.temperature)
        reference = reference_logps(plan, model, is_adapter, rollout)
        is_token = rollout.completion_mask.bool()
        torch.testing.assert_close(
            rollout.sampled_logps[is_token], old[is_token], atol=NEAR, rtol=0
        )
        advantages = trl_advantages(objective, rollout, old, reference)
        torch.testing.assert_close(rollout.advantages, advantages, atol=NEAR, rtol=NEAR)

        # 2. Each step that trains on it, from the weights before the step.
        parts = objective.steps_per_generation
        per_step = len(rollout.advantages) // parts
        for number in range(objective.num_iterations * parts):
            step = first_step + number
            if step not in events:
                break
            pass_number, part = divmod(number, parts)
            order = sorted(
                range(len(rollout.advantages)),
                key=lambda index: mix(plan.train.seed, first_step - 1, pass_number, index),
            )
            indices = order[part * per_step : (part + 1) * per_step]
            texts = rollout[indices]
            model, _ = load(run_dir / "checkpoints" / f"step-{step - 1:08d}")
            loss = trl_loss(
                objective,
                texts,
                model,
                old[indices],
                None if reference is None else reference[indices],
                rollout_tokens=rollout.completion_mask.sum(),
            )
            loss.backward()
            norm = torch.linalg.vector_norm(
                torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
            )
            # TRL divides by the tokens of a mean step of the rollout, Bloomery by those of the step.
            scale = 1.0
            if getattr(objective, "loss_type", "") in ("dapo", "cispo"):
                scale = float(rollout.completion_mask.sum() / parts / texts.completion_mask.sum())
            event = events[step]
            assert event.loss == pytest.approx(scale * float(loss.detach()), abs=NEAR), step
            assert event.grad_norm == pytest.approx(scale * float(norm), rel=NEAR, abs=NEAR), step
            assert event.grad_norm > 1e-2, "large enough to tell"
            checked[step] = scale
    return checked


# Completions of a group differ.
REWARDS = """
def score(completion_ids, **_):
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""
LORA = (
    "adapter={kind: lora, rank: 4, alpha: 32, target_modules: [q_proj, v_proj]}",
    "optimizer.learning_rate=1e-2",
)
SECOND_PASS = ("objective.num_iterations=2", "optimizer.learning_rate=1e-3")
LOSSES = {
    "dapo": ("objective.epsilon=0.1",),
    "grpo with KL": (*LORA, "objective.loss_type=grpo", "objective.beta=0.04"),
    "dapo with KL, all weights": ("objective.beta=0.5",),
    "rloo, all weights": (
        "objective.kind=rloo",
        "objective.num_generations=4",
        "objective.beta=0.5",
    ),
    "dr_grpo": ("objective.loss_type=dr_grpo", "objective.scale_rewards=none"),
    "cispo": ("objective.loss_type=cispo", "objective.epsilon_high=1.01"),
    "GSPO": (
        "objective.loss_type=grpo",
        "objective.importance_sampling_level=sequence",
        "objective.epsilon=0.06",
    ),
    "dapo with entropy": ("objective.entropy_coef=0.2",),
    "grpo with entropy": (
        *LORA,
        "objective.loss_type=grpo",
        "objective.beta=0.04",
        "objective.entropy_coef=0.2",
    ),
    "rloo": (*LORA, "objective.kind=rloo", "objective.num_generations=4"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Starts from a folder, so that an adapter has a base that transformers reads; many completions end early."""
    folder = tmp_path_factory.mktemp("rl")
    weights = make_model(folder / "base") / "model.safetensors"
    tensors = load_file(weights)
    stop_id = json.loads((folder / "base/config.json").read_text())["eos_token_id"]
    tensors["lm_head.weight"] *= 10
    tensors["lm_head.weight"][stop_id] *= 4
    save_file(tensors, weights, {"format": "pt"})
    (folder / "varied.py").write_text(REWARDS)
    return write_recipe(folder, *from_base(folder))


def from_base(folder: Path) -> tuple[str, ...]:
    return (f"model={{from: {folder}/base}}", "tokenizer={from: same}")


def run_of(recipe: Path, run_dir: Path, *edits: str) -> Path:
    """A run folder with a checkpoint of every step."""
    settings = (
        "checkpoint={every: 1 steps, keep: 100}",
        "eval.every=none",
        "objective.temperature=0.9",
        f'rewards=[{{python: "{recipe}/varied.py:score"}}]',
        "train.max_steps=6",
    )
    plan = plan_of(recipe, *from_base(recipe), *settings, *edits)
    events = train(plan, run_dir)
    with EventLog(run_dir / "events.jsonl") as log:
        for event in events:
            log(event)
    write_plan(plan, run_dir / "plan.json")
    return run_dir


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_run_folder_has_the_losses_of_trl(recipe, tmp_path, name):
    """First and second passes of two rollouts."""
    run_dir = run_of(recipe, tmp_path, *SECOND_PASS, *LOSSES[name])
    checked = assert_folder_agrees_with_trl(run_dir)
    assert checked == {3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}
    events = last_per_step(read_events(run_dir / "events.jsonl"), StepDone)
    clipped = [
        event.metrics.get("clip_ratio/region_mean", event.metrics.get("cispo_clip_ratio"))
        for event in events
    ]
    assert clipped[::2] == [0.0, 0.0, 0.0]  # first passes
    if name in ("dapo", "cispo", "GSPO"):
        assert all(0 < share < 1 for share in clipped[1::2])


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_a_step_of_several_per_rollout_is_divided_by_its_own_tokens(recipe, tmp_path, loss_type):
    """TRL divides by the mean over the steps of the rollout: its loss is ours times the step's share of that."""
    edits = ("objective.steps_per_generation=2", f"objective.loss_type={loss_type}")
    checked = assert_folder_agrees_with_trl(run_of(recipe, tmp_path, *SECOND_PASS, *edits))
    assert list(checked) == [5, 6]
    assert not any(math.isclose(scale, 1.0) for scale in checked.values())
