"""A part of an answer, as parsers return it while the answer is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Delta:
    """A part of an answer: content, thought, or a piece of the arguments of a call, whose first part has its name and
    id.
    """

    content: str = ""
    thought: str = ""
    call: int | None = None
    name: str | None = None
    id: str | None = None
    arguments: str = ""
