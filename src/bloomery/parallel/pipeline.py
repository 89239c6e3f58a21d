"""Transfers between the stages of a pipeline: the residual stream forward, its gradient backward.

They are autograd functions at the ends of a stage's layers, so that every forward and backward (of training,
evaluation, reference scores, sampling) runs over a pipeline unchanged. Labels, positions and counts are never sent:
every stage reads the batch itself.

The layers of a model are cut into groups, numbered in the model's order; group g is on stage g % stages
(`plan.pipeline`). Edge g is between group g and group g + 1.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bloomery.core.device import is_accelerator, synchronize_stream
from bloomery.model.adapters.settings import EMBEDDING, shares_head
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import local
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.transfers import pinned_like

EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
FORWARD = 0
BACKWARD = 1


class Transport(Protocol):
    """Moves tensors between two ranks. Tensors of one edge and direction arrive in the order in which they are sent.

    `direction` is FORWARD (the residual stream) or BACKWARD (its gradient).
    """

    def send(self, tensor: Tensor, rank: int, edge: int, direction: int) -> None:
        """Does not wait for the neighbor to receive; the tensor must not change before `settle`."""

    def receive(self, buffer: Tensor, rank: int, edge: int, direction: int) -> Tensor:
        """Fills and returns `buffer`; waits for the neighbor."""

    def settle(self) -> None:
        """Wait until everything that was sent has left."""


@final
class _SendQueue:
    """Tensors under way to other ranks, oldest first. It keeps each in memory until it has left."""

    def __init__(self, most_under_way: int) -> None:
        self._most_under_way = most_under_way
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def add(self, work: dist.Work | None, tensor: Tensor) -> None:
        assert work is not None, "a stage sends to another rank"
        self._under_way.append((work, tensor))
        self.settle(self._most_under_way)

    def settle(self, most_under_way: int = 0) -> None:
        """Wait for the oldest until at most so many are under way."""
        while len(self._under_way) > most_under_way:
            self._under_way.popleft()[0].wait()


@final
class HostTransport:
    """Through the hosts' memory, by gloo: a copy to and from the device where tensors are on one.

    Each edge and direction has a tag of its own, and so a queue: no order of a schedule can hang.
    """

    def __init__(self, under_way: int) -> None:
        """`under_way`: the most transfers that have not left yet; a further `send` waits for the oldest."""
        self._send_queue = _SendQueue(under_way)

    def send(self, tensor: Tensor, rank: int, edge: int, direction: int) -> None:
        on_host = tensor.detach().contiguous()
        if is_accelerator(tensor.device):
            # The neighbor reads what was computed: the host waits for that, and for its copy.
            on_host = pinned_like(on_host).copy_(on_host, non_blocking=True)
            synchronize_stream(tensor.device)
        self._send_queue.add(dist.isend(on_host, rank, tag=2 * edge + direction), on_host)

    def receive(self, buffer: Tensor, rank: int, edge: int, direction: int) -> Tensor:
        if not is_accelerator(buffer.device):
            dist.recv(buffer, rank, tag=2 * edge + direction)
            return buffer
        # The copy to the device may still run after this returns: the allocator reuses pinned memory only after it.
        on_host = pinned_like(buffer)
        dist.recv(on_host, rank, tag=2 * edge + direction)
        return buffer.copy_(on_host, non_blocking=True)

    def settle(self) -> None:
        self._send_queue.settle()


@final
class DeviceTransport:
    """From GPU to GPU, by NCCL or RCCL: the device waits for a neighbor, and the host goes on.

    Each edge and direction is a process group of two ranks, with a communicator and a stream of its own, and so a
    queue. With one queue per pair of ranks 69 of the 114 schedules that were tried hang. A communicator begins with its
    first tensor, for which both ranks wait: `preflight.check_ranks` sends it, edge by edge.

    Tested with gloo's groups; not confirmed on hardware. A driver may put several streams into one queue of the GPU
    (GPU_MAX_HW_QUEUES, CUDA_DEVICE_MAX_CONNECTIONS), so the preflight also tries all transfers of a rank at once.
    """

    def __init__(self, groups: Mapping[tuple[int, int], dist.ProcessGroup], under_way: int) -> None:
        """`groups`: the process groups by edge and direction. `under_way`: as in HostTransport."""
        self._groups = groups
        self._send_queue = _SendQueue(under_way)

    def send(self, tensor: Tensor, rank: int, edge: int, direction: int) -> None:
        contiguous = tensor.detach().contiguous()
        work = dist.isend(contiguous, rank, group=self._groups[edge, direction])
        self._send_queue.add(work, contiguous)

    def receive(self, buffer: Tensor, rank: int, edge: int, direction: int) -> Tensor:
        dist.recv(buffer, rank, group=self._groups[edge, direction])
        return buffer

    def settle(self) -> None:
        self._send_queue.settle()


def transport_of(mesh: Mesh, *, under_way: int) -> Transport:
    """The transport by which this rank sends to its neighbors. `under_way`: as in HostTransport."""
    if not mesh.sends_from_device:
        return HostTransport(under_way)
    assert mesh.groups is not None, "only pipelines have neighbors"
    return DeviceTransport(mesh.groups.edges, under_way)


@final
class PipelineLink:
    """The neighbors of one stage: the `model.decoder.StageLink` of its decoder.

    A decoder speaks of the groups of its own stage: 0, 1, ... Edges and ranks follow from the model's groups.
    """

    def __init__(
        self,
        mesh: Mesh,
        transport: Transport,
        *,
        num_groups: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """`num_groups`: the groups of layers on this stage. `width` and `dtype`: those of the residual stream."""
        self._mesh = mesh
        self._transport = transport
        self._last_edge = mesh.stages * num_groups - 1
        self._width = width
        self._dtype = dtype
        # An input of both functions that asks for a gradient: their backward runs on frozen stages, too, which have
        # to take gradients off the queue and pass them on.
        self._anchor = torch.zeros((), requires_grad=True)

    def receive(self, group: int, tokens_BT: Tensor) -> Tensor:
        """The residual stream from the group before this stage's `group`; backward sends its gradient there."""
        edge = self._group_of_model(group) - 1
        x_BTD: Tensor = _Receive.apply(self._anchor, self, edge, tokens_BT)  # type: ignore[no-untyped-call]  # torch's `apply`
        return x_BTD

    def send(self, group: int, x_BTD: Tensor) -> Tensor:
        """Sends the residual stream to the next group. Returns a 0 in the place of a loss, to call backward on."""
        edge = self._group_of_model(group)
        zero: Tensor = _Send.apply(x_BTD, self._anchor, self, edge)  # type: ignore[no-untyped-call]  # as above
        return zero

    def share(self, output: Tensor | None) -> Tensor:
        """The output of the last stage, on every stage."""
        return self._mesh.broadcast_from_last_stage(output)

    def settle(self) -> None:
        """Wait until everything that was sent has left: at the end of a step."""
        with self._mesh.clock.measure("pipeline", self._mesh.device):
            self._transport.settle()

    def _group_of_model(self, group: int) -> int:
        """The number in the model's order of this stage's `group`."""
        return group * self._mesh.stages + self._mesh.stage

    def _rank_of(self, model_group: int) -> int:
        """The rank that has this group of the model, and the same sequences as this rank."""
        stage = model_group % self._mesh.stages
        return stage * self._mesh.data_world + self._mesh.data_rank

    def receive_stream(self, edge: int, tokens_BT: Tensor) -> Tensor:
        # The tokens give the shape and the device alone.
        shape = (*tokens_BT.shape, self._width)
        buffer = torch.empty(shape, dtype=self._dtype, device=tokens_BT.device)
        with self._mesh.clock.measure("pipeline", self._mesh.device, name="activations"):
            return self._transport.receive(buffer, self._rank_of(edge), edge, FORWARD)

    def send_stream(self, edge: int, x_BTD: Tensor) -> None:
        assert x_BTD.dtype == self._dtype, f"the residual stream is {x_BTD.dtype}"
        self._transport.send(x_BTD, self._rank_of(edge + 1), edge, FORWARD)

    def receive_gradient(self, edge: int, buffer: Tensor) -> Tensor:
        with self._mesh.clock.measure("pipeline", self._mesh.device, name="gradients"):
            return self._transport.receive(buffer, self._rank_of(edge + 1), edge, BACKWARD)

    def send_gradient(self, edge: int, gradient: Tensor) -> None:
        self._transport.send(gradient, self._rank_of(edge), edge, BACKWARD)


@final
@dataclass(frozen=True)
class StageParameters:
    """The names of the trainable parameters of a whole model, of which each stage of a pipeline has some.

    `tied_name`: the matrix that is the embedding of the first stage and the head of the last; "" where they are two.
    The first stage owns it: there it counts in the norm and goes into checkpoints. Its gradients of both stages are
    summed, so that both update it alike.
    """

    names: tuple[str, ...]
    tied_name: str = ""

    @classmethod
    def of(cls, model: Decoder) -> "StageParameters":
        """The parameters of `model`, which is not cut yet."""
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        tied_name = EMBEDDING_WEIGHT if shares_head(model.config) else ""
        return cls(tuple(names), tied_name)

    def owns(self, name: str, mesh: Mesh) -> bool:
        """Whether a tensor of that name counts on this stage: every one but the tied matrix of the last stage.

        `name`: of a parameter, or "parameter.slot" of an optimizer's state.
        """
        is_tied = self.tied_name != "" and name.startswith(self.tied_name)
        return not is_tied or mesh.stage == 0

    def all_reduce_tied(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        """Sums the gradient of the tied matrix over the first and the last stage, in place, where it is trained."""
        if self.tied_name not in parameters:
            return
        parameter = parameters[self.tied_name]
        if parameter.grad is None:  # both stages take part in the sum, whatever they computed
            parameter.grad = torch.zeros_like(parameter)
        mesh.all_reduce_ends(local(parameter.grad))

    def norms_of_all_stages(self, names: Sequence[str], norms: Tensor, mesh: Mesh) -> Tensor:
        """[P]: the norm of the gradient of each parameter of the model, in the model's order.

        `norms`: those of this stage's parameters, which have the names `names`. Each stage adds zeros for the
        parameters of others: the sum has the bits that one device would have.
        """
        index_in_model = {name: index for index, name in enumerate(self.names)}
        owned = [index for index, name in enumerate(names) if self.owns(name, mesh)]
        all_norms = norms.new_zeros(len(self.names))
        all_norms[[index_in_model[names[index]] for index in owned]] = norms[owned]
        return mesh.all_reduce_stages(all_norms)


class _Receive(torch.autograd.Function):
    """Receives the residual stream over an edge; backward sends its gradient back over that edge."""

    @staticmethod
    def forward(
        context: Any, _anchor: Tensor, link: PipelineLink, edge: int, tokens_BT: Tensor
    ) -> Tensor:
        context.link = link
        context.edge = edge
        return link.receive_stream(edge, tokens_BT)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, ...]:
        context.link.send_gradient(context.edge, gradient)
        return None, None, None, None


class _Send(torch.autograd.Function):
    """Sends the residual stream over an edge and returns a 0, whose backward receives the gradient of the stream."""

    @staticmethod
    def forward(
        context: Any, x_BTD: Tensor, _anchor: Tensor, link: PipelineLink, edge: int
    ) -> Tensor:
        context.link = link
        context.edge = edge
        context.shape = x_BTD.shape
        context.dtype = x_BTD.dtype
        link.send_stream(edge, x_BTD)
        return x_BTD.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(context: Any, zero: Tensor) -> tuple[Tensor | None, ...]:
        buffer = torch.empty(context.shape, dtype=context.dtype, device=zero.device)
        return context.link.receive_gradient(context.edge, buffer), None, None, None
