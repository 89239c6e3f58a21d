"""Copies beside the work that nobody waits for any more: their memory is not used again before they are over."""

from collections.abc import Callable, Iterator

import pytest
import simulated
import torch
from plans_for_tests import tiny_config

from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.apply import checkpoint_block
from bloomery.parallel.offload import offload_activations
from bloomery.parallel.transfers import CopyStream, pinned_like
from bloomery.train.optim.placement import StatePlacement

DEVICE = torch.device("cuda")
COUNT = 4096


@pytest.fixture(autouse=True)
def _without_races() -> Iterator[None]:
    simulated.clear()
    yield
    assert simulated.report()["problem"] == {}


def gradients(mode: str, *, offloaded: bool) -> list[torch.Tensor]:
    """Of three backwards, in one sum."""
    model = fresh_decoder(tiny_config(), seed=0).to(DEVICE)
    for index, block in enumerate(model.model.layers):
        checkpoint_block(block, mode, index=index)
    if offloaded:
        offload_activations(model.model, threshold=1)
    for first in (0, 24, 48):
        tokens_BT = torch.arange(first, first + 24, device=DEVICE).view(2, 12)
        model(tokens_BT).head.square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", ["none", "every-2", "selective", "full"])
def test_gradients_do_not_depend_on_where_activations_wait(mode: str) -> None:
    stayed, left = gradients(mode, offloaded=False), gradients(mode, offloaded=True)
    assert stayed
    assert all(map(torch.equal, stayed, left))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_no_activation_comes_back_for_nobody(mode: str) -> None:
    """Backward asks for few of them again after it let them go: 19% of the bytes without checkpointing."""

    def copied(*, offloaded: bool) -> tuple[int, int]:
        before = simulated.stats()
        gradients(mode, offloaded=offloaded)
        after = simulated.stats()
        return after.copied_out - before.copied_out, after.copied_in - before.copied_in

    out_of_all, into_all = copied(offloaded=True)
    out_of_others, into_others = copied(offloaded=False)
    num_sent, num_fetched = out_of_all - out_of_others, into_all - into_others
    assert 0 < num_sent <= num_fetched < 1.25 * num_sent


def ones_in_the_memory_of(abandon: Callable[[torch.Tensor], object]) -> bool:
    """Whether a tensor in the memory of one that `abandon` was given last keeps what is written to it."""
    abandoned = torch.zeros(COUNT, device=DEVICE)
    address = abandoned.data_ptr()
    abandon(abandoned)
    del abandoned
    next_tensor = torch.ones(COUNT, device=DEVICE)
    assert next_tensor.data_ptr() == address
    torch.cuda.synchronize()  # every copy is over
    return bool(next_tensor.eq(1).all())


def test_a_copy_that_is_dropped_overwrites_nothing() -> None:
    home = pinned_like(torch.zeros(COUNT, device=DEVICE)).fill_(7)
    copies = CopyStream()

    def drop(tensor: torch.Tensor) -> None:
        copies.run_after_work([tensor], lambda: tensor.copy_(home, non_blocking=True))

    assert ones_in_the_memory_of(drop)


def test_a_copy_that_fails_half_way_overwrites_nothing() -> None:
    home = pinned_like(torch.zeros(COUNT, device=DEVICE)).fill_(7)
    copies = CopyStream()

    def fail(tensor: torch.Tensor) -> None:
        def copy() -> None:
            tensor.copy_(home, non_blocking=True)
            raise RuntimeError("the second copy")

        with pytest.raises(RuntimeError, match="the second copy"):
            copies.run_after_work([tensor], copy)

    assert ones_in_the_memory_of(fail)


def test_what_was_sent_is_not_overwritten_when_its_stream_is_dropped() -> None:
    home = pinned_like(torch.zeros(COUNT, device=DEVICE))

    def send(tensor: torch.Tensor) -> None:
        CopyStream().send([tensor], lambda: home.copy_(tensor, non_blocking=True), most_under_way=4)

    assert ones_in_the_memory_of(send)
    assert home.eq(0).all()


def test_an_update_that_stops_half_way_leaves_no_copy_behind() -> None:
    placement = StatePlacement(offload=True)
    states = [[[[pinned_like(torch.zeros(COUNT, device=DEVICE)).fill_(7)]]] for _ in range(3)]
    visits = placement.visits(states, DEVICE)
    first = next(visits)
    placement.send([first[0][0] + 1], states[0][0])
    del first, visits  # as an error in the update does: the second piece is on its way
    reused = [torch.ones(COUNT, device=DEVICE) for _ in range(8)]
    torch.cuda.synchronize()
    assert all(tensor.eq(1).all() for tensor in reused)
    placement.settle()
    assert states[0][0][0][0].eq(8).all()
