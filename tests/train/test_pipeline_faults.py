"""What goes wrong on one stage of a pipeline: all stages decide alike, as one rank would. Oracle: one rank."""

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from test_pipeline import assert_same_checkpoints, comparable

from ranks import fields, losses, on_ranks, ranks, train, train_here

MESHES = {
    "two stages": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "four stages": {"pipeline": 4},
}
QUICK_MESHES = [
    pytest.param(mesh, id=name, marks=[] if name == "two stages" else pytest.mark.soak)
    for name, mesh in MESHES.items()
]


def plan_of(prepared, **sections):
    config = sections.pop("config", {})
    train = {"micro_batch_size": 1, "accumulation": 4, "tokens_per_step": 128, "steps": 10}
    parts = {
        "train": train | sections.pop("train", {}),
        "checkpoint": {"every_steps": 3},
        "eval": {"every_steps": 99},
    }
    facts = {"vocab_size": 512, "num_layers": 4, "tie_embeddings": False} | config
    return tiny_plan(prepared, config=tiny_config(**facts), **parts | sections)


def train_with(plan_json: str, folder: str, fault: str, steps: list[int]) -> list[Any]:
    """On every rank: the events of a run with a fault in these steps, counted as they are taken."""
    from bloomery.train import loop, step
    from bloomery.train.step import LossScale

    plain_step, plain_norm = loop.train_step, step.global_norm
    taken = 0
    in_fault = False

    def counted_step(model_and_optimizer, batches, objective, **settings):
        nonlocal taken, in_fault
        taken += 1
        in_fault = taken in steps
        if taken == 1 and fault == "large loss scale":
            model_and_optimizer.loss_scale = LossScale(2.0**26)
        if in_fault and fault == "non-finite loss":
            sound = objective.loss
            objective = replace(
                objective,
                loss=lambda output, batch: (parts := sound(output, batch))._replace(
                    total=parts.total * math.nan
                ),
            )
        if in_fault and fault == "masked step":
            batches = [replace(b, loss_mask=torch.zeros_like(b.loss_mask)) for b in batches]
        if in_fault and fault == "masked micro-batch":
            masked = replace(batches[1], loss_mask=torch.zeros_like(batches[1].loss_mask))
            batches = [batches[0], masked, *batches[2:]]
        return plain_step(model_and_optimizer, batches, objective, **settings)

    def norm_of_faulty(gradients, *arguments):
        # Only the stage with the embedding has this gradient.
        if in_fault and fault == "non-finite gradient" and "model.embed_tokens.weight" in gradients:
            gradients["model.embed_tokens.weight"][3] = math.inf
        return plain_norm(gradients, *arguments)

    loop.train_step, step.global_norm = counted_step, norm_of_faulty
    try:
        return train_here(plan_json, folder, None, None)
    finally:
        loop.train_step, step.global_norm = plain_step, plain_norm


FAULTS = {
    "a non-finite loss": ("non-finite loss", [5], {}),
    "non-finite losses, then a rewind": ("non-finite loss", [5, 6, 7, 8], {}),
    "a non-finite gradient on the first stage": ("non-finite gradient", [2, 6], {}),
    "non-finite gradients, then a rewind": ("non-finite gradient", [5, 6, 7, 8], {}),
    "a loss scale too large": ("large loss scale", [], {"precision": "float16"}),
    "overflows of float16": ("non-finite gradient", [3, 4], {"precision": "float16"}),
    "a masked step": ("masked step", [2, 5], {}),
    "a masked micro-batch": ("masked micro-batch", [1, 2, 5], {}),
}
QUICK_FAULT = "non-finite losses, then a rewind"


@pytest.mark.parametrize("mesh", QUICK_MESHES)
@pytest.mark.parametrize(
    ("fault", "steps", "changes"),
    [
        pytest.param(*case, id=name, marks=[] if name == QUICK_FAULT else pytest.mark.soak)
        for name, case in FAULTS.items()
    ],
)
def test_all_stages_decide_as_one_rank(prepared, tmp_path, mesh, fault, steps, changes) -> None:
    plan = plan_of(prepared, train=changes, optimizer={"learning_rate": 0.003})
    several = on_ranks(plan, **mesh)
    folders = tmp_path / "one", tmp_path / "many"
    for folder in folders:
        folder.mkdir()
    one = train_with(plan.model_dump_json(), str(folders[0]), fault, steps)
    arguments = (several.model_dump_json(), str(folders[1]), fault, steps)
    many = ranks(several.train.ranks).call(train_with, *arguments)[0]
    assert losses(many)[10] is not None
    for kind in ("StepDone", "Warned", "Recovered", "StepHealth"):
        assert comparable(many, kind) == comparable(one, kind), kind
    if "rewind" in fault or len(steps) == 4:
        assert len(fields(many, "Recovered")) == 1
    elif "masked" not in fault:
        assert len(fields(many, "Warned")) > 1  # the first one: a small validation set
    assert_same_checkpoints(*folders, step=10)


@pytest.mark.parametrize("mesh", QUICK_MESHES)
def test_early_stopping_ends_all_stages(prepared, tmp_path, mesh) -> None:
    evaluation = {"every_steps": 1, "early_stopping_patience": 2}
    plan = plan_of(prepared, train={"steps": 40}, eval=evaluation, optimizer={"learning_rate": 0.3})
    one = train(plan, tmp_path / "one")
    many = train(on_ranks(plan, **mesh), tmp_path / "many")
    assert len(losses(one)) < 40
    for kind in ("StepDone", "EvalDone", "Warned"):
        assert comparable(many, kind) == comparable(one, kind), kind
    assert_same_checkpoints(tmp_path / "one", tmp_path / "many", step=len(losses(one)))


@pytest.mark.soak
@pytest.mark.parametrize("mesh", QUICK_MESHES)
def test_a_wall_time_run_ends_on_all_stages_at_once(prepared, tmp_path, mesh) -> None:
    plan = plan_of(prepared, train={"steps": None, "seconds": 4.0, "min_steps": 3})
    several = on_ranks(plan, **mesh)
    every = ranks(several.train.ranks).call(
        train_here, several.model_dump_json(), str(tmp_path), None, None
    )
    steps = [len(losses(events)) for events in every]
    assert steps[0] >= 3 and len(set(steps)) == 1, steps
    assert len({str(losses(events)) for events in every}) == 1


@pytest.mark.parametrize("mesh", QUICK_MESHES)
def test_a_profile_changes_no_bit_and_is_of_the_first_stage(prepared, tmp_path, mesh) -> None:
    plan = plan_of(prepared, train={"steps": 3})
    recorded = plan.model_copy(
        update={
            "logging": plan.logging.model_copy(update={"profile_steps": (2, 2), "memory": True})
        }
    )
    plain = train(on_ranks(plan, **mesh), tmp_path / "plain")
    seen = train(on_ranks(recorded, **mesh), tmp_path / "seen")
    assert losses(seen) == losses(plain)
    assert_same_checkpoints(tmp_path / "plain", tmp_path / "seen", step=3)
    names = sorted(path.name for path in (tmp_path / "seen" / "profile").iterdir())
    assert names == [
        "step-00000002.memory.txt",
        "step-00000002.operators.txt",
        "step-00000002.trace.json.gz",
    ]
    trace = gzip.decompress((tmp_path / "seen" / "profile" / names[2]).read_bytes())
    assert b"embedding" in trace


def out_of_memory_here(plan_json: str, folder: str, stage: int) -> str:
    """On every rank: how the run ends where one stage runs out of memory in its third step."""
    from bloomery.model.decoder import Block
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.loop import run

    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    forward, count = Block.forward, 0

    def forward_or_fail(self, *arguments):
        nonlocal count
        count += self.training
        if mesh.stage == stage and count > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")
        return forward(self, *arguments)

    Block.forward = forward_or_fail
    try:
        run(plan, run_dir=Path(folder), emit=lambda _: None, stop=lambda: False, mesh=mesh)
    except Exception as error:  # of any kind: its name is what the test reads
        return f"{type(error).__name__}: {error}"
    finally:
        Block.forward = forward
    return "ended"


@pytest.mark.parametrize("stage", [0, 1])
def test_memory_that_runs_out_names_the_rank_and_lists_its_tensors(
    prepared, tmp_path, stage
) -> None:
    plan = on_ranks(plan_of(prepared, logging={"memory": True}), pipeline=2)
    told = ranks(2).call(out_of_memory_here, plan.model_dump_json(), str(tmp_path), stage)
    layers = ("0 to 1", "2 to 3")[stage]
    expected = f"out of memory on rank {stage} (layers {layers}) after step 2 (2.50 GiB allocation"
    assert told[stage].startswith(f"OutOfMemory: error: {expected}"), told
    assert (tmp_path / "profile" / "step-00000003-full-1.memory.txt").is_file()
    assert not told[1 - stage].startswith("OutOfMemory") and told[1 - stage] != "ended"
