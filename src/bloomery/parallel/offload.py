"""Activations wait for backward in the host's memory: copied away during forward, and back shortly before their use."""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bloomery.parallel import copies

THRESHOLD = 2**20  # bytes: smaller tensors cost more calls than they free memory
UNDER_WAY = 4  # copies to the host at most: their tensors still lie on the device
AHEAD = 2  # tensors that come back before they are asked for


def offload_activations(backbone: nn.Module, *, threshold: int = THRESHOLD) -> None:
    """What `backbone` keeps for backward, when it is of `threshold` bytes and no parameter, waits on the host.

    In place, by hooks around its forward; blocks inside may be compiled and checkpointed. On the device lie what the
    layer at work needs, `UNDER_WAY` tensors on their way out and `AHEAD` on their way in. What `selective`
    checkpointing keeps does not pass through autograd's hooks, and stays; of `full`, the inputs of blocks go.
    """
    entered: list[_Away | None] = []

    def enter(_module: nn.Module, _inputs: object) -> None:
        away = _Away(backbone, threshold) if torch.is_grad_enabled() else None
        entered.append(away)
        if away is not None:
            away.__enter__()

    def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
        if (away := entered.pop()) is not None:
            away.__exit__(None, None, None)

    backbone.register_forward_pre_hook(enter)
    backbone.register_forward_hook(leave, always_call=True)


@final
@dataclass(eq=False)
class _Kept:
    """A tensor on the host. `coming`: on its way back, and when it is there; `lent`: who asked holds it still."""

    number: int
    host: Tensor
    device: torch.device
    coming: tuple[Tensor, torch.cuda.Event | None] | None = None
    lent: "weakref.ref[Tensor] | None" = None

    def given(self) -> Tensor | None:
        return None if self.lent is None else self.lent()


@final
class _Away(saved_tensors_hooks):
    """The hooks of one forward and of its backward."""

    def __init__(self, backbone: nn.Module, threshold: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._threshold = threshold
        weights = (*backbone.parameters(), *backbone.buffers())  # buffers: a quantised base
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._known: dict[tuple[object, ...], tuple[weakref.ref[torch.UntypedStorage], _Kept]] = {}
        self._kept: list[weakref.ref[_Kept]] = []
        self._lane = copies.Lane()

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not self._goes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*place, tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and known[0]() is storage:  # queries, keys and values all keep the same input
            return known[1]
        kept = _Kept(len(self._kept), self._to_host(tensor.detach()), tensor.device)
        self._known[key] = weakref.ref(storage), kept
        self._kept.append(weakref.ref(kept))
        return kept

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        return plain and tensor.nbytes >= self._threshold and tensor.untyped_storage().data_ptr() not in self._weights

    def _unpack(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._known.clear()  # forward is over
        self._lane.let_go(packed.device)
        back = self._back(packed)
        for number in range(packed.number - 1, max(-1, packed.number - 1 - AHEAD), -1):
            if (earlier := self._kept[number]()) is not None and earlier.given() is None:
                self._bring(earlier)
        return back

    def _back(self, kept: _Kept) -> Tensor:
        """The same tensor for all that ask while one of them still holds it."""
        if (given := kept.given()) is not None:
            return given
        tensor, here = self._bring(kept)
        kept.coming, kept.lent = None, weakref.ref(tensor)
        if here is not None:
            copies.wait_for(here, kept.device)
        return tensor

    def _bring(self, kept: _Kept) -> tuple[Tensor, torch.cuda.Event | None]:
        if kept.coming is None and not copies.apart(kept.device):
            kept.coming = kept.host.clone(), None
        if kept.coming is None:
            room = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            copy = partial(room.copy_, kept.host, non_blocking=True)
            kept.coming = room, self._lane.after_work(kept.device, copy)
        return kept.coming

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not copies.apart(tensor.device):
            return tensor.clone()
        host = copies.pinned_like(tensor)
        self._lane.out([tensor], partial(host.copy_, tensor, non_blocking=True), under_way=UNDER_WAY)
        return host
