"""What saving a checkpoint takes: the time that training waits, the time until it is on the disk, and host memory."""

from bloomery.plan.types import Estimate, SaveEstimate

# Of a host that hashes and writes a checkpoint to a shared file system; assumed.
WRITE_BYTES_PER_SECOND = 1e9
# Of the copies of all ranks of a host, from their devices; assumed: PCIe 4.0 x16 moves 25 GB/s for one device at most.
COPY_BYTES_PER_SECOND = 10e9


def estimate_save(
    checkpoint_bytes: float, largest_tensor_bytes: float, *, ranks: int, hosts: int, copies: bool
) -> SaveEstimate:
    """One checkpoint. Every rank copies its rows to the host and owns an equal share of the files (`rank_writers`).

    `copies`: training continues while the checkpoint is written; else no copy is needed, and it waits.
    """
    bytes_per_host = checkpoint_bytes / hosts
    seconds = _assumed(bytes_per_host / WRITE_BYTES_PER_SECOND)
    # One rank has whole tensors; of several, each owner makes one at a time.
    host_bytes = largest_tensor_bytes if ranks > 1 else 0.0
    if not copies:
        return SaveEstimate(host_bytes=host_bytes, stall_seconds=seconds, seconds=seconds)
    return SaveEstimate(
        host_bytes=host_bytes + checkpoint_bytes / ranks,
        stall_seconds=_assumed(bytes_per_host / COPY_BYTES_PER_SECOND),
        seconds=seconds,
    )


def _assumed(seconds: float) -> Estimate:
    """No speed of a disk or a bus has been measured: from half of the assumed time to three times."""
    return Estimate(value=seconds, low=seconds / 2, high=3 * seconds, origin="table")
