"""The usual learning rates: what is warned about, and that the page shows the table that the code has."""

import re
from pathlib import Path

import pytest

from bloomery.plan.learning_rates import (
    FULL,
    LORA,
    MUON,
    OF_OPTIMIZERS,
    PEFT,
    PREFERENCES,
    PRETRAINING,
    far_rates,
    short,
)
from bloomery.plan.resolve import local_facts
from bloomery.recipe.load import load_recipe, packaged

PAGE = Path(__file__).parents[2] / "docs/how-to/hyperparameters.md"
LORA_RECIPE = "qwen2.5-1.5b-lora"


def warned(*words, width=1536, recipe=LORA_RECIPE):
    return far_rates(load_recipe(recipe, words).recipe, width=width)


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_are_within(name):
    loaded = load_recipe(name)
    width = 2048 if loaded.recipe.model.from_ else local_facts(loaded).config.hidden_size
    # These train the model of a demo.
    if name.startswith("demo-chat"):
        width = 256
    if name == "demo-rl":
        width = 128
    assert far_rates(loaded.recipe, width=width) == []


@pytest.mark.parametrize("rate", ["2", "0.02", "0.0021"])
def test_a_rate_far_above_is_warned_about_with_the_range(rate):
    (warning,) = warned(f"optimizer.learning_rate={rate}")
    assert warning.startswith(
        f"optimizer.learning_rate is {short(float(rate))}, far above the usual 1e-4 to 2e-4 for LoRA"
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


def test_the_page_shows_this_table():
    text = PAGE.read_text()
    (row,) = re.findall(r"^\| learning rate \|.*$", text, re.MULTILINE)
    assert [
        str(rates) in cell
        for rates, cell in zip((LORA, FULL, PRETRAINING), row.split("|")[3:6], strict=True)
    ] == [True] * 3
    for objective, (adapted, full) in PREFERENCES.items():
        assert f"| `{objective}` | {adapted} | {full} |" in text
    assert (
        f"{OF_OPTIMIZERS['adafactor']:g} times as much: full fine-tuning {FULL.times(25)}" in text
    )
    assert f"of the matrices: {MUON}" in text and f"other methods of PEFT take {PEFT}" in text
