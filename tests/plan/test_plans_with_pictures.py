"""A plan of a dataset with pictures counts the weights of the vision tower."""

import math
from dataclasses import replace

from bloomery.data.shards import read_manifest
from bloomery.model.io.stored import vision_tensors
from bloomery.plan.gather import prepared_facts
from bloomery.plan.resolve import local_facts, resolve
from bloomery.recipe.load import load_recipe
from pictures_for_tests import RED, TEXT, prepared_rows, row


def planned(folder, rows):
    prepared = prepared_rows(folder, rows, kind="smolvlm", weights=True)
    loaded = load_recipe(folder / "recipe.yaml", ["train.precision=float32", "adapter.kind=lora"])
    dataset = prepared_facts(read_manifest(prepared), loaded.recipe, prepared)
    facts = replace(local_facts(loaded), dataset=dataset)
    return resolve(loaded, facts).memory.parts


def test_the_tower_is_a_part_of_the_memory(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    parts = planned(folder, [row(RED, TEXT)] * 4)
    numbers = sum(math.prod(each.shape) for each in vision_tensors(folder / "base").values())
    assert parts["vision tower"] == 4 * numbers
    folder = tmp_path / "text"
    folder.mkdir()
    assert "vision tower" not in planned(folder, [row(TEXT)] * 4)
