"""The bytes of live tensors, by what holds them, at the moment when most are alive.

torch.distributed._tools.MemTracker counts the same (a test compares them); its module hooks do not survive the tracing
of compiled blocks, and forbid a second micro-batch.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Bytes by kind at the moment when most are alive: `peak`.

    Storages are counted once, however many tensors share them. A storage created in backward counts as `temporaries`,
    else as `activations`; `call` names earlier tensors, `gradients` returns the current gradients.
    """

    supports_higher_order_operators = True  # as those of dropout in a graph with checkpoints

    def __init__(self, gradients: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.gradients = gradients
        self.hidden = False
        self.elsewhere = False  # what is created now is on another device
        self.peak: dict[str, float] = {}
        # Kind and bytes by a storage's identity, for as long as it lives.
        self._kinds: dict[int, tuple[str, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Flat tensors, whose storages FSDP frees and fills as it goes.
        self._flat: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._totals: dict[str, float] = {"gradients": 0.0}
        self._live_bytes = 0
        self._peak_bytes = 0

    def call(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors are of that kind."""
        for storage in storages_of(tensors):
            self._watch(storage, kind)
            self._note(id(storage), kind, self._kinds[id(storage)][1])

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These tensors, and all views of them, are on another device."""
        for storage in storages_of(tensors):
            key = id(storage)
            self._watched[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))  # type: ignore[misc]
            self._note(key, "elsewhere", 0)

    def forget_peak(self) -> None:
        self.peak = {}
        self._peak_bytes = 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Tensors created meanwhile take no memory: a fused kernel keeps them in registers."""
        was_hidden = self.hidden
        self.hidden = True
        try:
            yield
        finally:
            self.hidden = was_hidden

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel, which holds nothing of its own."""

        def run(*args: Any) -> Any:
            with self.unseen():
                return function(*args)

        return run

    def _watch(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key not in self._kinds:
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._note(key, kind, storage.nbytes())

    def _gone(self, key: int) -> None:
        self._note(key, self._kinds[key][0], 0)
        del self._kinds[key], self._watched[key]
        self._flat.pop(key, None)

    def _note(self, key: int, kind: str, size: int) -> None:
        old_kind, old_size = self._kinds.get(key, (kind, 0))
        self._totals[old_kind] = self._totals.get(old_kind, 0.0) - old_size
        self._totals[kind] = self._totals.get(kind, 0.0) + size
        self._live_bytes += size - old_size
        self._kinds[key] = kind, size

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # FSDP resizes storages where no dispatch mode sees it, so flat ones are looked at again first.
        for key, reference in list(self._flat.items()):
            resized = reference()
            if resized is not None and resized.nbytes() != self._kinds[key][1]:
                self._note(key, self._kinds[key][0], resized.nbytes())
        if self._flat:
            self._note_peak()
        result = func(*args, **(kwargs or {}))
        if self.hidden or self.elsewhere:
            return result

        in_backward = torch._C._current_graph_task_id() != -1
        for tensor in tree_leaves(result):
            for storage in storages_of([tensor]):
                self._watch(storage, "temporaries" if in_backward else "activations")
                if func is torch.ops.aten.empty.memory_format and tensor.ndim == 1:
                    self._flat[id(storage)] = self._watched[id(storage)]
        self._note_peak()
        return result

    def _note_peak(self) -> None:
        if self._live_bytes <= self._peak_bytes:
            return
        self._peak_bytes = self._live_bytes
        self.peak = dict(self._totals)
        # Gradients were noted as what they were when backward made them.
        for storage in {id(storage): storage for storage in storages_of(self.gradients())}.values():
            kind, size = self._kinds.get(id(storage), ("gradients", 0))
            self.peak[kind] -= size
            self.peak["gradients"] = self.peak.get("gradients", 0.0) + size


def storages_of(things: Iterable[object]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, DTensors' local ones included."""
    tensors = [getattr(thing, "_local_tensor", thing) for thing in things]
    return [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
