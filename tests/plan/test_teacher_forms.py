"""Which form of a teacher a plan names: by hand from parameters, the link and the limit of the device."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

# Qwen3-8B: 8.19e9 parameters, of which embeddings and head have 2 x 151,936 x 4,096.
PARAMETERS = 8.19e9
TABLES = 2 * 151_936 * 4096
LAYERS = 36


def recipe(**keys):
    objective = {
        "kind": "on_policy_distill",
        "teacher": "Qwen/Qwen3-8B",
        "max_completion_length": 512,
    }
    sections = {
        "model": {"from": "Qwen/Qwen3-0.6B"},
        "data": {"path": "prompts.jsonl", "sequence_length": 1024},
        "objective": objective | keys,
        "adapter": {"kind": "lora", "rank": 32},
        "train": {"max_steps": 150, "batch_size": 32},
    }
    return LoadedRecipe(Recipe.model_validate(sections), "pupil", {})


def reason_of(plan) -> str:
    return next(
        choice.reason for choice in plan.choices if choice.key == "objective.teacher_stream"
    )


@pytest.mark.parametrize(
    ("gpu", "form"), [("RX 7800 XT", "streamed from the host"), ("MI300X", "on the device")]
)
def test_the_plan_names_the_fastest_form_that_fits(gpu, form):
    assert f"The fastest that fits: {form}" in reason_of(planned(recipe(), gpu_machine(gpu)))


def test_a_streamed_teacher_is_counted():
    off = planned(recipe(), gpu_machine("MI300X")).memory.parts["teacher"]
    layers = planned(recipe(teacher_stream="layers"), gpu_machine("MI300X")).memory.parts["teacher"]
    assert off == pytest.approx(2 * PARAMETERS, rel=0.01)
    # Tables, a few layers, and the hidden states of 32 completions.
    a_layer = 2 * (PARAMETERS - TABLES) / LAYERS
    states = 2 * 32 * 512 * 4096
    assert 2 * TABLES + 2 * a_layer + states <= layers * 1.001
    assert layers <= 2 * TABLES + 4 * a_layer + states


def test_layers_that_arrive_later_than_they_compute_are_waited_for():
    """A step of a few tokens is over before 13.9 GB are on an MI300X: 64 GB/s is the most that PCIe 5 has."""
    few = recipe(teacher_stream="layers", max_completion_length=16)
    train = few.recipe.train.model_copy(update={"batch_size": 1})
    few = replace(few, recipe=few.recipe.model_copy(update={"train": train}))
    forms = reason_of(planned(few, gpu_machine("MI300X")))
    assert "The fastest that fits: on the device" in forms
    (streamed,) = [form for form in forms.split("; ") if form.startswith("streamed")]
    seconds = float(streamed.split(" and ")[1].split()[0])
    assert seconds > 2 * (PARAMETERS - TABLES) / 64e9


def test_a_host_without_room_is_refused():
    there = gpu_machine("RX 6700 XT")
    small = there.host.model_copy(update={"memory_free_bytes": 8 * GIB})
    with pytest.raises(UserError, match="of host memory"):
        planned(recipe(teacher_stream="layers"), there.model_copy(update={"host": small}))


def test_nothing_is_named_on_a_cpu():
    plan = planned(recipe(), machine(free_gib=30))
    assert all(choice.key != "objective.teacher_stream" for choice in plan.choices)
