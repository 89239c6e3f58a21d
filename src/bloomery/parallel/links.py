"""The links between the stages of a pipeline, tried before the first step with numbers that the receiver knows."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
from torch import Tensor

from bloomery.core.device import (
    accelerators_in_use,
    current_index,
    is_accelerator,
    select_device,
    synchronize_stream,
)
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.parallel.environment import LinkFailed
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline import (
    BACKWARD,
    FORWARD,
    DeviceTransport,
    HostTransport,
    Transport,
)
from bloomery.plan.types import TrainPlan
from bloomery.recipe.schema import PipelineTransport

LINK_SECONDS = 60.0  # to wait for a transfer; on GPUs the first one also begins a communicator
CPU_NUMBERS = 2**18  # float32 numbers of each transfer
GPU_NUMBERS = 2**22
ROUNDS = 3  # in which each transfer is timed. The fastest counts: the first one connects the ranks
FIXES: dict[PipelineTransport, str] = {
    "device": "set parallel.pipeline_link=host; `bloomery doctor --probe`; on AMD check that iommu=pt is set",
    "host": "`bloomery doctor --probe` on both hosts; check the network and the memory of these hosts",
}


@final
@dataclass(frozen=True)
class Transfer:
    """A transfer over one edge of a pipeline in one direction, between two ranks of one copy of the model."""

    edge: int
    direction: int
    sender: int
    receiver: int

    def numbers(self, count: int, device: str) -> Tensor:
        """[count] float32: whole numbers. At every index they differ from those of any other transfer."""
        key = (self.sender * 1024 + self.edge) * 2 + self.direction
        # An odd factor maps keys below 2^24 to different starts; float32 holds each number below 2^24.
        numbers = torch.arange(count, device=device) + key * 65_537
        return numbers.remainder_(2**24).float()


@final
@dataclass(frozen=True)
class LinkTrial:
    """A trial in which every transfer arrived. `slowest`: the transfer that sets the pace of the pipeline."""

    transport: PipelineTransport
    slowest: Transfer
    bytes_per_second: float

    def __str__(self) -> str:
        path = {"device": "from GPU to GPU", "host": "through the host"}[self.transport]
        ranks = f"rank {self.slowest.sender} to {self.slowest.receiver}"
        rate = f"{format_bytes(int(self.bytes_per_second))}/s"
        return f"pipeline {path}, slowest edge {ranks} at {rate}"


def try_links(mesh: Mesh, plan: TrainPlan, rank_names: Sequence[str]) -> LinkTrial | None:
    """Tries the transport between stages that the plan names, for "auto" both. Returns the faster trial.

    None without a pipeline. `rank_names`: of each rank, with its layers and its host. Raises UserError, with the same
    sentence on every rank, where a neighbor receives nothing or wrong numbers; LinkFailed where only the GPUs' link
    fails and the plan leaves the choice to this trial.
    """
    if mesh.stages == 1:
        return None
    assert mesh.groups is not None, "a pipeline has groups"
    num_edges = mesh.stages * plan.pipeline_chunks - 1
    trials = list[LinkTrial]()
    if plan.pipeline_link != "device":
        host_transport = HostTransport(under_way=2 * num_edges)
        trials.append(try_edges(mesh, host_transport, "host", num_edges, rank_names))
    if plan.pipeline_link != "host" and mesh.groups.edges:
        device_transport = DeviceTransport(mesh.groups.edges, under_way=2 * num_edges)
        try:
            trials.append(try_edges(mesh, device_transport, "device", num_edges, rank_names))
        except UserError as error:
            if plan.pipeline_link == "device":
                raise
            raise LinkFailed(error.problem, where=error.where, fix=error.fix) from error
    assert trials, "the plan names a device link for GPUs alone"
    # Every rank has the same figures, and so chooses the same transport.
    return max(trials, key=lambda trial: trial.bytes_per_second)


def try_edges(
    mesh: Mesh,
    transport: Transport,
    name: PipelineTransport,
    num_edges: int,
    rank_names: Sequence[str],
) -> LinkTrial:
    """Every edge in both directions: one after the other, timed, then all of them at once. Raises UserError."""
    count = GPU_NUMBERS if is_accelerator(mesh.device) else CPU_NUMBERS
    directions = list(product(range(num_edges), (FORWARD, BACKWARD)))
    transfers = [_transfer(mesh, edge, direction) for edge, direction in directions]
    best_seconds = [float("inf")] * len(transfers)

    # 1. In one order on all ranks: a communicator of GPUs begins with its first transfer, for which both ranks wait.
    for _ in range(ROUNDS):
        for index, transfer in enumerate(transfers):
            numbers = transfer.numbers(count, mesh.device)
            mesh.barrier()
            start = time.perf_counter()
            problem = ""
            if mesh.rank in (transfer.sender, transfer.receiver):
                problem = _exchange(mesh, transport, [transfer], [numbers], rank_names)
            if mesh.rank == transfer.receiver:
                best_seconds[index] = min(best_seconds[index], time.perf_counter() - start)
            _raise_everywhere(mesh, problem, name)

    # 2. All at once, received in another order than sent: each edge and direction must have a queue of its own.
    own_transfers = [
        transfer for transfer in transfers if mesh.rank in (transfer.sender, transfer.receiver)
    ]
    numbers_of_transfers = [transfer.numbers(count, mesh.device) for transfer in own_transfers]
    problem = _exchange(mesh, transport, own_transfers, numbers_of_transfers, rank_names)
    _raise_everywhere(mesh, problem, name)

    # 3. The slowest edge of all copies sets the pace.
    seconds_by_rank = mesh.all_gather_floats(*best_seconds)
    seconds, index, receiver = max(
        (seconds, index, rank)
        for rank, seconds_of_rank in enumerate(seconds_by_rank)
        for index, seconds in enumerate(seconds_of_rank)
        if seconds < float("inf")
    )
    edge, direction = directions[index]
    slowest = _transfer(mesh, edge, direction, data_rank=receiver % mesh.data_world)
    return LinkTrial(name, slowest, bytes_per_second=4 * count / seconds)


def _transfer(mesh: Mesh, edge: int, direction: int, data_rank: int | None = None) -> Transfer:
    """The transfer in the copy of the model with the sequences of `data_rank`; None: of this rank."""
    if data_rank is None:
        data_rank = mesh.data_rank
    before, after = (
        group % mesh.stages * mesh.data_world + data_rank for group in (edge, edge + 1)
    )
    if direction == FORWARD:
        return Transfer(edge, direction, sender=before, receiver=after)
    return Transfer(edge, direction, sender=after, receiver=before)


def _exchange(
    mesh: Mesh,
    transport: Transport,
    transfers: Sequence[Transfer],
    numbers: Sequence[Tensor],
    rank_names: Sequence[str],
) -> str:
    """Sends and receives these transfers of this rank. Returns the problem as a sentence, "" where numbers are right.

    `numbers`: by transfer, what is sent and expected.
    """
    received_numbers = dict[Transfer, Tensor]()
    waits_for = transfers[0]

    def send_and_receive() -> None:
        nonlocal waits_for
        for transfer, numbers_sent in zip(transfers, numbers, strict=True):
            if transfer.sender == mesh.rank:
                waits_for = transfer
                transport.send(numbers_sent, transfer.receiver, transfer.edge, transfer.direction)
        # In reverse: another order than that of sending.
        for transfer, expected in reversed(list(zip(transfers, numbers, strict=True))):
            if transfer.receiver == mesh.rank:
                waits_for = transfer
                buffer = torch.empty_like(expected)
                received_numbers[transfer] = transport.receive(
                    buffer, transfer.sender, transfer.edge, transfer.direction
                )
        transport.settle()
        synchronize_stream(mesh.device)

    failure = run_within(LINK_SECONDS, send_and_receive)
    if failure:
        neighbor = waits_for.sender if waits_for.receiver == mesh.rank else waits_for.receiver
        return f"{rank_names[mesh.rank]} got no answer from {rank_names[neighbor]}: {failure}"
    for transfer, expected in zip(transfers, numbers, strict=True):
        if transfer.receiver == mesh.rank and not torch.equal(received_numbers[transfer], expected):
            receiver = rank_names[mesh.rank]
            return f"{receiver} received wrong numbers from {rank_names[transfer.sender]}"
    return ""


def run_within(seconds: float, work: Callable[[], None]) -> str:
    """Runs `work` in a thread that may never end. Returns why it did not succeed in `seconds`, "" where it did."""
    errors = list[Exception]()
    device_indices = {kind: current_index(kind) for kind in accelerators_in_use()}

    def run() -> None:
        for kind, index in device_indices.items():
            select_device(kind, index)  # each thread has its own
        try:
            work()
        except Exception as error:  # any: it is reported, and ends the run
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="trial of a link")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"waited {format_seconds(seconds)}"
    return str(errors[0]).partition("\n")[0][:200] if errors else ""


def _raise_everywhere(mesh: Mesh, problem: str, name: PipelineTransport) -> None:
    """Raises UserError on all ranks where any has a problem: that of the first such rank."""
    problems = [problem for problem in mesh.all_gather_str(problem) if problem]
    if problems:
        raise UserError(
            problems[0], where="links of the pipeline, before the first step", fix=FIXES[name]
        )
