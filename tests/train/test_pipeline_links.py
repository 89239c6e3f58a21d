"""How the stages of a pipeline reach each other. Oracle: one rank."""

from dataclasses import replace
from pathlib import Path

import pytest
from plans_for_tests import tiny_config, tiny_plan

from ranks import losses, on_ranks, ranks, train


def eight_micro_batches(prepared):
    return tiny_plan(
        prepared,
        config=tiny_config(num_layers=4, vocab_size=512),
        train={"steps": 3, "micro_batch_size": 1, "accumulation": 8, "tokens_per_step": 512},
        eval={"every_steps": 2},
    )


def train_over_edge_groups(plan_json: str, folder: str) -> list:
    """One rank of a run whose tensors take the way of GPUs: a process group for each edge and direction."""
    import torch

    from bloomery.parallel.process_group import edge_groups, join
    from bloomery.plan.types import RunPlan
    from bloomery.train.loop import run

    torch.set_num_threads(1)
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    groups = edge_groups(plan.train, mesh.rank, backend="gloo")
    mesh = replace(mesh, groups=replace(mesh.groups, edges=groups), sends_from_device=True)
    events = []
    run(
        plan,
        run_dir=Path(folder),
        emit=events.append,
        stop=lambda: False,
        resume_from=None,
        mesh=mesh,
    )
    return events


@pytest.mark.parametrize(
    ("stages", "replicate", "schedule", "chunks"), [(2, 1, "1f1b", 1), (2, 1, "interleaved", 2)]
)
def test_a_queue_for_each_edge_and_direction_trains_as_one_rank(
    prepared, tmp_path, stages, replicate, schedule, chunks
):
    plan = eight_micro_batches(prepared)
    several = on_ranks(plan, pipeline=stages, replicate=replicate, schedule=schedule, chunks=chunks)
    (tmp_path / "many").mkdir()
    events = ranks(several.train.ranks).call(
        train_over_edge_groups, several.model_dump_json(), str(tmp_path / "many")
    )[0]
    assert losses(events) == losses(train(plan, tmp_path / "one"))
    assert all(
        event.communication_seconds["pipeline"] > 0
        for event in events
        if type(event).__name__ == "StepDone"
    )


def backend_of(plan_json: str) -> tuple[str, bool]:
    """Of the process group that ranks on GPUs would join; they are CPUs here."""
    import torch
    import torch.distributed as dist

    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan

    plan = RunPlan.model_validate_json(plan_json)
    device_functions = torch.cuda.device_count, torch.cuda.set_device
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: None
    try:
        mesh = join(plan.train)
    finally:
        torch.cuda.device_count, torch.cuda.set_device = device_functions
    return str(dist.get_backend_config()), mesh.reduces_on_host


def test_a_pipeline_over_the_hosts_starts_no_nccl(prepared):
    plan = on_ranks(eight_micro_batches(prepared), pipeline=2)
    train_plan = plan.train.model_copy(update={"device": "cuda", "pipeline_link": "host"})
    on_gpus = plan.model_copy(update={"train": train_plan}).model_dump_json()
    assert ranks(2).call(backend_of, on_gpus) == [("cpu:gloo,cuda:gloo", True)] * 2
