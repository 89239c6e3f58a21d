"""Joins this process to the ranks of a run, and leaves them."""

import time
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.parallel.environment import RankEnvironment, rank_environment
from bloomery.parallel.fsdp import return_freed_memory
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import TrainPlan

# All ranks start together, but may import torch from a slow file system.
JOIN_SECONDS = 600.0
# A backstop: the deadline of the worker ends a hang much earlier.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@final
class RanksMissing(RuntimeError):
    """Some ranks did not arrive within JOIN_SECONDS."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"not arrived: {ranks}")
        self.ranks = ranks


def join(plan: TrainPlan) -> Mesh:
    """Join the ranks of the plan, as the launcher's variables say; one rank alone needs none.

    Raises RanksMissing.
    """
    if plan.ranks == 1:
        return SINGLE_RANK
    environment = rank_environment()

    # CPU tensors travel over gloo in every run: the few numbers that ranks agree on.
    backend = "gloo"
    if plan.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        # Under some launchers each rank sees one device alone.
        torch.cuda.set_device(environment.local_rank % torch.cuda.device_count())

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
    return Mesh(
        environment.rank,
        replicate=plan.replicate,
        shard=plan.shard,
        device=plan.device,
        device_mesh=device_mesh,
    )


def leave() -> None:
    """End the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
    """The axes for FSDP2: shards, and replicas before them where there are several."""
    if plan.replicate == 1:
        return init_device_mesh(plan.device, (plan.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(
        plan.device, (plan.replicate, plan.shard), mesh_dim_names=("replicate", "shard")
    )
