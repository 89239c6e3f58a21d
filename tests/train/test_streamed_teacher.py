"""A teacher whose layers stay on the host: the bits of one on the device, one load of each layer per step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollouts_for_tests import metrics, plan_of, write_recipe

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.process_group import join
from bloomery.parallel.shared_memory import NAME
from bloomery.parallel.streamed import StreamedWeights
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.teacher import TeacherPlan, load_teacher, teacher_of_rank
from ranks import fields, losses, on_ranks, ranks, train

LAYERS = 5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("streamed"))
    teacher = folder / "teacher"
    teacher.mkdir()
    load_tokenizer(folder / "prepared").save(teacher)
    config = replace(plan_of(folder).model.config, num_layers=LAYERS, initializer_range=0.2)
    write_model(model_state(fresh_decoder(config, seed=7)), config, teacher)
    return folder


CASES = {
    "alone": ("objective.kind=on_policy_distill", "rewards=[]"),
    "nf4": ("objective.kind=on_policy_distill", "rewards=[]", "objective.teacher_quantize=nf4"),
    "sampled, bfloat16": (
        *("objective.kind=on_policy_distill", "rewards=[]"),
        *("objective.estimator=sampled", "train.precision=bfloat16"),
    ),
    "beside rewards": ("objective.teacher_kl_coef=0.5",),
    "told more": (
        *("objective.kind=on_policy_distill", "rewards=[]"),
        "objective.teacher_prompt_template='{answer}! {prompt}'",
    ),
}


def plan_with(recipe, *edits, stream: str = "off"):
    teacher = f"objective.teacher={recipe / 'teacher'}"
    return plan_of(
        recipe, teacher, f"objective.teacher_stream={stream}", "train.max_steps=3", *edits
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_teacher_on_the_device(recipe, tmp_path, case):
    resident = train(plan_with(recipe, *CASES[case]), tmp_path / "resident")
    streamed = train(plan_with(recipe, *CASES[case], stream="layers"), tmp_path / "streamed")
    assert losses(streamed) == losses(resident)
    assert metrics(streamed) == metrics(resident)
    held_out = [
        [event["metrics"] for event in fields(run, "EvalDone")] for run in (streamed, resident)
    ]
    assert held_out[0] == held_out[1] and held_out[0]
    name = "checkpoints/step-00000003/model.safetensors"
    assert (tmp_path / "streamed" / name).read_bytes() == (
        tmp_path / "resident" / name
    ).read_bytes()


def test_each_layer_is_loaded_once_per_step(recipe, tmp_path):
    """The forward ends with the last layers on the device, and has begun to copy the first one again."""
    plan = plan_with(recipe, *CASES["alone"], "eval.every=100 steps", stream="layers")
    stream = load_teacher(TeacherPlan.of(plan)).weight_stream  # the run's own: the last one is kept
    assert isinstance(stream, StreamedWeights)
    before = stream.ring.num_loads
    events = train(plan, tmp_path)
    assert len(losses(events)) == 3
    evaluations = len(fields(events, "EvalDone"))
    assert stream.ring.num_loads - before <= (3 + evaluations) * LAYERS + 1
    assert plan.train.accumulation > 1


def test_its_weights_are_on_the_host_and_frozen(recipe):
    teacher = load_teacher(TeacherPlan.of(plan_with(recipe, stream="layers")))
    expected = load_teacher(TeacherPlan.of(plan_with(recipe)))
    for (name, parameter), (_, other) in zip(
        teacher.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(parameter.cpu(), other), name
        assert not parameter.requires_grad


def test_the_plan_counts_what_is_on_the_device(recipe):
    deep = replace(plan_of(recipe).model.config, num_layers=40)
    folder = recipe / "deep"
    folder.mkdir()
    load_tokenizer(recipe / "prepared").save(folder)
    write_model(model_state(fresh_decoder(deep, seed=7)), deep, folder)
    parts = {
        stream: plan_of(
            recipe, f"objective.teacher={folder}", f"objective.teacher_stream={stream}"
        ).memory.parts["teacher"]
        for stream in ("off", "layers")
    }
    assert parts["layers"] < 0.25 * parts["off"]


def hosted_on_ranks(plan_json):
    """On every rank: whether this one read the layers, how often they are mapped, and a sum of the weights."""
    plan = RunPlan.model_validate_json(plan_json)
    teacher = teacher_of_rank(plan, join(plan.train))
    stream = teacher.weight_stream
    total = sum(float(parameter.double().sum()) for parameter in teacher.parameters())
    return stream._host_copy.fills, Path("/proc/self/maps").read_text().count(NAME), total


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}, {"replicate": 2, "context": 2}])
@pytest.mark.parametrize("form", ["none", "nf4"])
def test_ranks_of_a_host_share_its_layers(recipe, layout, form):
    quantized = (f"objective.teacher_quantize={form}", "model.num_kv_heads=2")
    plan = plan_with(recipe, *CASES["alone"], *quantized, stream="layers")
    first, second = ranks(2).call(hosted_on_ranks, on_ranks(plan, **layout).model_dump_json())
    assert (first[:2], second[:2]) == ((True, 1), (False, 1))
    assert first[2] == second[2] != 0


def test_ranks_that_share_its_layers_train_as_one(recipe, tmp_path):
    plan = plan_with(recipe, *CASES["alone"], stream="layers")
    alone = train(plan, tmp_path / "alone")
    both = train(on_ranks(plan, replicate=2), tmp_path / "both")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-6)
