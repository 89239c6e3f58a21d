"""Weights that live in the host's memory and stream through the device, one layer at a time.

The device holds a few buffers, each as large as the largest layer. While a layer computes, the next one is copied into
another buffer; backward, which is recomputed at the borders of layers, loads them again in reverse. Of a model that is
trained in full, gradients leave for the host as they are made, and the optimizer updates the host's parameters.

B bytes of a layer. Copies are ordered by events alone: the host waits for gradients, nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.facts.limits import aligned_bytes
from bloomery.model.adapters.lora import is_added
from bloomery.model.decoder import Decoder
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.parallel.host_gradients import HostGradients
from bloomery.parallel.host_memory import HostLayer, Place, give_memory
from bloomery.parallel.transfers import CopyStream, CopyUnderWay

BUFFERS = 2  # of a layer, on the device: one computes, one arrives


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
    arriving: CopyUnderWay | None = None
    used: int = 0  # when: the count of loads


@final
class LayerRing:
    """The buffers of the device, and which layer is in each."""

    def __init__(self, layers: Sequence[HostLayer], device: torch.device, num_buffers: int) -> None:
        most_bytes = max(layer.num_bytes for layer in layers)
        self._layers = layers
        self._buffers = [
            _Buffer(torch.empty(most_bytes, dtype=torch.uint8, device=device))
            for _ in range(num_buffers)
        ]
        self._copy_stream = CopyStream()
        self._uses = 0
        self.num_loads = 0  # of whole layers
        self.bytes_loaded = 0

    def load(self, index: int, upcoming: int | None) -> Tensor:
        """The bytes of a layer on the device [B], for work that is queued from now on, until two loads later.

        `upcoming`: the layer that is asked for next, whose copy begins when the work that is queued by now is over.
        """
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
    ) -> tuple[Tensor, list[CopyUnderWay]]:
        """The bytes of a layer on the device [B], of which only `parts` are copied, and the copy of each part.

        A part is spans of bytes. They arrive in this order, and work that reads one must wait for its copy.
        """
        buffer = self._free(keep=None)
        buffer.layer = None
        host_B = self._layers[index].host_B

        def copy(spans: Sequence[tuple[int, int]]) -> None:
            for start, end in spans:
                buffer.bytes_B[start:end].copy_(host_B[start:end], non_blocking=True)
                self.bytes_loaded += end - start

        copies = [
            self._copy_stream.run_after_work([buffer.bytes_B], partial(copy, spans))
            for spans in parts
        ]
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
        target_B = buffer.bytes_B[: layer.num_bytes]
        buffer.layer = index
        buffer.arriving = self._copy_stream.run_after_work(
            [buffer.bytes_B], partial(target_B.copy_, layer.host_B, non_blocking=True)
        )
        self.num_loads += 1
        self.bytes_loaded += layer.num_bytes
        return buffer


@final
class StreamedWeights:
    """The weights of a decoder in the host's memory, and their ways to the device and back. A `decoder.WeightStream`.

    Without an adapter all parameters live there: those of layers stream, the embedding, the head and the last norm have
    copies on the device until `weights_changed`. With one the frozen tensors of layers do, and all else is on the
    device.
    """

    def __init__(self, model: Decoder, device: torch.device, *, num_buffers: int = BUFFERS) -> None:
        """In place, of a model on the meta device; its blocks are checkpointed after this, so that they load their
        weights again. `allocate` must follow.
        """
        self.device = device
        self._model = model
        self._num_buffers = num_buffers
        self._in_full = all(
            parameter.requires_grad or parameter.numel() == 1 for parameter in model.parameters()
        )
        self._layers = [layer_of(block, in_full=self._in_full) for block in model.model.layers]
        self._outer = HostLayer([], 0)
        self._outer_copies = list[nn.Parameter]()
        self._outer_is_current = False
        self._gradients: HostGradients | None = None
        for index, block in enumerate(model.model.layers):
            block.forward = partial(self._layer_forward, index, block.forward)
        if self._in_full:
            model.forward = partial(self._forward, model.forward)  # type: ignore[method-assign]

    def allocate(self) -> None:
        """Give the model memory, undefined: on the host what lives there, on the device all else."""
        if self._in_full:
            self._outer = self._outer_of(self._model)
        layers = [*self._layers, self._outer]
        give_memory(self._model, layers, self.device)
        self._outer_copies = [
            nn.Parameter(
                torch.empty_like(place.tensor, device=self.device), place.tensor.requires_grad
            )
            for place in self._outer.places
        ]
        self.ring = LayerRing(self._layers, self.device, self._num_buffers)
        self._gradients = HostGradients(layers, self.device) if self._in_full else None

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
        if index == 0 and self._in_full and not in_backward():
            self.ring.forget()
        bytes_B = self.ring.load(index, self._upcoming(index))
        tensors = [place.view_of(bytes_B) for place in layer.places]
        if self._in_full and torch.is_grad_enabled():
            tensors = self._with_gradients(index, tensors)
        with layer.replaced(tensors):
            return forward(*args, **kwargs)

    def _upcoming(self, index: int) -> int | None:
        if in_backward():
            return index - 1 if index > 0 else None
        if index + 1 < len(self._layers):
            return index + 1
        # Backward begins with the last layers, which are here. Another forward would begin with the first one.
        return None if torch.is_grad_enabled() or self._in_full else 0

    def _with_gradients(self, index: int, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of a layer whose gradients go to the host; those that are frozen as they are."""
        places = self._layers[index].places
        trained = [number for number, place in enumerate(places) if place.tensor.requires_grad]
        arrived = _Arrived.apply(  # type: ignore[no-untyped-call]  # torch's `apply`
            partial(self._send_gradients, self._layers[index]),
            [tensors[number] for number in trained],
            *(places[number].tensor for number in trained),
        )
        for number, tensor in zip(trained, arrived, strict=True):
            tensors[number] = tensor
        return tensors

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of the whole decoder, with the device's copies of what is no layer."""
        if not self._outer_is_current:
            with torch.no_grad():
                for place, copy in zip(self._outer.places, self._outer_copies, strict=True):
                    copy.copy_(place.tensor, non_blocking=True)
            self._outer_is_current = True
        try:
            with self._outer.replaced(self._outer_copies):
                self._model.tie()
                return forward(*args, **kwargs)
        finally:
            self._model.tie()

    # Gradients.

    def _send_gradients(self, layer: HostLayer, gradients: Sequence[Tensor | None]) -> None:
        """Called in backward when those of a layer are complete."""
        assert self._gradients is not None
        self._gradients.send(layer, gradients)

    def settle(self) -> None:
        """Call after the backward of a step: the host's parameters have their gradients."""
        if self._gradients is None:
            return
        copies = [copy for copy in self._outer_copies if copy.requires_grad]
        self._send_gradients(self._outer, [copy.grad for copy in copies])
        for copy in copies:
            copy.grad = None
        self._gradients.settle()

    def weights_changed(self) -> None:
        """Call after every change of the host's weights: what the device has of them is no longer used."""
        self._outer_is_current = False
        self.ring.forget()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Arrived(torch.autograd.Function):
    """Weights on the device that stand for the host's parameters. Backward hands their gradients to `send`."""

    @staticmethod
    def forward(
        ctx: Any,
        send: Callable[[Sequence[Tensor | None]], None],
        on_device: Sequence[Tensor],
        *_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.send = send
        ctx.set_materialize_grads(False)
        return tuple(on_device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.send(gradients)
        return (None, None, *(None for _ in gradients))
