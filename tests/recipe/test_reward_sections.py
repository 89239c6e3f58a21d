"""Objectives that generate completions, and their rewards: what is read, and what is refused before a run."""

import pytest

from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.plan.choices import reference_of
from bloomery.plan.unsupported import refuse_recipe
from bloomery.plan.unsupported_objectives import refuse_reward_misfits
from bloomery.recipe.load import dump_recipe, load_recipe
from bloomery.recipe.rewards import ModelReward, PythonReward, VerifierReward
from bloomery.recipe.schema import Recipe

HEAD = (
    "model: {preset: go-coder-tiny}\ntokenizer: {train: {vocab_size: 300}}\ndata: {path: a.jsonl}\n"
)
REWARDS = """
rewards:
  - {python: "my_rewards.py:score", weight: 2.0, timeout: 5s}
  - {verifier: exact_match, column: answer, name: exact}
  - {model: runs/my-reward}
"""


@pytest.fixture
def read(tmp_path):
    def load(text: str) -> Recipe:
        (tmp_path / "mine.yaml").write_text(HEAD + text)
        return load_recipe(tmp_path / "mine.yaml").recipe

    return load


def test_rewards_are_read_and_survive_a_dump(read, tmp_path):
    rewards = read("objective: grpo\n" + REWARDS).rewards
    script = f"{tmp_path}/my_rewards.py:score"
    assert rewards == [
        PythonReward(python=script, weight=2.0, timeout=Duration(5.0, "seconds")),
        VerifierReward(verifier="exact_match", column="answer", name="exact"),
        ModelReward(model="runs/my-reward"),
    ], "a file is relative to the recipe"
    assert rewards[1].timeout == Duration(60.0, "seconds")
    loaded = load_recipe(tmp_path / "mine.yaml")
    (tmp_path / "copy.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "copy.yaml").recipe == loaded.recipe
    dumped = loaded.recipe.model_dump_json(by_alias=True)
    assert Recipe.model_validate_json(dumped) == loaded.recipe


def test_defaults_are_those_of_trl(read):
    grpo = read("objective: grpo").objective
    rloo = read("objective: rloo").objective
    assert (grpo.beta, grpo.num_generations) == (0.0, 8)
    assert (rloo.beta, rloo.num_generations) == (0.05, 2)
    trl = pytest.importorskip("trl")
    differing = {"max_completion_length", "steps_per_generation"}  # the contract, and other units
    for objective, config in ((grpo, trl.GRPOConfig), (rloo, trl.RLOOConfig)):
        defaults = {name: field.default for name, field in config.__dataclass_fields__.items()}
        shared = (set(type(objective).model_fields) & set(defaults)) - differing
        assert {"beta", "epsilon", "num_iterations", "temperature", "top_p"} <= shared
        for name in shared:
            value = getattr(objective, name)
            unset = {"top_k": 0, "min_p": None}  # as TRL writes "off"
            if name in unset and value in (None, 0.0):
                assert defaults[name] == unset[name]
            else:
                assert value == defaults[name], name


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ("[{pyton: 'a.py:f'}]", "a reward with python, verifier, model, function or plugin"),
        ("[score]", "a reward with python, verifier, model, function or plugin"),
        ("[{python: a.py}]", "FILE:FUNCTION"),
        ("[{python: 'a.py:my score'}]", "FILE:FUNCTION"),
        ("[{verifier: mth}]", "did you mean math"),
        ("[{python: 'a.py:f', wieght: 1}]", "no such key: rewards.0.wieght"),
        ("[{python: 'a.py:f', timeout: soon}]", "rewards.0.timeout"),
    ],
)
def test_a_mistake_in_a_reward_is_named(read, rewards, problem):
    with pytest.raises(UserError, match=problem) as told:
        read(f"objective: grpo\nrewards: {rewards}\n")
    assert "mine.yaml line 5" in told.value.where


MISFITS = {
    "rewards without completions": ("objective: dpo", "rewards score generated completions"),
    "completions without rewards": ("objective: rloo\nrewards: []", "rloo needs rewards"),
    "a part of a group": (
        "objective: grpo\ntrain: {batch_size: 12}",
        "12 completions, which is no multiple of the 8",
    ),
    "no length": (
        "objective: grpo\nrewards: [{verifier: soft_overlong}]",
        "soft_overlong needs max_completion_len",
    ),
    "no cache": (
        "objective: grpo\nrewards: [{verifier: soft_overlong, max_completion_len: 512}]",
        "soft_overlong needs soft_punish_cache",
    ),
    "a cache that is too large": (
        "objective: grpo\nrewards: [{verifier: soft_overlong, max_completion_len: 9, soft_punish_cache: 10}]",
        "soft_punish_cache of 10 tokens, and max_completion_len is 9",
    ),
    "a length that none reaches": (
        "objective: grpo\nrewards: [{verifier: soft_overlong, max_completion_len: 999, soft_punish_cache: 10}]",
        "of more than 989 tokens, and none has more than 512",
    ),
    "no room": (
        "objective: {kind: grpo, max_completion_length: 1024}",
        "leave no room for a prompt in sequences of 1,024",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_settings_that_contradict_each_other_are_refused(read, case):
    text, problem = MISFITS[case]
    recipe = read(text + ("" if "rewards:" in text else REWARDS))
    with pytest.raises(UserError, match=problem) as told:
        refuse_reward_misfits(recipe)
    assert told.value.fix
    assert told.value.code == 2


def test_one_completion_is_no_group(read):
    with pytest.raises(UserError, match="at least 2"):
        read("objective: {kind: grpo, num_generations: 1}" + REWARDS)


def test_ppo_has_the_defaults_of_trl_and_one_completion_a_prompt(read):
    """Those of PPOConfig in TRL 1.4, which has no such trainer any more."""
    ppo = read("objective: ppo").objective
    assert ppo.num_generations == 1
    assert (ppo.num_iterations, ppo.temperature, ppo.kl_coef) == (4, 0.7, 0.05)
    assert (ppo.gamma, ppo.lam, ppo.vf_coef) == (1.0, 0.95, 0.1)
    assert (ppo.cliprange, ppo.cliprange_value, ppo.kl_estimator) == (0.2, 0.2, "k1")
    assert not ppo.whiten_rewards and not ppo.missing_eos_penalty
    with pytest.raises(UserError, match="num_generations: must be 1, not 8"):
        read("objective: {kind: ppo, num_generations: 8}" + REWARDS)
    for key in ("beta: 0.1", "epsilon: 0.1", "mask_truncated_completions: true"):
        with pytest.raises(UserError, match="no such key"):
            read(f"objective: {{kind: ppo, {key}}}" + REWARDS)


@pytest.mark.parametrize("kind", ["ppo", "rloo", "{kind: grpo, beta: 0.1}"])
def test_a_divergence_is_measured_with_all_weights_trained(read, kind):
    recipe = read(f"objective: {kind}" + REWARDS)
    refuse_reward_misfits(recipe)
    assert recipe.objective.reference == "auto"
    assert reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value == "copy"


def test_rewards_without_completions_are_refused_before_a_run(read):
    with pytest.raises(UserError, match="rewards score generated completions"):
        refuse_recipe(read("objective: sft" + REWARDS))
