"""The layouts of a mesh as part of a plan."""

from dataclasses import dataclass

from bloomery.core.errors import UserError
from bloomery.hardware.profile import Profile
from bloomery.plan.estimate.speed import Rate
from bloomery.plan.estimate.step_shape import Occupancy
from bloomery.plan.mesh.layouts import Job, Laid, choose, layouts
from bloomery.plan.mesh.links import fabric_of
from bloomery.plan.types import LayoutPlan, MeshPlan
from bloomery.recipe.schema import Train


@dataclass(frozen=True)
class Found:
    laid: Laid  # the chosen one
    plan: MeshPlan


def plan_mesh(
    train: Train,
    profile: Profile,
    load: Occupancy,
    rate: Rate | None,
    *,
    rows_per_step: int,
    gpus: int,
    nodes: int,
    limit: float,
) -> Found:
    """Every layout over `nodes` nodes of `gpus` devices, and the one to take.

    Raises UserError where the step has too few rows for so many devices.
    """
    assert profile.gpu is not None, "a mesh is of devices that the table knows"
    fabric = fabric_of(profile.gpu, per_node=gpus, nodes=nodes)
    job = Job(
        load=load, train=train, rows_per_step=rows_per_step, fabric=fabric, rate=rate,
        vendor=profile.arch.vendor if profile.arch else "amd", limit=limit,
    )  # fmt: skip
    found = layouts(job)
    if not found:
        need = -(-rows_per_step // fabric.devices) * fabric.devices * load.sequence_length
        raise UserError(
            f"{rows_per_step:,} rows of a step cannot be shared by {fabric.devices:,} devices",
            where="train.tokens_per_step",
            remedy=f"set train.tokens_per_step={need}, or take a number of devices that divides {rows_per_step:,}",
            code=2,
        )
    chosen, because = choose(found)
    plan = MeshPlan(
        gpus=gpus,
        nodes=nodes,
        link=f"{fabric.inside.name}: {fabric.inside.gbs:g} GB/s ({fabric.inside.because})",
        network=f"{fabric.between.name}: {fabric.between.gbs:g} GB/s ({fabric.between.because})"
        if fabric.between
        else "",
        layouts=tuple(_layout(laid, rows_per_step) for laid in found),
        chosen=found.index(chosen),
        because=because,
    )
    return Found(chosen, plan)


def _layout(laid: Laid, rows_per_step: int) -> LayoutPlan:
    split, parts, micro_batch = laid.split, laid.parts or {}, laid.cut.micro_batch.value
    exposed, bubble = parts.get("exposed communication"), parts.get("pipeline bubble")
    return LayoutPlan(
        name=laid.name,
        replicate=split.replicate,
        shard=split.shard,
        pipeline=split.pipeline,
        micro_batch=micro_batch,
        accumulation=rows_per_step // split.data_parallel // micro_batch,
        activation_checkpointing=laid.cut.checkpointing.value,
        memory=laid.cut.memory,
        step_seconds=laid.seconds,
        exposed_seconds=exposed.value if exposed else 0.0,
        bubble_seconds=bubble.value if bubble else 0.0,
    )
