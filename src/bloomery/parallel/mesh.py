"""The ranks of a run as a mesh of axes, and the collectives over them.

All ranks must call the same collectives in the same order, or they wait for each other forever. So what a rank does
next depends only on numbers that were reduced here, which have the same bits on every rank. A rank that fails by itself
ends, and the launcher ends the others. A run of one rank has no process group: its sums are its input.

The device of a tensor picks the backend; `process_group.join` starts both. CPU tensors travel over gloo in every
run: the numbers and strings of the host. GPU tensors travel over NCCL, which is RCCL in a ROCm build of torch: in a run
on GPUs the tensors on the training device, such as losses and the rows of a shard. A run on CPUs has gloo alone; so may
a pipeline on GPUs (`Mesh.reduces_on_host`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bloomery.parallel.clock import CommunicationClock
from bloomery.parallel.messages import all_gather_json, broadcast_json

T = TypeVar("T")


@final
@dataclass(frozen=True)
class PipelineGroups:
    """The process groups of a rank in a pipeline: ranks of its stage, of its copy of the model, of that copy's ends."""

    data: dist.ProcessGroup
    stages: dist.ProcessGroup
    ends: dist.ProcessGroup | None  # of ranks in the first and the last stage
    # Where GPUs may send to each other: a group of two ranks for each (edge, direction) of this rank.
    edges: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Mesh:
    """`stages` x `replicate` x `shard` ranks, of which this process is `rank`; the last axis varies fastest.

    A stage holds some layers of the model. Its `replicate` x `shard` ranks share out the sequences of a step: they are
    the data-parallel ranks. The `shard` ranks of one replica hold its weights, gradients and states together (FSDP2).
    `context` neighbors among the data-parallel ranks read the same sequences, of which each holds a part of the tokens:
    for weights and gradients they are ranks like all others. `expert` neighbors among them divide the experts of each
    layer: where there are shards, too, these are the same ranks.
    """

    rank: int = 0
    replicate: int = 1
    shard: int = 1
    stages: int = 1
    context: int = 1
    expert: int = 1
    device: str = "cpu"
    # torch's mesh for FSDP2: None exactly when `shard` is 1. Its last axis is the shard axis; an axis of replicas comes
    # before it where there are several. Pipeline stages are no axis of it.
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    # The ranks that divide the experts with this one: None exactly when `expert` is 1.
    expert_mesh: DeviceMesh | None = field(default=None, compare=False)
    # The data-parallel ranks of this stage with the same experts: None where this one alone has them.
    expert_copies: dist.ProcessGroup | None = field(default=None, compare=False)
    # The process groups of a pipeline: None exactly when `stages` is 1.
    groups: PipelineGroups | None = field(default=None, compare=False)
    # The ranks that share the sequences of this one: None where `context` is 1, and where they are all ranks.
    shared_sequences: dist.ProcessGroup | None = field(default=None, compare=False)
    # Whether the stages of a pipeline send from GPU to GPU; else through the host's memory. The preflight decides.
    sends_from_device: bool = False
    # By rank, once the preflight has asked them: empty before.
    hosts: tuple[str, ...] = ()
    # Times FSDP2's collectives and those of the host's numbers.
    clock: CommunicationClock = field(default_factory=CommunicationClock, compare=False, repr=False)

    # ---- the axes

    @property
    def world(self) -> int:
        return self.stages * self.data_world

    @property
    def first_rank(self) -> bool:
        """Whether this is rank 0, which alone writes events, checkpoints and the plan."""
        return self.rank == 0

    @property
    def data_world(self) -> int:
        """How many ranks share out the sequences of a step, and sum their gradients."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which sequences, or parts of them, this rank reads; the same on all stages of a pipeline."""
        return self.rank % self.data_world

    @property
    def sequence_world(self) -> int:
        """How many ranks, or groups of `context` ranks, have sequences of their own."""
        return self.data_world // self.context

    @property
    def sequence_rank(self) -> int:
        """Which sequences this rank reads, whole or in part."""
        return self.data_rank // self.context

    @property
    def context_rank(self) -> int:
        """Which part of its sequences this rank has."""
        return self.data_rank % self.context

    @property
    def stage(self) -> int:
        return self.rank // self.data_world

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head, and so computes losses."""
        return self.stage == self.stages - 1

    @property
    def first_data_rank(self) -> bool:
        """Whether this rank sends the weights of its stage to the one that writes them."""
        return self.data_rank == 0

    @property
    def holders(self) -> int:
        """How many neighboring ranks hold a tensor together that is split into rows, or into experts."""
        return max(self.shard, self.expert)

    @property
    def holder_rank(self) -> int:
        return self.rank % self.holders

    @property
    def reduces_on_host(self) -> bool:
        """Whether tensors of the training device are summed on the host.

        A pipeline with one data-parallel rank a stage sums little: losses, norms, the gradient of a tied matrix. So it
        needs no collective on the device, and trains where these fail.
        """
        return self.stages > 1 and self.data_world == 1

    # ---- a few numbers and strings of the host, over all ranks

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks, in float64."""
        return self._all_reduce_floats(numbers, dist.ReduceOp.SUM)

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        return self._all_reduce_floats(numbers, dist.ReduceOp.MAX)

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition holds on at least one rank."""
        return bool(self.all_reduce_max(condition)[0])

    def broadcast_float(self, number: float) -> float:
        """The number of rank 0, as a sum in which all others are 0."""
        return self.all_reduce_sum(number if self.first_rank else 0.0)[0]

    def broadcast_bool(self, condition: bool) -> bool:
        """Whether the condition holds on rank 0."""
        return bool(self.broadcast_float(condition))

    def barrier(self) -> None:
        """Wait for all ranks: a sum over gloo, so that the GPUs take no part."""
        self.all_reduce_sum(0.0)

    def _all_reduce_floats(
        self, numbers: Sequence[float], operation: dist.ReduceOp.RedOpType
    ) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            with self.clock.measure():
                dist.all_reduce(reduced, operation)
        result: list[float] = reduced.tolist()
        return result

    def all_gather_floats(self, *numbers: float) -> list[list[float]]:
        """The numbers of every rank, by rank."""
        if self.world == 1:
            return [list(numbers)]
        with self.clock.measure():
            gathered = self.all_gather(torch.tensor(numbers, dtype=torch.float64))
        return [numbers_of_rank.tolist() for numbers_of_rank in gathered]

    def all_gather_json(self, content: Any) -> list[Any]:
        """What every rank gives, by rank: numbers, strings, lists and objects of any size."""
        if self.world == 1:
            return [content]
        with self.clock.measure():
            return all_gather_json(content)

    def broadcast_json(self, content: Any) -> Any:
        """What rank 0 gives: numbers, strings, lists and objects of any size."""
        if self.world == 1:
            return content
        with self.clock.noted("broadcast of rank 0"):
            return broadcast_json(content)

    def gather_by_name(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values of every stage by name, on rank 0; each other rank keeps its own. JSON must have them: no tuples.

        All ranks call it; the first data-parallel rank of each stage takes part.
        """
        if self.groups is None or not self.first_data_rank:
            return dict(values)
        with self.clock.noted("gather of the stages"):
            values_by_stage = all_gather_json(values, self.groups.stages)
        if not self.first_rank:
            return dict(values)
        merged = dict(values)
        for later_values in values_by_stage[1:]:
            merged.update(later_values)
        return merged

    # ---- tensors, over all ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum, in place, a tensor on the training device; returns the tensor."""
        return self._sum(tensor) if self.world > 1 else tensor

    def _sum(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, axis: str = ""
    ) -> Tensor:
        """Over the ranks of a group (None: over all), in place; returns the tensor."""
        with self.clock.measure(axis, self.device, name="all_reduce"):
            if not self.reduces_on_host:
                dist.all_reduce(tensor, group=group)
                return tensor
            on_host = tensor.cpu()
            dist.all_reduce(on_host, group=group)
            return tensor if on_host is tensor else tensor.copy_(on_host)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The CPU tensor of every rank, by rank; they must have one shape and dtype."""
        if self.world == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        with self.clock.noted("all_gather"):
            dist.all_gather(gathered, tensor.contiguous())
        return gathered

    # ---- tensors, over one axis of a pipeline

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the sequences of a step, with the layers of this rank; None: all ranks."""
        return None if self.groups is None else self.groups.data

    def all_reduce_stages(self, tensor: Tensor) -> Tensor:
        """Sum over the stages of one copy of the model, in place; returns the tensor."""
        if self.stages == 1:
            return tensor
        assert self.groups is not None
        return self._sum(tensor, self.groups.stages, axis="pipeline")

    def all_reduce_ends(self, tensor: Tensor) -> Tensor:
        """Sum over the first and the last stage of one copy, on these alone, in place; returns the tensor."""
        assert self.groups is not None and self.groups.ends is not None
        return self._sum(tensor, self.groups.ends, axis="pipeline")

    def broadcast_from_last_stage(self, tensor: Tensor | None) -> Tensor:
        """The float32 tensor of the last stage of this copy, on the host of all its stages; others give None."""
        assert self.groups is not None
        source = self.data_rank + (self.stages - 1) * self.data_world
        shape = torch.zeros(8, dtype=torch.int64)
        if tensor is not None:
            shape[: tensor.ndim + 1] = torch.tensor([tensor.ndim, *tensor.shape])
        with self.clock.noted("broadcast of the last stage"):
            dist.broadcast(shape, source, group=self.groups.stages)
            num_axes, *sizes = shape.tolist()
            content = torch.empty(sizes[:num_axes])
            if tensor is not None:
                content = tensor.detach().float().cpu().contiguous()
            dist.broadcast(content, source, group=self.groups.stages)
        return content

    def broadcast_from_stage(self, tensor: Tensor, stage: int) -> None:
        """In place: the tensor of that stage of this copy of the model, on all of its stages. Its bytes travel."""
        assert self.groups is not None
        if not tensor.numel():
            return
        content = tensor.view(-1).view(torch.uint8)
        on_wire = content.cpu() if self.reduces_on_host else content
        source = self.data_rank + stage * self.data_world
        with self.clock.measure("pipeline", self.device, name="broadcast"):
            dist.broadcast(on_wire, source, group=self.groups.stages)
        if on_wire is not content:
            content.copy_(on_wire)

    # ---- the ranks that share the sequences of this one

    @property
    def context_group(self) -> dist.ProcessGroup:
        group = self.shared_sequences or dist.group.WORLD
        assert group is not None, "a run of one rank shares no sequence"
        return group

    def all_gather_tokens(self, part: Tensor) -> Tensor:
        """Of numbers whose last axis is this rank's tokens: those of all tokens, with the ranks that share them."""
        if self.context == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.context)]
        with self.clock.measure("context", part.device.type, name="all_gather"):
            dist.all_gather(parts, part.contiguous(), group=self.context_group)
        return torch.cat(parts, -1)

    def own_tokens(self, numbers: Tensor) -> Tensor:
        """Of numbers of all tokens, which are their last axis, those of this rank's tokens."""
        return numbers.chunk(self.context, -1)[self.context_rank]

    # ---- the ranks that divide the experts with this one

    @property
    def expert_group(self) -> dist.ProcessGroup:
        assert self.expert_mesh is not None, "the experts are divided"
        return self.expert_mesh.get_group()

    # ---- tensors, over the ranks that hold the shards of one replica, or its experts
    #
    # Only for values of tensors that are split into rows. A tensor that every rank holds in full (the norm weights of a
    # block) has full values already, which a sum over the ranks would count `holders` times.

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks of this replica, the shard axis being the last of the device mesh; or those that divide experts."""
        if self.device_mesh is None:
            return self.expert_group
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)

    def all_reduce_shards(self, tensor: Tensor) -> Tensor:
        """Sum, in place, a tensor on the training device over the shards of a replica; returns the tensor."""
        if self.holders > 1:
            with self.clock.noted("all_reduce, shard", self.device):
                dist.all_reduce(tensor, group=self.shard_group)
        return tensor

    def norm_over_shards(self, norm: Tensor) -> Tensor:
        """The Euclidean norms of split tensors, from the norms of this rank's rows of them; elementwise."""
        if self.holders == 1:
            return norm
        return self.all_reduce_shards(norm.square()).sqrt()

    def all_to_all_shards(
        self, numbers: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Tensor:
        """Send each rank of the shard axis its part of the flat `numbers`; returns the parts received, by rank.

        `send_counts` and `receive_counts`: how many numbers go to, and come from, each rank of the shard axis.
        """
        received = numbers.new_empty(sum(receive_counts))
        with self.clock.noted("all_to_all, shard", self.device):
            dist.all_to_all_single(
                received, numbers, receive_counts, send_counts, group=self.shard_group
            )
        return received


# A run of one rank, and what code takes for a parameter that this rank holds in full.
SINGLE_RANK = Mesh()
