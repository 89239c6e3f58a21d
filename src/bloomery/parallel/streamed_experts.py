"""Experts that live in the host's memory: all else of the model is on the device.

Many tokens reach all experts of a layer, which arrive in one copy while the layer before computes. The few tokens of a
decoding step reach few: those are copied once the router has chosen, and the matrices of the next one arrive while one
multiplies.

B bytes of a layer's experts. N tokens, K experts that a token meets, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bloomery.facts.limits import STREAM_BUFFERS, copies_chosen
from bloomery.model.decoder import Decoder, Output
from bloomery.model.experts import ExpertMLPs
from bloomery.model.forward_input import ForwardInput
from bloomery.parallel.host_memory import HostLayer, Place, give_memory
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.ordered_sums import with_ordered_sums, with_own_leaves
from bloomery.parallel.staging import StagedCopy
from bloomery.parallel.streamed import LayerRing, in_backward, layer_of
from bloomery.parallel.transfers import CopyUnderWay
from bloomery.plan.types import HostPlacement

STACKS = ("gate_up_proj", "down_proj")  # in the order in which they multiply

Span = tuple[int, int]  # of the bytes of a layer: the first, and the end


@final
@dataclass(frozen=True)
class _Kept:
    """In place of a weight that autograd saves: which view it was of the buffer of its layer."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@final
@dataclass(eq=False)
class _Arrivals:
    """The matrices of a forward by stack and expert. An `experts.Arrivals`."""

    ends_E: Tensor
    copy_of: dict[tuple[str, int], CopyUnderWay | StagedCopy]

    def wait(self, stack: str, expert: int) -> None:
        if (stack, expert) in self.copy_of:  # else the stack is trained, on the device
            self.copy_of[stack, expert].finish()


@final
@dataclass(eq=False)
class _Layer:
    """The experts of a layer, and the tensors of them that stream."""

    experts: ExpertMLPs
    host: HostLayer
    is_recomputed: bool
    by_stack: dict[str, list[Place]] = field(init=False)  # of the stacks that stream

    def __post_init__(self) -> None:
        self.by_stack = {}
        for stack in STACKS:
            names: tuple[str, ...] = (stack,)
            tensors: dict[str, Any] = self.experts._parameters
            if stack in self.experts.quantized:
                names = ("codes", "scales")
                tensors = self.experts.quantized[stack].get_submodule("stored")._buffers
            places = [p for p in self.host.places if p.tensors is tensors and p.name in names]
            if places:
                self.by_stack[stack] = places

    @property
    def count(self) -> int:
        return self.experts.facts.count

    def spans_of(self, stack: str, expert: int) -> list[Span]:
        """The bytes of an expert's matrix."""
        sizes = [(place.start, place.num_bytes // self.count) for place in self.by_stack[stack]]
        return [(start + expert * size, start + (expert + 1) * size) for start, size in sizes]

    @property
    def common_spans(self) -> list[Span]:
        """The bytes of what is of no expert alone, and of biases: they are few."""
        of_matrices = {place.start for places in self.by_stack.values() for place in places}
        return [
            (place.start, place.start + place.num_bytes)
            for place in self.host.places
            if place.num_bytes and place.start not in of_matrices
        ]


@final
class StreamedExperts:
    """The frozen stacks of a decoder's experts in the host's memory. A `decoder.WeightStream`."""

    def __init__(
        self,
        model: Decoder,
        device: torch.device,
        *,
        is_recomputed: Callable[[int], bool],
        mesh: Mesh = SINGLE_RANK,
        num_buffers: int = STREAM_BUFFERS,
        placement: HostPlacement = "pinned",
    ) -> None:
        """In place, of a model on the meta device. `allocate` must follow.

        `is_recomputed`: whether the forward of a layer, by its number, runs again in backward. Of another layer
        autograd keeps the places of weights, and backward loads them. `placement`: of the stacks on the host.
        """
        self._placement = placement
        self.device = device
        self._model = model
        self._num_buffers = num_buffers
        self._mesh = mesh
        self._layers = list[_Layer]()
        for number, block in zip(model.stage.layers, model.model.layers, strict=True):
            for experts in block.modules():
                if not isinstance(experts, ExpertMLPs):
                    continue
                layer = _Layer(experts, layer_of(experts, in_full=False), is_recomputed(number))
                assert layer.host.places, "the stacks of experts are frozen"
                experts.mixed = partial(  # type: ignore[method-assign]
                    self._mixed, len(self._layers), experts.mixed
                )
                self._layers.append(layer)
        self._num_together = 1  # micro-batches that share a load
        for block in model.model.layers:
            block.forward = partial(self._block_forward, block, block.forward)
        model.forward_all = partial(self._forward_all, model.forward_all)  # type: ignore[method-assign]

    def allocate(self, source: Path | None = None, folder: Path | None = None) -> None:
        """Give the model memory, undefined: experts on the host, all else on the device."""
        host_layers = [layer.host for layer in self._layers]
        self._host_copy = give_memory(
            self._model,
            host_layers,
            self.device,
            mesh=self._mesh,
            is_frozen=True,
            placement=self._placement,
            source=source,
            folder=folder,
        )
        self.ring = LayerRing(host_layers, self.device, self._num_buffers, self._placement)

    def filling(self) -> AbstractContextManager[None]:
        """Inside, weights are read: where replicas share the host's copy, by one of them."""
        return self._host_copy.filling()

    @property
    def note(self) -> str | None:
        """What people should know about the weights on the host."""
        return self._host_copy.note

    def settle(self) -> None:
        """Nothing is under way: the device has all gradients."""

    def weights_changed(self) -> None:
        """Call after every change of the host's weights: what the device has of them is no longer used."""
        self.ring.forget()

    def _forward_all(
        self, forward_all: Callable[..., list[Output]], inputs: Sequence[ForwardInput]
    ) -> list[Output]:
        """Of micro-batches that share each load."""
        if len(inputs) == 1 or not torch.is_grad_enabled():
            return forward_all(inputs)
        self._num_together = len(inputs)
        try:
            return forward_all(with_own_leaves(self._model, inputs))
        finally:
            self._num_together = 1

    def _block_forward(
        self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        is_together = self._num_together > 1 and torch.is_grad_enabled()
        with with_ordered_sums(block) if is_together else nullcontext():
            return forward(*args, **kwargs)

    def _mixed(
        self,
        index: int,
        mixed: Callable[..., Tensor],
        x_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
    ) -> Tensor:
        """`ExpertMLPs.mixed` with the experts on the device."""
        layer = self._layers[index]
        keeps_graph = torch.is_grad_enabled()
        if not keeps_graph and copies_chosen(experts_NK.numel(), layer.count):
            with self._chosen(index, experts_NK):
                return mixed(x_ND, experts_NK, weights_NK)
        with layer.host.replaced(self._loaded(index)):
            if keeps_graph and not layer.is_recomputed:
                with self._kept_by_place(index):
                    return mixed(x_ND, experts_NK, weights_NK)
            return mixed(x_ND, experts_NK, weights_NK)

    def _loaded(self, index: int) -> list[Tensor]:
        """The tensors of all experts of a layer on the device; the copy of the next layer's begins."""
        bytes_B = self.ring.load(index, self._upcoming(index))
        return [place.view_of(bytes_B) for place in self._layers[index].host.places]

    def _upcoming(self, index: int) -> int | None:
        if in_backward():
            return index - 1 if index > 0 else None
        if index + 1 < len(self._layers):
            return index + 1
        # Backward begins with the last layers, which are here. Another forward would begin with the first one.
        return None if torch.is_grad_enabled() else 0

    @contextmanager
    def _kept_by_place(self, index: int) -> Iterator[None]:
        """Inside, autograd saves no weights of the ring, which the next layers overwrite, but where they belong.

        All other tensors go to the hooks that are around this one.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            if self.ring.has(tensor):
                return _Kept(
                    tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype
                )
            return tensor if outer is None else outer[0](tensor)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Kept):
                tensor: Tensor = packed if outer is None else outer[1](packed)
                return tensor
            bytes_B = self.ring.load(index, self._upcoming(index))
            return bytes_B.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)

        with saved_tensors_hooks(pack, unpack):
            yield

    @contextmanager
    def _chosen(self, index: int, experts_NK: Tensor) -> Iterator[None]:
        """Inside, the layer has the chosen experts alone, each from the moment that it multiplies.

        The host waits for the choice.
        """
        layer = self._layers[index]
        counts_E = torch.bincount(experts_NK.flatten().cpu(), minlength=layer.count)
        chosen = counts_E.nonzero().flatten().tolist()
        matrices = [(stack, expert) for stack in layer.by_stack for expert in chosen]
        parts = [layer.spans_of(stack, expert) for stack, expert in matrices]
        bytes_B, (common, *copies) = self.ring.load_parts(index, [layer.common_spans, *parts])
        common.finish()
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        layer.experts.arrivals = _Arrivals(ends_E, dict(zip(matrices, copies, strict=True)))
        try:
            with layer.host.replaced([place.view_of(bytes_B) for place in layer.host.places]):
                yield
        finally:
            layer.experts.arrivals = None
