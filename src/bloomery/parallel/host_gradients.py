"""Gradients of weights that live in the host's memory: their way from the device, and their sums over micro-batches.

B bytes of a layer. The first gradients of a step are copied to where the sum is; later ones arrive in one of few
staging buffers, from which a thread adds them while backward goes on: in the order of the micro-batches, so that the
bits are those of sums on the device.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor

from bloomery.facts.limits import STREAM_STAGED
from bloomery.parallel.host_memory import HostLayer, Place
from bloomery.parallel.transfers import CopyStream, CopyUnderWay, pinned_all


@final
class HostGradients:
    """The gradients of a step in pinned memory, allocated with the first ones and used again in each step.

    `send` makes those of a layer the `grad` of its host parameters, whose values are there after `settle`. Dropping
    `grad` begins a new sum.
    """

    def __init__(self, layers: Sequence[HostLayer], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._copies = CopyStream()
        self._sums = dict[HostLayer, Tensor]()  # [B] each
        self._free_buffers = SimpleQueue[Tensor]()
        self._num_buffers = 0
        self._adder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradients")
        self._being_added = deque[Future[None]]()

    def send(self, layer: HostLayer, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of `layer.trained`, which the device may still compute."""
        first = list[tuple[Tensor, Tensor]]()  # where to, and the gradient
        later = list[tuple[Place, Tensor]]()
        sums_B = self._sums_of(layer)
        for place, gradient in zip(layer.trained, gradients, strict=True):
            if gradient is None:
                continue
            if place.tensor.grad is None:
                place.tensor.grad = place.view_of(sums_B)
                first.append((place.tensor.grad, gradient))
            else:
                later.append((place, gradient))

        # A step that an error has ended may have left additions, which must not come after the first of this one.
        if first:
            self._finish_additions()
        if not later:
            if first:
                sent = [gradient for _, gradient in first]
                self._copies.send(sent, lambda: _copy_all(first), most_under_way=STREAM_STAGED)
            return

        buffer_B = self._free_buffer()
        staged = [(place.view_of(buffer_B), gradient) for place, gradient in later]
        arriving = [*first, *staged]
        under_way = self._copies.run_after_work(
            [gradient for _, gradient in arriving], lambda: _copy_all(arriving)
        )
        sums = [place.view_of(sums_B) for place, _ in later]
        values = [value for value, _ in staged]
        self._being_added.append(self._adder.submit(self._add, under_way, sums, values, buffer_B))

    def settle(self) -> None:
        """Return when all gradients that were sent are in their sums."""
        self._finish_additions()
        self._copies.synchronize()

    def _add(
        self, under_way: CopyUnderWay, sums: list[Tensor], values: list[Tensor], buffer_B: Tensor
    ) -> None:
        """In the thread that adds."""
        try:
            under_way.wait()
            with torch.no_grad():
                torch._foreach_add_(sums, values)
        finally:
            self._free_buffers.put(buffer_B)

    def _finish_additions(self) -> None:
        while self._being_added:
            self._being_added.popleft().result()

    def _sums_of(self, layer: HostLayer) -> Tensor:
        if not self._sums:
            sums = pinned_all([other.without_data() for other in self._layers], self._device)
            self._sums = dict(zip(self._layers, sums, strict=True))
        return self._sums[layer]

    def _free_buffer(self) -> Tensor:
        """A staging buffer [B] that nothing is in; waits for an addition where all are in use."""
        if self._num_buffers < STREAM_STAGED:
            self._num_buffers += 1
            largest = max(self._layers, key=lambda layer: layer.num_bytes)
            (buffer_B,) = pinned_all([largest.without_data()], self._device)
            return buffer_B
        return self._free_buffers.get()


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
