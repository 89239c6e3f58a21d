"""Six faults that keep a loss from falling are named within two hundred steps; sound runs are left in peace."""

import pytest
from faulty_runs import (
    all_masked,
    deaf_optimizer,
    frozen_blocks,
    healthy_plan,
    labels_after,
    labels_own,
    said,
    shuffled_inputs,
    shuffled_tokens,
    through_the_loader,
    through_the_objective,
)
from plans_for_tests import tiny_config, tiny_plan
from rollouts_for_tests import plan_of, write_recipe
from runs_of_the_loop import crossed

from bloomery.recipe.objectives import Preference
from bloomery.view.planned_figures import diagnosis_facts

LLAMA = tiny_config(vocab_size=300, num_layers=1, family="llama", qk_norm="none")
WAYS = {"loader": through_the_loader, "objective": through_the_objective}


@pytest.mark.parametrize(
    ("changes",),
    crossed(
        {
            "plain": {},
            "seed": {"train": {"seed": 7}},
            "llama": {"config": LLAMA},
            "muon": {"optimizer": {"kind": "muon", "learning_rate": 0.005}},
        },
        quick="plain",
    ),
)
def test_nothing_is_said_of_a_sound_run(prepared, tmp_path, changes):
    assert said(healthy_plan(prepared, **changes), tmp_path / "run") == ()


def test_a_rate_a_hundred_times_too_high(prepared, tmp_path):
    (sentence,) = said(
        healthy_plan(prepared, optimizer={"learning_rate": 1.0}, train={"steps": 60}),
        tmp_path / "run",
    )
    assert (
        "the learning rate is too high" in sentence and "times the size of the weights" in sentence
    )
    assert "set optimizer.learning_rate=0.01 (now 1)" in sentence


def test_a_rate_a_thousand_times_too_low(prepared, tmp_path):
    (sentence,) = said(healthy_plan(prepared, optimizer={"learning_rate": 1e-5}), tmp_path / "run")
    assert "the learning rate is too low" in sentence and "3.8% at most in 200 steps" in sentence
    assert "set optimizer.learning_rate=0.003 (now 1e-05)" in sentence  # the healthy run has 0.01


@pytest.mark.parametrize(
    ("way", "asked"),
    crossed(
        {way: way for way in WAYS},
        {
            "own": (labels_own, "at the same position"),
            "after": (labels_after, "the token after the next"),
        },
        quick="loader-own objective-after",
    ),
)
def test_labels_off_by_one(prepared, tmp_path, monkeypatch, way, asked):
    change, asked_for = asked
    WAYS[way](monkeypatch, change)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert sentence.startswith("the labels are off by one") and asked_for in sentence
    assert (
        "100% of the labels are" in sentence and "bloomery prepare RECIPE --preview 3" in sentence
    )


def test_everything_masked(prepared, tmp_path, monkeypatch):
    through_the_loader(monkeypatch, all_masked)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert (
        "all labels are masked" in sentence and "0 loss tokens of 128 tokens per step" in sentence
    )


def test_shuffled_tokens(prepared, tmp_path, monkeypatch):
    through_the_loader(monkeypatch, shuffled_tokens)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert "look shuffled" in sentence and "token entropy 3.20" in sentence


def test_tokens_shuffled_under_their_labels(prepared, tmp_path, monkeypatch):
    through_the_loader(monkeypatch, shuffled_inputs)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert "the labels are not the next tokens" in sentence and "shuffled" in sentence


def test_frozen_weights(prepared, tmp_path, monkeypatch):
    frozen_blocks(monkeypatch)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert (
        "45% of the parameters do not change: no gradient reaches them" in sentence
        and "model.layers." in sentence
    )


def test_weights_that_the_optimizer_forgot(prepared, tmp_path, monkeypatch):
    deaf_optimizer(monkeypatch)
    (sentence,) = said(healthy_plan(prepared, train={"steps": 60}), tmp_path / "run")
    assert "100% of the parameters do not change: they have gradients but no update" in sentence


def test_facts_of_pairs_are_not_those_of_text():
    pairs = tiny_plan().model_copy(update={"objective": Preference(kind="dpo")})
    told, text = diagnosis_facts(pairs, None), diagnosis_facts(tiny_plan(), None)
    assert (told.vocab_size, told.fresh, told.falls) == (None, False, False)
    assert (text.vocab_size, text.fresh, text.falls) == (97, True, True)


@pytest.mark.soak
def test_a_constant_reward_is_named_and_not_the_weights(tmp_path):
    """No advantage, no gradient: every parameter stays as it is, and no weight is at fault."""
    folder = write_recipe(tmp_path)
    rewards = "def spaces(completions, **_):\n    return [0.1 for _ in completions]\n"
    (folder / "my_rewards.py").write_text(rewards)
    edits = ("train.max_steps=12", "eval.every=none", "checkpoint.every=12")
    (sentence,) = said(plan_of(folder, *edits), tmp_path / "run")
    assert "all completions of a prompt have one reward (0.1 for every completion" in sentence
