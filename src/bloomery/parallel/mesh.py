"""The ranks of a run as a mesh of axes, and the collectives over them.

A rank decides only from numbers that were reduced here, which have the same bits on every rank. A rank that fails
otherwise ends, and the launcher ends the others. One rank alone has no process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bloomery.parallel.clock import CommunicationClock

STRING_BYTES = 1024  # of one rank in `all_gather_str`


@final
@dataclass(frozen=True)
class Mesh:
    """`stages` x `replicate` x `shard` ranks, of which this process is `rank`; the last axis varies fastest.

    A stage holds some layers of the model. Its `replicate` x `shard` ranks share out the sequences of a step: they are
    the data-parallel ranks. The `shard` ranks of one replica hold its weights, gradients and states together (FSDP2).
    """

    rank: int = 0
    replicate: int = 1
    shard: int = 1
    stages: int = 1
    device: str = "cpu"
    device_mesh: DeviceMesh | None = field(
        default=None, compare=False
    )  # where a replica has shards
    clock: CommunicationClock = field(default_factory=CommunicationClock, compare=False, repr=False)

    # ---- the axes

    @property
    def world(self) -> int:
        return self.stages * self.data_world

    @property
    def first_rank(self) -> bool:
        """Whether this rank writes: events, checkpoints, the plan."""
        return self.rank == 0

    @property
    def data_world(self) -> int:
        """How many ranks share out the sequences of a step."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which sequences this rank reads; the same on all stages of a pipeline."""
        return self.rank % self.data_world

    @property
    def stage(self) -> int:
        return self.rank // self.data_world

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head, and so computes losses."""
        return self.stage == self.stages - 1

    @property
    def shard_rank(self) -> int:
        return self.rank % self.shard

    # ---- a few numbers and strings of the host, over all ranks

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """The sum of each number, in float64."""
        return self._all_reduce_floats(numbers, dist.ReduceOp.SUM)

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """The largest of each number."""
        return self._all_reduce_floats(numbers, dist.ReduceOp.MAX)

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition holds on at least one rank."""
        return bool(self.all_reduce_max(condition)[0])

    def broadcast_float(self, number: float) -> float:
        """The number of rank 0."""
        return self.all_reduce_sum(number if self.first_rank else 0.0)[0]

    def broadcast_bool(self, condition: bool) -> bool:
        """Whether the condition holds on rank 0."""
        return bool(self.broadcast_float(condition))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce_sum(0.0)

    def _all_reduce_floats(
        self, numbers: Sequence[float], operation: dist.ReduceOp.RedOpType
    ) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            with self.clock.measure():
                dist.all_reduce(reduced, operation)  # a CPU tensor: gloo
        result: list[float] = reduced.tolist()
        return result

    def all_gather_floats(self, *numbers: float) -> list[list[float]]:
        """The numbers of every rank, by rank."""
        if self.world == 1:
            return [list(numbers)]
        with self.clock.measure():
            gathered = self.all_gather(torch.tensor(numbers, dtype=torch.float64))
        return [numbers_of_rank.tolist() for numbers_of_rank in gathered]

    def all_gather_str(self, string: str) -> list[str]:
        """The strings of all ranks, by rank, each cut to STRING_BYTES."""
        # Tensors of one size, as a gather needs them: padded with spaces, which are stripped again.
        padded = string.encode()[:STRING_BYTES].ljust(STRING_BYTES)
        gathered = self.all_gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [bytes(content.numpy()).decode(errors="replace").rstrip() for content in gathered]

    def broadcast_str(self, string: str) -> str:
        """The string of rank 0."""
        if self.world == 1:
            return string

        # The other ranks need its size to receive it; an empty string travels as one byte that is not read.
        encoded = string.encode()
        size = torch.tensor([len(encoded)])
        dist.broadcast(size, 0)
        if self.first_rank:
            content = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)
        else:
            content = torch.empty(max(1, int(size)), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return bytes(content.numpy()[: int(size)]).decode()

    # ---- tensors, over all ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum, in place, a tensor on the training device; returns the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The CPU tensors of every rank, by rank; of one shape and dtype on all ranks."""
        if self.world == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor.contiguous())
        return gathered

    # ---- tensors, over the ranks that hold the shards of one replica

    @property
    def shard_group(self) -> dist.ProcessGroup:
        assert self.device_mesh is not None, "only shards have a group"
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)

    def all_reduce_shards(self, tensor: Tensor) -> Tensor:
        """Sum, in place; returns the tensor."""
        if self.shard > 1 and self.device_mesh is not None:
            dist.all_reduce(tensor, group=self.shard_group)
        return tensor

    def norm_over_shards(self, norm: Tensor) -> Tensor:
        """The Euclidean norm of full tensors, from the norm of this rank's rows of them."""
        if self.shard == 1 or self.device_mesh is None:
            return norm
        return self.all_reduce_shards(norm.square()).sqrt()

    def all_to_all_shards(
        self, numbers: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Tensor:
        """A flat tensor, cut into pieces of `send_counts`, one for each rank; returns the pieces received, by rank."""
        received = numbers.new_empty(sum(receive_counts))
        dist.all_to_all_single(
            received, numbers, receive_counts, send_counts, group=self.shard_group
        )
        return received


SINGLE_RANK = Mesh()
