"""Which form of a teacher a plan names: by hand from parameters, the link and the limit of the device."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.stages import stage_bytes
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import step_shape
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


def over_devices(loaded, **parallel):
    changed = loaded.recipe.parallel.model_copy(update=parallel)
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"parallel": changed}))


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


LAYOUTS = {
    "copies": {"replicate": 4},
    "shards": {"shard": 4},
    "stages": {"pipeline": 2, "replicate": 2},
    "shards of stages": {"pipeline": 2, "shard": 2},
    "shared sequences": {"shard": 4, "context": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_device_with_the_head_has_all_of_a_teacher(layout):
    """Whatever the layout does to the model; and the hidden states of a step are those of its own completions."""
    there = gpu_machine("MI300X")
    host = there.host.model_copy(update={"memory_free_bytes": 256 * GIB})
    there = there.model_copy(update={"host": host})
    resident, streamed = (
        planned(over_devices(recipe(teacher_stream=form), **LAYOUTS[layout]), there, gpus=4)
        for form in ("off", "layers")
    )
    assert resident.memory.parts["teacher"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert "on the device 15.3 GiB" in reason_of(resident)
    # Stages and shared sequences are refused with devices that only score.
    assert ("on another device" in reason_of(resident)) == (layout in ("copies", "shards"))

    devices = 2 if "stages" in layout else 4
    states = 2 * 32 * 512 * 4096 / devices
    a_layer = 2 * (PARAMETERS - TABLES) / LAYERS
    on_device = streamed.memory.parts["teacher"]
    assert 2 * TABLES + 2 * a_layer + states <= on_device * 1.001
    assert on_device <= 2 * TABLES + 4 * a_layer + states


def test_the_last_stage_alone_has_a_teacher_and_fewer_layers():
    """Its forward is that of eight billion parameters, the student's step that of a tenth."""
    plan = planned(over_devices(recipe(), pipeline=2), gpu_machine("MI300X"), gpus=2)
    first, last = plan.train.pipeline_layers
    assert first > 3 * last
    facts = facts_of(recipe(), gpu_machine("MI300X"), dataset=None)
    step = step_shape(
        recipe().recipe,
        facts.model,
        facts.profile,
        facts.dataset,
        facts.teacher,
        precision="bfloat16",
        attention="sdpa",
    )
    split = MeshSplit(pipeline=2, layers=(first, last))
    assert "teacher" not in stage_bytes(step, split, 0)
    assert stage_bytes(step, split, 1)["teacher"] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_the_host_has_the_layers_once_and_for_each_device_of_a_last_stage():
    there = gpu_machine("MI300X")
    room = there.model_copy(
        update={"host": there.host.model_copy(update={"memory_free_bytes": 20 * GIB})}
    )
    streamed = recipe(teacher_stream="layers")
    with pytest.raises(UserError, match="once for each of 2 devices"):
        planned(over_devices(streamed, pipeline=2, replicate=2), room, gpus=4)
    planned(over_devices(streamed, pipeline=4), room, gpus=4)
    planned(over_devices(streamed, replicate=4), room, gpus=4)


def test_a_teacher_that_cannot_share_sequences_is_named():
    """Qwen3-0.6B and Qwen3-8B have eight key/value heads each, Qwen2.5-7B has four."""
    small = recipe(teacher="Qwen/Qwen2.5-7B")
    planned(over_devices(small, shard=8, context=4), gpu_machine("MI300X"), gpus=8)
    with pytest.raises(UserError, match="the teacher cannot share sequences: 8 devices") as refused:
        planned(over_devices(small, shard=8, context=8), gpu_machine("MI300X"), gpus=8)
    assert refused.value.fix == "set parallel.context=4"


def test_nothing_is_named_on_a_cpu():
    plan = planned(recipe(), machine(free_gib=30))
    assert all(choice.key != "objective.teacher_stream" for choice in plan.choices)
