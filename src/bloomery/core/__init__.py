"""Shared by every package: the version of Bloomery, which runs, reports and calibrations record; and `Choice`"""

from dataclasses import dataclass
from typing import Generic, TypeVar

__version__ = "0.1.0"


T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A chosen value, never "auto", with the reason that `plan` prints."""

    value: T
    reason: str
