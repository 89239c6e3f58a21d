"""The links between ranks, tried before the first step with numbers that the receiver knows.

Two trials: between neighbors, all pairs inside a host and a ring between hosts; and between the stages of a pipeline,
over the transport that the run will use. Between hosts of a cluster both are experimental: they ran on pretended hosts.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
import torch.distributed as dist
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
from bloomery.parallel.environment import LinkFailed, without_host
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

RankPair = tuple[int, int]  # the lower one first

LINK_SECONDS = 60.0  # to wait for a transfer; on GPUs the first one also begins a communicator
CPU_NUMBERS = 2**18  # float32 numbers of each transfer
GPU_NUMBERS = 2**22
TRIES = 3  # each transfer is timed so often. The fastest counts: the first one connects the ranks
# A link of one of many hosts is reported below this share of their usual rate.
SLOW_SHARE = 1 / 3
LEAST_PAIRS = 4  # of which most are usual
HOST_FIX = "check the network of these hosts, and GLOO_SOCKET_IFNAME"
GPU_FIX = "`bloomery doctor --probe` on these hosts; on AMD check that iommu=pt is set"
PIPELINE_FIXES: dict[PipelineTransport, str] = {
    "device": f"set parallel.pipeline_link=host; {GPU_FIX}",
    "host": f"{HOST_FIX}; `bloomery doctor --probe` on both",
}


# What both trials send, and how long they wait


def count_of(device: str) -> int:
    """The numbers of one transfer."""
    return GPU_NUMBERS if is_accelerator(device) else CPU_NUMBERS


def known_numbers(key: int, device: str) -> Tensor:
    """[count_of(device)] float32: whole numbers. At every index they differ from those of any other key below 2^24."""
    # An odd factor maps keys to different starts; float32 holds each number below 2^24.
    numbers = torch.arange(count_of(device), device=device) + key * 65_537
    return numbers.remainder_(2**24).float()


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


# Between neighbors


@final
@dataclass(frozen=True)
class LinkRates:
    """Bytes per second that each pair of ranks exchanged in each direction while all others did, too."""

    by_pair: dict[RankPair, float]
    hosts: tuple[str, ...]  # by rank

    def __str__(self) -> str:
        slowest = min(self.by_pair, key=self.by_pair.__getitem__)
        usual = statistics.median(self.by_pair.values())
        if len(self.by_pair) == 1:
            return f"the link {_named(slowest, self.hosts)} carries {_rate(usual)}"
        return (
            f"{len(self.by_pair):,} links, usually {_rate(usual)}, slowest {_named(slowest, self.hosts)}"
            f" at {_rate(self.by_pair[slowest])}"
        )

    def slow_links(self) -> list[str]:
        """A sentence about each link between hosts that is much slower than most of these."""
        between = {
            pair: rate
            for pair, rate in self.by_pair.items()
            if self.hosts[pair[0]] != self.hosts[pair[1]]
        }
        if len(between) < LEAST_PAIRS:
            return []
        usual = statistics.median(between.values())
        return [
            f"the link {_named(pair, self.hosts)} carries {_rate(rate)}, and most carry {_rate(usual)}"
            for pair, rate in between.items()
            if rate < SLOW_SHARE * usual
        ]


@final
@dataclass(frozen=True)
class LinkFailure:
    """A pair whose numbers did not arrive, as its lower rank or else its higher one found."""

    pair: RankPair
    problem: str


def neighbor_rounds(hosts: Sequence[str]) -> list[list[RankPair]]:
    """All pairs to try, in rounds in which a rank has one partner at most. `hosts`: by rank.

    First every pair inside a host, all hosts at once; then neighbors in the ring of all ranks on different hosts.
    """
    ranks_by_host = dict[str, list[int]]()
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    most = max(map(len, ranks_by_host.values()))
    inside = [
        [pair for ranks in ranks_by_host.values() for pair in _tournament_round(ranks, index)]
        for index in range(most + most % 2 - 1)
    ]

    # Two phases, and a third one for the edge that closes a ring of an odd number of ranks.
    world = len(hosts)
    ring = [(rank, rank + 1) for rank in range(world - 1)]
    phases: list[list[RankPair]] = [
        [pair for pair in ring if pair[0] % 2 == phase] for phase in (0, 1)
    ]
    if world > 2:
        closing_edge = (0, world - 1)
        if world % 2:
            phases.append([closing_edge])
        else:
            phases[1].append(closing_edge)
    between = [
        [(low, high) for low, high in pairs if hosts[low] != hosts[high]] for pairs in phases
    ]
    return [pairs for pairs in (*inside, *between) if pairs]


def _tournament_round(ranks: Sequence[int], index: int) -> list[RankPair]:
    """Round `index` of a tournament in which everyone meets everyone once (the circle method)."""
    count = len(ranks) + len(ranks) % 2  # with an absent one where the number is odd
    if index >= count - 1:
        return []
    circle = [0, *((position + index) % (count - 1) + 1 for position in range(count - 1))]
    seats = [(circle[seat], circle[count - 1 - seat]) for seat in range(count // 2)]
    return [(ranks[min(seat)], ranks[max(seat)]) for seat in seats if max(seat) < len(ranks)]


def try_neighbors(mesh: Mesh, hosts: Sequence[str], device: str) -> LinkRates:
    """Exchanges numbers that both know over every pair of `neighbor_rounds`. Raises UserError, the same on every rank.

    It names the host that most failed pairs have in common. `device`: where the numbers are; GPUs must have taken part
    in a collective before.
    """
    all_rounds = neighbor_rounds(hosts)
    inside = sum(1 for pairs in all_rounds if hosts[pairs[0][0]] == hosts[pairs[0][1]])
    own_seconds = [float("inf")] * len(all_rounds)
    failures = list[LinkFailure]()
    for index, pairs in enumerate(all_rounds):
        problem = ""
        partner = next((sum(pair) - mesh.rank for pair in pairs if mesh.rank in pair), None)
        for attempt in range(TRIES):
            # Also a barrier: all pairs of a round exchange at once.
            if mesh.any_rank(bool(problem)):
                break
            start = time.perf_counter()
            if partner is not None:
                problem = _exchange_with_neighbor(
                    mesh.rank, partner, device, tag=index * TRIES + attempt
                )
                seconds = time.perf_counter() - start
                own_seconds[index] = min(own_seconds[index], seconds)
        if mesh.any_rank(bool(problem)):
            problems = mesh.all_gather_json(problem)
            failures += [
                LinkFailure(pair, problems[pair[0]] or problems[pair[1]])
                for pair in pairs
                if problems[pair[0]] or problems[pair[1]]
            ]
        # Between hosts the other neighbors tell which of the two is at fault; a GPU that waits for one rank cannot try
        # another.
        if failures and (is_accelerator(device) or index < inside):
            break
    if failures:
        raise _neighbor_error(failures, hosts, device)

    seconds_by_rank = mesh.all_gather_floats(*own_seconds)
    return LinkRates(
        {
            (low, high): 4
            * count_of(device)
            / max(seconds_by_rank[low][index], seconds_by_rank[high][index])
            for index, pairs in enumerate(all_rounds)
            for low, high in pairs
        },
        tuple(hosts),
    )


def _exchange_with_neighbor(rank: int, partner: int, device: str, *, tag: int) -> str:
    """Sends and receives at once. Returns the problem, "" where the right numbers arrived."""
    own_numbers, expected = (known_numbers(sender, device) for sender in (rank, partner))
    received = torch.empty_like(expected)

    def send_and_receive() -> None:
        if device == "cpu":
            sending = dist.isend(own_numbers, partner, tag=tag)
            dist.recv(received, partner, tag=tag)
            assert sending is not None, "a partner is another rank"
            sending.wait()
            return
        operations = [
            dist.P2POp(dist.isend, own_numbers, partner),
            dist.P2POp(dist.irecv, received, partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        synchronize_stream(device)

    failure = run_within(LINK_SECONDS, send_and_receive)
    if failure:
        return f"no answer: {failure}"
    return "" if torch.equal(received, expected) else "wrong numbers"


def _neighbor_error(
    failures: Sequence[LinkFailure], hosts: Sequence[str], device: str
) -> UserError:
    failed_pairs_of = Counter(
        host for failure in failures for host in {hosts[rank] for rank in failure.pair}
    )
    most = max(failed_pairs_of.values())
    suspects = [host for host, count in failed_pairs_of.items() if count == most]
    first = next(
        failure for failure in failures if suspects[0] in (hosts[rank] for rank in failure.pair)
    )
    others = len(failures) - 1
    more = f", and {others} other{'s' if others > 1 else ''}" if others else ""
    kind, fix = "between the ranks' hosts", HOST_FIX
    if is_accelerator(device):
        kind, fix = "between GPUs", GPU_FIX
    several_hosts = len(set(hosts)) > 1
    host = ",".join(suspects) if several_hosts and len(suspects) < len(set(hosts)) else ""
    return UserError(
        f"the link {_named(first.pair, hosts)} fails{more}: {first.problem}",
        where=f"links {kind}, before the first step" + (f"; at fault: {host}" if host else ""),
        fix=f"{fix}; or leave it out: {without_host(host)}" if host else fix,
        host=host,
    )


def _named(pair: RankPair, hosts: Sequence[str]) -> str:
    low, high = pair
    if hosts[low] == hosts[high]:
        return f"between ranks {low} and {high} on {hosts[low]}"
    return f"between rank {low} on {hosts[low]} and rank {high} on {hosts[high]}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


# Between the stages of a pipeline


@final
@dataclass(frozen=True)
class Transfer:
    """A transfer over one edge of a pipeline in one direction, between two ranks of one copy of the model."""

    edge: int
    direction: int
    sender: int
    receiver: int

    def numbers(self, device: str) -> Tensor:
        """They differ from those of any other transfer."""
        return known_numbers((self.sender * 1024 + self.edge) * 2 + self.direction, device)


@final
@dataclass(frozen=True)
class PipelineTrial:
    """A transport over which every transfer arrived. `slowest`: the transfer that sets the pace of the pipeline."""

    transport: PipelineTransport
    slowest: Transfer
    bytes_per_second: float

    def __str__(self) -> str:
        path = {"device": "from GPU to GPU", "host": "through the host"}[self.transport]
        ranks = f"rank {self.slowest.sender} to {self.slowest.receiver}"
        rate = f"{format_bytes(int(self.bytes_per_second))}/s"
        return f"pipeline {path}, slowest edge {ranks} at {rate}"


def try_pipeline_links(
    mesh: Mesh, plan: TrainPlan, rank_names: Sequence[str]
) -> PipelineTrial | None:
    """Tries the transport between stages that the plan names, for "auto" both. Returns the faster trial.

    None without a pipeline. `rank_names`: of each rank, with its layers and its host. Raises UserError, with the same
    sentence on every rank, where a neighbor receives nothing or wrong numbers; LinkFailed where only the GPUs' link
    fails and the plan leaves the choice to this trial.
    """
    if mesh.stages == 1:
        return None
    assert mesh.groups is not None, "a pipeline has groups"
    num_edges = mesh.stages * plan.pipeline_chunks - 1
    trials = list[PipelineTrial]()
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
) -> PipelineTrial:
    """Every edge in both directions: one after the other, timed, then all of them at once. Raises UserError."""
    directions = list(product(range(num_edges), (FORWARD, BACKWARD)))
    transfers = [_transfer(mesh, edge, direction) for edge, direction in directions]
    best_seconds = [float("inf")] * len(transfers)

    # 1. In one order on all ranks: a communicator of GPUs begins with its first transfer, for which both ranks wait.
    for _ in range(TRIES):
        for index, transfer in enumerate(transfers):
            numbers = transfer.numbers(mesh.device)
            mesh.barrier()
            start = time.perf_counter()
            problem = ""
            if mesh.rank in (transfer.sender, transfer.receiver):
                problem = _exchange_between_stages(
                    mesh, transport, [transfer], [numbers], rank_names
                )
            if mesh.rank == transfer.receiver:
                best_seconds[index] = min(best_seconds[index], time.perf_counter() - start)
            _raise_everywhere(mesh, problem, name)

    # 2. All at once, received in another order than sent: each edge and direction must have a queue of its own.
    own_transfers = [
        transfer for transfer in transfers if mesh.rank in (transfer.sender, transfer.receiver)
    ]
    numbers_of_transfers = [transfer.numbers(mesh.device) for transfer in own_transfers]
    problem = _exchange_between_stages(
        mesh, transport, own_transfers, numbers_of_transfers, rank_names
    )
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
    return PipelineTrial(name, slowest, bytes_per_second=4 * count_of(mesh.device) / seconds)


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


def _exchange_between_stages(
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


def _raise_everywhere(mesh: Mesh, problem: str, name: PipelineTransport) -> None:
    """Raises UserError on all ranks where any has a problem: that of the first such rank."""
    problems = [problem for problem in mesh.all_gather_json(problem) if problem]
    if problems:
        raise UserError(
            problems[0],
            where="links of the pipeline, before the first step",
            fix=PIPELINE_FIXES[name],
        )
