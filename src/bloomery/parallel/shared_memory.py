"""Memory of a host that its ranks share.

It has no name: one rank makes an anonymous file in memory and the others open it as a descriptor of that process. So
nothing is left where a run is killed, and the size of /dev/shm, 64 MiB in many containers, does not limit it.

B bytes.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bloomery.core.device import pin_host_memory
from bloomery.core.errors import UserError
from bloomery.parallel.environment import node_name
from bloomery.parallel.mesh import Mesh

NAME = "bloomery-weights"  # in /proc/PID/maps


@final
class _Mapping(mmap.mmap):
    """A view of the memory in this process. It lives as long as a tensor of it does.

    `unpin` is called before it is unmapped, which a finalizer would be called after.
    """

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def host_leaders(mesh: Mesh) -> list[int]:
    """By rank the lowest rank that shares its memory: on the same host, and in the same container."""
    namespaces = [str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "user")]
    here = [node_name(), *namespaces]
    places = mesh.all_gather_json(here)
    return [places.index(place) for place in places]


def shared_bytes(num_bytes: int, mesh: Mesh, device: torch.device) -> tuple[Tensor, bool]:
    """Zeros that all ranks of a host read and write [B], pinned for `device` where it can; whether this rank leads.

    Every rank of the mesh calls it. Raises UserError where the system has no such memory, or does not give it.
    """
    if not hasattr(os, "memfd_create"):
        raise UserError(
            "ranks share the weights on the host by memory without a name, which Linux alone has",
            where="weights that stream",
            fix="train on one device, or stream no weights",
        )
    leader = host_leaders(mesh)[mesh.rank]
    is_leader = leader == mesh.rank
    own_file = os.memfd_create(NAME) if is_leader else -1
    try:
        if is_leader:
            os.ftruncate(own_file, num_bytes)
        process, descriptor = mesh.all_gather_json([os.getpid(), own_file])[leader]
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"rank {mesh.rank} cannot open the memory of rank {leader} on {node_name()}: {error.strerror}",
                where=path,
                fix="start all ranks of a host in one container, or stream no weights",
            ) from error
        try:
            mapping = _Mapping(file, num_bytes)
        finally:
            os.close(file)
        mesh.barrier()  # all have it open
    finally:
        if is_leader:
            os.close(own_file)

    bytes_B = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.unpin = pin_host_memory(device, bytes_B.data_ptr(), num_bytes)
    return bytes_B, is_leader
