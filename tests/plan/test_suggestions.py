"""What is offered was planned with the edit, and is a recipe that this version takes."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned, reported

from bloomery.plan.advise import edited
from bloomery.recipe.load import load_recipe

WIDE = ("model.hidden_size=2048", "model.num_heads=16", "model.num_layers=24")


@pytest.fixture(
    scope="module",
    params=[("RX 6700 XT", WIDE), ("RX 6600", (*WIDE, "train.micro_batch_size=4")), ("T4", WIDE)],
)
def too_large(request):
    gpu, words = request.param
    loaded = load_recipe("go-coder-125m", words)
    return loaded, gpu_machine(gpu), reported(loaded, gpu_machine(gpu))


def test_every_remedy_does_what_it_says(too_large):
    loaded, where, report = too_large
    plan = report.plan
    assert not plan.fits
    assert report.suggestions
    for fix in report.suggestions:
        again = planned(edited(loaded, fix.edit), where)  # refuses what this version cannot do
        assert again.memory.total < plan.memory.total
        assert again.fits == ("still does not fit" not in fix.saves)
        surely = again.fits and again.memory.high <= again.memory.limit
        assert surely == (fix.fit == "fits") == (", fits; " in fix.saves)


def test_shorter_rows_come_last_and_say_what_they_cost(too_large):
    report = too_large[2]
    single = [fix for fix in report.suggestions if " " not in fix.edit]
    lengths = [
        index for index, fix in enumerate(single) if fix.edit.startswith("data.sequence_length")
    ]
    assert lengths == list(range(len(single) - len(lengths), len(single)))
    assert all("changes the training" in single[index].saves for index in lengths)


def test_a_recipe_that_slows_itself_down_is_told():
    slow = load_recipe(
        "go-coder-125m", ["train.activation_checkpointing=full", "train.attention=math"]
    )
    report = reported(slow, gpu_machine("RX 7900 XTX"))
    assert report.plan.fits
    assert "train.activation_checkpointing=auto" in [fix.edit for fix in report.suggestions]


def test_dropout_that_keeps_fused_kernels_away_is_named_with_its_price():
    # Nobody has compiled the Triton kernels, which have dropout, for it.
    where = gpu_machine("RTX 5090")
    report = reported(load_recipe("go-coder-125m"), where)
    assert report.plan.model.attention == "blockwise"
    (fix,) = report.suggestions
    assert fix.edit == "model.dropout=0"
    assert "changes the training" in fix.saves
    quicker = planned(load_recipe("go-coder-125m", ["model.dropout=0"]), where)
    assert quicker.model.attention == "varlen"
    assert quicker.step_seconds.value < 0.9 * report.plan.step_seconds.value


def test_a_run_that_fits_and_is_quick_needs_nothing():
    report = reported(load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"))
    assert report.suggestions == ()


@pytest.mark.parametrize("name", ["demo", "go-coder-125m", "go-coder-medium", "everything"])
def test_an_edit_changes_one_key_and_nothing_else(name):
    loaded = load_recipe(name)
    changed = edited(loaded, "train.micro_batch_size=1")
    assert changed.recipe.train.micro_batch_size == 1
    same = changed.recipe.model_copy(update={"train": loaded.recipe.train})
    assert same == loaded.recipe
    assert replace(changed, recipe=loaded.recipe) == loaded


def test_memory_of_a_processor_has_remedies_too():
    report = reported(load_recipe("go-coder-125m"), machine(free_gib=2.0))
    assert not report.plan.fits
    assert report.plan.suggestions == tuple(fix.edit for fix in report.suggestions) != ()


def test_in_backward_a_smaller_step_is_offered():
    loaded = load_recipe("llama2-7b-full-24gb", ("train.tokens_per_step=65536",))
    report = reported(loaded, gpu_machine("RTX 4090"))
    assert "train.tokens_per_step=16384" in [
        fix.edit for fix in report.suggestions if fix.fit != "does not fit"
    ]
