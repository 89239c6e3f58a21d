"""Index arithmetic from a step's number to its batch."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.loading.packing import Layout, PackedSequence, PackedSequences
from bloomery.data.loading.reference_logprobs import Reference
from bloomery.data.shards.format import SplitName, open_split, read_manifest

_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def feistel(position: int, *, size: int, key: int) -> int:
    """A keyed bijection of 0 .. size - 1: four Feistel rounds over the next even power of two, walked until the
    result is inside.
    """
    assert 0 <= position < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = position >> half, position & low
        for turn in range(4):
            left, right = right, left ^ mix(key, turn, right) & low
        position = left << half | right
        if position < size:
            return position


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every tensor is [B, T].

    `labels[b, t]` is the token after `tokens[b, t]`; `loss_mask` is 1 where that label is learned (0 over the end of a
    document and on padding);
    `positions` count from the start of the document, or of the row where a document goes on from the row before;
    `documents` number the documents of a row from 0 (padding is -1).

    Of text with a structure, else None: `sequences` number the texts of the micro-batch that are judged as wholes from
    0 (padding is -1), the chosen and the rejected answer of a pair being 2i and 2i + 1; `kto_labels` are 1 for a
    desirable answer, 0 for an undesirable one; `reference` is each label's log-probability under the reference model.
    `baseline`, one number, is what the rewards of a whole step are measured from (kto).
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    loss_mask: Tensor  # float32
    positions: Tensor  # int64
    documents: Tensor  # int64
    sequences: Tensor | None = None  # int64
    kto_labels: Tensor | None = None  # int64
    reference: Tensor | None = None  # float32
    baseline: Tensor | None = None  # float32, []

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `change` made to every tensor that it has."""
        found: dict[str, Tensor] = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return Batch(**{name: change(tensor) for name, tensor in found.items()})


@dataclass(frozen=True)
class Cursor:
    """The data state of a run: the next row is f(seed, consumed)."""

    seed: int
    consumed: int  # rows


@final
class Loader:
    """Batches of a prepared folder. Row i of a run is f(seed, i): any row, at any time, on any number of ranks.

    A source of weight w comes floor(w) times in an epoch, and a share w - floor(w) of its rows once more, another share
    in each epoch. Raises UserError as `read_manifest` does, and when the split has no row.

    `reference`: a file that a ReferenceWriter filled from `stored_batches` for `run`, for Batch.reference.
    """

    def __init__(self, prepared: Path, *, sequence_length: int, layout: Layout, seed: int, split: SplitName = "train",
                 rank: int = 0, world: int = 1, reference: Path | None = None, run: str = "") -> None:  # fmt: skip
        manifest = read_manifest(prepared)
        opened = open_split(prepared, split, manifest)
        self.kind, self.tokens = manifest.kind, opened.record.tokens
        self._sequences = PackedSequences(
            opened, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id
        )
        self._reference = None if reference is None else Reference(reference, self.tokens, run)
        self._seed, self._rank, self._world = seed, rank, world
        weights = [part.weight if split == "train" else 1.0 for part in opened.record.parts]
        self._visits = [round(count * weight) for count, weight in zip(self._sequences.counts, weights, strict=True)]
        self._ends = np.cumsum(self._visits)
        self.sequences = sum(self._visits)
        if self.sequences == 0:
            if not self.tokens:
                fix = "add text, or set data.validation"
                raise UserError(f"the {split} split is empty", where=str(prepared), fix=fix)
            problem = f"no row of the {split} split has anything to learn within its length"
            fix = "raise data.sequence_length; bloomery prepare RECIPE --check says more"
            raise UserError(problem, where=str(prepared), fix=fix)

    def batch(self, cursor: Cursor, rows: int) -> Batch:
        """Rows consumed .. consumed + `rows` of the run; of these, this rank's: every world-th from its own number
        on.
        """
        assert rows % self._world == 0, f"{rows} rows cannot be shared by {self._world} ranks"
        assert cursor.seed == self._seed, "the cursor belongs to another run"
        places = range(cursor.consumed + self._rank, cursor.consumed + rows, self._world)
        return self._stack([self._sequences.read(*self.place(index)) for index in places])

    def place(self, index: int) -> tuple[int, int]:
        """(source, row in it) of the index-th row of the run."""
        epoch, position = divmod(index, self.sequences)
        return self._visit(feistel(position, size=self.sequences, key=mix(self._seed, epoch)), epoch)

    def _visit(self, number: int, epoch: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, number, side="right"))
        turn, row = divmod(number - int(self._ends[part]) + self._visits[part], self._sequences.counts[part])
        if (turn + 1) * self._sequences.counts[part] > self._visits[part]:
            row = feistel(row, size=self._sequences.counts[part], key=mix(self._seed, epoch, part + 1))
        return part, row

    def validation_batches(self, rows: int, limit: int | None = None) -> Iterator[Batch]:
        """This rank's batches of `rows` rows in the order of the text; what is missing at the end is padding of
        weight 0.

        `limit`: at most so many rows of all ranks together, spread evenly over the split.
        """
        wanted = min(self.sequences, limit or self.sequences)
        for start in range(0, wanted, rows * self._world):
            places = (start + self._rank + self._world * offset for offset in range(rows))
            yield self._stack(
                [
                    self._in_order(place * self.sequences // wanted) if place < wanted else self._sequences.empty()
                    for place in places
                ]
            )

    @property
    def stored_sequences(self) -> int:
        """How many rows `stored_batches` gives, of all ranks together and without padding."""
        return sum(self._sequences.counts)

    def stored_batches(self, rows: int) -> Iterator[tuple[Batch, Tensor]]:
        """Every row of the split once, in order, this rank's share; and int64 [B, T], which of the split's tokens each
        label is (-1: none). What is missing at the end is padding.
        """
        counts = np.cumsum(self._sequences.counts)
        for start in range(0, int(counts[-1]), rows * self._world):
            found = []
            for place in (start + self._rank + self._world * offset for offset in range(rows)):
                part = int(np.searchsorted(counts, place, side="right"))
                index = place - int(counts[part - 1] if part else 0)
                found.append(self._sequences.read(part, index) if part < len(counts) else self._sequences.empty())
            yield self._stack(found), torch.from_numpy(np.stack([row.stored for row in found]))

    def _stack(self, rows: list[PackedSequence]) -> Batch:
        def stacked(arrays: list[np.ndarray[Any, np.dtype[Any]]]) -> Tensor:
            return torch.from_numpy(np.stack(arrays))

        reference = None
        if self._reference is not None:
            reference = stacked([self._reference.of(row.stored, row.loss_mask) for row in rows])
        kto_labels = [row.kto_labels for row in rows if row.kto_labels is not None]
        return Batch(
            tokens=stacked([row.tokens for row in rows]),
            labels=stacked([row.labels for row in rows]),
            loss_mask=stacked([row.loss_mask for row in rows]),
            positions=stacked([row.positions for row in rows]),
            documents=stacked([row.documents for row in rows]),
            sequences=stacked(_numbered(rows)) if self._sequences.packed else None,
            kto_labels=stacked(kto_labels) if self.kind == "kto" else None,
            reference=reference,
        )

    def _in_order(self, number: int) -> PackedSequence:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self._sequences.read(
            part, (number - int(self._ends[part]) + self._visits[part]) % self._sequences.counts[part]
        )


def _numbered(rows: list[PackedSequence]) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """The documents of all rows counted on from row to row; padding stays -1."""
    ends = np.cumsum([int(row.documents.max()) + 1 for row in rows])
    begins = [0, *ends[:-1].tolist()]
    return [np.where(row.documents < 0, -1, row.documents + begin) for row, begin in zip(rows, begins, strict=True)]


@final
class Prefetcher:
    """Reads ahead in a thread: `next()` gives the batches from `cursor` on, in order. An error of the thread is
    raised by `next`.
    """

    def __init__(
        self, loader: Loader, cursor: Cursor, *, sequences: int, depth: int = 2, pin_memory: bool = False
    ) -> None:
        self._loader, self._cursor, self._size, self._pin = loader, cursor, sequences, pin_memory
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetcher":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):  # so that a thread that waits for room goes on
                while True:
                    self._queue.get_nowait()
            self._thread.join(0.05)

    def next(self) -> Batch:
        """The next batch; blocks while it is read."""
        if self._failed is not None:
            raise self._failed
        found = self._queue.get()
        if isinstance(found, BaseException):
            self._failed = found
            raise found
        return found

    def _run(self) -> None:
        consumed = self._cursor.consumed
        try:
            while not self._closed.is_set():
                batch = self._loader.batch(Cursor(self._cursor.seed, consumed), self._size)
                self._put(batch.each(Tensor.pin_memory) if self._pin else batch)
                consumed += self._size
        except BaseException as error:  # handed to the thread that asks
            self._put(error)

    def _put(self, found: Batch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(found, timeout=0.1)
                return
            except queue.Full:
                continue
