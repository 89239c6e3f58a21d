"""Copies between a GPU and the host that run beside the GPU's work, on a stream of their own."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from bloomery.core.device import can, current_stream, new_stream, on_stream


def has_own_memory(device: torch.device) -> bool:
    """Whether tensors of the device move to the host by copies, which run beside its work."""
    return can(device, "streams")


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty tensor on the host, of a memory that copies do not wait for.

    PyTorch rounds its size up to a power of two, and keeps freed ones for the next request.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=has_own_memory(tensor.device))


def wait_for(event: Any, device: torch.device) -> None:
    """Make the device's work after this wait for the event; the host goes on."""
    current_stream(device).wait_event(event)


@final
class CopyStream:
    """Orders copies without the host: a copy waits for the work before it, and the work after for what it needs."""

    def __init__(self) -> None:
        self._stream: Any = None  # as `core.device` makes them, like events
        self._being_sent: deque[tuple[Sequence[Tensor], Any]] = deque()

    def send(
        self, tensors: Sequence[Tensor], copy: Callable[[], object], *, most_under_way: int
    ) -> None:
        """Run `copy`, which copies `tensors` of the device to the host.

        They stay alive until that is done; of so many calls at most.
        """
        device = tensors[0].device
        self._being_sent.append((tensors, self.run_after_work(device, copy)))
        self.release_sent(device, most_under_way=most_under_way)

    def run_after_work(self, device: torch.device, copy: Callable[[], object]) -> Any:
        """Run `copy` on this stream; the event is its end.

        The caller allocates what `copy` writes to before, on the stream of the work: the allocator then frees it in
        order.
        """
        if self._stream is None:
            self._stream = new_stream(device)
        self._stream.wait_stream(current_stream(device))
        with on_stream(device, self._stream):
            copy()
            return self._stream.record_event()

    def release_sent(self, device: torch.device, *, most_under_way: int = 0) -> None:
        """Drop sent tensors, the oldest first: work that reuses their memory waits for their copies."""
        while len(self._being_sent) > most_under_way:
            _, end = self._being_sent.popleft()
            wait_for(end, device)

    def synchronize(self) -> None:
        """Return when the host may read everything that was sent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._being_sent.clear()
