"""How many bytes of tensors are alive while a function runs on fake tensors, and what they are.

torch.distributed._tools.MemTracker counts the same (the tests compare them); its module hooks do not survive the
tracing of compiled blocks, and forbid a second micro-batch.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_resize = torch.UntypedStorage.resize_


class Tracker(TorchDispatchMode):
    """Bytes by kind at the moment when most are alive: `peak`.

    Storages are counted once, however many tensors look at them. What is first seen while autograd runs backward is
    `temporaries`, else it is `activations`; `call` names what was there before, `ask` says where
    gradients are found at a peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._gradients: Callable[[], Iterable[Tensor]] = tuple
        self._kinds: dict[int, tuple[str, int]] = {}  # by a storage's identity, for as long as it lives
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._totals: dict[str, float] = {"gradients": 0.0}
        self._now = self._highest = 0
        self._hidden = False
        self.peak: dict[str, float] = {}

    def ask(self, gradients: Callable[[], Iterable[Tensor]]) -> None:
        """Where the gradients of the moment are."""
        self._gradients = gradients

    def call(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors are of that kind."""
        for storage in storages_of(tensors):
            self._watch(storage, kind)
            before, size = self._kinds[id(storage)]
            self._add(before, -size)
            self._kinds[id(storage)] = (kind, size)
            self._add(kind, size)

    def forget_peak(self) -> None:
        self.peak, self._highest = {}, 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made meanwhile takes no memory: a fused kernel keeps it in registers."""
        before, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = before

    def _watch(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key in self._kinds:
            return
        self._kinds[key] = (kind, storage.nbytes())
        self._add(kind, storage.nbytes())
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        self._add(kind, -size)
        del self._watched[key]

    def _add(self, kind: str, size: int) -> None:
        self._now += size
        self._totals[kind] = self._totals.get(kind, 0.0) + size

    def __torch_dispatch__(
        self, operator: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if self._hidden or tracing():
            return result
        backward = torch._C._current_graph_task_id() != -1
        for storage in storages_of(tree_leaves(result)):
            self._watch(storage, "temporaries" if backward else "activations")
        self._note_peak()
        return result

    def _note_peak(self) -> None:
        if self._now <= self._highest:
            return
        self._highest, self.peak = self._now, dict(self._totals)
        for storage in {id(storage): storage for storage in storages_of(self._gradients())}.values():
            kind, size = self._kinds.get(id(storage), ("gradients", 0))
            self.peak[kind] -= size
            self.peak["gradients"] = self.peak.get("gradients", 0.0) + size

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """`storage.resize_(size)`, which no dispatch mode sees; FSDP frees and fills its buffers so."""
        _resize(storage, size)
        if id(storage) in self._kinds:
            kind, before = self._kinds[id(storage)]
            self._add(kind, size - before)
            self._kinds[id(storage)] = (kind, size)
            self._note_peak()

    def __enter__(self) -> "Tracker":
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", lambda s, n: self.resized(s, n))
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's own
        self._patch.stop()


def storages_of(things: Iterable[object]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, DTensors' local ones included."""
    tensors = [getattr(thing, "_local_tensor", thing) for thing in things]
    return [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]


def tracing() -> bool:
    """Whether operators are being written down into a graph rather than run."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))
