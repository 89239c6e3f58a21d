"""Tensors of a layer that live in the host's memory, one after the other.

B bytes of a layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.core.files import cache_folder
from bloomery.model.decoder import Decoder
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.parallel.host_files import give_files
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.shared_memory import shared_bytes
from bloomery.parallel.staging import FileBytes, Piece
from bloomery.parallel.transfers import has_own_memory, pinned_all
from bloomery.plan.types import HostPlacement


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
    # By the first byte of a place, where the layer is in files; and which of them are the model's own.
    in_files: dict[int, FileBytes] = field(default_factory=dict)
    in_model_files: set[int] = field(default_factory=set)

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

    def pieces(self, target_B: Tensor, start: int, end: int) -> list[Piece]:
        """Of the bytes from `start` to `end`, on their way to those of a layer on the device."""
        if not self.in_files:
            return [Piece(self.host_B, start, target_B[start:end])]
        pieces = []
        for place in self.places:
            first = max(start, place.start)
            last = min(end, place.start + place.num_bytes)
            if first < last:
                source = self.in_files[place.start]
                pieces.append(Piece(source, first - place.start, target_B[first:last]))
        return pieces

    def without_model_files(self) -> AbstractContextManager[None]:
        """Inside, tensors that are in the files of the model have no data."""
        if not self.in_model_files:
            return nullcontext()
        tensors = [
            place.tensor.detach().to("meta") if place.start in self.in_model_files else place.tensor
            for place in self.places
        ]
        return self.replaced(tensors)

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


@final
@dataclass(eq=False)
class HostCopy:
    """What lives on the host of a model. `is_shared`: with the other ranks of the host, of which one `fills` it."""

    layers: Sequence[HostLayer]
    mesh: Mesh
    is_shared: bool
    fills: bool
    note: str | None = None  # what people should know about it

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Inside, weights are read: what another rank reads, or stays in the files of the model, has no data.

        Every rank takes part.
        """
        if not self.is_shared:
            with ExitStack() as stack:
                for layer in self.layers:
                    stack.enter_context(layer.without_model_files())
                yield
            return
        self.mesh.barrier()  # nobody reads any more what a rewind fills again
        with ExitStack() as stack:
            for layer in () if self.fills else self.layers:
                without_data = [place.tensor.detach().to("meta") for place in layer.places]
                stack.enter_context(layer.replaced(without_data))
            yield
        self.mesh.barrier()


def host_bytes(
    layers: Sequence[HostLayer], device: torch.device, placement: HostPlacement
) -> list[Tensor]:
    """Memory for each layer [B], undefined."""
    without_data = [layer.without_data() for layer in layers]
    if placement == "pinned":
        return pinned_all(without_data, device)
    return [torch.empty_like(layer_B, device="cpu") for layer_B in without_data]


def give_memory(
    model: Decoder,
    layers: Sequence[HostLayer],
    device: torch.device,
    *,
    mesh: Mesh = SINGLE_RANK,
    is_frozen: bool,
    placement: HostPlacement = "pinned",
    source: Path | None = None,
    folder: Path | None = None,
) -> HostCopy:
    """To a model on the meta device, undefined: on the host to what is in `layers`, on the device to all else.

    Frozen weights of replicas are one copy on each host. Every rank of the mesh calls it. `source`, `folder`: of mapped
    weights, as in `give_files`; without a folder they take the one of caches.
    """
    assert is_frozen or placement != "mapped", "weights that are trained do not stay in files"
    is_shared = is_frozen and mesh.replicate > 1 and placement != "mapped"
    fills = True
    note = None
    host: list[Tensor] = []
    if placement == "mapped":
        note = give_files(model, layers, source, folder or cache_folder())
    elif is_shared:
        num_bytes = sum(layer.num_bytes for layer in layers)
        pinned_for = device if placement == "pinned" else torch.device("cpu")
        bytes_B, fills = shared_bytes(num_bytes, mesh, pinned_for)
        host = list(bytes_B.split([layer.num_bytes for layer in layers]))
    else:
        host = host_bytes(layers, device, placement)
    for layer, host_B in zip(layers if host else (), host, strict=True):
        layer.live_in(host_B)
    model._apply(  # type: ignore[no-untyped-call]  # torch's
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    model.tie()
    for module in model.modules():
        if isinstance(module, QuantizedWeight) and has_own_memory(device):
            module.quantizes_on = device
    return HostCopy(layers, mesh, is_shared, fills, note)
