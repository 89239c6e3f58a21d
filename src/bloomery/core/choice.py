"""A chosen value and its reason."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A chosen value, never "auto", with the reason that `plan` prints."""

    value: T
    reason: str
