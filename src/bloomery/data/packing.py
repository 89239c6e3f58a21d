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
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The sequence of each text by best-fit decreasing: longest first (of equal ones the first), each into the sequence
    where it leaves the least room (of equal ones the latest), else into a new one. O(n log n). The number of sequences
    is at most 11/9 of the optimum plus 6/9 (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    # rooms: the free positions that a sequence has, each once, sorted
    rooms = list[int]()
    count = 0
    having: dict[int, list[int]] = defaultdict(list)  # the sequences of each room
    sequences = np.zeros(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for text, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            sequence = count
            room = capacity
            count += 1
        else:
            room = rooms[place]
            sequence = having[room].pop()
            if not having[room]:
                del rooms[place]
        sequences[text] = sequence
        if left := room - length:
            if not having[left]:
                insort(rooms, left)
            having[left].append(sequence)
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


def pack_source(
    split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]
) -> PackedSource:
    """The sequences of one source of conversations or pairs. Deterministic; a million units in about a second."""
    (_, begin) = split.part_starts[part]
    (_, end) = split.part_starts[part + 1]
    texts = DOCUMENTS_PER_UNIT[split.kind]  # of a unit
    bounds = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
    whole = (bounds[1:] - bounds[:-1]).reshape(-1, texts)
    first = (
        np.zeros(end - begin, np.int64)
        if split.first is None
        else np.asarray(split.first[begin:end], np.int64)
    )
    first = first.reshape(-1, texts)  # the place of its first loss token
    lengths = truncated_lengths(whole, sequence_length)
    trainable = (first < whole).all(1)
    kept = np.flatnonzero((first < lengths).all(1))
    shorter = lengths[kept] < whole[kept]
    places = (
        best_fit(lengths[kept].sum(1), sequence_length)
        if layout == "packed"
        else np.arange(len(kept))
    )
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


def count_plain_sequences(
    tokens: int, documents: int, *, sequence_length: int, layout: Layout
) -> int:
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
def count_sequences(
    folder: Path, manifest: Manifest, *, sequence_length: int, layout: Layout
) -> SequenceCounts:
    """Of the train split. Raises UserError as PackedSequences does."""
    if manifest.kind != "text":
        split = Split(folder, manifest, "train")
        sequences = PackedSequences(
            split, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id
        )
        return SequenceCounts(sequences.counts, sequences.packed)
    parts = manifest.train.parts
    counts = [
        count_plain_sequences(p.tokens, p.documents, sequence_length=sequence_length, layout=layout)
        for p in parts
    ]
    return SequenceCounts(counts, [])


@final
class PackedSequences:
    """Sequence `index` of source `part` of a split, padded with `pad_id` to `sequence_length`.

    `packed`: how each source of conversations or pairs is packed. Raises UserError for a layout that cuts pairs.
    """

    def __init__(
        self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None
    ) -> None:
        self._split = split
        self._length = sequence_length
        self._layout = layout
        self._pad_id = pad_id or 0
        parts = split.record.parts
        if layout == "fixed" and DOCUMENTS_PER_UNIT[split.kind] > 1:
            raise pairs_need_packing()
        self._packed_sources: dict[int, PackedSource] = {}
        if layout != "fixed" and split.kind != "text":
            for number, part in enumerate(parts):
                if not part.plain:
                    packed = pack_source(
                        split, number, sequence_length=sequence_length, layout=layout
                    )
                    self._packed_sources[number] = packed
        self.packed = list(self._packed_sources.values())
        self.counts = [
            self._packed_sources[number].sequences
            if number in self._packed_sources
            else count_plain_sequences(
                p.tokens, p.documents, sequence_length=sequence_length, layout=layout
            )
            for number, p in enumerate(parts)
        ]

    def read(self, part: int, index: int) -> PackedSequence:
        assert 0 <= index < self.counts[part]
        if part in self._packed_sources:
            return self._packed(part, index)
        split = self._split
        (first, document) = split.part_starts[part]
        (end, _) = split.part_starts[part + 1]
        start = first + index * self._length
        if self._layout == "padded":
            start, end = (
                int(place) for place in split.bounds[document + index : document + index + 2]
            )
        stop = min(start + self._length + 1, end)
        documents = begins = np.zeros(stop - start, np.int64)
        if self._layout == "packed":
            documents, begins = self._documents(start, stop - start)
        loss_mask = None if split.loss_mask is None else split.loss_mask[start:stop] > 0
        return self._padded(
            split.tokens[start:stop], documents, begins, np.arange(start, stop), loss_mask
        )

    def empty(self) -> PackedSequence:
        """A sequence of padding."""
        none = np.zeros(0, np.int64)
        return self._padded(
            none, none, none, none, kto_labels=none if self._split.kind == "kto" else None
        )

    def _packed(self, part: int, index: int) -> PackedSequence:
        packed = self._packed_sources[part]
        answers = DOCUMENTS_PER_UNIT[self._split.kind]
        units = packed.units[packed.starts[index] : packed.starts[index + 1]]
        numbers = (units[:, None] * answers + np.arange(answers)).ravel() + self._split.part_starts[
            part
        ][1]
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
            kto_labels = np.repeat(
                np.asarray(self._split.kto_labels[numbers]).astype(np.int64), sizes
            )
        return self._padded(
            np.append(ids, self._pad_id),  # the last position also has a label, of another document
            np.append(documents, -1),
            np.append(begins, 0),
            np.append(places, -1),
            np.append(loss_mask, False),
            kto_labels,
        )

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """The document of each token, numbered from 0 in this sequence, and the place where that document begins."""
        bounds = self._split.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, start + count - 1, side="right"))
        inner = np.asarray(bounds[first + 1 : last]).astype(np.int64) - start
        begins = np.concatenate([np.zeros(1, np.int64), inner])
        numbers = np.searchsorted(begins, np.arange(count), side="right") - 1
        return numbers, begins[numbers]

    def _padded(
        self,
        ids: Ids,
        documents: Ids,
        begins: Ids,
        places: Ids,
        loss_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
        kto_labels: Ids | None = None,
    ) -> PackedSequence:
        """A sequence of tokens, one more than it has positions where the text continues. The rest is padding: document
        -1, mask 0. Of each token: the number of its document and where that begins in the sequence, its place in the
        split, and whether it is trained on.
        """
        count = max(min(len(ids) - 1, self._length), 0)
        length = self._length

        def padded(values: Ids, fill: int) -> Ids:
            filled = np.full(length, fill, np.int64)
            filled[:count] = values[:count]
            return filled

        together = documents[1 : count + 1] == documents[:count]
        mask = np.zeros(length, np.float32)
        mask[:count] = together if loss_mask is None else together & loss_mask[1 : count + 1]
        return PackedSequence(
            tokens=padded(ids, self._pad_id),
            labels=padded(ids[1:], self._pad_id),
            loss_mask=mask,
            positions=padded(np.arange(count) - begins[:count], 0),
            documents=padded(documents, -1),
            stored=padded(np.where(together, places[1 : count + 1], -1), -1),
            kto_labels=None if kto_labels is None else padded(kto_labels, 0),
        )
