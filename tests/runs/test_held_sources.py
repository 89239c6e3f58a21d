"""A run holds every checkpoint of other runs that its recipe names, until its process ends."""

from pathlib import Path

import pytest
import yaml

from bloomery.infer.model_folder import remove_unread
from bloomery.recipe.load import load_recipe
from bloomery.runs.held_sources import held_sources
from models_for_tests import make_model, make_run


def recipe_naming(key: str, folder: Path, other: Path) -> dict[str, object]:
    recipe: dict[str, object] = {
        "model": {"from": str(folder if key == "model" else other)},
        "tokenizer": {"from": str(folder) if key == "tokenizer" else "same"},
        "data": {"path": "prompts.jsonl"},
    }
    if key == "teacher":
        recipe["objective"] = {"kind": "on_policy_distill", "teacher": str(folder)}
    if key == "reward":
        recipe["objective"] = {"kind": "grpo"}
        recipe["rewards"] = [{"model": str(folder)}]
    return recipe


@pytest.mark.parametrize("key", ["model", "tokenizer", "teacher", "reward"])
def test_what_a_recipe_names_stays(tmp_path, key):
    checkpoint = make_run(tmp_path / "run", 10) / "checkpoints" / "step-00000010"
    other = make_model(tmp_path / "other")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_naming(key, checkpoint, other)))
    recipe = load_recipe(path).recipe
    with held_sources(recipe, recipe):
        assert not remove_unread(checkpoint)
    assert remove_unread(checkpoint)
    with held_sources(recipe):  # that it is gone, its reader reports
        pass
