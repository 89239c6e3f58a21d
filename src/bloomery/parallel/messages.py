"""JSON between the ranks of a gloo group: numbers, strings, lists and objects of any size, without pickle."""

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(content: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of the group gives, by rank; None: the group of all ranks."""
    encoded = json.dumps(content).encode()
    world = dist.get_world_size(group)
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor(len(encoded)), group=group)

    # A gather needs tensors of one size: all are padded to the largest, and cut again.
    padded = encoded.ljust(max(map(int, sizes)))
    own_bytes = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    gathered = [torch.empty_like(own_bytes) for _ in range(world)]
    dist.all_gather(gathered, own_bytes, group=group)
    return [
        json.loads(bytes(tensor.numpy())[: int(size)])
        for tensor, size in zip(gathered, sizes, strict=True)
    ]


def broadcast_json(content: Any, group: dist.ProcessGroup | None = None) -> Any:
    """What rank 0 gives, on every rank; the others' content is not read."""
    is_first = dist.get_rank() == 0
    encoded = json.dumps(content).encode() if is_first else b""  # never empty on rank 0
    size = torch.tensor(len(encoded))
    dist.broadcast(size, 0, group=group)
    received = torch.empty(int(size), dtype=torch.uint8)
    if is_first:
        received = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    dist.broadcast(received, 0, group=group)
    return json.loads(bytes(received.numpy()))
