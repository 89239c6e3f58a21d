"""Memory of a layout over several devices: the device that needs most."""

from dataclasses import dataclass, replace

from bloomery.hardware.vendors import VENDORS, Vendor
from bloomery.plan.estimate.memory import estimate_memory, estimate_of
from bloomery.plan.estimate.sharding import sharded_bytes
from bloomery.plan.estimate.stages import fullest_stage_bytes
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import LayoutPlan, MemoryEstimate
from bloomery.recipe.schema import PipelineSchedule

GRADIENT_BUCKET = 25 * 2**20  # bytes of gradients per all-reduce when weights are replicated


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """How many devices hold copies, shards and stages; of a pipeline its schedule and the layers of each group.

    `context`: neighbors among the copies and shards that share each sequence. `expert`: those that divide the experts.
    `chunks`: groups of layers of each stage. `layers`: of each group, in the model's order; none: not cut yet, or one
    group a stage and all as even as possible.
    """

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    schedule: PipelineSchedule = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: LayoutPlan) -> "MeshSplit":
        """That of a planned layout."""
        return cls(
            replicate=layout.replicate,
            shard=layout.shard,
            pipeline=layout.pipeline,
            context=layout.context,
            expert=layout.expert,
            schedule=layout.pipeline_schedule,
            chunks=layout.pipeline_chunks,
            layers=layout.pipeline_layers,
        )

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of `context` ranks, with different sequences."""
        return self.replicate * self.shard // self.context

    @property
    def divides_experts(self) -> bool:
        """Whether its devices can divide experts as `expert` says: where there are shards, these do."""
        return self.expert == 1 or (
            self.replicate * self.shard % self.expert == 0 and self.shard in (1, self.expert)
        )


ONE_DEVICE = MeshSplit()


def mesh_memory(
    step: StepShape,
    split: MeshSplit,
    *,
    vendor: Vendor | None,
    limit: float,
    micro_batches: int | None = None,
    stage_limits: tuple[float, ...] = (),
) -> MemoryEstimate:
    """The device of a layout that needs most; a step has so many micro-batches, or enough to fill every stage.

    `stage_limits`: of unequal devices, instead of `limit`.
    """
    step = on_device(step, split)
    if split.pipeline > 1:
        fullest, parts = fullest_stage_bytes(step, split, micro_batches, limits=stage_limits)
        if stage_limits:
            limit = stage_limits[fullest]
    elif split.shard > 1:
        parts = dict(sharded_bytes(step, split.shard))
    else:
        parts = dict(estimate_memory(step, limit=limit).parts)
    return estimate_of(parts | mesh_overhead(split, vendor), limit=limit)


def on_device(step: StepShape, split: MeshSplit) -> StepShape:
    """The step with what each device has of it: its share of the tokens whose teacher's states are kept, and of the
    experts where devices divide them without shards.
    """
    if step.teacher_tokens:
        devices = split.replicate * split.shard
        step = replace(step, teacher_tokens=-(-step.teacher_tokens // devices))
    if split.expert > 1 and split.shard == 1:
        return _with_own_experts(step, split.expert)
    return step


def _with_own_experts(step: StepShape, devices: int) -> StepShape:
    """The step of a model with as many experts as each device has. It computes as many rows as it sends."""
    experts = step.config.experts
    assert experts is not None, "a plan refuses to divide what is no mixture"
    own_experts = replace(experts, count=experts.count // devices)
    config = replace(step.config, experts=own_experts)
    return replace(step, model=replace(step.model, config=config))


def mesh_overhead(split: MeshSplit, vendor: Vendor | None) -> dict[str, float]:
    """Bytes by part that a layout needs on each device in addition to one without communication."""
    overhead = {"collectives": _collective_bytes(split, vendor)}
    if split.replicate > 1 and split.shard == 1:
        overhead["gradient buckets"] = float(2 * GRADIENT_BUCKET)
    return overhead


def _collective_bytes(split: MeshSplit, vendor: Vendor | None) -> float:
    """Each process group has a context of the collective library, outside PyTorch's allocator."""
    groups = (split.pipeline > 1) + (split.replicate > 1) + (split.shard > 1)
    groups += split.context not in (1, split.replicate * split.shard)
    groups += split.expert > 1
    if vendor is None or groups == 0:
        return 0.0
    facts = VENDORS[vendor]
    return facts.first_context + facts.next_context * (groups - 1)
