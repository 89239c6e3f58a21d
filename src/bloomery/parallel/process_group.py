"""Joins this process to the ranks of a run, and leaves them."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.core.allocator import return_freed_memory
from bloomery.core.device import (
    collective_backends,
    device_backend,
    is_accelerator,
    num_devices,
    select_device,
)
from bloomery.core.errors import UserError
from bloomery.parallel.environment import RankEnvironment, node_name, rank_environment
from bloomery.parallel.experts import EXPERT_AXIS
from bloomery.parallel.mesh import SINGLE_RANK, Mesh, PipelineGroups
from bloomery.parallel.pipeline import BACKWARD, FORWARD
from bloomery.plan.types import LAZY_CONNECTIONS, TrainPlan

# All ranks start together, but may import torch from a slow file system.
JOIN_SECONDS = 600.0
# A backstop: the deadline of the worker ends a hang much earlier.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LEAVE_SECONDS = 10.0


@final
class RanksMissing(RuntimeError):
    """Some ranks did not arrive within JOIN_SECONDS."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"not arrived: {ranks}")
        self.ranks = ranks


def join(plan: TrainPlan) -> Mesh:
    """Join the ranks of the plan, as the launcher's variables say; one rank alone needs none.

    Raises RanksMissing, and UserError where this rank sees no device.
    """
    if plan.ranks == 1:
        return SINGLE_RANK
    environment = rank_environment()

    # CPU tensors travel over gloo in every run: the few numbers that ranks agree on.
    backend = "gloo"
    if is_accelerator(plan.device):
        visible_devices = num_devices(plan.device)
        if visible_devices == 0:
            raise UserError(
                f"rank {environment.rank} on {node_name()} sees no GPU",
                where="HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES",
                fix="give each rank a GPU, or start fewer processes",
            )
        # Under some launchers each rank sees one device alone.
        select_device(plan.device, environment.local_rank % visible_devices)
        if _devices_exchange(plan):
            backend = collective_backends(plan.device)

    store = _meet(environment, plan.ranks)
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=plan.ranks,
        timeout=COLLECTIVE_TIMEOUT,
    )

    device_mesh = None
    if plan.shard > 1:
        if plan.device == "cpu":
            return_freed_memory()
        device_mesh = _device_mesh(plan)
    groups = _pipeline_groups(plan, environment.rank) if plan.pipeline > 1 else None
    expert_mesh = None
    expert_copies = None
    if plan.expert > 1:
        expert_mesh, expert_copies = _expert_groups(plan, environment.rank)
    return Mesh(
        environment.rank,
        replicate=plan.replicate,
        shard=plan.shard,
        stages=plan.pipeline,
        context=plan.context,
        expert=plan.expert,
        device=plan.device,
        device_mesh=device_mesh,
        expert_mesh=expert_mesh,
        expert_copies=expert_copies,
        groups=groups,
        shared_sequences=_context_group(plan, environment.rank),
    )


def leave(mesh: Mesh) -> None:
    """At the end of training: waits for the other ranks, for LEAVE_SECONDS at most, where connections are lazy.

    A rank that has ended cannot be connected to any more, and with rank 0 the store ends, in which ranks find each
    other: the last message of a run may be the first one between two ranks.
    """
    if mesh.world == 1 or os.environ.get(LAZY_CONNECTIONS) != "1":
        return
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + LEAVE_SECONDS
    with suppress(RuntimeError):  # rank 0 has seen all of them, and is gone with the store
        store.add("left", 1)
        while store.add("left", 0) < mesh.world and time.monotonic() < deadline:
            time.sleep(0.05)


def _devices_exchange(plan: TrainPlan) -> bool:
    """Whether tensors may travel from GPU to GPU. A pipeline over the hosts with one rank a stage never does that.

    NCCL starts with the first tensor that it sends: where it fails, a run that does not use it is not disturbed.
    """
    return plan.pipeline == 1 or plan.ranks_per_stage > 1 or plan.pipeline_link != "host"


def _meet(environment: RankEnvironment, num_ranks: int) -> Any:
    """The torch.distributed.Store of all ranks, once each of them has arrived. Raises RanksMissing."""
    store: Any
    if environment.rendezvous_file:
        store = dist.FileStore(environment.rendezvous_file, num_ranks)  # type: ignore[attr-defined]  # unannotated
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # as above
            environment.address,
            int(environment.port),
            num_ranks,
            is_master=environment.rank == 0,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )

    # torch would wait for the others without naming those that are missing: each rank leaves a key of its own.
    store.set(f"arrived {environment.rank}", "1")
    store.add("arrived", 1)
    deadline = time.monotonic() + JOIN_SECONDS
    pause = 0.005
    while store.add("arrived", 0) < num_ranks:
        if time.monotonic() > deadline:
            missing_ranks = [
                rank for rank in range(num_ranks) if not store.check([f"arrived {rank}"])
            ]
            raise RanksMissing(missing_ranks)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return store


def _device_mesh(plan: TrainPlan) -> DeviceMesh:
    """The axes for FSDP2, inside one stage: shards, and replicas before them where there are several."""
    sizes = {"pipeline": plan.pipeline, "replicate": plan.replicate, "shard": plan.shard}
    axes = {name: size for name, size in sizes.items() if size > 1}
    device_mesh = init_device_mesh(plan.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if plan.pipeline == 1:
        return device_mesh
    return device_mesh[tuple(name for name in axes if name != "pipeline")]


def _expert_groups(plan: TrainPlan, own_rank: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """The neighbors that divide the experts with this rank, and the ranks of its stage that have the same experts;
    None: it alone. Every rank creates every group.
    """
    starts = range(0, plan.ranks, plan.expert)
    groups = [dist.new_group(list(range(start, start + plan.expert))) for start in starts]
    mesh = DeviceMesh.from_group(
        groups[own_rank // plan.expert], plan.device, mesh_dim_names=(EXPERT_AXIS,)
    )
    own_copies = None
    if plan.expert < plan.ranks_per_stage:
        for first in range(0, plan.ranks, plan.ranks_per_stage):
            for place in range(plan.expert):
                copies = list(range(first + place, first + plan.ranks_per_stage, plan.expert))
                group = dist.new_group(copies)
                if own_rank in copies:
                    own_copies = group
    return mesh, own_copies


def _pipeline_groups(plan: TrainPlan, own_rank: int) -> PipelineGroups:
    """The groups of this rank. Every rank takes part in creating every group, in one order."""
    stages = range(plan.pipeline)
    data_ranks = range(plan.ranks_per_stage)
    by_stage = [
        [stage * plan.ranks_per_stage + data_rank for data_rank in data_ranks] for stage in stages
    ]
    by_copy = [
        [stage * plan.ranks_per_stage + data_rank for stage in stages] for data_rank in data_ranks
    ]
    ends_by_copy = [[ranks[0], ranks[-1]] for ranks in by_copy]

    def own_group(all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
        groups = [dist.new_group(ranks) for ranks in all_ranks]
        own_groups = [
            group for group, ranks in zip(groups, all_ranks, strict=True) if own_rank in ranks
        ]
        return own_groups[0] if own_groups else None

    data_group = own_group(by_stage)
    stage_group = own_group(by_copy)
    assert data_group is not None and stage_group is not None, "every rank has a stage and a copy"
    ends_group = own_group(ends_by_copy)
    edges = {}
    if is_accelerator(plan.device) and plan.pipeline_link != "host":
        edges = edge_groups(plan, own_rank, backend=device_backend(plan.device))
    return PipelineGroups(data_group, stage_group, ends_group, edges)


def _context_group(plan: TrainPlan, own_rank: int) -> dist.ProcessGroup | None:
    """The ranks that share this rank's sequences; None: all of them, or it alone. Every rank creates every group."""
    if plan.context in (1, plan.ranks):
        return None
    starts = range(0, plan.ranks, plan.context)
    groups = [dist.new_group(range(start, start + plan.context)) for start in starts]
    own_group: dist.ProcessGroup = groups[own_rank // plan.context]
    return own_group


def edge_groups(
    plan: TrainPlan, own_rank: int, *, backend: str
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group of two ranks for each edge and direction of this rank. Every rank creates all, in one order."""
    num_edges = plan.pipeline * plan.pipeline_chunks - 1
    own_groups = {}
    for edge in range(num_edges):
        for direction in (FORWARD, BACKWARD):
            for data_rank in range(plan.ranks_per_stage):
                ends = [
                    group % plan.pipeline * plan.ranks_per_stage + data_rank
                    for group in (edge, edge + 1)
                ]
                group = dist.new_group(ends, backend=backend)
                if own_rank in ends:
                    own_groups[edge, direction] = group
    return own_groups
