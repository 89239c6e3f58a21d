"""Rows of conversations and pairs against a packer that is slow and obvious, and against a hand computation."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured import PAD, Text, write_structured

from bloomery.core.errors import UserError
from bloomery.data.packing import PackedSequences, best_fit
from bloomery.data.shards import Split


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Looks at every row for every text."""
    rows: list[list[int]] = []
    row_lengths: list[int] = []
    last_turns: list[int] = []  # when a row last took something
    for turn, text in enumerate(
        sorted(range(len(lengths)), key=lambda text: (-lengths[text], text))
    ):
        fitting_rows = [
            row for row in range(len(rows)) if row_lengths[row] + lengths[text] <= capacity
        ]
        if fitting_rows:
            row = max(fitting_rows, key=lambda row: (row_lengths[row], last_turns[row]))
        else:
            row = len(rows)
            rows.append([])
            row_lengths.append(0)
            last_turns.append(turn)
        rows[row].append(text)
        row_lengths[row] += lengths[text]
        last_turns[row] = turn
    return [sorted(row) for row in rows]


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 5000))
def test_best_fit_equals_a_slow_search_of_all_rows(data, capacity):
    lengths = data.draw(
        st.lists(st.integers(1, capacity) | st.integers(1, min(capacity, 9)), max_size=60)
    )
    row_of_text = best_fit(np.array(lengths, np.int64), capacity)
    rows = [
        np.flatnonzero(row_of_text == row).tolist()
        for row in range(row_of_text.max() + 1 if lengths else 0)
    ]
    assert rows == slow_best_fit(lengths, capacity)


def test_best_fit_of_a_hundred_thousand_texts_is_fast_and_tight():
    lengths = np.clip(
        np.random.default_rng(0).lognormal(5.8, 1.0, 100_000).astype(np.int64), 1, 4096
    )
    started = time.process_time()
    rows = best_fit(lengths, 4096)
    assert time.process_time() - started < 2
    assert rows.max() + 1 < 1.01 * lengths.sum() / 4096


def rows_of(split: Split, layout: str, length: int) -> list[dict[str, list[float]]]:
    rows = PackedSequences(split, sequence_length=length, layout=layout, pad_id=PAD)
    read_rows = [
        rows.read(part, index) for part, count in enumerate(rows.counts) for index in range(count)
    ]
    return [
        {
            name: value.tolist()
            for name, value in {**vars(row), **row.extras}.items()
            if name not in ("extras", "pictures")
        }
        for row in read_rows
    ]


def text(*tokens: int, loss_mask: tuple[int, ...]) -> Text:
    return [(token, position in loss_mask) for position, token in enumerate(tokens)]


def test_packed_conversations_by_hand(tmp_path):
    texts = [
        text(10, 11, 12, 13, loss_mask=(2, 3)),
        text(20, 21, loss_mask=(1,)),
        text(30, 31, 32, loss_mask=(1,)),
    ]
    first_row, second_row = rows_of(write_structured(tmp_path, [texts], "chat"), "packed", 6)
    assert first_row == {
        "tokens": [10, 11, 12, 13, 20, 21],
        "labels": [11, 12, 13, 20, 21, PAD],
        "loss_mask": [0, 1, 1, 0, 1, 0],
        "positions": [0, 1, 2, 3, 0, 1],
        "documents": [0, 0, 0, 0, 1, 1],
        "label_indices": [1, 2, 3, -1, 5, -1],
    }
    assert second_row == {
        "tokens": [30, 31, 32, PAD, PAD, PAD],
        "labels": [31, 32, PAD, PAD, PAD, PAD],
        "loss_mask": [1, 0, 0, 0, 0, 0],
        "positions": [0, 1, 2, 0, 0, 0],
        "documents": [0, 0, 0, -1, -1, -1],
        "label_indices": [7, 8, -1, -1, -1, -1],
    }


def test_long_conversations_keep_their_start_or_are_dropped(tmp_path):
    texts = [
        text(*range(10, 20), loss_mask=(3, 9)),
        text(*range(20, 30), loss_mask=(8, 9)),
        text(30, 31, loss_mask=()),
        text(40, 41, loss_mask=(0,)),  # nothing predicts the first token of a text
    ]
    rows = PackedSequences(
        write_structured(tmp_path, [texts], "chat"), sequence_length=6, layout="packed", pad_id=PAD
    )
    packed_source = rows.packed_sources[0]
    assert (
        packed_source.sequences,
        packed_source.truncated_units,
        packed_source.truncated_tokens,
        packed_source.dropped_units,
        packed_source.all_masked_units,
    ) == (
        1,
        1,
        4,
        1,
        2,
    )
    row = rows.read(0, 0)
    assert row.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert row.loss_mask.tolist() == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "kept_sizes"),
    [((3, 4), (3, 4)), ((3, 9), (3, 7)), ((9, 3), (7, 3)), ((9, 9), (5, 5)), ((5, 6), (5, 5))],
)
def test_both_sides_of_a_long_pair_share_the_row(tmp_path, sizes, kept_sizes):
    texts = [
        text(*range(100 * side, 100 * side + size), loss_mask=(2,))
        for side, size in enumerate(sizes, 1)
    ]
    (row,) = rows_of(write_structured(tmp_path, [texts], "pairs"), "packed", 10)
    expected = [*range(100, 100 + kept_sizes[0]), *range(200, 200 + kept_sizes[1])]
    assert row["tokens"][: sum(kept_sizes)] == expected
    assert row["documents"][: sum(kept_sizes)] == [0] * kept_sizes[0] + [1] * kept_sizes[1]
    assert sum(row["loss_mask"]) == 2


def test_a_pair_with_one_fully_masked_side_is_dropped(tmp_path):
    texts = [text(1, 2, 3, loss_mask=(2,)), text(1, 2, 4, loss_mask=())]
    texts += [text(5, 6, loss_mask=(1,)), text(5, 7, loss_mask=(1,))]
    (row,) = rows_of(write_structured(tmp_path, [texts], "pairs"), "packed", 8)
    assert row["tokens"][:4] == [5, 6, 5, 7]


def test_the_fixed_layout_refuses_pairs(tmp_path):
    split = write_structured(
        tmp_path, [[text(1, 2, loss_mask=(1,)), text(1, 3, loss_mask=(1,))]], "pairs"
    )
    with pytest.raises(UserError, match="a pair must stay in one sequence"):
        PackedSequences(split, sequence_length=8, layout="fixed", pad_id=PAD)


def test_fixed_rows_keep_the_loss_mask(tmp_path):
    texts = [text(1, 2, 3, loss_mask=(2,)), text(4, 5, 6, loss_mask=(1, 2))]
    first_row, second_row = rows_of(write_structured(tmp_path, [texts], "chat"), "fixed", 4)
    assert first_row["labels"] + second_row["labels"][:1] == [2, 3, 4, 5, 6]
    assert first_row["loss_mask"] + second_row["loss_mask"] == [0, 1, 0, 1, 1, 0, 0, 0]


TEXT = st.lists(st.tuples(st.integers(10, 999), st.booleans()), min_size=2, max_size=9)


@settings(deadline=None, max_examples=25)
@given(
    parts=st.lists(st.lists(TEXT, max_size=12), min_size=1, max_size=3), length=st.integers(4, 24)
)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("chat", "packed"), ("pairs", "packed"), ("chat", "padded"), ("kto", "padded")],
)
def test_every_kept_token_is_in_one_row_with_its_flag(
    tmp_path_factory, kind, layout, parts, length
):
    texts_per_unit = 1 if kind == "chat" else 2
    parts = [texts[: len(texts) // texts_per_unit * texts_per_unit] for texts in parts]
    split = write_structured(tmp_path_factory.mktemp("s"), parts, kind)
    rows = PackedSequences(split, sequence_length=length, layout=layout, pad_id=PAD)
    for part, texts in enumerate(parts):
        found_units: list[list[tuple[int, int, float]]] = []
        for index in range(rows.counts[part]):
            row = rows.read(part, index)
            numbers = [number for number in dict.fromkeys(row.documents.tolist()) if number >= 0]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) % texts_per_unit == 0
            assert layout == "packed" or len(numbers) == texts_per_unit
            pieces = [np.flatnonzero(row.documents == number) for number in numbers]
            assert all(row.positions[piece].tolist() == list(range(len(piece))) for piece in pieces)
            for unit in range(0, len(pieces), texts_per_unit):
                unit_positions = np.concatenate(pieces[unit : unit + texts_per_unit])
                found_units.append(
                    list(
                        zip(
                            row.tokens[unit_positions],
                            row.labels[unit_positions],
                            row.loss_mask[unit_positions],
                            strict=True,
                        )
                    )
                )
        expected_units = []
        for unit in range(0, len(texts), texts_per_unit):
            sides = kept_sides(texts[unit : unit + texts_per_unit], length)
            if all(any(flag for _, flag in side[1:]) for side in sides):
                expected_units.append([entry for side in sides for entry in as_positions(side)])
        assert sorted(map(masked, found_units)) == sorted(map(masked, expected_units))


def kept_sides(sides: list[Text], length: int) -> list[Text]:
    if len(sides) == 1:
        return [sides[0][:length]]
    a, b = map(len, sides)
    if a + b > length:
        half_length = length // 2
        a, b = (
            (a, length - a)
            if a <= half_length
            else (length - b, b)
            if b <= half_length
            else (half_length, half_length)
        )
    return [sides[0][:a], sides[1][:b]]


def as_positions(side: Text) -> list[tuple[int, int, float]]:
    next_entries = [*side[1:], (0, False)]
    return [
        (token, label, float(flag))
        for (token, _), (label, flag) in zip(side, next_entries, strict=True)
    ]


def masked(entries: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Labels that are not learned may be anything."""
    return [
        (int(token), int(label) if weight else 0, float(weight)) for token, label, weight in entries
    ]
