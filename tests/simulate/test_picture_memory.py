"""A plan has the memory of a step with pictures: of three sizes, with a tower that is frozen or trained."""

from dataclasses import replace
from itertools import product

import picture_steps
import pytest
from picture_steps import planned_and_measured, wide_config
from steps_for_tests import load_of

import tiny_composites
from bloomery.plan.estimate.memory import tensor_bytes
from bloomery.plan.estimate.sharding import sharded_bytes
from bloomery.plan.pictures import step_pictures
from bloomery.plan.resolve import local_facts, resolve
from bloomery.recipe.load import load_recipe
from pictures_for_tests import RED, TEXT, prepared_rows, row

SIZES = ((128, 128), (256, 192), (384, 320))
FROZEN = ("qwen3_vl", "qwen2_5_vl", "mistral3", "smolvlm", "gemma4")
WHOLE = ("adapter.kind=none", "vision.train=all")
FIRST_STAGE = ("adapter.kind=none", "vision.train=projector", "vision.freeze_language_model=true")


@pytest.fixture
def wide(monkeypatch):
    """A function that gives the tiny model of a kind a tower that weighs more than its language model."""

    def widen(kind):
        config = wide_config(kind)
        monkeypatch.setitem(tiny_composites.CONFIGS, kind, config)
        monkeypatch.setitem(picture_steps.CONFIGS, kind, config)

    return widen


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("kind", "size", "precision"), [*product(FROZEN, SIZES, ("float32", "bfloat16"))]
)
def test_the_plan_has_the_memory_of_a_step(kind, size, precision, wide, tmp_path):
    wide(kind)
    plan, planned, measured = planned_and_measured(tmp_path, kind, size, precision=precision)
    assert plan.memory.parts["pictures"] > 0
    assert planned == pytest.approx(measured, rel=0.05)


def test_the_plan_has_the_memory_of_an_embedder_without_layers(wide, tmp_path):
    wide("gemma4_unified")
    _, planned, measured = planned_and_measured(tmp_path, "gemma4_unified", SIZES[0])
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("edits", [WHOLE, FIRST_STAGE])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_plan_has_the_memory_of_a_tower_that_is_trained(edits, precision, wide, tmp_path):
    wide("qwen3_vl")
    _, planned, measured = planned_and_measured(
        tmp_path, "qwen3_vl", SIZES[2], *edits, precision=precision
    )
    assert planned == pytest.approx(measured, rel=0.05)


def test_each_shard_has_the_whole_tower(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 8, kind="smolvlm", weights=True)
    edits = [f"data.prepared={prepared}", "train.precision=float32", "vision.train=all"]
    loaded = load_recipe(tmp_path / "recipe.yaml", edits)
    plan = resolve(loaded, local_facts(loaded))
    text = load_of(plan)
    step = replace(text, pictures=step_pictures(loaded.recipe, plan.dataset))
    whole, shard = tensor_bytes(step), sharded_bytes(step, 2)
    assert shard["vision tower"] == whole["vision tower"] > 0
    of_tower = whole["optimizer"] - tensor_bytes(text)["optimizer"]
    assert shard["optimizer"] - sharded_bytes(text, 2)["optimizer"] == of_tower > 0
