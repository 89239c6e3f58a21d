"""The pages name every packaged recipe, and show what the commands print."""

import re
from pathlib import Path

import pytest
from words_of_docs import ROOT, shown_equals

from bloomery.cli import main
from bloomery.facts.counting import parameter_count
from bloomery.facts.objectives import OBJECTIVES
from bloomery.plan.resolve import local_facts
from bloomery.recipe.load import NEWEST_FIRST, by_release, load_recipe, packaged, twins


def test_the_page_on_recipes_lists_each_of_them_once():
    text = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8")
    listed = text.partition("$ bloomery recipes list\n")[2].partition("\n```")[0]
    names = [line.split()[0] for line in listed.partition("\n\n")[0].splitlines()[1:]]
    assert set(names) == {
        name for name in packaged() if name not in twins() and name != "everything"
    }
    assert f"NAME-tiny   {len(twins())} of them with a small random model" in text
    assert "go-coder-tiny" in names  # of 51 M parameters, on your own code
    assert len(names) == len(set(names))
    places = [by_release(name) for name in names]
    assert places == sorted(places) and places[-1] < len(NEWEST_FIRST), (
        "a recipe of a new family has no place"
    )


def test_the_guide_counts_the_twins_of_pretrained_models():
    pretrained = [
        name for name in twins() if load_recipe(name.removesuffix("-tiny")).recipe.model.from_
    ]
    guide = (ROOT / "docs/guides/forgather-examples.md").read_text(encoding="utf-8")
    assert f"{len(pretrained)} that start from a pretrained model have a `-tiny` twin" in guide


@pytest.mark.parametrize("name", packaged())
def test_the_first_line_of_a_recipe_has_the_size_of_its_model(name):
    """ "a random Llama model with 0.9M parameters", "GPT-2 (124M)": of models that are built here."""
    first_line = packaged()[name].read_text(encoding="utf-8").partition("\n")[0]
    stated = re.search(r"with ([\d.]+)M parameters|\(([\d.]+)M\)", first_line)
    if stated is None:
        return
    loaded = load_recipe(name)
    count = parameter_count(local_facts(loaded).config) / 1e6
    number = stated[1] or stated[2]
    decimals = len(number.partition(".")[2])
    assert f"{count:.{decimals}f}" == number


def test_the_page_on_fine_tuning_says_what_each_of_its_recipes_does_and_on_what_data():
    text = (ROOT / "docs/how-to/choose-a-method.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+)`", text))
    for name in packaged():
        recipe = load_recipe(name).recipe
        if (recipe.model.from_ or "").count("/") == 1:  # of the Hub
            stem = next(
                (stem for stem in named if name.startswith(stem) and not stem.startswith("-")), None
            )
            assert stem is not None, f"docs/how-to/choose-a-method.md lacks {name}"
            assert str(recipe.data.path).removeprefix("hub:") in named


MINE = """extends: go-coder-125m
data:
  path: my-code
  glob: "*.py"
num_train_epochs: 3
optimizer:
  learning_rte: 1e-3
  lr_scheduler_type: cosine
train:
  precision: bf16-mixed
  compile: on
  batch: 16
"""


@pytest.mark.parametrize(
    "command",
    ["plan mine.yaml", "train demo per_device_train_batch_size=4", "recipes import axolotl.yml"],
)
def test_the_page_shows_the_answers_to_other_names(command, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/reference/recipes.md"
    shown = re.search(
        rf"\$ bloomery {re.escape(command)}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )[1]
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    Path("axolotl.yml").write_text((ROOT / "tests/recipe/foreign/axolotl.yml").read_text())
    with pytest.raises(SystemExit):
        main(command.split())
    captured = capsys.readouterr()
    shown_equals(page, shown, captured.out + captured.err)


def test_the_page_of_concepts_names_every_objective():
    concepts = (ROOT / "docs/getting-started/concepts.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"What a training step minimizes: (.*)\.", concepts)
    assert set(re.findall(r"`(\w+)`", sentence)) == OBJECTIVES.keys()
