"""Reward models as rewards. Oracle: transformers' sequence classification on the texts, as TRL scores them."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from plans_for_tests import tiny_plan

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.plan.gather import gather
from bloomery.recipe.load import load_recipe
from bloomery.recipe.rewards import ModelReward, PythonReward
from bloomery.train.rl import reward_models
from bloomery.train.rl.reward_files import changed_rewards
from bloomery.train.rl.reward_models import RewardModels
from models_for_tests import make_chat_model, make_config, make_model, make_tokenizer

PROMPTS = ["def f(x):", "def f(x):", "für ", "naïve café, 東京"]
COMPLETIONS = ["\n    return x + 1", " x", "Größe, and so on and so on", "!"]
CHAT = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_value_model(folder, seed=0, *, chat=False):
    if chat:
        make_chat_model(folder, seed=seed)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = make_tokenizer(folder)
    config = replace(make_config(tokenizer), head="values")
    write_model(model_state(fresh_decoder(config, seed=seed)), config, folder)
    return folder


@dataclass
class FakeMesh:
    """One of `world` ranks; `gathered`: what each rank handed in."""

    rank: int = 0
    world: int = 1
    gathered: list | None = None

    def all_gather_json(self, value):
        return [value] if self.gathered is None else [*self.gathered, value]


def scorer(*models, mesh=None, **data):
    rewards = tuple(
        ModelReward(model=str(model), weight=1.0 + number) for number, model in enumerate(models)
    )
    plan = tiny_plan().model_copy(update={"rewards": rewards})
    plan = plan.model_copy(update={"data": plan.data.model_copy(update=data)})
    return RewardModels(plan, mesh or FakeMesh())


def transformers_values(folder, prompts, completions):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    values = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(prompt, str):
            ids = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        else:
            turns = [*prompt, {"role": "assistant", "content": completion}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            values.append(model(torch.tensor([ids])).logits.item())
    return values


def test_values_of_texts_are_those_of_transformers(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder)
    with scorer(folder) as models:
        scores, skipped = models.score(PROMPTS, COMPLETIONS)
    expected = transformers_values(folder, PROMPTS, COMPLETIONS)
    assert scores["reward"][1] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4 and not skipped


def test_a_conversation_has_the_template_of_the_reward_model(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder, chat=True)
    with scorer(folder) as models:
        scores, _ = models.score(CHAT, COMPLETIONS)
    expected = transformers_values(folder, CHAT, COMPLETIONS)
    assert scores["reward"][1] == pytest.approx(expected, abs=1e-5)


def test_several_models_have_weights_and_are_read_once(tmp_path, monkeypatch):
    for number in range(2):
        (tmp_path / f"reward{number}").mkdir()
        make_value_model(tmp_path / f"reward{number}", seed=number)
    models = scorer(tmp_path / "reward0", tmp_path / "reward1")
    with models:
        first, _ = models.score(PROMPTS, COMPLETIONS)
        monkeypatch.setattr(reward_models, "load_used", None)
        second, _ = models.score(PROMPTS, COMPLETIONS)
    with models:  # after a rewind
        third, _ = models.score(PROMPTS, COMPLETIONS)
    assert first == second == third
    assert [weight for weight, _ in first.values()] == [1.0, 2.0]
    assert first["reward0"][1] != first["reward1"][1]


def test_ranks_share_the_forwards_and_have_the_bits_of_one(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder)
    prompts, completions = (
        PROMPTS * 5,
        [text * (1 + n % 3) for n, text in enumerate(COMPLETIONS * 5)],
    )
    with scorer(folder) as models:
        alone, _ = models.score(prompts, completions)
    of_first_rank = []

    class FirstRank(FakeMesh):
        def all_gather_json(self, value):
            of_first_rank.append(value)
            return [value]

    with (
        scorer(folder, mesh=FirstRank(0, 2)) as models,
        pytest.raises(UserError, match="nan"),  # the other rank's values are missing
    ):
        models.score(prompts, completions)
    with scorer(folder, mesh=FakeMesh(1, 2, of_first_rank)) as models:
        together, _ = models.score(prompts, completions)
    assert 0 < len(of_first_rank[0]) < len(prompts)
    assert together == alone


def test_what_cannot_be_encoded_ends_the_run_or_is_skipped(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder, chat=True)
    prompts = ["<|im_start|>user\nalready formatted", "fine"]
    with (
        scorer(folder) as models,
        pytest.raises(UserError, match=r"completion 0.*already formatted"),
    ):
        models.score(prompts, ["a", "b"])
    with scorer(folder, on_error="skip") as models:
        scores, skipped = models.score(prompts, ["a", "b"])
    assert scores["reward"][1][0] is None and scores["reward"][1][1] is not None
    assert len(skipped) == 1


def test_long_texts_and_empty_completions_have_values(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder)
    with scorer(folder) as models:
        scores, _ = models.score(["def"] * 2, ["", "x = 1\n" * 500])
    assert None not in scores["reward"][1]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: make_model(folder), "not a reward model"),
        (lambda folder: (folder / "notes.txt").write_text("x"), "neither a model nor a run"),
    ],
)
def test_the_plan_refuses_what_is_no_reward_model(tmp_path, make, problem):
    (folder := tmp_path / "reward").mkdir()
    make(folder)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 8)
    (tmp_path / "r.yaml").write_text(
        "extends: demo\n"
        "data: {path: rows.jsonl, sequence_length: 64}\n"
        "objective: {kind: grpo, max_completion_length: 8}\n"
        "rewards: [{model: ./reward}]\n"
    )
    with pytest.raises(UserError, match=problem):
        gather(load_recipe(str(tmp_path / "r.yaml")), detect(), prepared=tmp_path / "prepared")


def test_a_changed_reward_is_told_once(tmp_path):
    (folder := tmp_path / "reward").mkdir()
    make_value_model(folder)
    file = tmp_path / "mine.py"
    file.write_text("def f(**_): ...\n")
    rewards = (PythonReward(python=f"{file}:f"), ModelReward(model=str(folder)))
    plan = tiny_plan().model_copy(update={"rewards": rewards})
    assert changed_rewards(tmp_path, plan.rewards) == []
    assert changed_rewards(tmp_path, plan.rewards) == []
    file.write_text("def f(**_): return 1\n")
    (sentence,) = changed_rewards(tmp_path, plan.rewards)
    assert "the reward f changed" in sentence
    assert changed_rewards(tmp_path, plan.rewards) == []
    make_value_model(folder, seed=1)
    (sentence,) = changed_rewards(tmp_path, plan.rewards)
    assert "the reward reward changed" in sentence
