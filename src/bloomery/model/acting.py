"""The kind of device whose code runs: that of the tensors, or the one that a simulation sets.

The tensors of a simulated step are on the CPU, whatever device it stands for. What chooses code, or the size of its
pieces, by the kind of a device asks here; nothing that is computed depends on it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

R = TypeVar("R")
Fuse = Callable[[Callable[..., R]], Callable[..., R]]


@dataclass
class _Acting:
    kind: str | None = None
    fuse: Fuse[None] | None = None


_acting = _Acting()


@contextmanager
def acting_as(kind: str, *, fuse: Fuse[None]) -> Iterator[None]:
    """While it is entered the code of that kind of device runs ("cpu", "cuda"); `fuse` stands for the compiler."""
    _acting.kind = kind
    _acting.fuse = fuse
    try:
        yield
    finally:
        _acting.kind = _acting.fuse = None


def kind_of(device: torch.device) -> str:
    """The kind of device whose code a tensor there is worked on with."""
    return _acting.kind or device.type


def simulated() -> bool:
    """Whether tensors stand for those of a step and have no memory."""
    return _acting.kind is not None


def fused(function: Callable[..., R]) -> Callable[..., R]:
    """The function as one kernel; compiled once."""
    return _compiled(function) if _acting.fuse is None else _acting.fuse(function)  # type: ignore[return-value, arg-type]


@functools.cache
def _compiled(function: Callable[..., R]) -> Callable[..., R]:
    return torch.compile(function, dynamic=False)
