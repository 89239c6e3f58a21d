"""The usual learning rates: what is warned about, and that the page shows the table that the code has."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.plan.plan_help import loaded, machine, reported

from bloomery.facts.objectives import OBJECTIVES
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.facts.published import published_config
from bloomery.facts.rates import rate_text
from bloomery.plan.learning_rates import (
    ADALORA,
    FULL,
    LORA,
    PEFT,
    PRETRAINING,
    far_rates,
    usual_optimizer,
    with_usual_values,
)
from bloomery.plan.made import made_recipe
from bloomery.plan.resolve import local_facts
from bloomery.recipe.load import load_recipe, load_text, packaged

PAGE = Path(__file__).parents[2] / "docs/how-to/hyperparameters.md"
LORA_RECIPE = "qwen2.5-1.5b-lora"


MUON = OPTIMIZERS["muon"].own_rate.of_new_model
CONFIG = published_config("Qwen/Qwen2.5-1.5B-Instruct")


def warned(*words, width=1536, recipe=LORA_RECIPE):
    return far_rates(load_recipe(recipe, words).recipe, replace(CONFIG, hidden_size=width))


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_are_within(name):
    loaded = load_recipe(name)
    base = loaded.recipe.model.from_ or "random:"
    config = local_facts(loaded).config if base.startswith("random:") else CONFIG
    # These train the model of a demo.
    if name.startswith("demo-chat"):
        config = replace(CONFIG, hidden_size=256)
    if name == "demo-rl":
        config = replace(CONFIG, hidden_size=128)
    assert far_rates(loaded.recipe, config) == []


@pytest.mark.parametrize("rate", ["2", "0.02", "0.0021"])
def test_a_rate_far_above_is_warned_about_with_the_range(rate):
    (warning,) = warned(f"optimizer.learning_rate={rate}")
    assert warning.startswith(
        f"optimizer.learning_rate is {rate_text(float(rate))}, far above the usual 1e-4 to 2e-4 for LoRA"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.learning_rate=0.0019"], None),
        (
            ["optimizer.learning_rate=1e-9"],
            "far below the usual 1e-4 to 2e-4 for LoRA: the model will hardly change",
        ),
        (
            ["adapter=none", "optimizer.learning_rate=1e-3"],
            "above the usual 1e-5 to 2e-5 for full fine-tuning",
        ),
        (["adapter=none", "optimizer.learning_rate=1e-4"], None),
        (["adapter=none", "optimizer.learning_rate=5e-3", "optimizer.kind=adafactor"], None),
        (
            ["objective=dpo", "optimizer.learning_rate=1e-3"],
            "above the usual 5e-6 to 5e-5 for dpo with LoRA",
        ),
        (
            ["objective=dpo", "adapter=none", "optimizer.learning_rate=1e-4"],
            "5e-7 to 5e-6 for dpo with full",
        ),
        (["adapter=dora", "optimizer.learning_rate=0.1"], "1e-4 to 2e-4 for DoRA"),
        (
            ["optimizer.kind=muon", "optimizer.muon_learning_rate=1"],
            "2e-3 to 0.05 for the matrices of muon",
        ),
    ],
)
def test_each_method_has_its_range(words, said):
    warnings = warned(*words)
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_narrow_models_take_higher_rates():
    assert warned("optimizer.learning_rate=0.005") and not warned(
        "optimizer.learning_rate=0.005", width=256
    )
    assert warned("optimizer.learning_rate=0.02", width=256)


TAUGHT = {"distill", "on_policy_distill"}
ADAPTERS = ("none", "lora", "dora", "peft")


def bare(objective, adapter="none", *, optimizer="adamw", model=None):
    """A recipe that sets no value of its optimizer."""
    section = {"kind": adapter} | ({"method": "ia3"} if adapter == "peft" else {})
    return load_text(
        json.dumps(
            {
                "model": model or {"from": "Qwen/Qwen2.5-1.5B-Instruct"},
                "data": {"path": "rows.jsonl"},
                "objective": {"kind": objective}
                | ({"teacher": "Qwen/Qwen2.5-1.5B-Instruct"} if objective in TAUGHT else {}),
                "rewards": [{"function": "score"}]
                if OBJECTIVES[objective].samples and objective not in TAUGHT
                else [],
                "adapter": section,
                "optimizer": {"kind": optimizer},
            }
        ),
        name="bare",
        source="test",
    ).recipe


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_auto_is_the_usual_value_and_nothing_warns_of_it(objective, adapter, optimizer):
    settled, choices = with_usual_values(bare(objective, adapter, optimizer=optimizer), CONFIG)
    assert set(choices) == {
        f"optimizer.{key}" for key in ("learning_rate", "weight_decay", "warmup")
    }
    assert far_rates(settled, CONFIG) == []
    # What is set stays, and is no choice.
    again, no_choices = with_usual_values(settled, CONFIG)
    assert again == settled and no_choices == {}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - TAUGHT))
def test_generated_recipes_have_the_values_of_auto(objective, adapter):
    made = made_recipe(
        "Qwen/Qwen2.5-1.5B-Instruct", None, [f"objective={objective}", f"adapter={adapter}"]
    )
    section = load_text(made.text, name="made", source="test").recipe.optimizer
    settled, _ = with_usual_values(bare(objective, adapter), CONFIG)
    for key in ("learning_rate", "weight_decay", "warmup"):
        assert getattr(section, key) == getattr(settled.optimizer, key), key


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(125e6, 6e-4), (0.99e9, 6e-4), (7e9, 3e-4), (13e9, 3e-4), (70e9, 1.5e-4)],
)
def test_larger_models_are_pretrained_at_lower_rates(parameters, rate):
    """GPT-3 of 125M, Llama 2 of 7B and 13B, and of 70B."""
    usual = usual_optimizer("pretrain", adapter="none", new_parameters=parameters)
    assert usual.rates.start == rate and usual.weight_decay == 0.1


def test_the_matrices_of_a_new_model_take_muons_rate():
    new = bare("pretrain", optimizer="muon", model={"preset": "go-coder-tiny"})
    settled, choices = with_usual_values(new, CONFIG)
    assert settled.optimizer.muon_learning_rate == MUON.low
    assert "of the matrices 2e-3" in choices["optimizer.learning_rate"].reason
    for recipe in (
        bare("sft", optimizer="muon"),
        new.model_copy(
            update={"optimizer": new.optimizer.model_copy(update={"learning_rate": 1e-3})}
        ),
    ):
        assert with_usual_values(recipe, CONFIG)[0].optimizer.muon_learning_rate is None


def test_a_recipe_that_sets_nothing_is_planned_without_a_warning_of_its_defaults():
    for sections in ({}, {"train": {"max_steps": 9}}):
        recipe = loaded(**sections)
        report = reported(recipe, machine())
        assert not [text for text in report.warnings if text.startswith(("optimizer.", "eval."))]
        assert report.plan.eval.every_steps <= report.plan.train.steps
        chosen = {choice.key: choice for choice in report.plan.choices}
        assert chosen["optimizer.learning_rate"].value == "6e-4"
        assert "pretraining" in chosen["optimizer.learning_rate"].reason


def test_the_page_shows_this_table():
    text = PAGE.read_text()
    (row,) = re.findall(r"^\| learning rate \|.*$", text, re.MULTILINE)
    assert [
        str(rates) in cell
        for rates, cell in zip((LORA, FULL, PRETRAINING), row.split("|")[3:6], strict=True)
    ] == [True] * 3
    with_rates = [spec for spec in OBJECTIVES.values() if spec.rates is not None]
    assert len(with_rates) == 10
    for spec in with_rates:
        assert f"| `{spec.kind}` | {spec.rates.adapter} | {spec.rates.full} |" in text
    assert (
        f"{OPTIMIZERS['adafactor'].rate_factor:g} times as much: full fine-tuning {FULL.times(25)}"
        in text
    )
    assert f"of the matrices: {MUON}" in text and f"AdaLoRA {ADALORA}" in text
    assert f"other methods of PEFT {PEFT}" in text
