"""Values of every stage of a pipeline, by name, on rank 0."""

import json
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from bloomery.parallel.mesh import Mesh

T = TypeVar("T")


def gather_by_name(values: Mapping[str, T], mesh: Mesh) -> dict[str, T]:
    """The values of every stage by name, on rank 0; each other rank keeps its own. JSON must have them: no tuples.

    The first data-parallel rank of each stage takes part.
    """
    merged = dict(values)
    for source in _first_ranks_of_later_stages(mesh):
        if mesh.rank == source:
            _send_bytes(json.dumps(merged).encode(), to_rank=0)
        elif mesh.first_rank:
            merged.update(json.loads(_received_bytes(source)))
    return merged


def _first_ranks_of_later_stages(mesh: Mesh) -> list[int]:
    return [stage * mesh.data_world for stage in range(1, mesh.stages)]


def _send_bytes(content: bytes, *, to_rank: int) -> None:
    """Never empty: JSON has at least two characters."""
    dist.send(torch.tensor([len(content)]), to_rank)
    dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), to_rank)


def _received_bytes(source: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, source)
    return bytes(content.numpy())
