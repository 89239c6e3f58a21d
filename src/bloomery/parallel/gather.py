"""The full tensors of a checkpoint on the rank that writes it, from the shards and the stages that hold them."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.model.io.parameters import full
from bloomery.parallel.mesh import Mesh

TensorsByFile = dict[str, dict[str, Tensor]]
T = TypeVar("T")


def gather_full_tensors(
    tensors_by_file: Mapping[str, Mapping[str, Tensor]],
    mesh: Mesh,
    is_rows_of_rank: Callable[[str], bool],
    is_owned: Callable[[str], bool] = lambda _name: True,
) -> TensorsByFile:
    """The tensors of a checkpoint, in full on the CPU of rank 0; {} on the others.

    `is_rows_of_rank`: whether the plain tensor of that name has the rows of this rank alone; those of DTensors are
    known. `is_owned`: whether this stage hands in the tensor of that name; both ends of a pipeline may have it. Tensor
    by tensor: a device holds one full tensor at a time, the host of rank 0 all of them.
    """
    # 1. Each tensor in full, on the first data-parallel rank of its stage.
    full_by_file: TensorsByFile = {}
    for file, tensors in tensors_by_file.items():
        for name, tensor in tensors.items():
            if not is_owned(name):
                continue
            full_tensor = tensor
            if mesh.shard > 1:
                is_rows = is_rows_of_rank(name)
                full_tensor = _gather_rows(tensor, mesh) if is_rows else full(tensor.detach())
                if mesh.first_data_rank:
                    full_tensor = full_tensor.cpu()
            if mesh.first_data_rank:
                full_by_file.setdefault(file, {})[name] = full_tensor
            del full_tensor

    # 2. Those of every stage, on rank 0.
    for source in _first_ranks_of_later_stages(mesh):
        if mesh.rank == source:
            _send_tensors(full_by_file, to_rank=0)
        elif mesh.first_rank:
            for file, received in _received_tensors(source).items():
                full_by_file.setdefault(file, {}).update(received)
    return full_by_file if mesh.first_rank else {}


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


def _send_tensors(tensors_by_file: TensorsByFile, *, to_rank: int) -> None:
    """Names, shapes and dtypes first, as JSON; then the content of each tensor."""
    header = [
        (file, name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for file, tensors in tensors_by_file.items()
        for name, tensor in tensors.items()
    ]
    _send_bytes(json.dumps(header).encode(), to_rank=to_rank)
    for tensors in tensors_by_file.values():
        for tensor in tensors.values():
            on_host = tensor.detach().cpu().contiguous()
            dist.send(on_host.reshape(-1).view(torch.uint8), to_rank)


def _received_tensors(source: int) -> TensorsByFile:
    tensors_by_file: TensorsByFile = {}
    for file, name, shape, dtype in json.loads(_received_bytes(source)):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.recv(tensor.reshape(-1).view(torch.uint8), source)
        tensors_by_file.setdefault(file, {})[name] = tensor
    return tensors_by_file


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


def _gather_rows(rows: Tensor, mesh: Mesh) -> Tensor:
    """The tensor whose rows the ranks of a replica hold in turn, some of them fewer than others."""
    rows = rows.detach().contiguous()
    row_counts = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(mesh.shard)]
    dist.all_gather(row_counts, torch.tensor(len(rows), device=rows.device), group=mesh.shard_group)

    # A gather needs tensors of one size: all are padded to the largest, and cut again.
    most_rows = max(map(int, row_counts))
    padded = rows.new_zeros(most_rows, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in row_counts]
    dist.all_gather(gathered, padded, group=mesh.shard_group)
    return torch.cat([part[: int(count)] for part, count in zip(gathered, row_counts, strict=True)])
