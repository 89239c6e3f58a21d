"""How conversations, pairs and other texts that stay whole are laid into rows, and what is cut or dropped.

What belongs together, a conversation or both answers of a pair, is one unit: it stands whole in one row. A unit that is
longer than a row keeps its start. Of a pair the side that fits half a row stays whole and the other takes the rest; two
long sides get half a row each. A unit of which nothing learned would be left (of a pair: on either side) is dropped.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bloomery.data.best_fit import best_fit
from bloomery.data.shards import ANSWERS, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Fitted:
    """`units` in the order of the rows; those of row r are starts[r] up to starts[r + 1]. `lengths` [units of the
    source, answers]: what is kept of each text.
    """

    units: Ids
    starts: Ids
    lengths: Ids
    truncated: int  # units that lost their end
    cut: int  # tokens that these lost
    dropped: int  # units that were longer, and of which nothing learned was left
    unlearned: int  # units that hold nothing to learn at any length

    @property
    def rows(self) -> int:
        return len(self.starts) - 1


def fit_part(split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]) -> Fitted:
    """The rows of one source of a structured split. Deterministic; a million units in about a second."""
    (_, begin), (_, end) = split.part_starts[part], split.part_starts[part + 1]
    answers = ANSWERS[split.kind]
    bounds = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
    whole = np.diff(bounds).reshape(-1, answers)
    first = np.zeros(end - begin, np.int64) if split.first is None else np.asarray(split.first[begin:end], np.int64)
    return fit(whole, first.reshape(-1, answers), sequence_length=sequence_length, layout=layout)


def fit(whole: Ids, first: Ids, *, sequence_length: int, layout: Literal["packed", "padded"]) -> Fitted:
    """`whole`: tokens of each text [units, answers]; `first`: where in each the first learned token is."""
    lengths = kept_lengths(whole, sequence_length)
    learns = (first < whole).all(1)
    kept = np.flatnonzero((first < lengths).all(1))
    shorter = lengths[kept] < whole[kept]
    rows = np.arange(len(kept))
    if layout == "packed":
        rows = best_fit(lengths[kept].sum(1), sequence_length)
    order = np.argsort(rows, kind="stable")
    count = int(rows.max()) + 1 if len(rows) else 0
    return Fitted(
        units=kept[order],
        starts=np.searchsorted(rows[order], np.arange(count + 1)),
        lengths=lengths,
        truncated=int(shorter.any(1).sum()),
        cut=int((whole[kept] - lengths[kept]).sum()),
        dropped=int(learns.sum()) - len(kept),
        unlearned=int((~learns).sum()),
    )


def kept_lengths(whole: Ids, sequence_length: int) -> Ids:
    """What a row keeps of each text of a unit, from its start."""
    if whole.shape[1] == 1:
        return np.minimum(whole, sequence_length)
    return np.minimum(whole, np.maximum(sequence_length // 2, sequence_length - whole[:, ::-1]))
