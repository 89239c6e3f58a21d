"""What the sections of a recipe are made of. No torch."""

from typing import TypeVar

from pydantic import BaseModel, Field

T = TypeVar("T")


def key(default: T, description: str, *examples: object) -> T:
    """A key with a default. `examples`: other values of it, for the reference page and for editors."""
    field: T = Field(default, description=description, examples=list(examples) or None)
    return field


class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A recipe section: unknown keys are errors, values never change after loading."""
