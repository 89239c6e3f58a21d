"""Puts what a plan asks for onto a plain model, from outside, block by block: checkpointing, offload, compilation.

Offloaded activations wait for backward in the host's memory: copied away during forward, and back shortly before use.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bloomery.model.decoder import Decoder
from bloomery.plan.types import TrainPlan

_Forward = Callable[..., Tensor]
_aten = torch.ops.aten
# Products cost more to repeat than to keep; everything between them (norms, activations, dropout) is cheap.
_KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def apply(model: Decoder, plan: TrainPlan) -> None:
    """In place, parameter names unchanged; before the optimizer is built and the first forward.

    Compilation is per block: whole-model graphs are not bitwise repeatable, and one block's graph serves all of them.
    """
    for index, block in enumerate(model.model.layers):
        checkpoint_block(block, plan.activation_checkpointing, index=index)
        if plan.compile:
            block.compile(dynamic=False)
    if plan.offload_activations and plan.device != "cpu":  # no effect on a CPU
        offload_activations(model.model)


def checkpoint_block(block: nn.Module, mode: str, *, index: int) -> None:
    """`full` recomputes the block in backward, `selective` all but its products, `every-N` each N-th block."""
    if mode == "none" or (
        mode.startswith("every-") and index % int(mode.removeprefix("every-")) != 0
    ):
        return
    contexts = {"context_fn": _selective_contexts} if mode == "selective" else {}
    block.forward = partial(_recomputed, block.forward, contexts)


def _recomputed(forward: _Forward, contexts: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    output: Tensor = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
    return output


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(
    _context: object, operation: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    # our own attention kernels
    kept = operation in _KEPT or getattr(operation, "namespace", "") == "bloomery"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def apart(device: torch.device) -> bool:
    """Whether the device has a memory of its own."""
    return device.type == "cuda"


def pinned_like(tensor: Tensor) -> Tensor:
    """Empty, on the host. PyTorch keeps what is freed for the next, and rounds sizes up to powers of two."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


@final
class Lane:
    """Order is kept without the host: a copy waits for the work before it, and the work after for what it needs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: deque[tuple[Sequence[Tensor], torch.cuda.Event]] = deque()

    def out(self, values: Sequence[Tensor], copy: Callable[[], object], *, under_way: int) -> None:
        """Copies what is computed by now to the host; so many copies are under way at most, and their values alive."""
        device = values[0].device
        self._leaving.append((values, self.after_work(device, copy)))
        self.let_go(device, under_way=under_way)

    def after_work(self, device: torch.device, copy: Callable[[], object]) -> torch.cuda.Event:
        """Runs `copy` on the lane; the event is its end. What it writes to must be made before, on the work's stream:
        the allocator then frees it in order."""
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy()
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def let_go(self, device: torch.device, *, under_way: int = 0) -> None:
        """Memory of what has left is used again only after its copy."""
        while len(self._leaving) > under_way:
            _, gone = self._leaving.popleft()
            wait_for(gone, device)

    def settle(self) -> None:
        """Returns when the host may read everything."""
        if self._stream is not None:
            self._stream.synchronize()
        self._leaving.clear()


def wait_for(event: torch.cuda.Event, device: torch.device) -> None:
    """The device's work after this waits, the host does not."""
    torch.cuda.current_stream(device).wait_event(event)


THRESHOLD = 2**20  # bytes: smaller tensors cost more calls than they free memory
UNDER_WAY = 4  # copies to the host at most, whose tensors are still on the device
AHEAD = 2  # tensors that come back before they are asked for


def offload_activations(backbone: nn.Module, *, threshold: int = THRESHOLD) -> None:
    """Offload to the host what `backbone` saves for backward, from `threshold` bytes on, parameters excepted.

    In place, by hooks around its forward; blocks inside may be compiled and checkpointed. The device holds what the
    current layer needs, `UNDER_WAY` tensors on their way out and `AHEAD` on their way in. What `selective`
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
    """A tensor on the host. `coming`: being copied back, with the event of its end; `lent`: still in use."""

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
        weights = (*backbone.parameters(), *backbone.buffers())  # buffers: a quantized base
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._known: dict[tuple[object, ...], tuple[weakref.ref[torch.UntypedStorage], _Kept]] = {}
        self._kept: list[weakref.ref[_Kept]] = []
        self._lane = Lane()

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        storage = (
            tensor.untyped_storage()
            if type(tensor) is Tensor and tensor.layout == torch.strided
            else None
        )
        if (
            storage is None
            or tensor.nbytes < self._threshold
            or storage.data_ptr() in self._weights
        ):
            return tensor
        place = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*place, tensor.dtype, tensor._version)
        known = self._known.get(key)
        # queries, keys and values all keep the same input
        if known is not None and known[0]() is storage:
            return known[1]
        kept = _Kept(len(self._kept), self._to_host(tensor.detach()), tensor.device)
        self._known[key] = weakref.ref(storage), kept
        self._kept.append(weakref.ref(kept))
        return kept

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
        kept.coming = None
        kept.lent = weakref.ref(tensor)
        if here is not None:
            wait_for(here, kept.device)
        return tensor

    def _bring(self, kept: _Kept) -> tuple[Tensor, torch.cuda.Event | None]:
        if kept.coming is None and not apart(kept.device):
            kept.coming = kept.host.clone(), None
        if kept.coming is None:
            room = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            copy = partial(room.copy_, kept.host, non_blocking=True)
            kept.coming = room, self._lane.after_work(kept.device, copy)
        return kept.coming

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not apart(tensor.device):
            return tensor.clone()
        host = pinned_like(tensor)
        self._lane.out(
            [tensor], partial(host.copy_, tensor, non_blocking=True), under_way=UNDER_WAY
        )
        return host
