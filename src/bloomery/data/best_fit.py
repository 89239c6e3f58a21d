"""Best-fit decreasing: which texts share a row, so that little of it stays empty."""

from typing import Any, final

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int64]]
_BITS = 10  # of a word of _Rooms: two small integers are faster to search than one large


@final
class _Rooms:
    """Rows by how much room they have, and the least room that is enough, in O(capacity / 2^20)."""

    def __init__(self, capacity: int) -> None:
        self._rows: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._words = [0] * ((capacity >> _BITS) + 1)  # bit r of word w: a row has room (w << _BITS) + r
        self._used = 0  # bit w: word w is not 0

    def put(self, room: int, row: int) -> None:
        if not self._rows[room]:
            word = room >> _BITS
            self._words[word] |= 1 << (room & (1 << _BITS) - 1)
            self._used |= 1 << word
        self._rows[room].append(row)

    def take(self, length: int) -> tuple[int, int] | None:
        """A row with the least room of at least `length`, and that room."""
        word = length >> _BITS
        low = length & (1 << _BITS) - 1
        bits = self._words[word] >> low << low
        if not bits:
            later = self._used >> word + 1 << word + 1
            if not later:
                return None
            word = _lowest(later)
            bits = self._words[word]
        room = (word << _BITS) + _lowest(bits)
        row = self._rows[room].pop()
        if not self._rows[room]:
            self._words[word] ^= 1 << (room & (1 << _BITS) - 1)
            if not self._words[word]:
                self._used ^= 1 << word
        return row, room


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The row of each text: longest first (of equal ones the first), each into the row that it leaves least room in
    (of equal ones the latest), a new one when it fits nowhere. O(n log n); the rows need at most 11/9 of the fewest
    possible and 6/9 of one more (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    rooms, rows = _Rooms(capacity), 0
    found = np.zeros(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for text, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = rooms.take(length)
        if place is None:
            place = rows, capacity
            rows += 1
        row, room = place
        found[text] = row
        if room > length:
            rooms.put(room - length, row)
    return found
