"""Copies between a GPU and the host that run beside the GPU's work, on a stream of their own."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from bloomery.core.device import can, current_stream, new_stream, on_stream
from bloomery.facts.limits import aligned_bytes, pinned_blocks


def has_own_memory(device: torch.device | str) -> bool:
    """Whether tensors of the device move to the host by copies, which run beside its work."""
    return can(device, "streams")


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty tensor on the host, of a memory that copies do not wait for.

    PyTorch rounds its size up to a power of two, and keeps freed ones for the next request: for a few tensors only.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=has_own_memory(tensor.device))


def pinned_block(num_bytes: int, device: torch.device) -> Tensor:
    """Empty bytes on the host [num_bytes], pinned for a device with memory of its own."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_own_memory(device))


def pinned_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Empty tensors on the host of these shapes and dtypes, pinned together for `device`: views of few blocks.

    `facts.limits.pinned_together` says of how many bytes. A block is free once none of its tensors is left.
    """
    sizes, places = pinned_blocks([aligned_bytes(tensor.nbytes) for tensor in tensors])
    blocks = [pinned_block(size, device) for size in sizes]
    return [
        blocks[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, (block, start) in zip(tensors, places, strict=True)
    ]


@final
class CopyUnderWay:
    """Tensors of the device that a copy beside its work reads or writes.

    They were allocated on the stream of the work, to which the allocator gives their memory back the moment that the
    last reference is gone: this object holds one, and makes the work wait before it lets go. So also where nobody
    finishes it, as after an error.
    """

    def __init__(self, tensors: Sequence[Tensor], end: Any, work_stream: Any) -> None:
        """`end`: the event after the copy. `work_stream`: on which `tensors` were allocated."""
        self._tensors = tensors
        self._end = end
        self._work_stream = work_stream

    def finish(self) -> None:
        """Make the work that is queued from now on wait for the copy; the host goes on."""
        if self._end is not None:
            self._work_stream.wait_event(self._end)
            self._end = None

    def without_tensors(self) -> "CopyUnderWay":
        """The same copy for another thread to wait for, which frees nothing."""
        return CopyUnderWay((), self._end, self._work_stream)

    def wait(self) -> None:
        """Return when the copy is over: the host may read what it wrote."""
        if self._end is not None:
            self._end.synchronize()
            self._end = None

    def __del__(self) -> None:
        self.finish()


@final
class CopyStream:
    """Orders copies without the host: a copy waits for the work before it, and the work after for what it needs."""

    def __init__(self) -> None:
        self._stream: Any = None  # as `core.device` makes them, like events
        self._being_sent: deque[CopyUnderWay] = deque()

    def send(
        self, tensors: Sequence[Tensor], copy: Callable[[], object], *, most_under_way: int
    ) -> None:
        """Run `copy`, which copies `tensors` of the device to the host.

        They stay alive until that is done; of so many calls at most.
        """
        self._being_sent.append(self.run_after_work(tensors, copy))
        self.release_sent(most_under_way=most_under_way)

    def run_after_work(self, tensors: Sequence[Tensor], copy: Callable[[], object]) -> CopyUnderWay:
        """Run `copy` on this stream, which reads or writes `tensors` of one device.

        The caller has allocated them on the stream of the work, before. A device without streams copies at once.
        """
        device = tensors[0].device
        if not has_own_memory(device):
            copy()
            return CopyUnderWay(tensors, None, None)
        if self._stream is None:
            self._stream = new_stream(device)
        work_stream = current_stream(device)
        self._stream.wait_stream(work_stream)
        try:
            with on_stream(device, self._stream):
                copy()
        finally:
            # Also after an error: a part of the copies may be under way.
            under_way = CopyUnderWay(tensors, self._stream.record_event(), work_stream)
        return under_way

    def release_sent(self, *, most_under_way: int = 0) -> None:
        """Drop sent tensors, the oldest first: work that reuses their memory waits for their copies."""
        while len(self._being_sent) > most_under_way:
            self._being_sent.popleft().finish()

    def synchronize(self) -> None:
        """Return when the host may read everything that was sent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._being_sent.clear()
