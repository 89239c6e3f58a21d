"""Host memory that PyTorch pins for a save: blocks that are powers of two, which it does not round up."""

import math
import random

import pytest
from plan_help import gpu_machine, loaded, machine, planned

from bloomery.core.units import GIB
from bloomery.facts.limits import pinned_blocks, pinned_bytes
from bloomery.plan.checkpoints import checkpoint_bytes, planned_save
from bloomery.plan.estimate.states import TrainedModel

# Llama 3.1 8B: embeddings and head, then the matrices and norms of 32 layers.
LAYER = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3 + [(4096, 1)] * 2
SHAPES = [(128256, 4096)] * 2 + 32 * LAYER


def test_a_request_is_rounded_as_pytorch_does() -> None:
    assert [pinned_bytes(size) for size in (1, 2, 3, 2**20, 2**20 + 1)] == [1, 2, 4, 2**20, 2**21]


def sizes_of_8b(ranks: int) -> list[int]:
    """What each of so many shards hands in: weights and two states, float32."""
    return [4 * math.prod(shape) // ranks for shape in SHAPES for _ in range(3)]


@pytest.mark.parametrize(
    "sizes",
    [
        sizes_of_8b(8),
        sizes_of_8b(64),
        [],
        [1, 0, 3],
        [5 * 2**20],
        [random.Random(0).randrange(2**26) for _ in range(300)],
    ],
    ids=["8 ranks", "64 ranks", "none", "tiny", "one", "random"],
)
def test_tensors_lie_apart_in_blocks_of_powers_of_two(sizes) -> None:
    blocks, places = pinned_blocks(sizes)
    assert all(pinned_bytes(block) == block for block in blocks)
    ends = [0] * len(blocks)
    for (block, start), size in sorted(zip(places, sizes, strict=True)):
        assert start >= ends[block]
        ends[block] = start + size
    assert all(end <= block for end, block in zip(ends, blocks, strict=True))
    # In the order of allocation they shrink, so that a smaller save fits into the blocks of a larger one.
    assert blocks == sorted(blocks, reverse=True)
    largest = max(sizes, default=0)
    assert sum(blocks) <= 1.02 * sum(sizes) + pinned_bytes(largest) + 2**20


def test_a_save_of_8b_on_8_ranks_pins_what_it_copies() -> None:
    """One request for all rows pinned 16 GiB on each rank, 128 a node."""
    sizes = sizes_of_8b(8)
    assert sum(sizes) / GIB == pytest.approx(11.2, abs=0.1)
    assert pinned_bytes(sum(sizes)) == 16 * GIB
    assert sum(pinned_blocks(sizes)[0]) < 1.02 * sum(sizes)


def test_the_plan_counts_blocks_on_gpus_and_bytes_elsewhere() -> None:
    recipe = loaded(
        model={"hidden_size": 512, "num_layers": 4, "vocab_size": 8192},
        parallel={"shard": 2},
        train={"micro_batch_size": 1},
    )
    for here, pins in ((gpu_machine("RX 6700 XT"), True), (machine(), False)):
        plan = planned(recipe, here, gpus=2)
        model = TrainedModel.of(plan, plan.model.config)
        rows = checkpoint_bytes(plan, model) / 2
        copied = planned_save(plan).host_bytes - model.largest_bytes(plan.train.precision)
        if pins:
            assert rows < copied < 1.1 * rows + 2 * 2**20
            assert copied % 2**20 == 0
        else:
            assert copied == rows
