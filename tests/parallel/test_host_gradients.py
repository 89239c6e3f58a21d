"""Gradients on the host are the sums that autograd makes, in memory that is allocated once."""

import threading

import pytest
import torch
from torch import Tensor, nn

from bloomery.facts.limits import STREAM_STAGED
from bloomery.parallel import host_gradients, host_memory
from bloomery.parallel.host_gradients import HostGradients
from bloomery.parallel.host_memory import HostLayer, Place
from bloomery.parallel.transfers import CopyUnderWay, pinned_all
from bloomery.plan.types import HostPlacement

CPU = torch.device("cpu")


def a_layer(dtype: torch.dtype) -> HostLayer:
    """A matrix and a vector, with values."""
    module = nn.Linear(64, 48, dtype=dtype)
    places = [
        Place(module._parameters, "weight", 0, module.weight.shape, dtype),
        Place(module._parameters, "bias", 64 * 48 * 4, module.bias.shape, dtype),
    ]
    layer = HostLayer(places, 64 * 48 * 4 + 1024)
    layer.live_in(torch.zeros(layer.num_bytes, dtype=torch.uint8))
    return layer


def gradients_of(layer: HostLayer, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in layer.places]


def drop(layers: list[HostLayer]) -> None:
    for layer in layers:
        for place in layer.places:
            place.tensor.grad = None


@pytest.mark.parametrize("placement", ["pinned", "staged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_each_step_are_autograds_to_the_bit(
    dtype: torch.dtype, placement: HostPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []

    def noted(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        requested.append(len(tensors))
        return pinned_all(tensors, device)

    monkeypatch.setattr(host_gradients, "pinned_all", noted)
    monkeypatch.setattr(host_memory, "pinned_all", noted)
    layers = [a_layer(dtype) for _ in range(4)]
    sums = HostGradients(layers, CPU, placement)
    for step in range(3):
        for micro_batch in range(5):
            for number, layer in reversed(list(enumerate(layers))):
                sums.send(layer, gradients_of(layer, 100 * step + 10 * micro_batch + number))
        sums.settle()
        for number, layer in enumerate(layers):
            expected = gradients_of(layer, 100 * step + number)
            for micro_batch in range(1, 5):
                seed = 100 * step + 10 * micro_batch + number
                for total, gradient in zip(expected, gradients_of(layer, seed), strict=True):
                    total += gradient
            for place, total in zip(layer.places, expected, strict=True):
                assert place.tensor.grad.dtype == dtype
                assert torch.equal(place.tensor.grad, total)
        drop(layers)
    # The sums together where they are pinned, and the staging buffers one by one.
    assert requested == [4] * (placement == "pinned") + [1] * STREAM_STAGED


def test_a_gradient_that_comes_first_in_a_later_micro_batch_begins_a_sum() -> None:
    layer = a_layer(torch.float32)
    sums = HostGradients([layer], CPU)
    weight, bias = gradients_of(layer, 0)
    sums.send(layer, [weight, None])
    sums.settle()
    assert layer.places[1].tensor.grad is None
    sums.send(layer, [weight, bias])
    sums.settle()
    assert torch.equal(layer.places[0].tensor.grad, weight + weight)
    assert torch.equal(layer.places[1].tensor.grad, bias)


def test_what_an_interrupted_step_left_is_in_no_later_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions that are still to come when the gradients are dropped."""
    layer = a_layer(torch.float32)
    sums = HostGradients([layer], CPU)
    waited: list[CopyUnderWay] = []
    wait = CopyUnderWay.wait

    def slow(under_way: CopyUnderWay) -> None:
        never.wait(0.2)
        waited.append(under_way)
        wait(under_way)

    never = threading.Event()
    monkeypatch.setattr(CopyUnderWay, "wait", slow)
    for seed in (1, 2):
        sums.send(layer, gradients_of(layer, seed))
    drop([layer])
    sums.send(layer, gradients_of(layer, 3))
    sums.settle()
    assert len(waited) == 1
    for place, gradient in zip(layer.places, gradients_of(layer, 3), strict=True):
        assert torch.equal(place.tensor.grad, gradient)


def test_an_error_of_the_thread_is_raised_where_the_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = a_layer(torch.float32)
    sums = HostGradients([layer], CPU)
    sums.send(layer, gradients_of(layer, 1))

    def broken(_under_way: CopyUnderWay) -> None:
        raise RuntimeError("the copy has failed")

    monkeypatch.setattr(CopyUnderWay, "wait", broken)
    sums.send(layer, gradients_of(layer, 2))
    with pytest.raises(RuntimeError, match="the copy has failed"):
        sums.settle()


@pytest.mark.parametrize("placement", ["pinned", "staged"])
def test_what_is_in_no_layer_needs_no_staging_buffer(
    placement: HostPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding is larger than many layers."""
    requested: list[int] = []

    def noted(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        requested.extend(tensor.nbytes for tensor in tensors)
        return pinned_all(tensors, device)

    monkeypatch.setattr(host_gradients, "pinned_all", noted)
    layer, outer = a_layer(torch.float32), a_layer(torch.float32)
    outer.num_bytes *= 10
    sums = HostGradients([layer], CPU, placement, outer=outer)
    for micro_batch in range(3):
        sums.send(layer, gradients_of(layer, micro_batch))
    for micro_batch in range(2):
        sums.send(outer, gradients_of(outer, micro_batch))
    sums.settle()
    assert set(requested) == {layer.num_bytes}
    for place, one, other in zip(
        outer.places, gradients_of(outer, 0), gradients_of(outer, 1), strict=True
    ):
        assert torch.equal(place.tensor.grad, one + other)
