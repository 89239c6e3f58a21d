"""Copies between a device and pinned memory of its host, on a stream beside the work."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor


def apart(device: torch.device) -> bool:
    """Whether the device has a memory of its own."""
    return device.type == "cuda"


def pinned_like(tensor: Tensor) -> Tensor:
    """Empty, on the host. PyTorch keeps what is freed for the next, and rounds sizes up to powers of two."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


@final
class Lane:
    """Order is kept without the host: a copy waits for the work before it, and the work after for what it needs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: deque[tuple[Sequence[Tensor], torch.cuda.Event]] = deque()

    def out(self, values: Sequence[Tensor], copy: Callable[[], object], *, under_way: int) -> None:
        """Copies what is computed by now to the host; so many copies are under way at most, and their values alive."""
        device = values[0].device
        self._leaving.append((values, self.after_work(device, copy)))
        self.let_go(device, under_way=under_way)

    def after_work(self, device: torch.device, copy: Callable[[], object]) -> torch.cuda.Event:
        """Runs `copy` on the lane; the event is its end. What it writes to must be made before, on the work's stream:
        the allocator then knows when that is free again."""
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy()
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def let_go(self, device: torch.device, *, under_way: int = 0) -> None:
        """Memory of what has left is used again only after its copy."""
        while len(self._leaving) > under_way:
            _, gone = self._leaving.popleft()
            wait_for(gone, device)

    def settle(self) -> None:
        """Returns when the host may read everything."""
        if self._stream is not None:
            self._stream.synchronize()
        self._leaving.clear()


def wait_for(event: torch.cuda.Event, device: torch.device) -> None:
    """The device's work after this waits, the host does not."""
    torch.cuda.current_stream(device).wait_event(event)
