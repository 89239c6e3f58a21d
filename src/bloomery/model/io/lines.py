"""Where the rows of a tensor lie in its file, if not one after the other. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lines:
    """Rows of a stored matrix of `count` rows that are a tensor: every `step`-th one from `first` on.

    `are_columns`: they are columns of the stored matrix, which has `count` of them.
    """

    count: int
    first: int = 0
    step: int = 1
    are_columns: bool = False
