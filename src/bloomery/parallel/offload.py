"""Activations wait for backward in the host's memory: copied away during forward, and back shortly before use."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bloomery.facts.limits import PINNED_CHUNK, aligned_bytes
from bloomery.model.decoder import Backbone
from bloomery.model.experts import RouterLoad
from bloomery.model.forward_input import ForwardInput
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.parallel.transfers import CopyStream, CopyUnderWay, has_own_memory, pinned_block

THRESHOLD_BYTES = 2**20  # smaller tensors cost more calls than they free memory
MOST_UNDER_WAY = 4  # copies to the host, whose tensors are still on the device
PREFETCHED = 2  # tensors that come back before backward asks for them


def offload_activations(backbone: nn.Module, *, threshold: int = THRESHOLD_BYTES) -> None:
    """Offload to the host what `backbone` saves for backward, from `threshold` bytes on, parameters excepted.

    In place, by hooks around its forward; blocks inside may be compiled and checkpointed. The device holds what the
    current layer needs, MOST_UNDER_WAY tensors on their way out and PREFETCHED on their way in. What `selective`
    checkpointing keeps does not pass through autograd's hooks, and stays; of `full`, the inputs of blocks go.
    """
    hooks_by_depth: list[_OffloadHooks | None] = []

    def enter(*_: object) -> None:
        hooks = _OffloadHooks(backbone, threshold) if torch.is_grad_enabled() else None
        hooks_by_depth.append(hooks)
        if hooks is not None:
            hooks.__enter__()

    def leave(*_: object) -> None:
        hooks = hooks_by_depth.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)

    backbone.register_forward_pre_hook(enter)
    backbone.register_forward_hook(leave, always_call=True)
    if not isinstance(backbone, Backbone | TransformersBackbone):
        return

    # A forward of several inputs is no call of the module.
    forward_all = backbone.forward_all

    def offloading(
        inputs: Sequence[ForwardInput],
    ) -> list[tuple[Tensor, Mapping[int, RouterLoad]]]:
        enter()
        try:
            return forward_all(inputs)
        finally:
            leave()

    backbone.forward_all = offloading  # type: ignore[method-assign]


@final
@dataclass(eq=False)
class _Offloaded:
    """A tensor on the host. `arriving`: its copy on the device, which may be read once it is no longer under way."""

    number: int  # in the order of forward
    like: Tensor  # without data: its shape, strides and dtype
    host_bytes: list[Tensor]  # one after the other
    device: torch.device
    arriving: tuple[Tensor, CopyUnderWay | None] | None = None  # None: it is there
    returned: "weakref.ref[Tensor] | None" = None

    def in_use(self) -> Tensor | None:
        """The copy that backward was given, while something still holds it."""
        return None if self.returned is None else self.returned()


@final
class _OffloadHooks(saved_tensors_hooks):
    """The hooks of one forward and of its backward."""

    def __init__(self, backbone: nn.Module, threshold: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._threshold = threshold
        weights = (*backbone.parameters(), *backbone.buffers())  # buffers: a quantized base
        self._weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}
        self._offloaded_by_view: dict[
            tuple[object, ...], tuple[weakref.ref[torch.UntypedStorage], _Offloaded]
        ] = {}
        self._in_forward_order: list[weakref.ref[_Offloaded]] = []
        self._copy_stream = CopyStream()
        self._chunk: Tensor | None = None  # that is being filled
        self._chunk_used = 0

    def _pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        """Called in forward for each tensor that autograd saves."""
        # Subclasses (DTensor) and sparse tensors have no storage of their own: they stay.
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if tensor.nbytes < self._threshold or storage.data_ptr() in self._weight_storages:
            return tensor

        # Queries, keys and values all save the same input: the view of a storage is offloaded once. An address may be
        # used again after its storage was freed, so the storage itself must be the same.
        view = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        if view in self._offloaded_by_view:
            storage_then, offloaded = self._offloaded_by_view[view]
            if storage_then() is storage:
                return offloaded

        offloaded = self._to_host(tensor.detach(), len(self._in_forward_order))
        self._offloaded_by_view[view] = weakref.ref(storage), offloaded
        self._in_forward_order.append(weakref.ref(offloaded))
        return offloaded

    def _unpack(self, packed: Tensor | _Offloaded) -> Tensor:
        """Called in backward for each tensor that it needs."""
        if isinstance(packed, Tensor):
            return packed

        # Forward is over: nothing more is offloaded.
        self._offloaded_by_view.clear()
        self._chunk = None
        self._copy_stream.release_sent()

        # Backward asks in about the reverse order of forward: the tensors saved just before come next. One that it was
        # given before and has let go is alive for a moment only: a second copy of it would be for nobody.
        tensor = self._give(packed)
        for number in range(packed.number - 1, max(-1, packed.number - 1 - PREFETCHED), -1):
            earlier = self._in_forward_order[number]()
            if earlier is not None and earlier.returned is None:
                self._fetch(earlier)
        return tensor

    def _give(self, offloaded: _Offloaded) -> Tensor:
        """The tensor on its device; the same for all that ask while one of them still holds it."""
        in_use = offloaded.in_use()
        if in_use is not None:
            return in_use
        tensor, under_way = self._fetch(offloaded)
        offloaded.arriving = None
        offloaded.returned = weakref.ref(tensor)
        if under_way is not None:
            under_way.finish()
        return tensor

    def _fetch(self, offloaded: _Offloaded) -> tuple[Tensor, CopyUnderWay | None]:
        """Begin the copy to the device, where it has not begun; without a device of its own, a copy at once."""
        if offloaded.arriving is not None:
            return offloaded.arriving
        tensor = torch.empty_like(offloaded.like, device=offloaded.device)
        parts = _parts_like(tensor, offloaded.host_bytes)
        if has_own_memory(offloaded.device):
            copy = partial(_copy_parts, offloaded.host_bytes, parts, non_blocking=True)
            offloaded.arriving = tensor, self._copy_stream.run_after_work([tensor], copy)
        else:
            _copy_parts(offloaded.host_bytes, parts, non_blocking=False)
            offloaded.arriving = tensor, None
        return offloaded.arriving

    def _to_host(self, tensor: Tensor, number: int) -> _Offloaded:
        # What has gaps or overlaps, as an expanded tensor, goes without them.
        like = torch.empty_like(tensor, device="meta")
        if like.stride() != tensor.stride():
            tensor = torch.empty_like(like, device=tensor.device).copy_(tensor)

        host_bytes = self._next_bytes(tensor.nbytes, tensor.device)
        parts = _parts_like(tensor, host_bytes)
        if has_own_memory(tensor.device):
            copy = partial(_copy_parts, parts, host_bytes, non_blocking=True)
            self._copy_stream.send([tensor], copy, most_under_way=MOST_UNDER_WAY)
        else:
            _copy_parts(parts, host_bytes, non_blocking=False)
        return _Offloaded(number, like, host_bytes, tensor.device)

    def _next_bytes(self, size: int, device: torch.device) -> list[Tensor]:
        """Host memory for so many bytes: what is left of a chunk, and the chunks after it.

        PyTorch rounds what it pins up to a power of two, which a chunk is. It is free with the last tensor in it.
        """
        parts = list[Tensor]()
        while size > 0:
            if self._chunk is None or self._chunk_used == len(self._chunk):
                self._chunk, self._chunk_used = pinned_block(PINNED_CHUNK, device), 0
            part = self._chunk[self._chunk_used : self._chunk_used + size]
            self._chunk_used += aligned_bytes(len(part))
            size -= len(part)
            parts.append(part)
        return parts


def _parts_like(tensor: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The bytes of a tensor without gaps, in the order of its memory, divided as `parts`."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return list(flat.split_with_sizes([len(part) for part in parts]))


def _copy_parts(sources: list[Tensor], targets: list[Tensor], *, non_blocking: bool) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=non_blocking)
