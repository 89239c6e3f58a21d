"""Parameters one by one: random numbers keyed by seed and name, drawn on the CPU; and the rows of a rank.

FSDP2 shards parameters by rows over ranks (DTensors). A plain tensor is whole.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def stream(seed: int, name: str) -> torch.Generator:
    """The values it draws depend neither on the device nor on which other parameters exist."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def is_split(tensor: Tensor) -> bool:
    """Whether this rank holds some rows of it."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows: Tensor = tensor.to_local()
    return rows


def full(tensor: Tensor) -> Tensor:
    """The whole tensor: a collective over the ranks of its shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


def first_row(tensor: Tensor) -> int:
    """The index in the whole tensor of this rank's first row. FSDP2 shards as `torch.chunk` does, the last axis."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return min(tensor.shape[0], rows * mesh.get_local_rank(mesh.ndim - 1))


def part_of(whole: Tensor, parameter: Tensor, *, block: int = 1) -> Tensor:
    """The rows of `whole` that belong to what this rank holds of `parameter`, a view.

    A row of `whole` is one of the parameter, or a block of so many of its numbers; no block belongs to two ranks.
    """
    if not isinstance(parameter, DTensor) or not whole.ndim:
        return whole
    start = first_row(parameter)
    held = parameter.to_local()
    if len(whole) == len(parameter):
        return whole[start : start + len(held)]
    first = start * (parameter.numel() // len(parameter)) // block
    return whole[first : first + -(-held.numel() // block)]


@torch.no_grad()
def put(whole: Tensor, parameter: Tensor) -> None:
    """Copy a whole tensor into `parameter`, or its rows into this rank's shard."""
    local(parameter).copy_(part_of(whole, parameter))
