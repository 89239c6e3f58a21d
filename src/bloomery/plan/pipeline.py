"""What the stages of a pipeline hold and the order in which they take micro-batches: data that step and plan share.

A pipeline of `stages` devices cuts the layers into `stages` x `chunks` groups. Device `stage` has the groups `stage`,
`stage + stages`, ...: its chunks 0, 1, ... A micro-batch goes forward through all groups in turn, and backward through
them in reverse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from bloomery.facts.config import ModelConfig, Stage
from bloomery.model.adapters.settings import shares_head
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import PipelineSchedule


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk of a device."""

    is_forward: bool
    chunk: int
    micro_batch: int


def order(
    schedule: PipelineSchedule, *, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> list[Action]:
    """The passes of a device in one step, in their order. One stage alone alternates forward and backward: that is
    gradient accumulation.

    gpipe: every forward, then every backward (Huang et al., arXiv:1811.06965). 1f1b: as many forwards as stages
    follow, then forward and backward in turn, so that at most `stages` micro-batches are in memory; interleaved: the
    same over several chunks, with a smaller bubble (both Narayanan et al., arXiv:2104.04473).
    """
    if schedule == "gpipe":
        assert chunks == 1, "GPipe has one group of layers a device"
        forwards = [Action(True, 0, number) for number in range(micro_batches)]
        backwards = [Action(False, 0, number) for number in range(micro_batches)]
        return forwards + backwards

    # Micro-batches go through the chunks in rounds of as many as there are stages: a device that has sent the last of
    # a round from one chunk gets the first of them for its next chunk.
    rounds = [
        range(start, min(start + stages, micro_batches))
        for start in range(0, micro_batches, stages)
    ]
    forwards = [
        Action(True, chunk, number)
        for round_ in rounds
        for chunk in range(chunks)
        for number in round_
    ]
    backwards = [
        Action(False, chunk, number)
        for round_ in rounds
        for chunk in reversed(range(chunks))
        for number in round_
    ]

    # Forwards before the first backward, until the first micro-batch is back from the stages that follow. With several
    # chunks the number is that of Megatron-LM: two for each following stage, and all stages for each further chunk.
    following_stages = stages - stage - 1
    num_warmup = following_stages
    if chunks > 1:
        num_warmup = 2 * following_stages + (chunks - 1) * stages
    num_warmup = min(num_warmup, len(forwards))

    # Then one forward and one backward in turn, and at the end the backwards that are left.
    pairs = zip(forwards[num_warmup:], backwards, strict=False)
    alternating = [action for pair in pairs for action in pair]
    return forwards[:num_warmup] + alternating + backwards[len(forwards) - num_warmup :]


@dataclass(frozen=True)
class PassInFlight:
    """A pass at the end of its forward, or in its backward. `waiting`: by chunk, how many other passes the device keeps
    in memory until their backward.

    `is_first`: no backward has run before it in this step, so that there are no gradients.
    """

    chunk: int
    waiting: tuple[int, ...]
    is_first: bool


@cache
def fullest_passes(
    schedule: PipelineSchedule, *, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[PassInFlight, ...]:
    """The passes at which a device has most in memory: of each chunk one until the first backward, and one after it.

    They are found by going through the device's order itself.
    """
    in_flight = [0] * chunks
    fullest = dict[tuple[int, bool], PassInFlight]()
    is_first = True
    for action in order(
        schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks
    ):
        if action.is_forward:
            in_flight[action.chunk] += 1
        waiting = [count - (chunk == action.chunk) for chunk, count in enumerate(in_flight)]
        key = (action.chunk, is_first)
        if key not in fullest or sum(waiting) > sum(fullest[key].waiting):
            fullest[key] = PassInFlight(action.chunk, tuple(waiting), is_first)
        if not action.is_forward:
            in_flight[action.chunk] -= 1
            is_first = False
    return tuple(fullest.values())


def most_in_flight(
    schedule: PipelineSchedule, *, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> int:
    """The largest number of passes of a device that wait for their backward: each holds a chunk's activations."""
    passes = fullest_passes(
        schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks
    )
    return max(1 + sum(fullest.waiting) for fullest in passes)


def bubble(*, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step in which a device of an even pipeline waits: (P - 1) / (C M + P - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def stage_of(
    config: ModelConfig, index: int, stages: int, layers_by_group: Sequence[int] = ()
) -> Stage:
    """The stage `index`. `layers_by_group`: the number of layers of every group, in the model's order; empty: one group
    per stage, all even.

    Group g is on stage g % stages. The last stage has the embedding, too, where the head is tied to it.
    """
    ends = list(accumulate(layers_by_group or even_groups(config.num_layers, stages), initial=0))
    groups = [range(first, end) for first, end in pairwise(ends)]
    assert ends[-1] == config.num_layers and len(groups) % stages == 0, "every layer is on a stage"
    is_last = index == stages - 1
    return Stage(
        groups=tuple(groups[index::stages]),
        embeds=index == 0,
        has_embedding=index == 0 or (is_last and shares_head(config)),
        has_head=is_last,
    )


def layer_names(stage: Stage) -> str:
    """The layers of a stage for people, such as "layers 0 to 3 and 8 to 11"."""
    spans = [
        f"{group[0]}" if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in stage.groups
    ]
    noun = "layer" if len(stage.layers) == 1 else "layers"
    return f"{noun} {' and '.join(spans)}"


def rank_name(rank: int, plan: RunPlan) -> str:
    """A rank for people, such as "rank 1", and in a pipeline "rank 1 (layers 8 to 15)"."""
    train = plan.train
    if train.pipeline == 1:
        return f"rank {rank}"
    stage = stage_of(
        plan.model.config, rank // train.ranks_per_stage, train.pipeline, train.pipeline_layers
    )
    return f"rank {rank} ({layer_names(stage)})"


def even_groups(num_layers: int, groups: int) -> tuple[int, ...]:
    """The number of layers of each group. Two groups differ by one at most."""
    ends = [index * num_layers // groups for index in range(groups + 1)]
    return tuple(end - first for first, end in pairwise(ends))


def balanced_groups(
    layer_costs: Sequence[float],
    *,
    stages: int,
    chunks: int = 1,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    most_layers: Sequence[int] = (),
    slowness: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The number of layers of each group such that the slowest stage is as fast as possible, and then all stages are as
    even as possible.

    Costs are those of one micro-batch: of each layer, of the embedding in the first group, of the head in the last.
    `most_layers`: the limit of each stage, where it has one group. `slowness`: by how much costs are larger on the
    device of each stage; none: all are alike. None where the stages cannot hold all layers.
    """
    num_layers = len(layer_costs)
    num_groups = stages * chunks
    cost_before = [0.0, *accumulate(layer_costs)]

    def cost_of(group: int, first: int, end: int) -> float:
        cost = cost_before[end] - cost_before[first]
        if group == 0:
            cost += embedding_cost
        if group == num_groups - 1:
            cost += head_cost
        return cost * slowness[group % stages] if slowness else cost

    # Dynamic programming, group by group. best[end] is the best cut of the first `end` layers into the groups so far:
    # its most costly group, the sum of squared costs (least where costs are even), the number of layers of each group.
    # Every group has a layer and leaves one for each group that follows; the last group takes all that remain.
    Cut = tuple[float, float, tuple[int, ...]]
    best: dict[int, Cut] = {0: (0.0, 0.0, ())}
    for group in range(num_groups):
        most_of_group = most_layers[group] if most_layers else num_layers
        extended = dict[int, Cut]()
        for first, (slowest, squares, counts) in best.items():
            last_end = num_layers - (num_groups - group - 1)
            ends = range(first + 1, min(first + most_of_group, last_end) + 1)
            for end in ends if group < num_groups - 1 else ends[last_end - first - 1 :]:
                cost = cost_of(group, first, end)
                figures = (max(slowest, cost), squares + cost * cost)
                if end not in extended or figures < extended[end][:2]:
                    extended[end] = (*figures, (*counts, end - first))
        best = extended
    if num_layers not in best:
        return None
    groups = best[num_layers][2]
    return groups if chunks == 1 else _with_even_stages(groups, stages, cost_of)


def _with_even_stages(
    groups: tuple[int, ...], stages: int, cost_of: Callable[[int, int, int], float]
) -> tuple[int, ...]:
    """`groups` with layers moved between them, one at a time, as long as that makes the slowest stage faster, or all
    stages more even.

    Even groups do not make even stages: a stage whose groups are all among the larger ones would set the pace.
    """

    def figures(counts: tuple[int, ...]) -> tuple[float, float]:
        ends = list(accumulate(counts, initial=0))
        costs = [0.0] * stages
        for group, (first, end) in enumerate(pairwise(ends)):
            costs[group % stages] += cost_of(group, first, end)
        return round(max(costs), 9), round(sum(cost * cost for cost in costs), 9)

    while True:
        neighbors = [
            tuple(
                count - (group == source) + (group == target) for group, count in enumerate(groups)
            )
            for source, count_at_source in enumerate(groups)
            if count_at_source > 1
            for target in range(len(groups))
            if target != source
        ]
        better = min(neighbors, key=figures, default=groups)
        if figures(better) >= figures(groups):
            return groups
        groups = better
