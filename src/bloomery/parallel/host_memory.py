"""Tensors of a layer that live in the host's memory, one after the other.

B bytes of a layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Decoder
from bloomery.parallel.transfers import pinned_all


@final
@dataclass(frozen=True)
class Place:
    """A tensor of a module, and where it lies in the bytes of its layer."""

    tensors: dict[str, Any]  # the module's parameters or buffers by name
    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.tensors[self.name]
        return tensor

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view_of(self, layer_B: Tensor) -> Tensor:
        end = self.start + self.num_bytes
        return layer_B[self.start : end].view(self.dtype).view(self.shape)


@final
@dataclass(eq=False)
class HostLayer:
    """The tensors of a layer that stream: one after the other in the host's memory, to be copied in one call."""

    places: list[Place]
    num_bytes: int
    host_B: Tensor = field(init=False)

    def without_data(self) -> Tensor:
        """Its bytes on the meta device [B]: what memory is asked for."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")

    @property
    def trained(self) -> list[Place]:
        return [place for place in self.places if place.tensor.requires_grad]

    def live_in(self, host_B: Tensor) -> None:
        """Tensors of the host take the place of those without data."""
        self.host_B = host_B
        for place in self.places:
            tensor = place.view_of(host_B)
            if isinstance(place.tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=place.tensor.requires_grad)
            place.tensors[place.name] = tensor

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the modules have these tensors, in the order of `places`."""
        on_host = [place.tensor for place in self.places]
        for place, tensor in zip(self.places, tensors, strict=True):
            place.tensors[place.name] = tensor
        try:
            yield
        finally:
            for place, tensor in zip(self.places, on_host, strict=True):
                place.tensors[place.name] = tensor


def give_memory(model: Decoder, layers: Sequence[HostLayer], device: torch.device) -> None:
    """To a model on the meta device, undefined: on the host to what is in `layers`, on the device to all else."""
    without_data = [layer.without_data() for layer in layers]
    for layer, host_B in zip(layers, pinned_all(without_data, device), strict=True):
        layer.live_in(host_B)
    model._apply(  # type: ignore[no-untyped-call]  # torch's
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    model.tie()
