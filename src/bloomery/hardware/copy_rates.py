"""Rates of copies between a device and the memory of its host, as they are here and now."""

import time
from collections.abc import Callable

from bloomery.core.device import new_stream, on_stream, synchronize

COPIED_BYTES = 2**26  # by each copy: a few milliseconds
TRIES = 4  # the fastest counts: the first one pins memory and starts the copy engines


def copy_rates(device: str) -> dict[str, float]:
    """GB/s to the device and back, of both together while both copy, and to the device from memory that is not pinned.

    `device`: one with memory of its own. The numbers that come back are compared with those that went: raises
    RuntimeError where they differ.
    """
    import torch

    sent = torch.arange(COPIED_BYTES // 4, dtype=torch.int32).pin_memory(device)
    received = torch.empty_like(sent).pin_memory(device)
    pageable = sent.clone()
    there = torch.empty_like(sent, device=device)
    other = torch.zeros_like(there)
    streams = [new_stream(device), new_stream(device)]

    def seconds_of(work: Callable[[], object]) -> float:
        times = []
        for _ in range(TRIES):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    def both() -> None:
        with on_stream(device, streams[0]):
            there.copy_(sent, non_blocking=True)
        with on_stream(device, streams[1]):
            received.copy_(other, non_blocking=True)

    seconds = {
        "both": seconds_of(both),
        "pageable": seconds_of(lambda: there.copy_(pageable)),
        "to_device": seconds_of(lambda: there.copy_(sent, non_blocking=True)),
        "from_device": seconds_of(lambda: received.copy_(there, non_blocking=True)),
    }
    if not torch.equal(received, sent):
        raise RuntimeError("a copy to the device and back changed the data")
    gigabytes = {"both": 2 * COPIED_BYTES / 1e9}
    return {
        name: gigabytes.get(name, COPIED_BYTES / 1e9) / needed for name, needed in seconds.items()
    }
