"""The order of rows is arithmetic: each once an epoch, the same on any number of ranks, any batch at any time."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.loader import Loader, Prefetcher
from bloomery.data.order import Cursor, feistel, mix, mix_arrays
from bloomery.data.prepare.prepare import prepare


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_feistel_is_a_bijection(size, key):
    assert sorted(feistel(position, size=size, key=key) for position in range(size)) == list(
        range(size)
    )


def test_shuffle_is_the_same_for_ever():
    """Figures from the first version: another order would break the resumption of every run there is."""
    assert [
        feistel(index % 10, size=10, key=mix(7, index // 10)) for index in range(20)
    ] == FIRST_ORDER
    assert mix(1, 2, 3) == FIRST_MIX
    states = np.array([mix(1, 2), mix(5, 2**63)], dtype=np.uint64)
    mixed_states = mix_arrays(states, np.array([3, 2**40], dtype=np.uint64))
    assert mixed_states.tolist() == [FIRST_MIX, mix(5, 2**63, 2**40)]


FIRST_ORDER = [5, 6, 3, 1, 9, 2, 0, 8, 7, 4, 2, 0, 7, 8, 6, 4, 3, 5, 1, 9]
FIRST_MIX = 15020427595393229491


@pytest.fixture
def folder(corpus: Path, tmp_path: Path, recipe_of) -> Path:
    prepare(recipe_of(path=str(corpus), validation="20%"), tmp_path / "prepared")
    return tmp_path / "prepared"


def loader(folder: Path, **options) -> Loader:
    return Loader(folder, **{"sequence_length": 16, "layout": "packed", "seed": 3, **options})


def as_rows(batch: Batch) -> list[tuple]:
    return [
        tuple(map(tuple, (batch.tokens[row].tolist(), batch.labels[row].tolist())))
        for row in range(len(batch.tokens))
    ]


def test_a_batch_has_the_shapes_and_types_of_its_docstring(folder):
    batch = loader(folder).batch(Cursor(3, 0), 5)
    for name, dtype in (
        ("tokens", torch.int64),
        ("labels", torch.int64),
        ("loss_mask", torch.float32),
        ("positions", torch.int64),
        ("documents", torch.int64),
    ):
        assert getattr(batch, name).shape == (5, 16)
        assert getattr(batch, name).dtype == dtype


def test_an_epoch_visits_every_row_once_in_another_order_each_time(folder):
    data = loader(folder)
    first_epoch = [data.locate(index) for index in range(data.sequences)]
    second_epoch = [data.locate(index) for index in range(data.sequences, 2 * data.sequences)]
    assert (
        sorted(first_epoch) == sorted(second_epoch) == [(0, row) for row in range(data.sequences)]
    )
    assert first_epoch != second_epoch
    assert first_epoch != [loader(folder, seed=4).locate(index) for index in range(data.sequences)]


def test_ranks_share_the_rows_of_one_rank(folder):
    rows_of_one_rank = as_rows(loader(folder).batch(Cursor(3, 8), 8))
    for world in (2, 4):
        parts = [
            as_rows(loader(folder, data_rank=rank, data_world=world).batch(Cursor(3, 8), 8))
            for rank in range(world)
        ]
        assert [parts[index % world][index // world] for index in range(8)] == rows_of_one_rank


def test_micro_batches_are_consecutive_rows_of_the_batch(folder):
    data = loader(folder)
    assert as_rows(data.batch(Cursor(3, 4), 3)) + as_rows(data.batch(Cursor(3, 7), 3)) == as_rows(
        data.batch(Cursor(3, 4), 6)
    )


def test_weights_of_sources_are_exact(tmp_path, recipe_of):
    sources = []
    for name, weight in (("a", 2.5), ("b", 1.0), ("c", 0.4)):
        path = tmp_path / f"{name}.txt"
        path.write_text(f"{name} " * 700)
        sources.append({"path": str(path), "weight": weight})
    prepare(recipe_of(sources=sources, validation=0), tmp_path / "prepared")
    data = loader(tmp_path / "prepared")
    row_counts = loader(tmp_path / "prepared")._packing.counts
    for epoch in range(2):
        visits = Counter(
            data.locate(epoch * data.sequences + index) for index in range(data.sequences)
        )
        by_source = [
            Counter({row: n for (part, row), n in visits.items() if part == source})
            for source in range(3)
        ]
        assert [sum(rows.values()) for rows in by_source] == [
            round(2.5 * row_counts[0]),
            row_counts[1],
            round(0.4 * row_counts[2]),
        ]
        assert set(by_source[0].values()) == {2, 3}
        assert set(by_source[1].values()) == set(by_source[2].values()) == {1}


def test_validation_is_in_order_and_padded_to_one_shape(folder):
    data = loader(folder, split="validation")
    batches = list(data.validation_batches(4))
    assert {batch.tokens.shape for batch in batches} == {(4, 16)}
    rows = [row for batch in batches for row in as_rows(batch)]
    assert len(rows) == -(-data.sequences // 4) * 4
    assert all(
        batch.loss_mask[row].sum() == 0
        for batch in batches[-1:]
        for row in range(4)
        if data.sequences % 4 and row >= data.sequences % 4
    )
    expected = [data._packing.read(0, index) for index in range(data.sequences)]
    assert [row[0] for row in rows[: data.sequences]] == [
        tuple(row.tokens.tolist()) for row in expected
    ]
    rank_batches = [
        list(loader(folder, split="validation", data_rank=rank, data_world=2).validation_batches(2))
        for rank in range(2)
    ]
    assert len(rank_batches[0]) == len(rank_batches[1])
    rank_rows = [
        as_rows(batch)[row]
        for pair in zip(*rank_batches, strict=True)
        for row in range(2)
        for batch in pair
    ]
    assert rank_rows[: data.sequences] == rows[: data.sequences]


def test_limited_validation_is_spread_over_the_text(folder):
    data = loader(folder, split="validation")
    rows = [row for batch in data.validation_batches(2, limit=4) for row in as_rows(batch)]
    all_rows = [row for batch in data.validation_batches(2) for row in as_rows(batch)]
    assert rows == [all_rows[index * data.sequences // 4] for index in range(4)]


def test_an_empty_validation_split_is_refused(tmp_path, corpus, recipe_of):
    prepare(recipe_of(path=str(corpus), validation=0), tmp_path / "prepared")
    with pytest.raises(UserError, match="the validation split is empty"):
        loader(tmp_path / "prepared", split="validation")


def test_weights_that_round_to_no_sequence_are_named(tmp_path, corpus, recipe_of):
    sources = [{"path": str(corpus), "weight": 1e-6}]
    prepare(recipe_of(sources=sources, validation=0), tmp_path / "prepared")
    with pytest.raises(UserError, match="the weights of the sources round to none"):
        loader(tmp_path / "prepared")


def test_prefetcher_gives_the_cursor_s_batches_and_closes(folder):
    data = loader(folder)
    with Prefetcher(data, Cursor(3, 5), batch_size=2, depth=3) as prefetcher:
        prefetched_rows = [row for _ in range(6) for row in as_rows(prefetcher.next())]
    assert prefetched_rows == as_rows(data.batch(Cursor(3, 5), 12))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_out_a_step_and_fill_it_up_with_padding(folder, world):
    """Steps of 7 sequences in micro-batches of 2 for each rank: each sequence once, in the order of one rank."""
    loader_of_one_rank = loader(folder)
    micro_batches = -(-7 // (2 * world))
    rank_batches: list[list[Batch]] = []
    for rank in range(world):
        loader_of_rank = loader(folder, data_rank=rank, data_world=world)
        with Prefetcher(
            loader_of_rank, Cursor(3, 4), batch_size=2 * world, step_size=7
        ) as prefetcher:
            rank_batches.append([prefetcher.next() for _ in range(2 * micro_batches)])
    for step in range(2):
        batches = [
            batches_of_rank[step * micro_batches + number]
            for number in range(micro_batches)
            for batches_of_rank in rank_batches
        ]
        rows = [row for batch in batches for row in as_rows(batch)]
        expected_rows = as_rows(loader_of_one_rank.batch(Cursor(3, 4 + 7 * step), 7))
        assert sorted(row for row in rows if row in expected_rows) == sorted(expected_rows)
        padding = sum(
            bool((batch.documents[row_index] == -1).all())
            for batch in batches
            for row_index in range(2)
        )
        assert padding == micro_batches * 2 * world - 7
        assert sum(float(batch.loss_mask.sum()) for batch in batches) == float(
            loader_of_one_rank.batch(Cursor(3, 4 + 7 * step), 7).loss_mask.sum()
        )


def test_prefetcher_hands_over_errors(folder, monkeypatch):
    data = loader(folder)

    def failing_batch(cursor: Cursor, rows: int, *, filled: int) -> Batch:
        if cursor.consumed >= 4:
            raise UserError("the disk went away")
        return Loader.batch(data, cursor, rows, filled=filled)

    class FailingLoader:
        batch = staticmethod(failing_batch)

    with Prefetcher(FailingLoader(), Cursor(3, 0), batch_size=2) as prefetcher:
        prefetcher.next()
        prefetcher.next()
        for _ in range(2):
            with pytest.raises(UserError, match="went away"):
                prefetcher.next()
