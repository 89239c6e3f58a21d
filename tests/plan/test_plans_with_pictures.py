"""A plan of a dataset with pictures: the weights of the tower, pictures by their sizes, what is said of them."""

import math
from dataclasses import replace

import pytest

from bloomery.data.pictures.encoder import VisionSource
from bloomery.data.pictures.processor import TEXTS
from bloomery.data.shards import read_manifest
from bloomery.facts.picture_sizes import _PROCESSORS
from bloomery.facts.pictures import VISION_KINDS
from bloomery.facts.towers import _TOWERS
from bloomery.model.configs import headers_of
from bloomery.model.io.stored import vision_tensors
from bloomery.plan.estimate.towers import _WIDTHS, TowerMemory, tower_flops
from bloomery.plan.gather import prepared_facts
from bloomery.plan.notes import plan_notes
from bloomery.plan.page_batch import picture_lines
from bloomery.plan.pictures import step_pictures, tower_in
from bloomery.plan.resolve import local_facts, resolve, step_shape
from bloomery.recipe.load import load_recipe, packaged
from bloomery.view.planned_figures import diagnosis_facts
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row
from tiny_composites import CONFIGS


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


def test_pictures_are_counted_before_preparation_as_after_it(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT), row(RED, BLUE, TEXT)] * 4, weights=True)
    unprepared = load_recipe(tmp_path / "recipe.yaml", ["data.prepared=elsewhere"])
    guessed = local_facts(unprepared).dataset
    loaded = load_recipe(tmp_path / "recipe.yaml", [f"data.prepared={prepared}"])
    facts = local_facts(loaded).dataset
    (size,) = facts.pictures.sizes
    assert (size.width, size.height, size.tokens, size.share) == (40, 60, 2, 1.0)
    assert facts.pictures.pictures_per_epoch == facts.pictures.looked_at == 12
    assert facts.pictures.mean.patches == 12 * 8
    assert guessed.pictures == facts.pictures
    assert guessed.tower_weights == facts.tower_weights

    plan = resolve(loaded, local_facts(loaded))
    words = " ".join(picture_lines(plan))
    assert diagnosis_facts(plan, None).has_pictures
    assert "12 pictures · a 40x60 picture is 2 tokens" in words
    assert "frozen" in words
    tower = tower_in(facts.pictures.raw_config)
    seen = replace(step_pictures(loaded.recipe, facts), train="all")
    sequences = facts.sequences_per_epoch
    forward = 12 * tower.flops(
        VisionSource(str(prepared), facts.pictures.raw_config).shapes.shape(40, 60)
    )
    assert tower_flops(seen, sequences=sequences, checkpointing="none") == pytest.approx(
        3 * forward
    )


def test_a_text_dataset_is_told_what_pictures_would_be(tmp_path):
    prepared = prepared_rows(tmp_path, [row(TEXT)] * 4, weights=True)
    loaded = load_recipe(tmp_path / "recipe.yaml", [f"data.prepared={prepared}"])
    plan = resolve(loaded, local_facts(loaded))
    line = " ".join(picture_lines(plan))
    assert line.startswith("none in the dataset; as tokens, one would be: 640x480 ")
    assert plan.dataset.pictures is None
    assert not diagnosis_facts(plan, None).has_pictures


def test_no_note_says_that_a_tower_is_not_read(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 4, weights=True)
    loaded = load_recipe(tmp_path / "recipe.yaml", [f"data.prepared={prepared}"])
    assert local_facts(loaded).unrun == ()
    (tmp_path / "text").mkdir()
    prepared = prepared_rows(tmp_path / "text", [row(TEXT)] * 4, weights=True)
    loaded = load_recipe(tmp_path / "text/recipe.yaml", [f"data.prepared={prepared}"])
    assert any("are not read" in line for line in local_facts(loaded).unrun)
    assert headers_of(tmp_path / "base", sees=True).notes == ()


def test_a_teacher_has_a_tower_of_its_own(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 4, weights=True)
    path = tmp_path / "recipe.yaml"
    alone = [f"data.prepared={prepared}", "train.precision=float32"]
    taught = [*alone, "objective.kind=distill", f"objective.teacher={tmp_path / 'base'}"]
    towers = []
    for edits in (alone, taught):
        loaded = load_recipe(path, edits)
        towers.append(resolve(loaded, local_facts(loaded)).memory.parts["vision tower"])
    assert towers[1] == 2 * towers[0]


def test_longer_sequences_have_more_pictures(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 40, weights=True)
    loaded = load_recipe(tmp_path / "recipe.yaml", [f"data.prepared={prepared}"])
    facts = local_facts(loaded)
    pictures = step_pictures(loaded.recipe, facts.dataset)
    shape = step_shape(
        loaded.recipe,
        facts.model,
        facts.profile,
        facts.dataset,
        None,
        precision="float32",
        attention="per_document",
    )
    longer = replace(shape, sequence_length=2 * shape.sequence_length)
    assert TowerMemory(longer, pictures).passing == 2 * TowerMemory(shape, pictures).passing > 0


def test_a_picture_of_both_answers_is_read_once(tmp_path):
    question = [{"role": "user", "content": [RED, TEXT]}]
    answers = {
        name: [{"role": "assistant", "content": color}]
        for name, color in (("chosen", "red"), ("rejected", "blue"))
    }
    rows = [{"prompt": question, **answers}] * 4
    prepared = prepared_rows(tmp_path, rows, objective="dpo", weights=True)
    path = tmp_path / "recipe.yaml"
    facts = local_facts(load_recipe(path, [f"data.prepared={prepared}"])).dataset
    guessed = local_facts(load_recipe(path, ["data.prepared=elsewhere"])).dataset
    assert facts.pictures.pictures_per_epoch == 8
    assert facts.pictures.mean.patches * facts.sequences_per_epoch == 4 * 8
    assert facts.pictures.mean.features * facts.sequences_per_epoch == 8 * 2
    assert guessed.pictures == facts.pictures


def test_a_random_model_lacks_no_weights(tmp_path):
    prepared_rows(tmp_path, [row(RED, TEXT)] * 4)
    overrides = ["data.prepared=elsewhere", "model.from=random:qwen3-vl"]
    loaded = load_recipe(tmp_path / "recipe.yaml", overrides)
    notes = list(plan_notes(loaded.recipe, resolve(loaded, local_facts(loaded)), is_local=True))
    assert not [note for note in notes if "no weights" in note]


def test_tables_of_plans_have_each_kind_of_tower():
    kinds = set(VISION_KINDS)
    for table in (_TOWERS, _PROCESSORS, _WIDTHS, TEXTS):
        assert set(table) == kinds


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("train", ["none", "projector", "all"])
def test_each_kind_of_tower_has_an_estimate(kind, train, tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 4, kind=kind, weights=True)
    edits = [f"data.prepared={prepared}", "train.precision=float32", f"vision.train={train}"]
    loaded = load_recipe(tmp_path / "recipe.yaml", edits)
    assert resolve(loaded, local_facts(loaded)).memory.parts["pictures"] > 0


SEEING = sorted(
    name
    for name in packaged()
    if name.startswith(("demo-vision", "qwen3-vl", "smolvlm")) or "-vision-" in name
)


@pytest.mark.parametrize("name", SEEING)
def test_each_packaged_recipe_with_pictures_has_a_plan(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(name)
    memory = resolve(loaded, local_facts(loaded)).memory
    assert memory.high > 0
    # Of data that are not downloaded no picture is known.
    assert ("pictures" in memory.parts) == (not str(loaded.recipe.data.path).startswith("hub:"))
