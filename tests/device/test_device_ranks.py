"""Two simulated devices in two processes train as CPUs do, and resume bitwise. Collectives: library/ranks.h."""

import math
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import prepared_corpus
from safetensors.torch import load_file

from bloomery.facts.config import Experts
from bloomery.plan.types import RunPlan
from ranks import Ranks, losses, on_ranks, ranks, seconds_of, train_here

STEPS, HALF = 4, 2
MESHES = {
    "copies": {"replicate": 2},
    "shards": {"shard": 2},
    "shared sequences": {"shard": 2, "context": 2},
    "experts": {"replicate": 2, "expert": 2},
    "pipeline over GPUs": {"pipeline": 2},
    "pipeline over the host": {"pipeline": 2},
}
OFTEN_ALIKE = ("shared sequences", "pipeline over the host")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("prepared"))


def plan_of(prepared: Path, device: str, mesh: str, **train: object) -> RunPlan:
    every = {"every_steps": HALF}
    sizes = {"micro_batch_size": 2, "accumulation": 2, "tokens_per_step": 128, "steps": STEPS}
    link = {"pipeline_link": "host" if mesh.endswith("host") else "device"}
    config = tiny_config(vocab_size=300, num_kv_heads=2)
    if mesh == "experts":
        experts = Experts(count=4, per_token=2, width=16)
        config = replace(config, family="qwen3_moe", experts=experts)
    plan = tiny_plan(
        prepared,
        config=config,
        train={**sizes, "device": device, **link, **train},
        data={"pin_memory": device != "cpu"},
        eval=every,
        checkpoint=every,
    )
    memory = plan.memory.model_copy(update={"limit": 4 * 2**30})
    return on_ranks(plan.model_copy(update={"memory": memory}), **MESHES[mesh])


def rank_of_a_device(*words: Any) -> tuple[list[Any], list[str], int]:
    """The events of this rank, the problems of its device, and the bytes that it put on the other one."""
    import simulated
    import torch

    simulated.clear()
    events = train_here(*words)
    torch.cuda.synchronize()
    others = [
        device
        for device in range(torch.cuda.device_count())
        if device != torch.cuda.current_device()
    ]
    return (
        events,
        list(simulated.report()["problem"]),
        sum(simulated.stats(device).total for device in others),
    )


def train(plan: RunPlan, folder: Path, resume_from: Path | None = None) -> list[Any]:
    folder.mkdir()
    words = (plan.model_dump_json(), str(folder), resume_from and str(resume_from), None)
    if plan.train.device == "cpu":
        return ranks(2).call(train_here, *words, seconds=seconds_of(plan))[0]
    by_rank = ranks(2).call(rank_of_a_device, *words, seconds=seconds_of(plan))
    assert [problems for _, problems, _ in by_rank] == [[], []]
    assert [elsewhere for _, _, elsewhere in by_rank] == [0, 0]
    return by_rank[0][0]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.soak] if mesh in OFTEN_ALIKE else [])
        for mesh in MESHES
    ],
)
def test_two_devices_train_as_cpus_do_and_resume_bitwise(
    prepared: Path, tmp_path: Path, mesh: str
) -> None:
    on_cpus = train(plan_of(prepared, "cpu", mesh), tmp_path / "cpus")
    plan = plan_of(prepared, "cuda", mesh)
    whole = train(plan, tmp_path / "whole")
    assert losses(whole).keys() == set(range(1, STEPS + 1))
    assert losses(whole) == pytest.approx(losses(on_cpus), rel=3e-7)

    half = tmp_path / "whole/checkpoints" / f"step-{HALF:08d}"
    resumed = train(plan, tmp_path / "resumed", resume_from=half)
    assert losses(resumed) == {step: losses(whole)[step] for step in range(HALF + 1, STEPS + 1)}
    last = f"checkpoints/step-{STEPS:08d}"
    files = sorted((tmp_path / "whole" / last).glob("*.safetensors"))
    assert files
    for file in files:
        others = load_file(tmp_path / "resumed" / last / file.name)
        assert all(tensor.equal(others[name]) for name, tensor in load_file(file).items())


def preflight_of_a_device(plan_json: str, folder: str) -> tuple[str, list[str]]:
    """What the check before the first step found; and the problems of this rank's device."""
    import simulated

    from bloomery.parallel.preflight import check_ranks
    from bloomery.parallel.process_group import join

    simulated.clear()
    plan = RunPlan.model_validate_json(plan_json)
    found = check_ranks(join(plan.train), plan, Path(folder), product_problem=lambda _: "")
    return str(found), list(simulated.report()["problem"])


@pytest.mark.parametrize("mesh", ["shards", "pipeline over GPUs"])
def test_links_between_devices_are_tried(prepared: Path, tmp_path: Path, mesh: str) -> None:
    plan = plan_of(prepared, "cuda", mesh).model_dump_json()
    for found, problems in ranks(2).call(preflight_of_a_device, plan, str(tmp_path)):
        assert problems == []
        assert ("from GPU to GPU" in found) == (mesh == "pipeline over GPUs")


MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.mark.soak  # four processes that start from nothing
def test_ranks_may_see_one_device_each(prepared: Path, tmp_path: Path) -> None:
    """As some launchers start them; one device for both is refused."""
    plan = plan_of(prepared, "cuda", "copies")
    with closing(Ranks(2, [dict.fromkeys(MASKS, str(rank)) for rank in (0, 1)])) as masked:
        masked.call(preflight_of_a_device, plan.model_dump_json(), str(tmp_path))
        words = (plan.model_dump_json(), str(tmp_path), None, None)
        by_rank = masked.call(rank_of_a_device, *words)
    assert set(losses(by_rank[0][0])) == set(range(1, STEPS + 1))
    with (
        closing(Ranks(2, [dict.fromkeys(MASKS, "0")] * 2)) as on_one,
        pytest.raises(AssertionError, match="use the same GPU"),
    ):
        on_one.call(preflight_of_a_device, plan.model_dump_json(), str(tmp_path))


def sum_that_is_read_early(plan_json: str) -> tuple[float, float, list[str]]:
    """A planted fault: a sum over ranks before `wait`, after it, and what the device noticed."""
    import simulated
    import torch
    import torch.distributed as dist

    from bloomery.parallel.process_group import join

    join(RunPlan.model_validate_json(plan_json).train)
    simulated.clear()
    simulated.problem_is_error(False)
    simulated._lib.sim_set_problem_file(b"")  # here it is expected, and fails no test
    number = torch.ones((), device="cuda")
    work = dist.all_reduce(number, async_op=True)
    before = number.item()
    work.wait()
    simulated.problem_is_error(True)
    reports = os.environ.get("BLOOMERY_SIMULATED_REPORTS", "")
    simulated._lib.sim_set_problem_file(reports.encode())
    return before, number.item(), list(simulated.report()["problem"])


def test_a_sum_that_nobody_waits_for_is_noticed(prepared: Path) -> None:
    plan = plan_of(prepared, "cuda", "copies").model_dump_json()
    for before, after, problems in ranks(2).call(sum_that_is_read_early, plan):
        assert math.isnan(before)
        assert after == 2
        assert ["all_reduce" in problem for problem in problems] == [True]
