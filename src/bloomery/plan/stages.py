"""The stages of a pipeline in a plan: what a recipe may ask of them, their layers, and the seconds of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.hardware.vendors import Vendor
from bloomery.plan.estimate.mesh import MeshSplit, mesh_overhead
from bloomery.plan.estimate.speed import Rate, step_parts, total, work_of
from bloomery.plan.estimate.stages import (
    end_model,
    layer_model,
    most_layers,
    stage_bytes,
    stage_models,
)
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.pipeline import balanced_groups
from bloomery.plan.types import Estimate
from bloomery.recipe.schema import Parallel, Recipe

# The rate of a device that the GPU table does not have. Seconds are then FLOPs, which also tell slow stages from fast.
ANY_RATE = Rate(peak=1.0, share=(1.0, 1.0, 1.0))
# On CPUs a pipeline takes this many micro-batches per stage: with fewer it waits, with more each one computes slower.
CPU_MICRO_BATCHES = 4

PartSeconds = dict[str, Estimate]


@dataclass(frozen=True)
class Device:
    """A device of a mesh: its rate, None where unknown, and the bytes of it that a plan may use."""

    name: str
    rate: Rate | None
    limit: float


def slowest(devices: Sequence[Device], step: StepShape) -> Device:
    """Ranks that do the same work wait for this one; with the memory of the smallest of them."""
    device = max(devices, key=lambda device: _seconds(step, step.model, device.rate))
    return replace(device, limit=min(device.limit for device in devices))


def chunks_of(parallel: Parallel) -> int:
    """The number of groups of layers that each stage has."""
    if parallel.pipeline_chunks != "auto":
        return parallel.pipeline_chunks
    return 2 if parallel.pipeline_schedule == "interleaved" else 1


def refuse_schedule(parallel: Parallel) -> None:
    """Raises UserError for numbers of chunks that the schedule does not have."""
    chunks = parallel.pipeline_chunks
    schedule = parallel.pipeline_schedule
    if chunks == "auto" or (chunks > 1) == (schedule == "interleaved"):
        return
    problem = f"the schedule {schedule} has one group of layers per stage, not {chunks}"
    fix = "set parallel.pipeline_schedule=interleaved, or parallel.pipeline_chunks=1"
    if schedule == "interleaved":
        problem = "the schedule interleaved needs at least two groups of layers per stage"
        fix = "set parallel.pipeline_chunks=2, or parallel.pipeline_schedule=1f1b"
    raise UserError(problem, where="parallel.pipeline_chunks", fix=fix, code=2)


def refuse_few_layers(num_layers: int, split: MeshSplit) -> None:
    """Raises UserError for more groups of layers than layers."""
    groups = split.pipeline * split.chunks
    if groups <= num_layers:
        return
    stages = f"{split.pipeline} stages"
    if split.chunks > 1:
        stages += f" of {split.chunks} groups"
    most_stages = num_layers // split.chunks
    fix = f"set parallel.pipeline={most_stages} or lower"
    if most_stages < 2:
        fix = "set parallel.pipeline_schedule=1f1b" if num_layers > 1 else "set parallel.pipeline=1"
    raise UserError(
        f"{stages} need {groups} layers, and the model has {num_layers}",
        where="parallel.pipeline",
        fix=fix,
        code=2,
    )


def micro_batch_misfit(recipe: Recipe, split: MeshSplit, sequences: int) -> UserError | None:
    """Why the micro-batches that the recipe asks for cannot be made of `sequences`; None where they can.

    `sequences`: those of a step that each copy of the pipeline takes.
    """
    stages = split.pipeline
    is_interleaved = split.schedule == "interleaved"
    count = recipe.parallel.pipeline_microbatches
    size = recipe.train.micro_batch_size
    of_a_copy = f"the {sequences:,} sequences of a step"
    if split.data_parallel > 1:
        of_a_copy += " that each copy takes"

    def misfit(problem: str, *, where: str, fix: str) -> UserError:
        return UserError(problem, where=where, fix=fix, code=2)

    # The recipe names the number of micro-batches.
    if count != "auto":
        where = "parallel.pipeline_microbatches"
        possible_counts = [
            number
            for number in range(1, min(sequences, 1024) + 1)
            if sequences % number == 0 and not (is_interleaved and number % stages)
        ]
        listed = ", ".join(map(str, possible_counts))
        fix = f"set parallel.pipeline_microbatches to one of {listed}"
        if not possible_counts:
            fix = "set parallel.pipeline_schedule=1f1b"
        if sequences % count:
            problem = f"{count:,} micro-batches do not divide {of_a_copy}"
            return misfit(problem, where=where, fix=fix)
        if is_interleaved and count % stages:
            problem = f"interleaved stages take micro-batches in rounds of {stages}, not {count:,}"
            return misfit(problem, where=where, fix=fix)
        if size != "auto" and size * count != sequences:
            micro_batches = f"{counted(count, 'micro-batches')} of {counted(size, 'sequences')}"
            problem = f"{micro_batches} are not {of_a_copy}"
            fix = f"set train.micro_batch_size={sequences // count}, or leave out one of the two"
            return misfit(problem, where=where, fix=fix)
        return None

    # It does not. Interleaved stages still take whole rounds: of any size, or of the size that the recipe names.
    if is_interleaved and sequences % stages:
        need = -(-sequences // stages) * stages * split.data_parallel
        problem = f"interleaved stages take micro-batches in rounds of {stages}, which do not divide {of_a_copy}"
        fix = f"set train.batch_size={need}, or parallel.pipeline_schedule=1f1b"
        return misfit(problem, where="parallel.pipeline_schedule", fix=fix)
    if is_interleaved and size != "auto" and (sequences // min(size, sequences)) % stages:
        problem = (
            f"interleaved stages take micro-batches in rounds of {stages}: {of_a_copy} make"
            f" {sequences // min(size, sequences)} of {size}"
        )
        fix = (
            f"set train.micro_batch_size={sequences // stages}, or parallel.pipeline_schedule=1f1b"
        )
        return misfit(problem, where="train.micro_batch_size", fix=fix)
    return None


def micro_batch_sizes(
    recipe: Recipe, step: StepShape, split: MeshSplit, sequences: int
) -> Iterator[int]:
    """Micro-batch sizes to try, smallest first: many small micro-batches fill a pipeline.

    A CPU has one size: the largest that makes CPU_MICRO_BATCHES per stage.
    """
    count = recipe.parallel.pipeline_microbatches
    if count != "auto":
        yield sequences // count
        return
    # Powers of two that divide the sequences. Interleaved stages take micro-batches in rounds of `round_size`; where
    # the plan chooses the pipeline, there is a micro-batch for every stage at least.
    round_size = split.pipeline if split.schedule == "interleaved" else 1
    fewest_micro_batches = 1 if recipe.parallel.pipeline != "auto" else split.pipeline
    sizes = []
    size = 1
    while (
        size * fewest_micro_batches <= sequences
        and sequences % size == 0
        and sequences // size % round_size == 0
    ):
        sizes.append(size)
        size *= 2
    if step.on_gpu:
        yield from sizes
        return
    enough = CPU_MICRO_BATCHES * split.pipeline
    yield max((size for size in sizes if sequences // size >= enough), default=sizes[0])


def cut_layers(
    step: StepShape,
    split: MeshSplit,
    devices: Sequence[Device],
    *,
    vendor: Vendor | None,
    micro_batches: int,
) -> MeshSplit:
    """The split with the layers of each group, such that the slowest stage is as fast as possible and each stage fits.

    `devices`: of each stage. Where no cut fits, the fastest one is planned, and the plan does not fit. The groups of
    interleaved stages are cut by time alone.
    """
    # The cost of each layer, and of the ends, for a micro-batch: on the first device, and by how much the others are
    # slower, in hundredths.
    model = step.model
    rate = devices[0].rate
    slowness: tuple[float, ...] = ()
    if any(device.rate != rate for device in devices):
        model_seconds = [_seconds(step, model, device.rate) for device in devices]
        slowness = tuple(round(seconds / model_seconds[0], 2) for seconds in model_seconds)
    layer_costs = model.by_layer_number(
        lambda number: _seconds(step, layer_model(step, number), rate)
    )
    embedding_cost, head_cost = (
        _seconds(step, end_model(step, is_head=is_head), rate) for is_head in (False, True)
    )
    # In thousandths of the largest: whole numbers, so that `_balanced` finds costs that are nearly alike in its cache.
    cost_unit = max(layer_costs) / 1000
    costs = tuple(round(cost / cost_unit) for cost in (*layer_costs, embedding_cost, head_cost))
    groups = _balanced(costs, split.pipeline, split.chunks, slowness=slowness)
    assert groups is not None, "there are as many layers as groups"
    fastest = replace(split, layers=groups)
    if split.chunks > 1:
        return fastest

    # A stage that needs too much memory hands layers to others; where all together have too little, none can.
    overhead = sum(mesh_overhead(split, vendor).values())
    available = [device.limit - overhead for device in devices]
    if _state_bytes(step) / split.shard > sum(available):
        return fastest
    needed = [
        sum(stage_bytes(step, fastest, index, micro_batches).values())
        for index in range(split.pipeline)
    ]
    if all(need <= limit for need, limit in zip(needed, available, strict=True)):
        return fastest
    if sum(needed) > sum(available):
        return fastest
    most_by_stage = tuple(
        most_layers(step, fastest, index, limit=limit, micro_batches=micro_batches)
        for index, limit in enumerate(available)
    )
    fitting_groups = (
        _balanced(costs, split.pipeline, split.chunks, most_by_stage, slowness)
        if min(most_by_stage)
        else None
    )
    return fastest if fitting_groups is None else replace(split, layers=fitting_groups)


def _state_bytes(step: StepShape) -> float:
    """Bytes of weights and optimizer states of a copy of the model, over all of its stages: the least that it needs."""
    model = step.model
    states = 0.0 if step.mode.offload else model.optimizer_bytes(step.optimizer, step.precision)
    return model.weight_bytes(step.precision) + states


@lru_cache(maxsize=512)
def _balanced(
    costs: tuple[int, ...],
    stages: int,
    chunks: int,
    most_by_stage: tuple[int, ...] = (),
    slowness: tuple[float, ...] = (),
) -> tuple[int, ...] | None:
    *layer_costs, embedding_cost, head_cost = costs
    return balanced_groups(
        layer_costs,
        stages=stages,
        chunks=chunks,
        embedding_cost=embedding_cost,
        head_cost=head_cost,
        most_layers=most_by_stage,
        slowness=slowness,
    )


def _seconds(step: StepShape, model: TrainedModel, rate: Rate | None) -> float:
    """Seconds of forward and backward of a micro-batch through `model`, a part of the step's model."""
    part_step = replace(step, model=model)
    work = work_of(part_step, tokens=step.tokens_per_micro_batch)
    return total(_without_optimizer(step_parts(work, rate or ANY_RATE))).value


def _without_optimizer(parts: PartSeconds) -> PartSeconds:
    return {name: part for name, part in parts.items() if name != "optimizer"}


def pipeline_parts(
    step: StepShape, split: MeshSplit, rates: Sequence[Rate], sequences: int
) -> tuple[PartSeconds, tuple[float, ...]]:
    """Seconds of a step by operation, and by stage the seconds in which it computes. `rates`: of each stage's device.

    The slowest stage sets the pace: its forward and backward of all M micro-batches, and while the first and the last
    micro-batch pass through the other stages it waits. With t_s the seconds of a micro-batch on stage s and C chunks
    that is M max(t) + (sum(t) - max(t)) / C, which for equal stages is (M + (P - 1) / C) t (Narayanan et al.,
    arXiv:2104.04473, section 2.2). All stages update after the last backward.
    """
    tokens = sequences * step.sequence_length
    by_stage = []
    for stage, rate in zip(stage_models(step.model, split), rates, strict=True):
        work = work_of(replace(step, model=stage.model), tokens=tokens)
        by_stage.append(step_parts(work.with_shard_of_update(split.shard), rate))
    computing = [total(_without_optimizer(parts)) for parts in by_stage]
    pace = max(range(split.pipeline), key=lambda index: computing[index].value)

    parts = _without_optimizer(by_stage[pace])
    updates = [stage_parts["optimizer"] for stage_parts in by_stage if "optimizer" in stage_parts]
    if updates:
        parts["optimizer"] = max(updates, key=lambda update: update.value)
    seconds = tuple(part.value for part in computing)
    micro_batches = max(1, sequences // step.micro_batch_size)
    waiting_share = (sum(seconds) / seconds[pace] - 1) / (micro_batches * split.chunks)
    parts["pipeline bubble"] = computing[pace].scaled(waiting_share)
    return parts, seconds
