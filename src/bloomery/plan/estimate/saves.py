"""What saving a checkpoint takes: the time that training waits, the time until it is on the disk, and host memory."""

from collections.abc import Sequence

from bloomery.facts.limits import pinned_blocks
from bloomery.plan.types import Estimate, SaveEstimate

# Of a host that hashes and writes a checkpoint to a shared file system; assumed.
WRITE_BYTES_PER_SECOND = 1e9
# Of the copies of all ranks of a host, from their devices; assumed: PCIe 4.0 x16 moves 25 GB/s for one device at most.
COPY_BYTES_PER_SECOND = 10e9


def estimate_save(
    checkpoint_bytes: float,
    largest_tensor_bytes: float,
    *,
    ranks: int,
    hosts: int,
    copies: bool,
    pinned_sizes: Sequence[int] = (),
) -> SaveEstimate:
    """One checkpoint. Every rank copies its rows to the host and owns an equal share of the files (`rank_writers`).

    `copies`: training continues while the checkpoint is written; else no copy is needed, and it waits. `pinned_sizes`:
    bytes of each tensor that a rank copies from a GPU, to blocks that are powers of two.
    """
    bytes_per_host = checkpoint_bytes / hosts
    seconds = _assumed(bytes_per_host / WRITE_BYTES_PER_SECOND)
    # One rank has whole tensors; of several, each owner makes one at a time.
    host_bytes = largest_tensor_bytes if ranks > 1 else 0.0
    if not copies:
        return SaveEstimate(host_bytes=host_bytes, stall_seconds=seconds, seconds=seconds)
    return SaveEstimate(
        host_bytes=host_bytes + max(checkpoint_bytes / ranks, sum(pinned_blocks(pinned_sizes)[0])),
        stall_seconds=_assumed(bytes_per_host / COPY_BYTES_PER_SECOND),
        seconds=seconds,
    )


def _assumed(seconds: float) -> Estimate:
    """No speed of a disk or a bus has been measured: from half of the assumed time to three times."""
    return Estimate(value=seconds, low=seconds / 2, high=3 * seconds, origin="table")
