"""Weights that live in the host's memory and stream through the device, one layer at a time.

The device holds a few buffers, each as large as the largest layer. While a layer computes, the next one is copied into
another buffer; backward, which is recomputed at the borders of layers, loads them again in reverse. Of a model that is
trained in full, gradients leave for the host as they are made, and the optimizer updates the host's parameters.
Several micro-batches may share a load: a layer computes all of them, forward and backward, before the next one does.

B bytes of a layer. Copies are ordered by events alone: the host waits for gradients, nowhere else.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bloomery.facts.counting import is_never_trained
from bloomery.facts.limits import STREAM_BUFFERS, aligned_bytes
from bloomery.model.adapters.lora import is_added
from bloomery.model.decoder import Decoder, Output
from bloomery.model.forward_input import ForwardInput
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.parallel.host_gradients import HostGradients
from bloomery.parallel.host_memory import HostLayer, Place, give_memory
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.ordered_sums import Arrived, with_ordered_sums, with_own_leaves
from bloomery.parallel.staging import StagedCopy, staging_of
from bloomery.parallel.transfers import CopyStream, CopyUnderWay
from bloomery.plan.types import HostPlacement


def layer_of(block: nn.Module, *, in_full: bool) -> HostLayer:
    """What streams of a block: `in_full` every parameter, else those that are frozen; and quantized weights."""
    places = list[Place]()
    start = 0
    for module in block.modules():
        candidates: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for name, parameter in module.named_parameters(recurse=False)
            if (in_full or not parameter.requires_grad) and not is_added(name)
        ]
        if isinstance(module, QuantizedWeight):
            candidates += [(module._buffers, name) for name, _ in module.named_buffers()]
        for tensors, name in candidates:
            tensor = tensors[name]
            places.append(Place(tensors, name, start, tensor.shape, tensor.dtype))
            start += aligned_bytes(tensor.nbytes)
    return HostLayer(places, start)


@final
@dataclass(eq=False)
class _Buffer:
    bytes_B: Tensor
    layer: int | None = None
    arriving: CopyUnderWay | StagedCopy | None = None
    used: int = 0  # when: the count of loads


@final
class LayerRing:
    """The buffers of the device, and which layer is in each. `placement`: of the layers on the host."""

    def __init__(
        self,
        layers: Sequence[HostLayer],
        device: torch.device,
        num_buffers: int,
        placement: HostPlacement = "pinned",
    ) -> None:
        most_bytes = max(layer.num_bytes for layer in layers)
        self._layers = layers
        self._buffers = [
            _Buffer(torch.empty(most_bytes, dtype=torch.uint8, device=device))
            for _ in range(num_buffers)
        ]
        self._copy_stream = CopyStream()
        self._staging = None if placement == "pinned" else staging_of(device, most_bytes)
        self._uses = 0
        self.num_loads = 0  # of whole layers
        self.bytes_loaded = 0

    def load(self, index: int, upcoming: int | None) -> Tensor:
        """The bytes of a layer on the device [B], for work that is queued from now on, until two loads later.

        `upcoming`: the layer that is asked for next, whose copy begins when the work that is queued by now is over.
        """
        # Checkpointing that keeps some results compares what forward and backward compute: copies are no part of that.
        with _disable_current_modes():
            buffer = self._with(index) or self._begin(index, keep=None)
            self._uses += 1
            buffer.used = self._uses
            if buffer.arriving is not None:
                buffer.arriving.finish()
                buffer.arriving = None
            if upcoming is not None and self._with(upcoming) is None:
                self._begin(upcoming, keep=buffer)
        return buffer.bytes_B[: self._layers[index].num_bytes]

    def load_parts(
        self, index: int, parts: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[Tensor, list[CopyUnderWay | StagedCopy]]:
        """The bytes of a layer on the device [B], of which only `parts` are copied, and the copy of each part.

        A part is spans of bytes. They arrive in this order, and work that reads one must wait for its copy.
        """
        buffer = self._free(keep=None)
        buffer.layer = None
        copies = [self._copy(index, buffer, spans) for spans in parts]
        return buffer.bytes_B[: self._layers[index].num_bytes], copies

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a buffer."""
        address = tensor.untyped_storage().data_ptr()
        return any(buffer.bytes_B.data_ptr() == address for buffer in self._buffers)

    def forget(self) -> None:
        """Every layer is copied again before it is used: the host's weights have changed."""
        for buffer in self._buffers:
            buffer.layer = None

    def _with(self, index: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == index), None)

    def _free(self, keep: _Buffer | None) -> _Buffer:
        """The buffer whose layer was used longest ago."""
        others = [buffer for buffer in self._buffers if buffer is not keep]
        buffer = min(others, key=lambda other: other.used if other.layer is not None else -1)
        if buffer.arriving is not None:  # for nobody
            buffer.arriving.finish()
            buffer.arriving = None
        return buffer

    def _begin(self, index: int, keep: _Buffer | None) -> _Buffer:
        buffer = self._free(keep)
        layer = self._layers[index]
        buffer.layer = index
        buffer.arriving = self._copy(index, buffer, [(0, layer.num_bytes)])
        self.num_loads += 1
        return buffer

    def _copy(
        self, index: int, buffer: _Buffer, spans: Sequence[tuple[int, int]]
    ) -> CopyUnderWay | StagedCopy:
        """Copy spans of a layer's bytes, once the work that is queued by now is over."""
        layer = self._layers[index]
        pieces = [
            piece for start, end in spans for piece in layer.pieces(buffer.bytes_B, start, end)
        ]
        self.bytes_loaded += sum(end - start for start, end in spans)
        if self._staging is not None:
            return self._staging.copy(pieces)

        def copy() -> None:
            for piece in pieces:
                piece.send()

        return self._copy_stream.run_after_work([buffer.bytes_B], copy)


@final
class StreamedWeights:
    """The weights of a decoder in the host's memory, and their ways to the device and back. A `decoder.WeightStream`.

    Without an adapter all parameters live there: those of layers stream, the embedding, the head and the last norm have
    copies on the device until `weights_changed`. With one the frozen tensors of layers do, and all else is on the
    device.
    """

    def __init__(
        self,
        model: Decoder,
        device: torch.device,
        *,
        mesh: Mesh = SINGLE_RANK,
        num_buffers: int = STREAM_BUFFERS,
        placement: HostPlacement = "pinned",
    ) -> None:
        """In place, of a model on the meta device; its blocks are checkpointed after this, so that they load their
        weights again. `allocate` must follow. `placement`: of weights, and of the sums of their gradients.
        """
        self.device = device
        self._model = model
        self._num_buffers = num_buffers
        self._mesh = mesh
        self._placement = placement
        self._in_full = all(
            parameter.requires_grad or is_never_trained(name)
            for name, parameter in model.named_parameters()
        )
        self._layers = [layer_of(block, in_full=self._in_full) for block in model.model.layers]
        self._outer = HostLayer([], 0)
        self._outer_copies = list[nn.Parameter]()
        self._outer_is_current = False
        self._gradients: HostGradients | None = None
        self._num_together = 1  # micro-batches that share a load
        # By layer: the sums of gradients of those micro-batches so far, where their sum leaves for the host at once.
        self._sums_on_device = dict[int, _Sum]()
        self._sent_layers = set[int]()  # of which the host has gradients of this step
        for index, block in enumerate(model.model.layers):
            block.forward = partial(self._layer_forward, index, block.forward)
        model.forward_all = partial(self._forward_all, model.forward_all)  # type: ignore[method-assign]
        if self._in_full:
            model.forward = partial(self._forward, model.forward)  # type: ignore[method-assign]

    def allocate(self, source: Path | None = None, folder: Path | None = None) -> None:
        """Give the model memory, undefined: on the host what lives there, on the device all else."""
        if self._in_full:
            self._outer = self._outer_of(self._model)
        layers = [*self._layers, self._outer]
        self._host_copy = give_memory(
            self._model,
            layers,
            self.device,
            mesh=self._mesh,
            is_frozen=not self._in_full,
            placement=self._placement,
            source=source,
            folder=folder,
        )
        self._outer_copies = [
            nn.Parameter(
                torch.empty_like(place.tensor, device=self.device), place.tensor.requires_grad
            )
            for place in self._outer.places
        ]
        self.ring = LayerRing(self._layers, self.device, self._num_buffers, self._placement)
        if self._in_full:
            self._gradients = HostGradients(
                self._layers, self.device, self._placement, outer=self._outer
            )

    def _outer_of(self, model: Decoder) -> HostLayer:
        """All parameters outside of layers; one that two modules share is in it once."""
        places = list[Place]()
        start = 0
        for name, parameter in model.named_parameters():
            if name.startswith("model.layers."):
                continue
            owner, _, leaf = name.rpartition(".")
            tensors = model.get_submodule(owner)._parameters
            places.append(Place(tensors, leaf, start, parameter.shape, parameter.dtype))
            start += aligned_bytes(parameter.nbytes)
        return HostLayer(places, start)

    # Forward, and backward's second forward of each layer.

    def _layer_forward(
        self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        layer = self._layers[index]
        bytes_B = self.ring.load(index, self._upcoming(index))
        tensors = [place.view_of(bytes_B) for place in layer.places]
        resident: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():
            if self._in_full:
                tensors = self._with_gradients(index, tensors)
            elif self._num_together > 1:
                resident = with_ordered_sums(self._model.model.layers[index])
        with layer.replaced(tensors), resident:
            return forward(*args, **kwargs)

    def _upcoming(self, index: int) -> int | None:
        if in_backward():
            return index - 1 if index > 0 else None
        if index + 1 < len(self._layers):
            return index + 1
        # Backward begins with the last layers, which are here. Another forward would begin with the first one.
        return None if torch.is_grad_enabled() else 0

    def _with_gradients(self, index: int, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of a layer whose gradients go to the host; those that are frozen as they are."""
        places = self._layers[index].places
        trained = [number for number, place in enumerate(places) if place.tensor.requires_grad]
        arrived = Arrived.apply(  # type: ignore[no-untyped-call]  # torch's `apply`
            partial(self._gather_gradients, index, self._num_together),
            [tensors[number] for number in trained],
            *(places[number].tensor for number in trained),
        )
        for number, tensor in zip(trained, arrived, strict=True):
            tensors[number] = tensor
        return tensors

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of the whole decoder, with the device's copies of what is no layer."""
        return self._with_outer(forward, *args, **kwargs)

    def _with_outer(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._in_full:
            return compute(*args, **kwargs)
        if not self._outer_is_current:
            with torch.no_grad():
                for place, copy in zip(self._outer.places, self._outer_copies, strict=True):
                    copy.copy_(place.tensor, non_blocking=True)
            self._outer_is_current = True
        try:
            with self._outer.replaced(self._outer_copies):
                self._model.tie()
                return compute(*args, **kwargs)
        finally:
            self._model.tie()

    def _forward_all(
        self, forward_all: Callable[..., list[Output]], inputs: Sequence[ForwardInput]
    ) -> list[Output]:
        """Of micro-batches that share each load: every one has leaves of its own outside of layers."""
        outputs: list[Output]
        if len(inputs) == 1 or not torch.is_grad_enabled():
            outputs = self._with_outer(forward_all, inputs)
            return outputs
        self._num_together = len(inputs)
        try:
            outputs = self._with_outer(lambda: forward_all(with_own_leaves(self._model, inputs)))
        finally:
            self._num_together = 1
        return outputs

    # Gradients.

    def _gather_gradients(
        self, index: int, num_together: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Called in backward when those of a micro-batch are complete.

        The host adds to what it has. While it has nothing, the sum over micro-batches that share a load is taken here,
        and leaves once.
        """
        if num_together > 1 and index not in self._sent_layers:
            running = self._sums_on_device.setdefault(index, _Sum())
            running.add(gradients)
            if running.count < num_together:
                return
            gradients = self._sums_on_device.pop(index).gradients
        self._sent_layers.add(index)
        self._send_gradients(self._layers[index], gradients)

    def _send_gradients(self, layer: HostLayer, gradients: Sequence[Tensor | None]) -> None:
        """Called in backward when those of a layer are complete."""
        assert self._gradients is not None
        self._gradients.send(layer, gradients)

    def filling(self) -> AbstractContextManager[None]:
        """Inside, weights are read: where replicas share the host's copy, by one of them."""
        return self._host_copy.filling()

    @property
    def note(self) -> str | None:
        """What people should know about the weights on the host."""
        return self._host_copy.note

    def settle(self) -> None:
        """Call after the backward of a step: the host's parameters have their gradients."""
        if self._gradients is None:
            return
        copies = [copy for copy in self._outer_copies if copy.requires_grad]
        self._send_gradients(self._outer, [copy.grad for copy in copies])
        for copy in copies:
            copy.grad = None
        self._gradients.settle()
        self._sent_layers.clear()

    def weights_changed(self) -> None:
        """Call after every change of the host's weights: what the device has of them is no longer used."""
        self._outer_is_current = False
        self.ring.forget()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@final
@dataclass
class _Sum:
    """The gradients of a layer over micro-batches, in their order."""

    gradients: list[Tensor | None] = field(default_factory=list)
    count: int = 0

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Autograd may have given a gradient to others, too: the first ones are not changed in place."""
        self.count += 1
        if self.count == 1:
            self.gradients = list(gradients)
            return
        for number, gradient in enumerate(gradients):
            so_far = self.gradients[number]
            if so_far is None or gradient is None:
                self.gradients[number] = gradient if so_far is None else so_far
            else:
                self.gradients[number] = so_far + gradient
