"""One small training step three ways: counted from shapes, run on fake tensors, and run and measured."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_tracker import peak_bytes
from plan_help import loaded, machine, planned

from bloomery.data.batch import Batch
from bloomery.model.io.parameters import local
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.process_group import join
from bloomery.plan.choices import teacher_of, teacher_place, teacher_streams, teacher_tokens
from bloomery.plan.estimate.memory import tensor_bytes
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit, mesh_memory
from bloomery.plan.estimate.stages import stage_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import NOT_TENSORS, LayoutPlan, RunPlan
from bloomery.simulate.step import simulated_stage, simulated_step
from bloomery.train.objectives.build import pretraining
from bloomery.train.state import build_state
from bloomery.train.step import train_step
from ranks import ranks

SIZES = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 256,
    "vocab_size": 1024,
}


def small_plan(
    family: str = "llama",
    *,
    dropout: float = 0.0,
    rows: int = 4,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    sizes: dict[str, int] | None = None,
    chunk: int | None = None,
    device: str = "cpu",
    attention: str = "per_document",
    adapter: dict[str, object] | None = None,
    lean: dict[str, object] | None = None,
    base: str = "none",
    **train: object,
) -> RunPlan:
    """Rows of 256 tokens in documents of 64; `train`: precision, compile, activation_checkpointing."""
    shape = SIZES | ({} if family == "gpt2" else {"num_kv_heads": 2}) | (sizes or {})
    settings = {"precision": "float32", "compile": False} | train
    recipe = loaded(
        model={"family": family, **shape},
        data={"sequence_length": 256},
        optimizer={"kind": optimizer} | (lean or {}),
        adapter=adapter or {"kind": "none"},
        quantize={"kind": base},
        train={"micro_batch_size": rows, "tokens_per_step": 256 * rows * micro_batches, **settings},
    )
    plan = planned(recipe, machine())
    rates = dict.fromkeys(("residual_dropout", "attention_dropout", "embedding_dropout"), dropout)
    model = plan.model.model_copy(
        update={
            "config": replace(plan.model.config, **rates),
            "attention": attention,
            "scores": "compiled" if attention == "compiled" else "torch",
            "score_chunk": chunk or plan.model.score_chunk,
        }
    )
    return plan.model_copy(
        update={
            "model": model,
            "train": plan.train.model_copy(update={"device": device, "threads": 1}),
        }
    )


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All of them in `make soak`, those that are quick and unlike each other in `make test`."""
    names = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*name, marks=[] if case in quick else pytest.mark.soak)
        for case, name in zip(cases, names, strict=True)
    ]


def load_of(plan: RunPlan) -> StepShape:
    train = plan.train
    return StepShape(
        model=TrainedModel.of(plan, plan.model.config),
        sequence_length=plan.data.sequence_length,
        micro_batch_size=train.micro_batch_size,
        precision=train.precision,
        optimizer=plan.optimizer.kind,
        attention=plan.model.attention,
        checkpointing=train.activation_checkpointing,
        compiled=train.compile,
        score_chunk=plan.model.score_chunk,
        context=train.context,
        expert=train.expert,
        context_bytes=0.0,
        on_gpu=train.device != "cpu",
        accumulating=train.accumulation > 1,
        offload_activations=train.offload_activations,
        stream=train.stream,
        stream_micro_batches=train.stream_micro_batches,
        teacher=teacher_of(plan),
        teacher_stream=teacher_streams(plan),
        teacher_tokens=teacher_tokens(plan),
        teacher_place=teacher_place(plan, aligns_texts=plan.aligns_texts),
    )


def counted(plan: RunPlan, *, split: MeshSplit = ONE_DEVICE) -> float:
    """Bytes from shapes alone."""
    if split == ONE_DEVICE:
        return sum(tensor_bytes(load_of(plan)).values())
    split = MeshSplit(replicate=split.replicate, shard=split.shard, expert=split.expert)
    return mesh_memory(load_of(plan), split, vendor="amd", limit=0.0).allocated


def simulated(plan: RunPlan, *, fused: bool = True, split: MeshSplit = ONE_DEVICE) -> float:
    """Bytes on fake tensors."""
    return sum(simulated_step(plan, fused=fused, split=split).parts.values())


def laid(plan: RunPlan, layout: LayoutPlan) -> RunPlan:
    """The plan as if this layout had been chosen."""
    names = ("micro_batch_size", "accumulation", "activation_checkpointing")
    changed = {name: getattr(layout, name) for name in names}
    return plan.model_copy(update={"train": plan.train.model_copy(update=changed)})


def both_of_stage(
    plan: RunPlan, split: MeshSplit, index: int, *, fused: bool = True
) -> tuple[float, float]:
    """Counted and simulated bytes of one stage."""
    parts = stage_bytes(load_of(plan), split, index, plan.train.accumulation)
    told = sum(size for name, size in parts.items() if name not in NOT_TENSORS)
    return told, sum(simulated_stage(plan, split, index, fused=fused).parts.values())


def measured_ranks(plan: RunPlan) -> list[float]:
    """What `measured` gives on each rank of the plan, on real ranks."""
    return ranks(plan.train.ranks).call(_measured_rank, plan.model_dump_json())


def _measured_rank(plan_json: str) -> float:
    plan = RunPlan.model_validate_json(plan_json)
    return measured(plan, join(plan.train))


def measured(plan: RunPlan, mesh: Mesh = SINGLE_RANK) -> float:
    """Bytes that the CPU's allocator hands out, of the third step, on this rank."""
    torch.set_num_threads(1)
    model_and_optimizer = build_state(plan, mesh=mesh).model_and_optimizer
    native = plan.model.scores == "compiled"
    objective = pretraining(
        score_chunk=plan.model.score_chunk, compiled=plan.train.compile, native=native
    )
    # without a pipeline a third micro-batch holds what the second does
    most = 2 if mesh.stages == 1 else plan.train.accumulation
    batches = [
        _batch(plan).part(mesh.context_rank, mesh.context)
        for _ in range(min(most, plan.train.accumulation))
    ]

    def step() -> None:
        train_step(model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)

    step()
    step()
    held = [
        *model_and_optimizer.model.parameters(),
        *model_and_optimizer.model.buffers(),
        *model_and_optimizer.optimizer.named_tensors().values(),
    ]
    held += [tensor for batch in batches for tensor in batch.tensors()]
    return sum(local(tensor).nbytes for tensor in held) + peak_bytes(step)


def _batch(plan: RunPlan) -> Batch:
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    tokens = torch.randint(
        0, plan.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)
    )
    stage_positions = torch.arange(shape[1]).repeat(shape[0], 1)
    return Batch(
        tokens, tokens.roll(-1, 1), torch.ones(shape), stage_positions % 64, stage_positions // 64
    )
