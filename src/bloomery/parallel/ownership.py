"""The owner of each tensor of a checkpoint: the rank that writes it, in full.

Owners follow from sizes alone, so that every rank finds the same ones. A part that is large enough is divided over the
ranks that hold it, into contiguous runs of the model's order with equal bytes: one file for each owner. A stage of a
pipeline keeps its tensors, and the replicas of a stage share its work: the rows of a tensor come from the ranks of the
owner's replica. A part that is small is one file, of rank 0.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from bloomery.core.units import MIB
from bloomery.model.io.safetensors import file_order
from bloomery.model.io.stored import TensorLocation
from bloomery.parallel.mesh import Mesh

# A part is divided into as many files as have at least this size.
FILE_BYTES = 64 * MIB


@final
@dataclass(frozen=True)
class HeldTensor:
    """A tensor as one rank holds it. `is_rows`: these are some of its rows, and the other shards have the rest."""

    part: str
    name: str
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    is_rows: bool

    @property
    def row_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize * math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """A scalar is one row."""
        return self.shape[0] if self.shape else 1


@final
@dataclass(frozen=True)
class HeldBytes:
    """Contiguous bytes of a stored tensor, from byte `start` on, that `rank` holds as its tensor of that name."""

    rank: int
    name: str
    start: int
    size: int


@final
@dataclass(frozen=True)
class OwnedTensor:
    """A tensor as files have it, its owner, and the pieces that make it.

    `shape` is that of the pieces, below each other. `location`: how the file has them; None: as they are.
    """

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    location: TensorLocation | None
    pieces: tuple[HeldBytes, ...]
    owner: int
    file: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.location is None else self.location.stored_shape(self.shape)

    @property
    def bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize * math.prod(self.shape)


@dataclass
class _Stored:
    """A stored tensor of one stage, before it has an owner. `sources`: (first byte, index among the held tensors)."""

    stage: int
    held: HeldTensor
    name: str
    location: TensorLocation | None
    rows: int
    sources: list[tuple[int, int]]
    owner: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.held.shape[1:]) if self.held.shape else ()

    @property
    def bytes(self) -> int:
        return self.rows * self.held.row_bytes


def assign_owners(
    held_by_stage: Sequence[Sequence[HeldTensor]],
    rows_by_rank: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    locations_by_part: Mapping[str, Mapping[str, TensorLocation]],
    divided_parts: Collection[str],
) -> tuple[OwnedTensor, ...]:
    """Every tensor of a checkpoint in the order of its files.

    `held_by_stage`: what the first data-parallel rank of each stage holds, in the model's order; the other ranks of the
    stage hold tensors of the same names, and `rows_by_rank` has their numbers of rows. `locations_by_part`: of parts
    that are stored under other names; several tensors may be one stored tensor. `divided_parts`: those that may have
    several owners.
    """
    stored_tensors = [
        stored
        for stage, held_tensors in enumerate(held_by_stage)
        for stored in _stored_of_stage(stage, held_tensors, rows_by_rank, mesh, locations_by_part)
    ]
    parts = dict.fromkeys(stored.held.part for stored in stored_tensors)
    owned_tensors = []
    for part in parts:
        tensors = [stored for stored in stored_tensors if stored.held.part == part]
        total_bytes = sum(stored.bytes for stored in tensors)
        if part in divided_parts and total_bytes >= 2 * FILE_BYTES:
            _divide(tensors, mesh)
        owners = sorted({stored.owner for stored in tensors})
        for owner in owners:
            file = f"{part}.safetensors"
            if len(owners) > 1:
                number = 1 + owners.index(owner)
                file = f"{part}-{number:05d}-of-{len(owners):05d}.safetensors"
            own_tensors = [stored for stored in tensors if stored.owner == owner]
            own_tensors.sort(key=lambda stored: file_order(stored.name, stored.held.dtype))
            owned_tensors += [
                OwnedTensor(
                    part,
                    stored.name,
                    stored.held.dtype,
                    stored.shape,
                    stored.location,
                    _pieces(stored, held_by_stage[stored.stage], rows_by_rank, mesh),
                    owner,
                    file,
                )
                for stored in own_tensors
            ]
    return tuple(owned_tensors)


def _stored_of_stage(
    stage: int,
    held_tensors: Sequence[HeldTensor],
    rows_by_rank: Sequence[Sequence[int]],
    mesh: Mesh,
    locations_by_part: Mapping[str, Mapping[str, TensorLocation]],
) -> list[_Stored]:
    """The stored tensors of a stage in its order; those that are stored fused stand where the first of them does."""
    stored_tensors: dict[tuple[str, str], _Stored] = {}
    for index, held in enumerate(held_tensors):
        rows = held.rows
        if held.is_rows:
            shards = _shards(stage * mesh.data_world, mesh)
            rows = sum(rows_by_rank[rank][index] for rank in shards)
        name = held.name
        first_row = 0
        stored_rows = rows
        location = None
        locations = locations_by_part.get(held.part)
        if locations is not None:
            if held.name not in locations:
                continue  # no tensor of a file
            location = locations[held.name]
            name = location.name
            first_row = location.first
            stored_rows = location.stored_rows
        stored = stored_tensors.setdefault(
            (held.part, name), _Stored(stage, held, name, location, stored_rows, [])
        )
        stored.sources.append((first_row * held.row_bytes, index))
    return list(stored_tensors.values())


def _divide(tensors: Sequence[_Stored], mesh: Mesh) -> None:
    """Give the tensors of a part owners: in each stage contiguous runs of equal bytes, by the middle of each tensor."""
    for stage in range(mesh.stages):
        of_stage = [stored for stored in tensors if stored.stage == stage]
        stage_bytes = sum(stored.bytes for stored in of_stage)
        num_files = max(1, min(mesh.data_world, stage_bytes // FILE_BYTES))
        bytes_before = 0
        for stored in of_stage:
            middle = bytes_before + stored.bytes / 2
            run = min(num_files - 1, int(middle * num_files / max(1, stage_bytes)))
            stored.owner = stage * mesh.data_world + run * mesh.data_world // num_files
            bytes_before += stored.bytes


def _pieces(
    stored: _Stored,
    held_tensors: Sequence[HeldTensor],
    rows_by_rank: Sequence[Sequence[int]],
    mesh: Mesh,
) -> tuple[HeldBytes, ...]:
    """From the owner's replica; where the owner is of another stage, from the first replica of the tensor's stage."""
    sender = stored.stage * mesh.data_world
    if stored.owner // mesh.data_world == stored.stage:
        sender = stored.owner
    pieces = []
    for start, index in stored.sources:
        held = held_tensors[index]
        if not held.is_rows:
            pieces.append(HeldBytes(sender, held.name, start, held.rows * held.row_bytes))
            continue
        for rank in _shards(sender, mesh):
            size = rows_by_rank[rank][index] * held.row_bytes
            pieces.append(HeldBytes(rank, held.name, start, size))
            start += size
    return tuple(piece for piece in pieces if piece.size)


def _shards(rank: int, mesh: Mesh) -> range:
    """The ranks that hold split tensors together with `rank`, in the order of their rows."""
    first = rank // mesh.holders * mesh.holders
    return range(first, first + mesh.holders)
