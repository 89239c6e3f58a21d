"""Index arithmetic from a step's number to its batch."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np
import torch
from torch import Tensor

from bloomery.data.packing import Layout, Row, Rows
from bloomery.data.shards import Name, open_split, read_manifest
from bloomery.data.shuffle import feistel, mix
from bloomery.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every tensor is [B, T].

    `labels[b, t]` is the token after `tokens[b, t]`; `weights` is 1 where that label is learned (0 over the end of a
    document and on padding);
    `positions` count from the start of the document, or of the row where a document goes on from the row before;
    `documents` number the documents of a row from 0 (padding is -1).

    Of text with a structure, else None: `sequences` number the texts of the micro-batch that are judged as wholes from
    0 (padding is -1), the chosen and the rejected answer of a pair being 2i and 2i + 1; `marks` are what the data says
    of each (kto: 1 desirable, 0 not); `reference` is what the model of the start gives each label, a log-probability.
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    weights: Tensor  # float32
    positions: Tensor  # int64
    documents: Tensor  # int64
    sequences: Tensor | None = None  # int64
    marks: Tensor | None = None  # int64
    reference: Tensor | None = None  # float32

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
    """

    def __init__(self, prepared: Path, *, sequence_length: int, layout: Layout, seed: int,
                 split: Name = "train", rank: int = 0, world: int = 1) -> None:  # fmt: skip
        manifest = read_manifest(prepared)
        opened = open_split(prepared, split, manifest)
        self._rows = Rows(opened, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id)
        self._seed, self._rank, self._world = seed, rank, world
        self._vocab_size, self._prepared = manifest.vocab_size, prepared
        weights = [part.weight if split == "train" else 1.0 for part in opened.record.parts]
        self._visits = [round(count * weight) for count, weight in zip(self._rows.counts, weights, strict=True)]
        self._ends = np.cumsum(self._visits)
        self.rows = sum(self._visits)
        if self.rows == 0:
            raise UserError(
                f"the {split} split is empty", where=str(prepared), remedy="add text, or set data.validation"
            )

    def batch(self, cursor: Cursor, rows: int) -> Batch:
        """Rows consumed .. consumed + `rows` of the run; of these, this rank's: every world-th from its own number
        on.
        """
        assert rows % self._world == 0, f"{rows} rows cannot be shared by {self._world} ranks"
        assert cursor.seed == self._seed, "the cursor belongs to another run"
        places = range(cursor.consumed + self._rank, cursor.consumed + rows, self._world)
        return self._stacked([self._rows.read(*self.place(index)) for index in places])

    def place(self, index: int) -> tuple[int, int]:
        """(source, row in it) of the index-th row of the run."""
        epoch, position = divmod(index, self.rows)
        return self._visit(feistel(position, size=self.rows, key=mix(self._seed, epoch)), epoch)

    def _visit(self, number: int, epoch: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, number, side="right"))
        turn, row = divmod(number - int(self._ends[part]) + self._visits[part], self._rows.counts[part])
        if (turn + 1) * self._rows.counts[part] > self._visits[part]:
            row = feistel(row, size=self._rows.counts[part], key=mix(self._seed, epoch, part + 1))
        return part, row

    def validation_batches(self, rows: int, limit: int | None = None) -> Iterator[Batch]:
        """This rank's batches of `rows` rows in the order of the text; what is missing at the end is padding of
        weight 0.

        `limit`: at most so many rows of all ranks together, spread evenly over the split.
        """
        wanted = min(self.rows, limit or self.rows)
        for start in range(0, wanted, rows * self._world):
            places = (start + self._rank + self._world * offset for offset in range(rows))
            yield self._stacked(
                [
                    self._in_order(place * self.rows // wanted) if place < wanted else self._rows.empty()
                    for place in places
                ]
            )

    def _stacked(self, rows: list[Row]) -> Batch:
        """The checksums of shards are too slow for every start; an id without an embedding is noticed here instead."""
        batch = _stack(rows)
        largest = max(int(batch.tokens.max()), int(batch.labels.max()))
        if largest >= self._vocab_size:
            raise UserError(
                f"a shard holds token {largest:,} of a vocabulary of {self._vocab_size:,}: it is damaged",
                where=str(self._prepared),
                remedy="delete that folder and prepare again",
            )
        return batch

    def _in_order(self, number: int) -> Row:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self._rows.read(part, (number - int(self._ends[part]) + self._visits[part]) % self._rows.counts[part])


def _stack(rows: list[Row]) -> Batch:
    stacked = {
        field.name: torch.from_numpy(np.stack([getattr(row, field.name) for row in rows])) for field in fields(Row)
    }
    return Batch(**stacked)


@final
class Prefetcher:
    """Reads ahead in a thread: `next()` gives the batches from `cursor` on, in order. An error of the thread is
    raised by `next`.
    """

    def __init__(self, loader: Loader, cursor: Cursor, *, rows: int, depth: int = 2, pin_memory: bool = False) -> None:
        self._loader, self._cursor, self._rows_each, self._pin = loader, cursor, rows, pin_memory
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
            self._drain()
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
                self._put(self._read(consumed))
                consumed += self._rows_each
        except BaseException as error:  # handed to the thread that asks
            self._put(error)

    def _read(self, consumed: int) -> Batch:
        batch = self._loader.batch(Cursor(self._cursor.seed, consumed), self._rows_each)
        return batch.each(Tensor.pin_memory) if self._pin else batch

    def _put(self, found: Batch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(found, timeout=0.1)
                return
            except queue.Full:
                continue

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return
