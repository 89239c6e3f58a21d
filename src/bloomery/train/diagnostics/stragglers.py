"""Ranks, hosts and stages of a pipeline for which all others wait, found by the clocks of their steps."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

TIMES = 1.3  # of the median, or of the fastest stage of a pipeline
# The same for each rank of a slow host, when one of them has become TIMES as slow as most.
HOST_TIMES = 1.15
STEPS = 100
SLOW_STEPS = 50


@final
@dataclass(frozen=True)
class Straggler:
    """A slow rank; or all ranks of `host`, which is "" for one rank alone. `times` as long as most it takes."""

    ranks: tuple[int, ...]
    host: str
    times: float


def worked_seconds(
    seconds_without_waiting: Sequence[float], communication_seconds: Sequence[float]
) -> list[float]:
    """Seconds of a step that each rank worked, from those in which its host did not wait, by rank.

    On GPUs a fast rank waits for a slow one inside a collective of the device: the slow one's takes the least time.
    What a rank communicates longer than that, it waited. On a CPU the host's clock has all of it: zeros.
    """
    least = min(communication_seconds)
    return [
        max(0.0, seconds - (communication - least))
        for seconds, communication in zip(
            seconds_without_waiting, communication_seconds, strict=True
        )
    ]


@final
class Stragglers:
    """Finds the ranks that are slow in many of the last steps, and the stages of a pipeline: each is named once.

    A rank is slow next to the ranks of its stage, which have the same layers. Where all ranks of its host are slower
    than all others, the host is. A stage is slow next to the fastest one.
    """

    def __init__(self, stages: int = 1, hosts: Sequence[str] = ()) -> None:
        """`hosts`: by rank; empty: all ranks are on one host."""
        self._stages = stages
        # By rank: all ranks of its host, where that has several and there are other hosts.
        self._ranks_beside = dict[int, tuple[int, ...]]()
        self._hosts = tuple(hosts)
        if len(set(hosts)) > 1:
            for rank, host in enumerate(hosts):
                self._ranks_beside[rank] = tuple(
                    other for other, other_host in enumerate(hosts) if other_host == host
                )
        # Of each of the last steps, by rank: its seconds relative to the median of the ranks of its stage.
        self._slowness = deque[tuple[float, ...]](maxlen=STEPS)
        self._named_ranks = set[int]()
        # Of each of the last steps, by stage: the median of its ranks' seconds relative to that of the fastest stage.
        self._stage_slowness = deque[tuple[float, ...]](maxlen=STEPS)
        self._named_stages = False

    def note(self, seconds: Sequence[float]) -> list[Straggler]:
        """`seconds` of one step that each rank worked, without waiting for others. The stragglers to name now."""
        per_stage = len(seconds) // self._stages
        seconds_by_stage = [
            seconds[stage * per_stage : (stage + 1) * per_stage] for stage in range(self._stages)
        ]
        medians = [statistics.median_low(of_stage) for of_stage in seconds_by_stage]
        self._slowness.append(
            tuple(
                rank_seconds / median_seconds if median_seconds else 1.0
                for of_stage, median_seconds in zip(seconds_by_stage, medians, strict=True)
                for rank_seconds in of_stage
            )
        )
        fastest = min(medians)
        self._stage_slowness.append(
            tuple(median_seconds / fastest if fastest > 0 else 1.0 for median_seconds in medians)
        )

        stragglers = list[Straggler]()
        for rank in range(len(seconds)):
            slow_steps = [step for step in self._slowness if step[rank] > TIMES]
            if len(slow_steps) >= SLOW_STEPS and rank not in self._named_ranks:
                straggler = self._straggler(rank, slow_steps)
                self._named_ranks.update(straggler.ranks)
                stragglers.append(straggler)
        return stragglers

    def _straggler(self, rank: int, slow_steps: Sequence[tuple[float, ...]]) -> Straggler:
        """The rank, or its host where all its ranks are usually slower than those of other hosts."""
        times = statistics.median(step[rank] for step in slow_steps)
        ranks = self._ranks_beside.get(rank, (rank,))
        if len(ranks) == 1:
            return Straggler((rank,), "", times)
        usual_slowness = [
            statistics.median(of_steps) for of_steps in zip(*self._slowness, strict=True)
        ]
        others = [slowness for other, slowness in enumerate(usual_slowness) if other not in ranks]
        least_of_host = min(usual_slowness[other] for other in ranks)
        if least_of_host > max(HOST_TIMES, *others):
            host_times = statistics.median(usual_slowness[other] for other in ranks)
            return Straggler(ranks, self._hosts[rank], host_times)
        return Straggler((rank,), "", times)

    def slowest_stage(self) -> tuple[int, float] | None:
        """The stage for which others wait in most steps, and how many times as long as the fastest one it works.

        None where the stages work for about as long, and after it was named once.
        """
        if self._named_stages or not self._stage_slowness:
            return None
        slowness = [
            statistics.median(of_steps) for of_steps in zip(*self._stage_slowness, strict=True)
        ]
        slowest = max(range(self._stages), key=slowness.__getitem__)
        slow_steps = [step[slowest] for step in self._stage_slowness if step[slowest] > TIMES]
        # Two stages may take turns: the same one must be slow in two of three steps.
        if len(slow_steps) < SLOW_STEPS or 3 * len(slow_steps) < 2 * len(self._stage_slowness):
            return None
        self._named_stages = True
        return slowest, statistics.median(slow_steps)
