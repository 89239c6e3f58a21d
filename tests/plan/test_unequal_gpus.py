"""Unequal GPUs that train together. Oracles: every possible cut, and each GPU planned alone."""

from dataclasses import replace

import pytest
from plan_help import gpu_machine, machine, planned, reported

from bloomery.core.device import DeviceProperties
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware.calibration import device_of
from bloomery.hardware.profile import build_profile, with_gpus
from bloomery.hardware.specs import find_gpus, named_gpus
from bloomery.parallel import preflight
from bloomery.plan import stages
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.stages import stage_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.page import page
from bloomery.plan.page_devices import device_lines
from bloomery.plan.resolve import step_shape
from bloomery.recipe.load import load_recipe

PAIRS = ["MI100 + RX 6700 XT", "RX 6700 XT + MI100", "RTX 3090 + RTX 3060 12GB", "RTX 4090 + T4"]
PIPELINE = "parallel.pipeline=2"


def together(names: str):
    return with_gpus(machine(), find_gpus(names))


def plan_of(recipe: str, names: str, *edits: str):
    return planned(load_recipe(recipe, [*edits]), together(names), gpus=len(find_gpus(names)))


def planned_step(plan, names: str):
    """The step of a plan, and its split."""
    train = plan.train
    profile = build_profile(together(names))
    step = step_shape(
        plan,
        TrainedModel.of(plan, plan.model.config),
        profile,
        plan.dataset,
        None,
        precision=train.precision,
        attention=plan.model.attention,
    )
    step = replace(
        step,
        compiled=train.compile,
        micro_batch_size=train.micro_batch_size,
        checkpointing=train.activation_checkpointing,
        score_chunk=plan.model.score_chunk,
        accumulating=train.accumulation > 1,
    )
    return step, MeshSplit.of(plan.parallel.layout)


@pytest.mark.parametrize("names", PAIRS)
def test_no_other_cut_that_fits_has_a_faster_slowest_stage(names):
    plan = plan_of("go-coder-125m", names, PIPELINE)
    step, split = planned_step(plan, names)
    estimators = StepEstimator.of(plan, together(names), build_profile(together(names))).peers()
    rates = [estimator.rate(step) for estimator in estimators]
    limits = [estimator.limit for estimator in estimators]
    sequences = plan.train.accumulation * plan.train.micro_batch_size
    num_layers = plan.model.config.num_layers

    def pace(layers: tuple[int, ...]) -> float:
        return max(stages.pipeline_parts(step, replace(split, layers=layers), rates, sequences)[1])

    def fits(layers: tuple[int, ...]) -> bool:
        cut = replace(split, layers=layers)
        needs = [sum(stage_bytes(step, cut, index).values()) for index in range(2)]
        return all(need <= limit for need, limit in zip(needs, limits, strict=True))

    cuts = [(first, num_layers - first) for first in range(1, num_layers)]
    # The speed of a whole model stands for that of its layers: within a hundredth.
    assert pace(plan.train.pipeline_layers) <= 1.01 * min(pace(cut) for cut in cuts if fits(cut))
    even = (num_layers // 2, num_layers - num_layers // 2)
    assert plan.train.pipeline_layers != even
    assert pace(plan.train.pipeline_layers) < pace(even)
    assert plan.parallel.layout.stage_seconds == pytest.approx(
        stages.pipeline_parts(step, split, rates, sequences)[1]
    )


@pytest.mark.parametrize("names", ["RTX 3090 + RTX 3060 12GB", "RTX 3060 12GB + RTX 3090"])
def test_each_stage_stays_below_the_memory_of_its_own_gpu(names):
    """7 B weights and gradients in bfloat16 are 27 GB: even halves do not fit 12 GB, nor 7 B the other GPU."""
    plan = plan_of("llama2-7b-pipeline-2gpu", names)
    assert plan.fits
    step, split = planned_step(plan, names)
    by_stage = [
        sum(stage_bytes(step, split, index, plan.train.accumulation).values()) for index in range(2)
    ]
    limits = [
        estimator.limit
        for estimator in StepEstimator.of(
            plan, together(names), build_profile(together(names))
        ).peers()
    ]
    assert all(need <= limit for need, limit in zip(by_stage, limits, strict=True))
    fullest = plan.parallel.layout.fullest_stage
    assert plan.memory.limit == limits[fullest]
    even = [
        sum(stage_bytes(step, replace(split, layers=(16, 16)), index).values())
        for index in range(2)
    ]
    smallest = limits.index(min(limits))
    assert even[smallest] > limits[smallest]
    assert not planned(
        load_recipe("llama2-7b-pipeline-2gpu"), gpu_machine("RTX 3060 12GB"), gpus=2
    ).fits


def test_a_rank_on_another_gpu_than_its_stage_was_cut_for_is_named(monkeypatch):
    plan = plan_of("llama2-7b-pipeline-2gpu", "RTX 3090 + RTX 3060 12GB")
    limits = plan.parallel.layout.stage_limits
    assert [plan.memory_limit_of(rank) for rank in range(2)] == list(limits) and limits[0] > limits[
        1
    ]

    def problem_on(gib: int, rank: int) -> str:
        device = DeviceProperties("a GPU", total_bytes=gib * GIB)
        monkeypatch.setattr(preflight, "properties_of", lambda _: device)
        return preflight.place_problem(plan, rank)

    assert problem_on(24, 0) == problem_on(12, 1) == problem_on(24, 1) == ""
    problem = problem_on(12, 0)
    assert problem == "has 12.0 GiB, and its stage was planned for 22.1 GiB of a GeForce RTX 3090"
    facts = [
        preflight.RankFacts("n", "2", "0", "p", f"{rank}", "", text, 2**40, True, "")
        for rank, text in enumerate((problem, ""))
    ]
    error = next(error for check in preflight.CHECKS if (error := check(facts)) is not None)
    assert error.problem.startswith("the device of rank 0 on n has 12.0 GiB")
    alike = planned(load_recipe("llama2-7b-pipeline-2gpu"), gpu_machine("RTX 3090"), gpus=2)
    assert alike.memory_limit_of(0) == alike.memory_limit_of(1) == alike.memory.limit
    assert preflight.place_problem(alike, 0) == ""


def test_copies_wait_for_the_slowest_and_the_smallest():
    copies = "parallel.replicate=2"
    both = plan_of("go-coder-125m", "RTX 4090 + RTX 3060 12GB", copies)
    slow = planned(load_recipe("go-coder-125m", [copies]), gpu_machine("RTX 3060 12GB"), gpus=2)
    assert both.memory.limit == slow.memory.limit
    assert both.train.micro_batch_size == slow.train.micro_batch_size
    assert both.step_seconds.value == pytest.approx(slow.step_seconds.value)


def test_settings_suit_all_of_the_gpus():
    profile = build_profile(together("RTX 3090 + T4"))
    assert [peer.dtype.value for peer in profile.peers] == ["bfloat16", "float16"]
    assert profile.dtype.value == "float16"
    amd = build_profile(together("MI300X + RX 6700 XT"))
    assert [peer.attention.value for peer in amd.peers] == ["fused", "plain"]
    assert amd.attention.value == "plain"
    assert [peer.compile.value for peer in amd.peers] == [True, False]
    assert not amd.compile.value
    # What one of them needs in its environment is set, and both are shown.
    environment = amd.environment.value
    assert environment["HIP_FORCE_DEV_KERNARG"] == "1"
    assert environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert build_profile(together("RTX 3090 + T4")).environment.value["CUDA_DEVICE_ORDER"]
    assert device_of(together("RTX 3090 + T4")).name == "GeForce RTX 3090 + Tesla T4"


def test_names_of_alike_gpus_are_those_of_several():
    recipe = load_recipe("go-coder-125m")
    alike = planned(recipe, together("RTX 3090 + RTX 3090"), gpus=2)
    assert alike.parallel == planned(recipe, gpu_machine("RTX 3090"), gpus=2).parallel
    assert named_gpus(("RTX 3090 + 2 x T4",), None) == (("RTX 3090 + 2 x T4",), 3)


@pytest.mark.parametrize(
    ("names", "gpus", "problem"),
    [("RTX 3090 + RX 6700 XT", 2, "two vendors"), ("RTX 3090 + T4", 3, "all of them")],
)
def test_what_cannot_train_together_is_refused(names, gpus, problem):
    with pytest.raises(UserError, match=problem):
        planned(load_recipe("go-coder-125m"), together(names), gpus=gpus)


def test_the_page_names_the_gpu_of_each_stage():
    names = "MI100 + RX 6700 XT"
    on = together(names)
    report = reported(load_recipe("go-coder-125m", [PIPELINE]), on, gpus=2)
    lines = page(report, on, source="go-coder-125m", commands=[])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert "stage 1 on Instinct MI100 · stage 2 on Radeon RX 6700 XT" in text
    listed = device_lines(report.plan, build_profile(on), on)
    assert listed[0].startswith("1 x Instinct MI100") and "1 x Radeon RX 6700 XT" in listed[1]
    assert "of peak" not in text and "MFU" not in text
    assert "at 300 + 230 W" in text.replace("\n          ", " ")
