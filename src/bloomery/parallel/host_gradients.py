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
from bloomery.parallel.host_memory import HostLayer, Place, host_bytes
from bloomery.parallel.transfers import CopyStream, CopyUnderWay, pinned_all
from bloomery.plan.types import HostPlacement


@final
class HostGradients:
    """The gradients of a step in pinned memory, allocated with the first ones and used again in each step.

    `send` makes those of a layer the `grad` of its host parameters, whose values are there after `settle`. Dropping
    `grad` begins a new sum.
    """

    def __init__(
        self,
        layers: Sequence[HostLayer],
        device: torch.device,
        placement: HostPlacement = "pinned",
        *,
        outer: HostLayer | None = None,
    ) -> None:
        """`placement`: of the sums. Where they are not pinned, the first gradients pass through staging, too.

        `outer`: what is in no layer. It is sent once a step, and may be much larger than a layer: no staging buffer has
        its size.
        """
        self._placement = placement
        self._layers = [*layers, *([] if outer is None else [outer])]
        self._outer = outer
        self._largest = max(layers, key=lambda layer: layer.num_bytes)
        self._device = device
        self._copies = CopyStream()
        self._sums = dict[HostLayer, Tensor]()  # [B] each
        self._free_buffers = SimpleQueue[Tensor]()
        self._num_buffers = 0
        self._adder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradients")
        # With the copies of tensors of the device, which are freed where the step runs and not by the thread.
        self._being_added = deque[tuple[Future[None], CopyUnderWay]]()

    def send(self, layer: HostLayer, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of `layer.trained`, which the device may still compute."""
        first = list[tuple[Place, Tensor]]()
        later = list[tuple[Place, Tensor]]()
        sums_B = self._sums_of(layer)
        for place, gradient in zip(layer.trained, gradients, strict=True):
            if gradient is None:
                continue
            if place.tensor.grad is None:
                place.tensor.grad = place.view_of(sums_B)
                first.append((place, gradient))
            else:
                later.append((place, gradient))
        if not first and not later:
            return

        are_staged = self._placement != "pinned"
        if layer is self._outer and (are_staged or later):
            self._take_at_once(first, later)
            return

        # A step that an error has ended may have left additions, which must not come after the first of this one.
        if first and not are_staged:
            self._finish_additions()
        sent = [gradient for _, gradient in (*first, *later)]
        direct = [] if are_staged else [(place.view_of(sums_B), value) for place, value in first]
        if not later and not are_staged:
            self._copies.send(sent, lambda: _copy_all(direct), most_under_way=STREAM_STAGED)
            return

        # The rest arrives in a staging buffer, and the thread takes it from there. The last gradients of the first
        # micro-batch have left long ago.
        self._copies.release_sent()
        buffer_B = self._free_buffer()

        def staged(pairs: list[tuple[Place, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            return [(place.view_of(sums_B), place.view_of(buffer_B)) for place, _ in pairs]

        through = [*first, *later] if are_staged else later
        arriving = [*direct, *((place.view_of(buffer_B), gradient) for place, gradient in through)]
        under_way = self._copies.run_after_work(sent, lambda: _copy_all(arriving))
        copied = staged(first) if are_staged else []
        addition = self._adder.submit(
            self._add, under_way.without_tensors(), copied, staged(later), buffer_B
        )
        self._being_added.append((addition, under_way))

    @torch.no_grad()
    def _take_at_once(
        self, first: Sequence[tuple[Place, Tensor]], later: Sequence[tuple[Place, Tensor]]
    ) -> None:
        """The host waits for the copies."""
        self._finish_additions()
        for place, gradient in first:
            assert place.tensor.grad is not None
            place.tensor.grad.copy_(gradient)
        for place, gradient in later:
            assert place.tensor.grad is not None
            place.tensor.grad += gradient.cpu()

    def settle(self) -> None:
        """Return when all gradients that were sent are in their sums."""
        self._finish_additions()
        self._copies.synchronize()

    def _add(
        self,
        under_way: CopyUnderWay,
        copied: list[tuple[Tensor, Tensor]],
        added: list[tuple[Tensor, Tensor]],
        buffer_B: Tensor,
    ) -> None:
        """In the thread that adds: pairs of a sum and what it becomes, or what is added to it."""
        try:
            under_way.wait()
            with torch.no_grad():
                _copy_all(copied)
                for total, value in added:
                    total += value
        finally:
            self._free_buffers.put(buffer_B)

    def _finish_additions(self) -> None:
        while self._being_added:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        addition, under_way = self._being_added.popleft()
        addition.result()
        under_way.finish()

    def _sums_of(self, layer: HostLayer) -> Tensor:
        if not self._sums:
            sums = host_bytes(self._layers, self._device, self._placement)
            self._sums = dict(zip(self._layers, sums, strict=True))
        return self._sums[layer]

    def _free_buffer(self) -> Tensor:
        """A staging buffer [B] that nothing is in; waits for an addition where all are in use."""
        if self._num_buffers < STREAM_STAGED:
            self._num_buffers += 1
            (buffer_B,) = pinned_all([self._largest.without_data()], self._device)
            return buffer_B
        if len(self._being_added) >= STREAM_STAGED:
            self._finish_oldest()
        return self._free_buffers.get()


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
