"""The memory of a teacher over stages, shared sequences and shards: counted from shapes, on fake tensors, on ranks."""

from dataclasses import replace

import pytest
import torch
from memory_tracker import peak_bytes
from steps_for_tests import _batch, both_of_stage, counted, load_of, simulated, small_plan
from test_simulated_objectives import of_objective

from bloomery.model.configs import read_config
from bloomery.model.io.parameters import local
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.process_group import join
from bloomery.plan.estimate.fabric import exchanged_bytes
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Distill, Pretrain
from bloomery.simulate.step import simulated_step, weights
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step
from ranks import on_ranks, ranks

SIZES = {"hidden_size": 256, "num_layers": 4, "intermediate_size": 768}


def taught_plan(folder, *, stream: str = "off", **changes) -> RunPlan:
    """Of a student and a teacher of the same size."""
    plan = small_plan(rows=1, micro_batches=4, sizes=SIZES, **changes)
    if not (folder / "config.json").exists():
        config = plan.model.config
        write_model(model_state(fresh_decoder(config, seed=0)), config, folder)
    return of_objective(plan, Distill(kind="distill", teacher=str(folder), teacher_stream=stream))


def measured_rank(plan_json: str) -> tuple[float, int]:
    """On this rank: the bytes of the third step with the plan's objective, and those of the teacher."""
    torch.set_num_threads(1)
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    teachers = []

    def load(teacher_plan):
        config = read_config(teacher_plan.folder)
        teacher = fresh_decoder(config, seed=0, attention=plan.model.attention)
        teachers.append(teacher.eval().requires_grad_(False))
        return teacher

    model_and_optimizer = build_state(plan, mesh=mesh).model_and_optimizer
    objective = build_objective(plan, load, mesh=mesh)
    batches = [
        _batch(plan).part(mesh.context_rank, mesh.context) for _ in range(plan.train.accumulation)
    ]

    def step() -> None:
        train_step(model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)

    step()
    step()
    held = [
        *weights(model_and_optimizer.model),
        *model_and_optimizer.optimizer.named_tensors().values(),
    ]
    held += [tensor for batch in batches for tensor in batch.tensors()]
    of_teacher = sum(tensor.nbytes for teacher in teachers for tensor in weights(teacher))
    return sum(local(tensor).nbytes for tensor in held) + of_teacher + peak_bytes(step), of_teacher


def test_the_last_stage_has_the_teacher(tmp_path):
    plan = taught_plan(tmp_path)
    several = on_ranks(plan, pipeline=2)
    split = MeshSplit(pipeline=2, layers=several.train.pipeline_layers)
    peaks = ranks(2).call(measured_rank, several.model_dump_json())
    assert [of_teacher > 0 for _, of_teacher in peaks] == [False, True]
    for index, (real, _) in enumerate(peaks):
        told, fake = both_of_stage(plan, split, index)
        assert told == pytest.approx(fake, rel=0.05), index
        assert fake == pytest.approx(real, rel=0.05), index


def test_of_a_teacher_that_streams_the_last_stage_has_buffers(tmp_path):
    """A deep one, whose layers would be most of the stage."""
    deep = replace(small_plan(sizes=SIZES).model.config, num_layers=16)
    write_model(model_state(fresh_decoder(deep, seed=0)), deep, tmp_path)
    split = MeshSplit(pipeline=2)
    resident, streamed = (
        both_of_stage(taught_plan(tmp_path, stream=stream), split, 1)
        for stream in ("off", "layers")
    )
    for told, fake in (resident, streamed):
        assert told == pytest.approx(fake, rel=0.08)
    assert streamed[1] < 0.7 * resident[1]


LAYOUTS = {"shared sequences": {"replicate": 2, "context": 2}, "shards": {"shard": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_the_teacher(tmp_path, layout):
    several = on_ranks(taught_plan(tmp_path), **LAYOUTS[layout])
    split = MeshSplit(**LAYOUTS[layout])
    fake = simulated(several, split=split)
    told = counted(several, split=split) if split.shard > 1 else counted(several)
    assert told == pytest.approx(fake, rel=0.08)
    for real, of_teacher in ranks(2).call(measured_rank, several.model_dump_json()):
        assert of_teacher > 0
        assert fake == pytest.approx(real, rel=0.08)


def test_what_its_attention_exchanges_is_counted(tmp_path):
    """Its queries, keys, values and outputs travel once, those of the student and their gradients twice."""
    several = on_ranks(taught_plan(tmp_path), replicate=2, context=2)
    split = MeshSplit(replicate=2, context=2)
    sent = simulated_step(several, fused=True, split=split).sent
    of_student = simulated_step(
        several.model_copy(update={"objective": Pretrain(kind="pretrain")}), fused=True, split=split
    ).sent
    assert sent["context"] == pytest.approx(1.5 * of_student["context"])
    step = replace(load_of(several), context=2)
    taught, untaught = (exchanged_bytes(form) for form in (step, replace(step, teacher=None)))
    assert taught == (pytest.approx(1.5 * untaught[0]), 1.5 * untaught[1])
