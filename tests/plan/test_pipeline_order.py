"""Every order of a pipeline runs to its end, with the bubble and the memory that its source gives.

Oracles: simulations of devices that wait for one another, and the formulas of arXiv:1811.06965 and arXiv:2104.04473.
"""

from collections import deque

import pytest
from plans_for_tests import tiny_config

from bloomery.facts.config import whole_model
from bloomery.plan.pipeline import (
    Action,
    bubble,
    even_groups,
    most_in_flight,
    order,
    stage_of,
)

# (schedule, stages, chunks, micro-batches); interleaved rounds are whole, as the plan requires.
ORDERS = [
    (schedule, stages, chunks, micro_batches)
    for stages in range(2, 9)
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3))
    for micro_batches in range(1, 17)
    if chunks == 1 or micro_batches % stages == 0
]
# An edge, a micro-batch and a direction name one tensor that is sent.
Tensor = tuple[int, int, bool]


def orders_of(schedule, stages, chunks, micro_batches) -> list[list[Action]]:
    return [
        order(schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks)
        for stage in range(stages)
    ]


def received_and_sent(
    action: Action, stage: int, stages: int, chunks: int
) -> tuple[Tensor | None, Tensor | None]:
    """What a pass waits for from another device, and what it gives to one. Edge g leaves group g of the layers."""
    group = action.chunk * stages + stage
    last_group = stages * chunks - 1
    before = (group - 1, action.micro_batch, action.is_forward) if group > 0 else None
    after = (group, action.micro_batch, action.is_forward) if group < last_group else None
    return (before, after) if action.is_forward else (after, before)


def simulated_seconds(orders, stages, chunks) -> float | None:
    """Of a step whose forward takes 1 and whose backward takes 2 seconds a device; None where devices hang.

    Each edge and direction has a queue of its own: a device waits only for what it receives next.
    """
    arrivals = dict[Tensor, float]()
    clocks = [0.0] * stages
    pending = [deque(actions) for actions in orders]
    while any(pending):
        moved = False
        for stage, actions in enumerate(pending):
            while actions:
                received, sent = received_and_sent(actions[0], stage, stages, chunks)
                if received is not None and received not in arrivals:
                    break
                start = max(clocks[stage], 0.0 if received is None else arrivals[received])
                clocks[stage] = start + (1 if actions[0].is_forward else 2) / chunks
                if sent is not None:
                    arrivals[sent] = clocks[stage]
                actions.popleft()
                moved = True
        if not moved:
            return None
    return max(clocks)


def hangs_with_one_queue_per_pair(orders, stages, chunks) -> bool:
    """As NCCL's communicators: the transfers of two ranks are one queue at each end, and each blocks the next."""
    transfers = [deque[tuple[str, int, Tensor]]() for _ in range(stages)]
    for stage, actions in enumerate(orders):
        for action in actions:
            received, sent = received_and_sent(action, stage, stages, chunks)
            step = 1 if action.is_forward else -1
            if received is not None:
                transfers[stage].append(("receive", (stage - step) % stages, received))
            if sent is not None:
                transfers[stage].append(("send", (stage + step) % stages, sent))

    queues = {
        (rank, peer): deque[tuple[str, Tensor]]()
        for rank in range(stages)
        for peer in range(stages)
    }
    waits = [False] * stages  # whether the first transfer of a rank is a receive in its queue
    arrived = set[Tensor]()
    while any(transfers):
        moved = False
        # A rank puts its sends into the queue and goes on; it waits for what it receives.
        for rank, of_rank in enumerate(transfers):
            while of_rank:
                kind, peer, tensor = of_rank[0]
                if not waits[rank]:
                    queues[rank, peer].append((kind, tensor))
                waits[rank] = kind == "receive" and tensor not in arrived
                if waits[rank]:
                    break
                of_rank.popleft()
                moved = True

        # The first transfers of both ends take place where they are of one tensor.
        for rank in range(stages):
            for peer in range(rank):
                ends = queues[rank, peer], queues[peer, rank]
                while all(ends) and ends[0][0][1] == ends[1][0][1]:
                    arrived.add(ends[0].popleft()[1])
                    ends[1].popleft()
                    moved = True
        if not moved:
            return True
    return False


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_no_order_hangs_and_each_edge_is_first_in_first_out(schedule) -> None:
    cases = [case for case in ORDERS if case[0] == schedule]
    assert len(cases) > 30
    for _, stages, chunks, micro_batches in cases:
        orders = orders_of(schedule, stages, chunks, micro_batches)

        # Every device passes every micro-batch through each of its chunks once, backward after forward.
        for actions in orders:
            assert len(actions) == len(set(actions)) == 2 * chunks * micro_batches
            places = {action: place for place, action in enumerate(actions)}
            for chunk in range(chunks):
                for number in range(micro_batches):
                    forward = places[Action(True, chunk, number)]
                    assert forward < places[Action(False, chunk, number)]

        # Both ends of an edge agree on the order, per direction.
        sent_over = dict[tuple[int, bool], list[int]]()
        received_over = dict[tuple[int, bool], list[int]]()
        for stage, actions in enumerate(orders):
            for action in actions:
                received, sent = received_and_sent(action, stage, stages, chunks)
                for tensor, over in ((received, received_over), (sent, sent_over)):
                    if tensor is not None:
                        edge, number, is_forward = tensor
                        over.setdefault((edge, is_forward), []).append(number)
        assert sent_over == received_over
        assert len(sent_over) == 2 * (stages * chunks - 1)
        assert simulated_seconds(orders, stages, chunks) is not None


def test_one_queue_per_pair_of_ranks_would_hang() -> None:
    """The simulation above can tell: over NCCL's queues 69 of these 114 orders hang, the shortest ones do not."""
    cases = [
        case
        for case in ORDERS
        if case[1] in (2, 3, 4, 6, 8) and case[3] in (1, 2, 3, 4, 6, 8, 12, 16)
    ]
    assert len(cases) == 114
    hanging = [
        (schedule, stages, chunks, micro_batches)
        for schedule, stages, chunks, micro_batches in cases
        if hangs_with_one_queue_per_pair(
            orders_of(schedule, stages, chunks, micro_batches), stages, chunks
        )
    ]
    assert len(hanging) == 69
    assert not any(schedule == "gpipe" for schedule, *_ in hanging)
    assert ("1f1b", 2, 1, 1) not in hanging and ("1f1b", 2, 1, 4) in hanging


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_the_bubble_of_an_even_pipeline_is_that_of_the_formula(schedule) -> None:
    for name, stages, chunks, micro_batches in ORDERS:
        # The formula is for enough micro-batches that no device of 1F1B waits between two of them.
        if name != schedule or micro_batches < stages:
            continue
        seconds = simulated_seconds(orders_of(name, stages, chunks, micro_batches), stages, chunks)
        expected = bubble(stages=stages, micro_batches=micro_batches, chunks=chunks)
        assert expected == (stages - 1) / (chunks * micro_batches + stages - 1)
        assert 1 - 3 * micro_batches / seconds == pytest.approx(expected, abs=1e-12)


def test_the_first_device_holds_the_most_micro_batches() -> None:
    def most(schedule, stages, micro_batches, chunks=1, stage=0):
        return most_in_flight(
            schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks
        )

    for stages in range(2, 9):
        for micro_batches in range(1, 17):
            of_stages = [most("1f1b", stages, micro_batches, stage=s) for s in range(stages)]
            assert of_stages == [min(stages - s, micro_batches) for s in range(stages)]
            assert most("gpipe", stages, micro_batches) == micro_batches
    assert most("interleaved", 2, 8, chunks=2) == 5
    assert most("interleaved", 4, 8, chunks=2) == 11


def test_one_device_alternates_forward_and_backward() -> None:
    (actions,) = orders_of("1f1b", 1, 1, 3)
    assert actions == [
        Action(is_forward, 0, number) for number in range(3) for is_forward in (True, False)
    ]
    assert bubble(stages=1, micro_batches=3) == 0


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_have_every_layer_once_and_both_ends(is_tied) -> None:
    for num_layers in range(2, 20):
        config = tiny_config(num_layers=num_layers, tie_embeddings=is_tied)
        for stages in range(2, min(8, num_layers) + 1):
            for chunks in range(1, num_layers // stages + 1):
                groups = even_groups(num_layers, stages * chunks)
                assert sum(groups) == num_layers and max(groups) - min(groups) <= 1
                parts = [stage_of(config, index, stages, groups) for index in range(stages)]
                layers = [layer for part in parts for layer in part.layers]
                assert sorted(layers) == list(whole_model(config).layers)
                assert [part.embeds for part in parts] == [True] + [False] * (stages - 1)
                assert [part.has_head for part in parts] == [False] * (stages - 1) + [True]
                middle = [False] * (stages - 2)
                assert [part.has_embedding for part in parts] == [True, *middle, is_tied]
