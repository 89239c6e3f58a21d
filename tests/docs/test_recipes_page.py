"""The pages name every recipe that is packaged."""

import re

from words_of_docs import ROOT

from bloomery.recipe.load import load_recipe, packaged


def test_the_page_on_recipes_lists_each_of_them_once():
    text = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8")
    listed = text.partition("$ bloomery recipes list\n")[2].partition("\n```")[0]
    assert sorted(line.split()[0] for line in listed.splitlines()) == sorted(packaged())


def test_the_page_on_fine_tuning_says_what_each_of_its_recipes_does_and_on_what_data():
    text = (ROOT / "docs/how-to/choose-a-method.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+)`", text))
    for name in packaged():
        recipe = load_recipe(name).recipe
        if (recipe.model.from_ or "").count("/") == 1:  # of the Hub
            stem = next((stem for stem in named if name.startswith(stem) and not stem.startswith("-")), None)
            assert stem is not None, f"docs/how-to/choose-a-method.md lacks {name}"
            assert str(recipe.data.path).removeprefix("hub:") in named
