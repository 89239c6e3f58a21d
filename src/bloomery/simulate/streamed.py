"""Weights that stream, on fake tensors: what lives on the host is in no figure of a device."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bloomery.facts.limits import STREAM_STAGED
from bloomery.model.decoder import Decoder
from bloomery.parallel.host_memory import HostLayer
from bloomery.parallel.streamed import StreamedWeights
from bloomery.simulate.tracker import MemoryTracker

HOST = torch.device("cpu")  # and, of fake tensors, the device too


@final
class FakeStream:
    """`StreamedWeights` of a model of fake tensors. `tensors`: those of the device beside the model's own.

    The update of a model that is trained in full is the host's: from the moment that gradients are there until weights
    have changed, the tracker sees nothing.
    """

    def __init__(self, model: Decoder, tracker: MemoryTracker) -> None:
        self._stream = StreamedWeights(model, HOST)
        self._tracker = tracker
        move = model._apply
        # No tensor is on the meta device, and fake ones refuse to be replaced.
        model._apply = lambda *_: model  # type: ignore[method-assign]
        try:
            self._stream.allocate()
        finally:
            model._apply = move  # type: ignore[method-assign]
        layers = [*self._stream._layers, self._stream._outer]
        tracker.leave_out([layer.host_B for layer in layers])
        self.tensors: list[Tensor] = [
            *(buffer.bytes_B for buffer in self._stream.ring._buffers),
            *self._stream._outer_copies,
        ]
        self.updates_on_host = self._stream._gradients is not None
        if self.updates_on_host:
            fake_gradients = FakeHostGradients(layers, tracker)
            self._stream._gradients = fake_gradients  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return self._stream.device

    @property
    def note(self) -> None:
        """Nothing is read."""

    def allocate(self, source: Path | None = None, folder: Path | None = None) -> None:
        """Its memory is there."""
        del source, folder

    def filling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        self._stream.settle()
        self._tracker.elsewhere = self.updates_on_host

    def weights_changed(self) -> None:
        self._stream.weights_changed()
        self._tracker.elsewhere = False


@final
class FakeHostGradients:
    """In place of `HostGradients`: those of a few layers are on the device until others have left."""

    def __init__(self, layers: Sequence[HostLayer], tracker: MemoryTracker) -> None:
        self._sums = {layer: torch.empty(layer.num_bytes, dtype=torch.uint8) for layer in layers}
        tracker.leave_out(list(self._sums.values()))
        self._leaving = deque[list[Tensor | None]](maxlen=STREAM_STAGED)

    def send(self, layer: HostLayer, gradients: Sequence[Tensor | None]) -> None:
        self._leaving.append(list(gradients))
        for place, gradient in zip(layer.trained, gradients, strict=True):
            if gradient is not None:
                place.tensor.grad = place.view_of(self._sums[layer])

    def settle(self) -> None:
        self._leaving.clear()
