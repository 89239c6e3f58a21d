"""Parameters one by one: random numbers keyed by seed and name, drawn on the CPU; and the rows of a rank.

FSDP2 shards parameters by rows over ranks (DTensors). A plain tensor has all rows.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import expert_parts, is_kept_float32

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def stream(seed: int, name: str) -> torch.Generator:
    """A generator whose values depend neither on the device nor on which other parameters exist."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def dtype_in(config: ModelConfig, name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a parameter in a model of `dtype`: that, or float32 where a few digits less would choose other experts."""
    return torch.float32 if dtype.itemsize < 4 and is_kept_float32(config, name) else dtype


@torch.no_grad()
def cast(model: nn.Module, config: ModelConfig, dtype: torch.dtype) -> None:
    """In place: every parameter of the model to `dtype`, by `dtype_in`."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_in(config, name, dtype))


def is_linear_map(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is y = W x + b and nothing else; a subclass of transformers may be more, as some routers are."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_sharded(module: nn.Module) -> TypeGuard["FSDPModule"]:
    """Whether FSDP2 gathers the module's parameters before its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as in `is_split`
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_split(tensor: Tensor) -> "TypeIs[DTensor]":
    """Whether the tensor is sharded: this rank holds some of its rows."""
    # Its module takes a second to import; where nobody has imported it, there are no shards.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory; a plain tensor itself."""
    if not is_split(tensor):
        return tensor
    rows: Tensor = tensor.to_local()
    return rows


def full(tensor: Tensor) -> Tensor:
    """The tensor with all rows: a collective over the ranks of its shards."""
    if not is_split(tensor):
        return tensor
    full_tensor: Tensor = tensor.full_tensor()
    return full_tensor


def first_row(tensor: Tensor) -> int:
    """The index in the full tensor of this rank's first row. FSDP2 shards as `torch.chunk` does, the last axis."""
    if not is_split(tensor):
        return 0
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    place = mesh.get_coordinate()
    assert place is not None, "this rank holds rows"
    return min(tensor.shape[0], rows * place[-1])


def unstacked(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter by its name; of a stack of experts a view of each part (`counting.expert_parts`) on this rank."""
    parts = expert_parts(name, parameter.shape)
    if not parts:
        yield name, parameter
        return
    first = first_row(parameter)
    entries = local(parameter)
    for part in parts:
        if first <= part.expert < first + len(entries):
            yield part.name, entries[part.expert - first, part.first : part.first + part.rows]


def part_of(full_tensor: Tensor, parameter: Tensor) -> Tensor:
    """The rows of `full_tensor` that belong to this rank's rows of `parameter`, a view."""
    if not full_tensor.ndim:
        return full_tensor
    start, count = rows_of(len(full_tensor), parameter)
    return full_tensor[start : start + count]


def rows_of(num_rows: int, parameter: Tensor, *, block: int = 1) -> tuple[int, int]:
    """Which rows of a tensor with `num_rows` belong to this rank's rows of `parameter`: the first one, and how many.

    The tensor has a row for each row of the parameter, or for each `block` of its numbers; no block belongs to two
    ranks.
    """
    if not is_split(parameter):
        return 0, num_rows
    start = first_row(parameter)
    local_rows = parameter.to_local()
    if num_rows == len(parameter):
        return start, len(local_rows)
    first_block = start * (parameter.numel() // len(parameter)) // block
    return first_block, -(-local_rows.numel() // block)


@torch.no_grad()
def put(full_tensor: Tensor, parameter: Tensor) -> None:
    """Copies a full tensor into `parameter`, or its rows into this rank's shard."""
    local(parameter).copy_(part_of(full_tensor, parameter))
