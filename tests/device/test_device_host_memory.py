"""Pinned host memory, which the simulated device rounds up as PyTorch does, against what a plan counts."""

import simulated
import torch

from bloomery.facts.limits import pinned_blocks
from bloomery.parallel.owner_exchange import ALIGNMENT, HostBuffer

MIB = 2**20


def test_a_save_pins_the_planned_blocks() -> None:
    """One request for all of it would pin 16 MiB. The blocks serve the next save and a smaller one."""
    tensors = {
        ("model", f"{number}"): torch.full((rows, 256), float(number), device="cuda")
        for number, rows in enumerate([3000, 1500, 1500, 1200, 700, 700, 300, 50, 1])
    }
    assert sum(tensor.nbytes for tensor in tensors.values()) > 8.7 * MIB
    simulated.empty_pinned_cache()
    before = simulated.stats().pinned
    buffer = HostBuffer("cuda")
    copies = buffer.copy(tensors)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    planned = sum(pinned_blocks(sizes)[0])
    assert simulated.stats().pinned - before == planned <= 10 * MIB
    for key, tensor in tensors.items():
        assert torch.equal(copies[key].view(torch.float32).view(tensor.shape), tensor.cpu())

    few = dict(list(tensors.items())[2:])
    for again in (few, tensors):
        copies = buffer.copy(again)
        for key, tensor in again.items():
            assert torch.equal(copies[key].view(torch.float32).view(tensor.shape), tensor.cpu())
    assert simulated.stats().pinned - before == planned
