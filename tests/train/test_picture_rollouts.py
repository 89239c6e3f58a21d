"""Rollouts of prompts with pictures: what is sampled, trained on and rewarded sees them. Oracle: transformers."""

import base64
import io
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor
from rollouts_for_tests import assert_same_training, completions, plan_of
from safetensors.torch import load_file
from test_picture_objectives import whole_logits

from bloomery.core.errors import UserError
from bloomery.data.pictures.batches import PictureLoader
from bloomery.data.pictures.encoder import saved_vision
from bloomery.data.prepare.prepare import prepare
from bloomery.data.prompts import Prompts
from bloomery.evals.evaluate import evaluate_model
from bloomery.model.heads import ScoreSettings
from bloomery.plan.store import write_plan
from bloomery.plan.types import VisionPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.rewards import ModelReward
from bloomery.report.rewards import shown_completions
from bloomery.train.objectives.objective import batch_label_scores
from bloomery.train.rl import rollout_source, sampler
from bloomery.train.rl.rollout import RolloutSample, completion_span, pack
from bloomery.train.rl.rollout_pictures import PromptReader, RolloutPictures
from bloomery.train.state import build_state
from pictures_for_tests import png, save_base
from ranks import fields, losses, on_ranks, train

RECIPE = """
name: seen
model: {from: base}
data: {path: rows, sequence_length: 160, num_proc: 1, validation: VALIDATION}
objective: {kind: KIND, num_generations: 4, max_completion_length: 4}
rewards: [{python: "my_rewards.py:right"}]
sample: {prompts: []}
train: {max_steps: 4, batch_size: 16, micro_batch_size: 2, precision: float32}
optimizer: {kind: adamw, learning_rate: 1e-2, warmup: 1 steps}
eval: {every: 2 steps}
checkpoint: {every: 1 steps}
"""
# A model that draws at random gets a third; so does one that cannot see.
REWARDS = """
def right(completion_ids, answer, **_):
    return [sum(i % 3 == a for i in ids) / len(ids) for ids, a in zip(completion_ids, answer)]
"""
COLORS = ("red", "green", "blue")


def write_recipe(folder, kind, *edits, objective="grpo", rows=None, validation="0"):
    save_base(kind, folder / "base", weights=True)
    (folder / "rows").mkdir()
    for color in COLORS:
        (folder / "rows" / f"{color}.png").write_bytes(png(color=color))
    if rows is None:
        rows = [prompt(COLORS[number % 3], number % 3, text=number) for number in range(12)]
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    recipe = RECIPE.replace("KIND", objective).replace("VALIDATION", validation)
    (folder / "rl.yaml").write_text(recipe)
    prepare(load_recipe(str(folder / "rl.yaml"), edits), folder / "prepared")
    return folder


def prompt(color, answer, *, text=""):
    parts = [{"type": "image", "image": f"{color}.png"}, {"type": "text", "text": f"Which? {text}"}]
    return {"prompt": [{"role": "user", "content": parts}], "answer": answer}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("seen"), "qwen3_vl")


def trained(recipe, folder, *edits):
    """Events and the folder of a run whose answers have no token of a picture: transformers would take it for one."""
    token = saved_vision(recipe / "prepared").vision.image_token_id
    for seed in range(8):
        run = folder / f"run-{seed}"
        events = train(plan_of(recipe, *edits, f"train.seed={seed}"), run)
        rows = [row for rollout in completions(run).values() for row in rollout]
        if not any(token in row["completion_ids"] for row in rows):
            return events, run
    raise AssertionError("every run had such an answer")


def logprobs_of(base, prepared, row, color):
    """[tokens of the completion, vocabulary], by transformers, after a prompt of which the picture has this color."""
    ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
    pictures = PictureLoader(prepared).pictures_of([png(color=color)], ids)
    whole = SimpleNamespace(tokens=ids, documents=torch.zeros_like(ids), pictures=pictures)
    first = len(row["prompt_ids"]) - 1
    return F.log_softmax(whole_logits(base, whole)[0, first:-1].float(), -1)


def sampled_logps(base, prepared, row, color):
    taken = torch.tensor(row["completion_ids"])
    return logprobs_of(base, prepared, row, color).gather(1, taken[:, None])[:, 0]


def number_of(row):
    return int(row["prompt"][0]["content"].removeprefix("<image>Which? "))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_completions_have_the_probabilities_of_transformers_with_their_pictures(kind, tmp_path):
    """And training has those that they were sampled with."""
    recipe = write_recipe(tmp_path, kind)
    events, run = trained(recipe, tmp_path, "train.max_steps=1")
    (metrics,) = (event["metrics"] for event in fields(events, "StepDone"))
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    rows = completions(run)["step-00000001.jsonl"]
    others = []
    for row in rows[::4][:3]:
        number = number_of(row)
        color, other = COLORS[number % 3], COLORS[(number + 1) % 3]
        near = sampled_logps(tmp_path / "base", tmp_path / "prepared", row, color)
        assert torch.tensor(row["logps"]) == pytest.approx(near, abs=1e-4)
        far = sampled_logps(tmp_path / "base", tmp_path / "prepared", row, other)
        others.append((torch.tensor(row["logps"]) - far).abs().max())
    assert max(others) > 1e-3

    # Pages about the run show each completion beside the picture that it is about.
    seed = int(run.name.removeprefix("run-"))
    write_plan(plan_of(recipe, "train.max_steps=1", f"train.seed={seed}"), run / "plan.json")
    ((_, shown),) = shown_completions(run)
    for completion in shown:
        color = COLORS[int(completion.prompt.rpartition(" ")[2]) % 3]
        (picture,) = completion.pictures
        jpeg = Image.open(io.BytesIO(base64.b64decode(picture.url.partition(",")[2])))
        expected = ImageColor.getrgb(color)
        difference = zip(jpeg.getpixel((20, 30)), expected, strict=True)
        assert max(abs(level - other) for level, other in difference) < 9 and jpeg.size == (40, 60)


def test_few_prompts_have_their_pictures_in_memory_at_once(recipe, tmp_path, monkeypatch):
    """Those that are decoded, not all of a rollout."""
    monkeypatch.setattr(sampler, "ROLLOUT_SLOTS", 4)
    alive = weakref.WeakSet()
    most = 0

    class Counted:
        def __init__(self, prepared):
            self.read = PromptReader(prepared)

        def __call__(self, prompt):
            nonlocal most
            made = self.read(prompt)
            alive.update(made.pictures)
            most = max(most, len(alive))
            return made

    monkeypatch.setattr(rollout_source, "PromptReader", Counted)
    train(plan_of(recipe, "train.max_steps=1", "train.batch_size=24"), tmp_path / "run")
    assert 1 <= most <= 3


def sample_of(recipe, number, completion):
    prompts = Prompts(recipe / "prepared", seed=0)
    ids = tuple(prompts[number].ids.tolist())
    return RolloutSample(ids, completion, (0.0,) * len(completion), prompt_number=number)


def test_samples_in_a_row_are_as_alone_also_with_the_token_of_a_picture(recipe):
    """A model may sample that token: it is none. The tower reads a picture of several samples once."""
    state = build_state(plan_of(recipe))
    token = saved_vision(recipe / "prepared").vision.image_token_id
    complete = RolloutPictures(recipe / "prepared", Prompts(recipe / "prepared", seed=0))
    samples = [
        sample_of(recipe, number, completion)
        for number, completion in ((0, (7, token, 8)), (1, (9, 10)), (0, (token, token, 11, 12)))
    ]

    def logps(some, length):
        batches, places = pack(some, length=length, rows=1, complete=complete)
        numbers = []
        for batch in batches:
            distinct = {sample.prompt_number for sample in some}
            assert len(batch.pictures.inputs["image_grid_thw"]) == len(distinct)
            with torch.no_grad():
                sent = batch.map_tensors(lambda tensor: tensor.to(state.model.device))
                scores = batch_label_scores(
                    state.model, sent, ScoreSettings(64), precision="float32"
                ).cpu()
            numbers += [
                scores[place.row, completion_span(sample, place)]
                for sample, place in zip(some, places, strict=True)
                if batches[place.micro_batch] is batch
            ]
        return numbers

    together = logps(samples, 160)
    alone = [logps([sample], 64)[0] for sample in samples]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert len(pack(samples, length=160, rows=1)[0]) == 1


@pytest.mark.parametrize("stop_after", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_run_that_stops_within_a_rollout_resumes_to_the_same_bits(recipe, stop_after, tmp_path):
    """Its checkpoint knows which prompts, and holds no pixels."""
    plan = plan_of(recipe, "objective.num_iterations=2", "objective.steps_per_generation=2")
    whole = train(plan, tmp_path / "whole")
    folder = tmp_path / "stopped"
    first = train(plan, folder, stop_after=stop_after)
    checkpoint = folder / "checkpoints" / f"step-{stop_after:08d}"
    rollout = load_file(checkpoint / "rollout.safetensors")
    assert len(rollout["prompt_numbers"]) == 32
    assert all(tensor.ndim == 1 and tensor.dtype != torch.uint8 for tensor in rollout.values())
    assert sum(tensor.numel() for tensor in rollout.values()) < 4000
    rest = train(plan, folder, resume_from=checkpoint)
    assert_same_training(folder, [*first, *rest], tmp_path / "whole", whole)


RANKS = {
    "copies": ({"replicate": 2}, ()),
    "shards": ({"shard": 2}, ("objective.beta=0.1",)),
    "shards, adapter": ({"shard": 2}, ("objective.beta=0.1", "adapter={kind: lora, rank: 4}")),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_train_as_one(name, recipe, tmp_path):
    axes, edits = RANKS[name]
    plan = plan_of(recipe, "objective.num_iterations=2", "train.max_steps=3", *edits)
    one = train(plan, tmp_path / "one")
    two = train(on_ranks(plan, **axes), tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    for rollout, rows in completions(tmp_path / "one").items():
        others = completions(tmp_path / "two")[rollout]
        assert [row["completion_ids"] for row in rows] == [row["completion_ids"] for row in others]


@pytest.mark.soak
def test_compiled_layers_lose_the_same(recipe, tmp_path):
    plan = plan_of(recipe, "objective.beta=0.1", "train.max_steps=2")
    compiled = plan.model_copy(update={"train": plan.train.model_copy(update={"compile": True})})
    eager_events = train(plan, tmp_path / "eager")
    compiled_events = train(compiled, tmp_path / "compiled")
    assert losses(compiled_events) == pytest.approx(losses(eager_events), abs=1e-5)


REFERENCES = {
    "grpo, copy": ["objective.beta=0.1"],
    "grpo, adapter": ["objective.beta=0.1", "adapter={kind: lora, rank: 4}"],
    "ppo": ["objective.kind=ppo", "objective.num_generations=1", "objective.num_iterations=1"],
    "rloo": ["objective.kind=rloo", "objective.beta=0.1"],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_sees_the_same_pictures(name, recipe, tmp_path):
    """Before the first step it is the model: no divergence."""
    plan = plan_of(recipe, *REFERENCES[name], "train.max_steps=2", "optimizer.learning_rate=0.1")
    events = train(plan, tmp_path / "run")
    first, second = (event["metrics"] for event in fields(events, "StepDone"))
    key = "objective/kl" if "objective/kl" in first else "kl"
    assert abs(first[key]) < 1e-5
    assert abs(second[key]) > 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("adapter", ["{kind: lora, rank: 4}", "{kind: none}"])
def test_a_reference_has_the_projector_as_it_was(adapter, recipe, tmp_path):
    """Only that is changed: the divergence is of it alone."""
    plan = plan_of(recipe, f"adapter={adapter}", "objective.beta=0.1", "train.max_steps=2")
    vision = VisionPlan(train="projector", projector_learning_rate=0.5)
    optimizer = plan.optimizer.model_copy(update={"learning_rate": 0.0})
    plan = plan.model_copy(update={"vision": vision, "optimizer": optimizer})
    events = train(plan, tmp_path / "run")
    first, second = (event["metrics"]["kl"] for event in fields(events, "StepDone"))
    assert abs(first) < 1e-8
    assert second > 1e-5


def test_a_teacher_sees_the_pictures_of_what_the_model_answers(recipe, tmp_path):
    """The loss is the divergence from it, by transformers."""
    save_base("qwen3_vl", tmp_path / "teacher", weights=True, seed=1)
    objective = "{kind: on_policy_distill, teacher: %s, max_completion_length: 4}"
    edits = (f"objective={objective % (tmp_path / 'teacher')}", "rewards=[]", "train.batch_size=4")
    events, run = trained(recipe, tmp_path, *edits, "train.max_steps=1")
    divergences = {"own": [], "others": []}
    for row in completions(run)["step-00000001.jsonl"]:
        color = COLORS[number_of(row) % 3]
        student = logprobs_of(recipe / "base", recipe / "prepared", row, color)
        for name, shown in (("own", color), ("others", COLORS[(number_of(row) + 1) % 3])):
            teacher = logprobs_of(tmp_path / "teacher", recipe / "prepared", row, shown)
            divergences[name].append((student.exp() * (student - teacher)).sum(-1))
    own, others = (torch.cat(each).mean().item() for each in divergences.values())
    assert losses(events)[1] == pytest.approx(own, abs=1e-5)
    assert abs(own - others) > 1e-4


@pytest.mark.soak
def test_a_teacher_sees_the_pictures_of_held_out_prompts(tmp_path):
    """A model that is its own teacher learns nothing."""
    recipe = write_recipe(tmp_path, "qwen3_vl", validation="0.4")
    objective = "{kind: on_policy_distill, teacher: %s, max_completion_length: 4}"
    edits = (f"objective={objective % (recipe / 'base')}", "rewards=[]", "eval.every=1 steps")
    edits += ("optimizer.learning_rate=1e-9",)
    events = train(plan_of(recipe, *edits, "train.max_steps=2"), tmp_path / "run")
    evaluated = [event["loss"] for event in fields(events, "EvalDone")]
    assert len(evaluated) >= 2
    assert [*losses(events).values(), *evaluated] == pytest.approx(
        [0.0] * (2 + len(evaluated)), abs=1e-6
    )


SEEING = """
import os

def seen(prompts, images, **_):
    assert all(prompt[0]["content"].startswith("<image>Which?") for prompt in prompts)
    return [float(os.path.basename(paths[0]) == "red.png" and os.path.isfile(paths[0])) for paths in images]
"""


def test_rewards_get_the_paths_of_pictures(recipe, tmp_path):
    (tmp_path / "seeing.py").write_text(SEEING)
    plan = plan_of(
        recipe, f"rewards=[{{python: '{tmp_path / 'seeing.py'}:seen'}}]", "train.max_steps=1"
    )
    train(plan, tmp_path / "run")
    for row in completions(tmp_path / "run")["step-00000001.jsonl"]:
        assert row["reward"] == (COLORS[number_of(row) % 3] == "red")


def test_reward_models_read_text_and_are_refused(recipe, tmp_path):
    plan = plan_of(recipe)
    reward = ModelReward(model=str(recipe / "base"))
    with pytest.raises(UserError, match="a reward model, which reads text") as raised:
        build_state(plan.model_copy(update={"rewards": [reward]}))
    assert "functions or verifiers" in raised.value.fix


def test_eval_of_a_run_is_its_own_evaluation(tmp_path):
    recipe = write_recipe(tmp_path, "qwen3_vl", validation="0.4")
    plan = plan_of(recipe, "train.max_steps=2", "adapter={kind: lora, rank: 4}")
    vision = VisionPlan(train="projector", projector_learning_rate=0.1)
    plan = plan.model_copy(update={"vision": vision})
    events = train(plan, tmp_path / "run")
    write_plan(plan, tmp_path / "run" / "plan.json")
    last = fields(events, "EvalDone")[-1]["metrics"]["reward"]
    scores, _ = evaluate_model(tmp_path / "run", None, step="last", trust_code=True)
    assert scores.reward == pytest.approx(last, abs=1e-6)
    scores, _ = evaluate_model(
        tmp_path / "run", tmp_path / "rows" / "train.jsonl", step="last", trust_code=True
    )
    assert scores.prompts == 12


@pytest.mark.soak
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_rewards_rise_with_pictures_and_not_with_those_of_other_rows(is_shuffled, tmp_path):
    pairs = [(color, number) for number, color in enumerate(COLORS)]
    if is_shuffled:
        pairs = [(color, number) for color in COLORS for number in range(3)]
    rows = [prompt(*pair) for pair in pairs] * (1 if is_shuffled else 3)
    edits = ("data.sequence_length=512", "objective.max_completion_length=1")
    recipe = write_recipe(tmp_path, "smolvlm", *edits, rows=rows)
    steps = ("train.max_steps=80", "train.batch_size=36", "train.micro_batch_size=4")
    plan = plan_of(recipe, *edits, *steps, "checkpoint.every=80 steps")
    events = train(plan, tmp_path / "run")
    rewards = [event["metrics"]["reward"] for event in fields(events, "StepDone")]
    print([round(reward, 2) for reward in rewards[::4]])
    last = sum(rewards[-10:]) / 10
    assert last < 0.45 if is_shuffled else last > 0.8
