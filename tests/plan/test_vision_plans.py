"""Recipes that train what reads pictures: their rates, their choices, and what contradicts them."""

import pytest
from plan_help import gpu_machine

from bloomery.core.errors import UserError
from bloomery.facts.pictures import VISION_KINDS, is_projector
from bloomery.plan.resolve import local_facts, resolve
from bloomery.plan.vision import refuse_vision_misfits, vision_plan
from bloomery.recipe.aliases import look_up
from bloomery.recipe.import_draft import ToolFile
from bloomery.recipe.importing import drafted
from bloomery.recipe.load import load_recipe
from pictures_for_tests import RED, TEXT, prepared_rows, row
from tiny_composites import CONFIGS, composite


@pytest.fixture
def recipe(tmp_path):
    """A function of overrides: the recipe with them."""
    path = tmp_path / "recipe.yaml"
    path.write_text("objective: {kind: sft}\nmodel: {from: base}\ndata: {path: rows}\n")
    return lambda *edits: load_recipe(path, list(edits)).recipe


FIRST_STAGE = ("vision.train=projector", "vision.freeze_language_model=true")


@pytest.mark.parametrize(
    ("edits", "tower", "projector"),
    [
        (["vision.train=all"], 2e-6, 5e-5),
        (["vision.train=all", "adapter.kind=lora"], 2e-6, 2e-5),
        (["adapter.kind=lora", "adapter.vision=all"], 5e-5, 5e-5),
        (["adapter.kind=lora", "adapter.vision=tower", "vision.learning_rate=1e-6"], 1e-6, 5e-5),
        ([*FIRST_STAGE, "vision.projector_learning_rate=1e-4"], 5e-5, 1e-4),
        (["vision.train=tower", "vision.freeze_language_model=true"], 5e-5, 5e-5),
    ],
)
def test_each_part_has_its_rate(edits, tower, projector, recipe):
    plan = vision_plan(recipe(*edits, "optimizer.learning_rate=5e-5"))
    assert (plan.learning_rate, plan.projector_learning_rate) == (tower, projector)


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        (["vision.freeze_language_model=true"], "nothing is trained"),
        ([*FIRST_STAGE, "adapter.kind=lora"], "to be frozen"),
        (["vision.train=all", "adapter.kind=lora", "adapter.vision=tower"], "the tower is both"),
        (["vision.learning_rate=1e-5"], "has no effect"),
        (["vision.train=tower", "objective.kind=dpo"], "a reference"),
        (["adapter.kind=dora", "adapter.vision=tower"], "DoRA"),
        (["vision.train=tower", "optimizer.fused_backward=true"], "during backward"),
    ],
)
def test_contradictions_are_refused(edits, problem, recipe):
    with pytest.raises(UserError, match=problem):
        refuse_vision_misfits(recipe(*edits))


def test_a_plan_says_what_is_trained_and_a_dataset_without_pictures_is_refused(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 4, kind="smolvlm", weights=True)
    edits = [*FIRST_STAGE, "train.precision=float32", f"data.prepared={prepared}"]
    loaded = load_recipe(tmp_path / "recipe.yaml", edits)
    facts = local_facts(loaded)
    plan = resolve(loaded, facts)
    reasons = {choice.key: f"{choice.value} ({choice.reason})" for choice in plan.choices}
    expected = "projector at 1e-3 (in full; the language model is frozen)"
    assert reasons["vision.train"] == expected
    assert facts.model.trainable_count == 0
    whole = composite("smolvlm").model
    assert facts.dataset.projector_weights == sum(p.numel() for p in whole.connector.parameters())
    (tmp_path / "text").mkdir()
    prepared = prepared_rows(tmp_path / "text", [row(TEXT)] * 4, kind="smolvlm")
    loaded = load_recipe(tmp_path / "text/recipe.yaml", [*FIRST_STAGE, f"data.prepared={prepared}"])
    with pytest.raises(UserError, match="the dataset has no pictures"):
        local_facts(loaded)


def test_a_plan_refuses_what_a_run_would(tmp_path):
    prepared = prepared_rows(tmp_path, [row(RED, TEXT)] * 4, kind="smolvlm", weights=True)
    edits = [f"data.prepared={prepared}", "parallel.stream=layers", "vision.train=all"]
    loaded = load_recipe(tmp_path / "recipe.yaml", edits)
    facts = local_facts(loaded, gpu_machine("RTX 4090"))
    problem = "not supported with pictures: parallel.stream of trained weights beside a tower"
    with pytest.raises(UserError, match=problem):
        resolve(loaded, facts)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_has_its_projector(kind):
    whole = composite(kind).model
    for module in VISION_KINDS[kind].projector:
        assert whole.get_submodule(module)
    names = [f"model.{name}" for name, _ in whole.named_parameters() if "language" not in name]
    is_of_projector = {is_projector(kind, name) for name in names}
    assert is_of_projector == {True, False}


@pytest.mark.parametrize(
    ("tool", "keys", "expected"),
    [
        ("LLaMA-Factory", {"freeze_vision_tower": False}, {"adapter.vision": "tower"}),
        (
            "LLaMA-Factory",
            {"finetuning_type": "full", "freeze_multi_modal_projector": False}
            | {"freeze_language_model": True},
            {"vision.train": "projector", "vision.freeze_language_model": "true"},
        ),
        ("ms-swift", {"freeze_aligner": False, "freeze_vit": False}, {"adapter.vision": "all"}),
        (
            "ms-swift",
            {"tuner_type": "full", "freeze_vit": False, "vit_lr": 1e-6, "freeze_llm": False},
            {"vision.train": "tower", "vision.learning_rate": "1e-06"},
        ),
    ],
)
def test_files_of_others_say_what_they_freeze(tool, keys, expected):
    least = {"model_name_or_path": "a/b"} if tool == "LLaMA-Factory" else {"model": "a/b"}
    settings = drafted(ToolFile(tool, least | {"dataset": "x"} | keys, "sft")).settings
    assert {key: settings[key].text for key in expected} == expected


def test_a_key_of_another_tool_is_answered():
    assert "vision.learning_rate" in str(look_up(("vision_lr",), 1e-6, {}))
