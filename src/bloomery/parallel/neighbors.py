"""Links between ranks, tried before the first step: all pairs inside a host, neighbors in a ring between hosts."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.core.device import is_accelerator, synchronize_stream
from bloomery.core.errors import UserError
from bloomery.parallel import links
from bloomery.parallel.environment import without_host
from bloomery.parallel.mesh import Mesh

Pair = tuple[int, int]  # of ranks, the lower one first
Device = str  # where the numbers are that are sent: a type of device

CPU_NUMBERS = 2**18  # float32 numbers of each transfer
GPU_NUMBERS = 2**22
TRIES = 3  # each pair is timed so often. The fastest counts: the first one connects the ranks
# A link of one of many hosts is reported below this share of their usual rate.
SLOW_SHARE = 1 / 3
LEAST_PAIRS = 4  # of which most are usual
HOST_FIX = "check the network of these hosts, and GLOO_SOCKET_IFNAME"
GPU_FIX = "`bloomery doctor --probe` there; on AMD check that iommu=pt is set"


@final
@dataclass(frozen=True)
class LinkRates:
    """Bytes per second that each pair of ranks exchanged in each direction while all others did, too."""

    by_pair: dict[Pair, float]
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
class Failure:
    """A pair whose numbers did not arrive, as its lower rank or else its higher one found."""

    pair: Pair
    problem: str


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
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
    phases: list[list[Pair]] = [[pair for pair in ring if pair[0] % 2 == phase] for phase in (0, 1)]
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


def _tournament_round(ranks: Sequence[int], index: int) -> list[Pair]:
    """Round `index` of a tournament in which everyone meets everyone once (the circle method)."""
    count = len(ranks) + len(ranks) % 2  # with an absent one where the number is odd
    if index >= count - 1:
        return []
    circle = [0, *((position + index) % (count - 1) + 1 for position in range(count - 1))]
    seats = [(circle[seat], circle[count - 1 - seat]) for seat in range(count // 2)]
    return [(ranks[min(seat)], ranks[max(seat)]) for seat in seats if max(seat) < len(ranks)]


def try_neighbors(mesh: Mesh, hosts: Sequence[str], device: Device) -> LinkRates:
    """Exchanges numbers that both know over every pair of `rounds`. Raises UserError, the same on every rank.

    It names the host that most failed pairs have in common. `device`: where the numbers are; GPUs must have taken part
    in a collective before.
    """
    all_rounds = rounds(hosts)
    inside = sum(1 for pairs in all_rounds if hosts[pairs[0][0]] == hosts[pairs[0][1]])
    own_seconds = [float("inf")] * len(all_rounds)
    failures = list[Failure]()
    for index, pairs in enumerate(all_rounds):
        problem = ""
        partner = next((sum(pair) - mesh.rank for pair in pairs if mesh.rank in pair), None)
        for attempt in range(TRIES):
            # Also a barrier: all pairs of a round exchange at once.
            if mesh.any_rank(bool(problem)):
                break
            start = time.perf_counter()
            if partner is not None:
                problem = _exchange(mesh.rank, partner, device, tag=index * TRIES + attempt)
                seconds = time.perf_counter() - start
                own_seconds[index] = min(own_seconds[index], seconds)
        if mesh.any_rank(bool(problem)):
            problems = mesh.all_gather_str(problem)
            failures += [
                Failure(pair, problems[pair[0]] or problems[pair[1]])
                for pair in pairs
                if problems[pair[0]] or problems[pair[1]]
            ]
        # Between hosts the other neighbors tell which of the two is at fault; a GPU that waits for one rank cannot try
        # another.
        if failures and (is_accelerator(device) or index < inside):
            break
    if failures:
        raise _error(failures, hosts, device)

    numbers = GPU_NUMBERS if is_accelerator(device) else CPU_NUMBERS
    seconds_by_rank = mesh.all_gather_floats(*own_seconds)
    return LinkRates(
        {
            (low, high): 4
            * numbers
            / max(seconds_by_rank[low][index], seconds_by_rank[high][index])
            for index, pairs in enumerate(all_rounds)
            for low, high in pairs
        },
        tuple(hosts),
    )


def _exchange(rank: int, partner: int, device: Device, *, tag: int) -> str:
    """Sends and receives at once. Returns the problem, "" where the right numbers arrived."""
    own_numbers, expected = (_numbers(sender, device) for sender in (rank, partner))
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

    failure = links.run_within(links.LINK_SECONDS, send_and_receive)
    if failure:
        return f"no answer: {failure}"
    return "" if torch.equal(received, expected) else "wrong numbers"


def _numbers(sender: int, device: Device) -> Tensor:
    """float32: whole numbers below 2^24, which at every index differ from those of any other rank."""
    count = GPU_NUMBERS if is_accelerator(device) else CPU_NUMBERS
    return (torch.arange(count, device=device) + sender * 65_537).remainder_(2**24).float()


def _error(failures: Sequence[Failure], hosts: Sequence[str], device: Device) -> UserError:
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


def _named(pair: Pair, hosts: Sequence[str]) -> str:
    low, high = pair
    if hosts[low] == hosts[high]:
        return f"between ranks {low} and {high} on {hosts[low]}"
    return f"between rank {low} on {hosts[low]} and rank {high} on {hosts[high]}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
