"""A decision and its reason."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that was decided, never "auto", with the reason that `plan` prints beside it."""

    value: T
    reason: str
