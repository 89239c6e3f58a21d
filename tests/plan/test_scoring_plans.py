"""Plans with devices that score: their memory and time by hand, who counts them, and what is refused."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned
from test_teacher_forms import PARAMETERS, over_devices, reason_of, recipe

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware.sites import Site
from bloomery.hardware.specs import find_gpu
from bloomery.plan.estimate.scoring import with_scoring
from bloomery.plan.estimate.speed import Rate, step_parts, total, work_of
from bloomery.plan.gather import facts_of
from bloomery.plan.mesh import training_devices_of
from bloomery.plan.price import Price, run_cost
from bloomery.plan.resolve import resolve, step_shape
from bloomery.recipe.load import LoadedRecipe
from bloomery.runs.devices import device_count, devices_of_ranks

OUTPUT = 151_936 * 4096  # numbers of Qwen3-8B's output layer


def scored(devices: int = 1, **keys) -> LoadedRecipe:
    return over_devices(recipe(**keys), scoring_devices=devices)


def planned_over(loaded: LoadedRecipe, gpus: int, *, gpu: str = "MI300X", nodes: int = 1):
    facts = facts_of(loaded, gpu_machine(gpu))
    return resolve(loaded, facts, gpus=gpus, nodes=nodes)


def test_a_device_that_trains_has_the_output_layer_and_one_that_scores_the_rest():
    plan = planned_over(scored(), 1)
    assert plan.memory.parts["teacher"] == pytest.approx(2 * OUTPUT, rel=1e-6)
    assert plan.scoring is not None and plan.scoring.devices == 1
    assert plan.scoring.memory.parts["teacher"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert plan.train.scoring_devices == 1 and plan.train.ranks == 1
    # In 4 bits on the scoring device; what is left on the other one is no matrix of a layer.
    in_nf4 = planned_over(scored(teacher_quantize="nf4"), 1)
    assert in_nf4.scoring is not None
    assert in_nf4.scoring.memory.parts["teacher"] < 0.5 * plan.scoring.memory.parts["teacher"]
    assert in_nf4.memory.parts["teacher"] == plan.memory.parts["teacher"]


def test_a_run_fits_where_both_devices_have_room():
    small = planned_over(scored(), 1, gpu="RX 7800 XT")  # 16 GB: too few for 16.4 GB of teacher
    assert small.memory.fits and not small.fits
    assert planned_over(scored(), 1, gpu="RTX 4090").fits


def shape_of(loaded: LoadedRecipe, ranks_per_scorer: float):
    facts = facts_of(loaded, gpu_machine("MI300X"))
    shape = step_shape(
        loaded.recipe,
        facts.model,
        facts.profile,
        None,
        facts.teacher,
        precision="bfloat16",
        attention="varlen",
    )
    return replace(shape, ranks_per_scorer=ranks_per_scorer)


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("ranks_per_scorer", [0.1, 7.0])
def test_scoring_runs_beside_the_micro_batches_before_it(micro_batches, ranks_per_scorer):
    """By hand: each micro-batch is scored, then trained on; each of the two works on one at a time."""
    step = shape_of(scored(), ranks_per_scorer)
    rate = Rate(peak=1e15, share=(0.4, 0.4, 0.4), bandwidth=1e12, bandwidth_share=(0.5, 0.5, 0.5))
    tokens = micro_batches * step.tokens_per_micro_batch
    parts = step_parts(work_of(step, tokens=tokens), rate)
    training = total(parts).value / micro_batches
    resident = replace(step, teacher_place="device")
    taught = total(step_parts(work_of(resident, tokens=tokens), rate)).value
    scoring = (taught - total(parts).value) * ranks_per_scorer / micro_batches
    assert scoring > 0

    scored_at = trained_at = 0.0
    for _ in range(micro_batches):
        scored_at += scoring
        trained_at = max(trained_at, scored_at) + training
    assert total(with_scoring(parts, step, rate, tokens)).value == pytest.approx(trained_at)
    # Of a dataset the next step is known: over many steps the slower of the two is never idle.
    ahead = replace(step, scored_ahead=True)
    slower = micro_batches * max(scoring, training)
    assert total(with_scoring(parts, ahead, rate, tokens)).value == pytest.approx(slower)
    # The cores of a CPU do both, one after the other.
    on_cpu = total(with_scoring(parts, replace(step, on_gpu=False), rate, tokens)).value
    assert on_cpu == pytest.approx(micro_batches * (scoring + training))


def test_the_forms_of_a_teacher_have_another_device_where_there_is_one():
    name = "on another device, which needs"
    assert name not in reason_of(planned_over(recipe(), 1))
    assert name in reason_of(planned_over(recipe(), 2))
    assert name in reason_of(planned_over(scored(), 1))  # one trains, one scores


def test_cost_and_command_line_count_all_devices():
    plan = planned_over(scored(2), 6, nodes=2)
    assert plan.num_gpus == 16
    hours = plan.seconds.value / 3600
    assert run_cost(plan, Price(2.0)).money.value == pytest.approx(16 * 2 * hours)
    parallel = scored(2).recipe.parallel
    assert training_devices_of(parallel, gpus=8, nodes=2) == 6
    assert training_devices_of(parallel, gpus=1, nodes=1) == 1  # none is named: two more
    with pytest.raises(UserError, match="none is left to train"):
        training_devices_of(parallel, gpus=2, nodes=1)


def gpus_of(count: int):
    found = gpu_machine("MI300X")
    device = find_gpu("MI300X")
    devices = [device.model_copy(update={"index": index}) for index in range(count)]
    return found.model_copy(update={"accelerators": tuple(devices)})


def test_the_last_gpus_of_a_machine_score():
    narrowed, count = device_count(scored().recipe, gpus_of(4), 4, user_named=False)
    assert count == 3 and len(narrowed.accelerators) == 4
    sized = over_devices(scored(), replicate=2, shard=1)
    narrowed, count = device_count(sized.recipe, gpus_of(5), 5, user_named=False)
    assert count == 2 and len(narrowed.accelerators) == 3
    with pytest.raises(UserError, match="leave none of 1 to train"):
        device_count(scored().recipe, gpus_of(1), 1)
    # Processes of a CPU are as many as are named, and one more scores.
    assert device_count(scored().recipe, machine(), 2)[1] == 2


def test_a_launcher_starts_a_process_for_each_gpu_that_trains():
    assert len(devices_of_ranks(gpus_of(4), 4, 3, "torchrun", scoring=1).accelerators) == 4
    with pytest.raises(UserError, match="too few for 1 device that score") as refused:
        devices_of_ranks(gpus_of(4), 4, 4, "torchrun", scoring=1)
    assert "start 3 on each host" in refused.value.fix


def test_a_site_gives_each_rank_all_gpus_of_its_node():
    site = Site(
        gpu="MI300X", gpus_per_node=8, task_options=("--gpus-per-task=1", "--gpu-bind=closest")
    )
    assert site.with_scoring(0) == site and site.ranks_per_node == 8
    with_two = site.with_scoring(2)
    assert with_two.ranks_per_node == 6
    assert with_two.rank_options == ("--gpus-per-node=8",)
    with pytest.raises(UserError, match="none is left to train"):
        site.with_scoring(8)


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        (scored(teacher="base", teacher_prompt_template="{prompt}!"), "nothing to score with"),
        (scored(teacher_stream="layers"), "whose layers stream"),
        (over_devices(scored(), pipeline=2), "parallel.scoring_devices"),
        (over_devices(scored(), replicate=2, context=2), "parallel.scoring_devices"),
    ],
)
def test_what_does_not_go_is_one_sentence(loaded, problem):
    with pytest.raises(UserError, match=problem) as refused:
        planned_over(loaded, 2)
    assert refused.value.fix


def test_a_cpu_has_the_memory_that_its_ranks_leave():
    plan = planned(scored(), machine())
    assert plan.scoring is not None
    free = machine().host.memory_free_bytes
    assert plan.scoring.memory.limit == pytest.approx(max(0.0, free - plan.memory.total), rel=0.02)
    assert plan.memory.parts["teacher"] < GIB * 3
