"""Sample packing: the sequences of a split, their document masking and their loss mask.

Layouts of plain text (recipe: data.packing, data.document_masking):
packed  the concatenated documents of a source, cut every T tokens; no attention across documents
padded  one document per sequence, cut at T (packing: false)
fixed   as packed, with attention across documents (document_masking: false)

Layouts of conversations and pairs, which are only ever cut at their end:
packed  as many per sequence as fit (best fit); no attention across them, positions restart at 0
padded  one per sequence; both responses of a pair share it
fixed   as for plain text; not for pairs

A sequence has tokens of one source. Plain text next to conversations is packed as it is without them.

The loss mask is 1 where the label, the next token, belongs to the same document (fixed: the same source) and, in
conversations and pairs, to a text that is trained on.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]
_BITS = 10  # of a word of _FreeSpace: two small integers are faster to search than one large


@final
class _FreeSpace:
    """Sequences by their free positions. Finds the least room that is enough in O(capacity / 2^20)."""

    def __init__(self, capacity: int) -> None:
        self._sequences: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._words = [0] * ((capacity >> _BITS) + 1)  # bit r of word w: a sequence has room (w << _BITS) + r
        self._used = 0  # bit w: word w is not 0

    def put(self, room: int, sequence: int) -> None:
        if not self._sequences[room]:
            word = room >> _BITS
            self._words[word] |= 1 << (room & (1 << _BITS) - 1)
            self._used |= 1 << word
        self._sequences[room].append(sequence)

    def take(self, length: int) -> tuple[int, int] | None:
        """A sequence with the least room of at least `length`, and that room."""
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
        sequence = self._sequences[room].pop()
        if not self._sequences[room]:
            self._words[word] ^= 1 << (room & (1 << _BITS) - 1)
            if not self._words[word]:
                self._used ^= 1 << word
        return sequence, room


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The sequence of each text by best-fit decreasing: longest first (of equal ones the first), each into the sequence
    where it leaves the least room (of equal ones the latest), else into a new one. O(n log n). The number of sequences
    is at most 11/9 of the optimum plus 6/9 (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    rooms, count = _FreeSpace(capacity), 0
    sequences = np.zeros(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for text, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = rooms.take(length)
        if place is None:
            place = count, capacity
            count += 1
        sequence, room = place
        sequences[text] = sequence
        if room > length:
            rooms.put(room - length, sequence)
    return sequences


@dataclass(frozen=True)
class PackedSource:
    """The packing of a source: sequence s holds the conversations or pairs units[starts[s]:starts[s + 1]].
    `lengths` [units of the source, texts per unit]: the tokens kept of each text.
    """

    units: Ids
    starts: Ids
    lengths: Ids
    truncated: int  # units cut at their end
    cut: int  # tokens that they lost
    dropped: int  # units longer than a sequence without a loss token in the part that fits
    all_masked: int  # units without a loss token at any length

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1


def pack_source(split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]) -> PackedSource:
    """The sequences of one source of conversations or pairs. Deterministic; a million units in about a second."""
    (_, begin), (_, end) = split.part_starts[part], split.part_starts[part + 1]
    answers = DOCUMENTS_PER_UNIT[split.kind]
    bounds = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
    whole = np.diff(bounds).reshape(-1, answers)
    first = np.zeros(end - begin, np.int64) if split.first is None else np.asarray(split.first[begin:end], np.int64)
    return pack_units(whole, first.reshape(-1, answers), sequence_length=sequence_length, layout=layout)


def pack_units(whole: Ids, first: Ids, *, sequence_length: int, layout: Literal["packed", "padded"]) -> PackedSource:
    """`whole`: tokens of each text [units, texts per unit]; `first`: the place of its first loss token."""
    lengths = truncated_lengths(whole, sequence_length)
    trainable = (first < whole).all(1)
    kept = np.flatnonzero((first < lengths).all(1))
    shorter = lengths[kept] < whole[kept]
    places = best_fit(lengths[kept].sum(1), sequence_length) if layout == "packed" else np.arange(len(kept))
    order = np.argsort(places, kind="stable")
    count = int(places.max()) + 1 if len(places) else 0
    return PackedSource(
        units=kept[order],
        starts=np.searchsorted(places[order], np.arange(count + 1)),
        lengths=lengths,
        truncated=int(shorter.any(1).sum()),
        cut=int((whole[kept] - lengths[kept]).sum()),
        dropped=int(trainable.sum()) - len(kept),
        all_masked=int((~trainable).sum()),
    )


def truncated_lengths(whole: Ids, sequence_length: int) -> Ids:
    """Tokens kept of each text of a unit, from its start: a pair shares the sequence, a short side leaves room."""
    if whole.shape[1] == 1:
        return np.minimum(whole, sequence_length)
    return np.minimum(whole, np.maximum(sequence_length // 2, sequence_length - whole[:, ::-1]))


Layout = Literal["packed", "padded", "fixed"]


@dataclass(frozen=True)
class PackedSequence:
    """int64 and float32 arrays [T]; see loader.Batch. `stored`: the place of each label among the split's tokens, -1
    where it belongs to another document.
    """

    tokens: Ids
    labels: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.float32]]
    positions: Ids
    documents: Ids
    stored: Ids
    kto_labels: Ids | None = None


@dataclass(frozen=True)
class _Span:
    """Tokens of a sequence, one more than it has positions: number and begin (in the sequence) of each one's document,
    its place in the split, and whether it is trained on.
    """

    ids: Ids
    documents: Ids
    begins: Ids
    places: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    kto_labels: Ids | None = None


def count_plain_sequences(tokens: int, documents: int, *, sequence_length: int, layout: Layout) -> int:
    """Sequences of one source of plain text. The last token has no label, so that it takes no position of its own."""
    return documents if layout == "padded" else -(-max(tokens - 1, 0) // sequence_length)


def pairs_need_packing() -> UserError:
    problem = "without document masking the dataset is cut at any token, and a pair must stay in one sequence"
    return UserError(problem, where="data.document_masking", fix="set data.document_masking=true")


@dataclass(frozen=True)
class SequenceCounts:
    """Sequences of each source; of conversations and pairs also the truncated and dropped ones."""

    counts: list[int]
    packed: list[PackedSource]


@functools.lru_cache(maxsize=4)  # a run asks several times before it begins
def count_sequences(folder: Path, manifest: Manifest, *, sequence_length: int, layout: Layout) -> SequenceCounts:
    """Of the train split. Raises UserError as PackedSequences does."""
    if manifest.kind != "text":
        split = Split(folder, manifest, "train")
        sequences = PackedSequences(split, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id)
        return SequenceCounts(sequences.counts, sequences.packed)
    parts = manifest.train.parts
    counts = [
        count_plain_sequences(p.tokens, p.documents, sequence_length=sequence_length, layout=layout) for p in parts
    ]
    return SequenceCounts(counts, [])


@final
class PackedSequences:
    """Sequence `index` of source `part` of a split, padded with `pad_id` to `sequence_length`.

    `packed`: how each source of conversations or pairs is packed. Raises UserError for a layout that cuts pairs.
    """

    def __init__(self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None) -> None:
        self._split, self._length, self._layout = split, sequence_length, layout
        self._pad_id = pad_id or 0
        parts = split.record.parts
        if layout == "fixed" and DOCUMENTS_PER_UNIT[split.kind] > 1:
            raise pairs_need_packing()
        self._packed_sources: dict[int, PackedSource] = {}
        if layout != "fixed" and split.kind != "text":
            structured = [number for number, part in enumerate(parts) if not part.plain]
            self._packed_sources = {
                number: pack_source(split, number, sequence_length=sequence_length, layout=layout)
                for number in structured
            }
        self.packed = list(self._packed_sources.values())
        self.counts = [
            self._packed_sources[number].sequences
            if number in self._packed_sources
            else count_plain_sequences(p.tokens, p.documents, sequence_length=sequence_length, layout=layout)
            for number, p in enumerate(parts)
        ]

    def read(self, part: int, index: int) -> PackedSequence:
        assert 0 <= index < self.counts[part]
        if part in self._packed_sources:
            return self._padded(self._packed(part, index))
        if self._layout == "padded":
            return self._one_document(self._split.part_starts[part][1] + index)
        return self._stream(part, index)

    def empty(self) -> PackedSequence:
        """A sequence of padding."""
        none = np.zeros(0, np.int64)
        kto_labels = none if self._split.kind == "kto" else None
        return self._padded(_Span(none, none, none, none, None, kto_labels))

    def _packed(self, part: int, index: int) -> _Span:
        packed, answers = self._packed_sources[part], DOCUMENTS_PER_UNIT[self._split.kind]
        units = packed.units[packed.starts[index] : packed.starts[index + 1]]
        numbers = (units[:, None] * answers + np.arange(answers)).ravel() + self._split.part_starts[part][1]
        sizes = packed.lengths[units].ravel()
        starts = np.asarray(self._split.bounds[numbers]).astype(np.int64)
        ends = np.cumsum(sizes)
        documents = np.repeat(np.arange(len(sizes)), sizes)
        begins = np.repeat(ends - sizes, sizes)
        places = np.arange(len(documents)) - begins + np.repeat(starts, sizes)
        texts = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        ids = np.concatenate([self._split.tokens[start:end] for start, end in texts])
        assert self._split.loss_mask is not None
        loss_mask = np.concatenate([self._split.loss_mask[start:end] for start, end in texts]) > 0
        kto_labels = None
        if self._split.kto_labels is not None:
            kto_labels = np.repeat(np.asarray(self._split.kto_labels[numbers]).astype(np.int64), sizes)
        return _Span(
            ids=np.append(ids, self._pad_id),  # the last position also has a label, of another document
            documents=np.append(documents, -1),
            begins=np.append(begins, 0),
            places=np.append(places, -1),
            loss_mask=np.append(loss_mask, False),
            kto_labels=kto_labels,
        )

    def _one_document(self, document: int) -> PackedSequence:
        start, end = int(self._split.bounds[document]), int(self._split.bounds[document + 1])
        count = min(end - start, self._length + 1)
        none = np.zeros(count, np.int64)
        return self._padded(_Span(self._split.tokens[start : start + count], none, none, start + np.arange(count)))

    def _stream(self, part: int, index: int) -> PackedSequence:
        first, end = self._split.part_starts[part][0], self._split.part_starts[part + 1][0]
        start = first + index * self._length
        stop = min(start + self._length + 1, end)
        ids, places = self._split.tokens[start:stop], np.arange(start, stop)
        loss_mask = None if self._split.loss_mask is None else self._split.loss_mask[start:stop] > 0
        if self._layout == "fixed":
            none = np.zeros(len(ids), np.int64)
            return self._padded(_Span(ids, none, none, places, loss_mask))
        return self._padded(_Span(ids, *self._documents(start, len(ids)), places, loss_mask))

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """The document of each token, numbered from 0 in this sequence, and the place where that document begins."""
        bounds = self._split.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, start + count - 1, side="right"))
        inner = np.asarray(bounds[first + 1 : last]).astype(np.int64) - start
        begins = np.concatenate([np.zeros(1, np.int64), inner])
        numbers = np.searchsorted(begins, np.arange(count), side="right") - 1
        return numbers, begins[numbers]

    def _padded(self, of: _Span) -> PackedSequence:
        """`of` has one more token than positions where the text continues. The rest is padding: document -1, mask 0."""
        count, length = max(min(len(of.ids) - 1, self._length), 0), self._length

        def padded(values: Ids, fill: int) -> Ids:
            filled = np.full(length, fill, np.int64)
            filled[:count] = values[:count]
            return filled

        together = of.documents[1 : count + 1] == of.documents[:count]
        loss_mask = np.zeros(length, np.float32)
        loss_mask[:count] = together if of.loss_mask is None else together & of.loss_mask[1 : count + 1]
        return PackedSequence(
            tokens=padded(of.ids, self._pad_id),
            labels=padded(of.ids[1:], self._pad_id),
            loss_mask=loss_mask,
            positions=padded(np.arange(count) - of.begins[:count], 0),
            documents=padded(of.documents, -1),
            stored=padded(np.where(together, of.places[1 : count + 1], -1), -1),
            kto_labels=None if of.kto_labels is None else padded(of.kto_labels, 0),
        )
