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
    used: list[int] = []
    changed: list[int] = []  # when a row last took something
    for turn, text in enumerate(
        sorted(range(len(lengths)), key=lambda text: (-lengths[text], text))
    ):
        fitting = [row for row in range(len(rows)) if used[row] + lengths[text] <= capacity]
        if fitting:
            row = max(fitting, key=lambda row: (used[row], changed[row]))
        else:
            row = len(rows)
            rows.append([])
            used.append(0)
            changed.append(turn)
        rows[row].append(text)
        used[row] += lengths[text]
        changed[row] = turn
    return [sorted(row) for row in rows]


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 5000))
def test_best_fit_is_the_slow_one(data, capacity):
    lengths = data.draw(
        st.lists(st.integers(1, capacity) | st.integers(1, min(capacity, 9)), max_size=60)
    )
    found = best_fit(np.array(lengths, np.int64), capacity)
    rows = [
        np.flatnonzero(found == row).tolist() for row in range(found.max() + 1 if lengths else 0)
    ]
    assert rows == slow_best_fit(lengths, capacity)


def test_a_hundred_thousand_texts_take_no_time_and_little_room():
    lengths = np.clip(
        np.random.default_rng(0).lognormal(5.8, 1.0, 100_000).astype(np.int64), 1, 4096
    )
    begun = time.process_time()
    rows = best_fit(lengths, 4096)
    assert time.process_time() - begun < 2
    assert rows.max() + 1 < 1.01 * lengths.sum() / 4096


def rows_of(split: Split, layout: str, length: int) -> list[dict[str, list[float]]]:
    rows = PackedSequences(split, sequence_length=length, layout=layout, pad_id=PAD)
    read = [
        rows.read(part, index) for part, count in enumerate(rows.counts) for index in range(count)
    ]
    return [
        {
            name: value.tolist()
            for name, value in {**vars(row), **row.extras}.items()
            if name != "extras"
        }
        for row in read
    ]


def text(*tokens: int, loss_mask: tuple[int, ...]) -> Text:
    return [(token, place in loss_mask) for place, token in enumerate(tokens)]


def test_packed_conversations_by_hand(tmp_path):
    texts = [
        text(10, 11, 12, 13, loss_mask=(2, 3)),
        text(20, 21, loss_mask=(1,)),
        text(30, 31, 32, loss_mask=(1,)),
    ]
    first, second = rows_of(write_structured(tmp_path, [texts], "chat"), "packed", 6)
    assert first == {
        "tokens": [10, 11, 12, 13, 20, 21],
        "labels": [11, 12, 13, 20, 21, PAD],
        "loss_mask": [0, 1, 1, 0, 1, 0],
        "positions": [0, 1, 2, 3, 0, 1],
        "documents": [0, 0, 0, 0, 1, 1],
        "label_indices": [1, 2, 3, -1, 5, -1],
    }
    assert second == {
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
    fitted = rows.packed_sources[0]
    assert (
        fitted.sequences,
        fitted.truncated_units,
        fitted.truncated_tokens,
        fitted.dropped_units,
        fitted.all_masked_units,
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
    ("sizes", "kept"),
    [((3, 4), (3, 4)), ((3, 9), (3, 7)), ((9, 3), (7, 3)), ((9, 9), (5, 5)), ((5, 6), (5, 5))],
)
def test_both_sides_of_a_long_pair_share_the_row(tmp_path, sizes, kept):
    texts = [
        text(*range(100 * side, 100 * side + size), loss_mask=(2,))
        for side, size in enumerate(sizes, 1)
    ]
    (row,) = rows_of(write_structured(tmp_path, [texts], "pairs"), "packed", 10)
    expected = [*range(100, 100 + kept[0]), *range(200, 200 + kept[1])]
    assert row["tokens"][: sum(kept)] == expected
    assert row["documents"][: sum(kept)] == [0] * kept[0] + [1] * kept[1]
    assert sum(row["loss_mask"]) == 2


def test_a_pair_with_one_side_unlearned_is_dropped_whole(tmp_path):
    texts = [text(1, 2, 3, loss_mask=(2,)), text(1, 2, 4, loss_mask=())]
    texts += [text(5, 6, loss_mask=(1,)), text(5, 7, loss_mask=(1,))]
    (row,) = rows_of(write_structured(tmp_path, [texts], "pairs"), "packed", 8)
    assert row["tokens"][:4] == [5, 6, 5, 7]


def test_pairs_are_never_cut_by_the_stream(tmp_path):
    split = write_structured(
        tmp_path, [[text(1, 2, loss_mask=(1,)), text(1, 3, loss_mask=(1,))]], "pairs"
    )
    with pytest.raises(UserError, match="a pair must stay in one sequence"):
        PackedSequences(split, sequence_length=8, layout="fixed", pad_id=PAD)


def test_fixed_learns_what_is_marked(tmp_path):
    texts = [text(1, 2, 3, loss_mask=(2,)), text(4, 5, 6, loss_mask=(1, 2))]
    first, second = rows_of(write_structured(tmp_path, [texts], "chat"), "fixed", 4)
    assert first["labels"] + second["labels"][:1] == [2, 3, 4, 5, 6]
    assert first["loss_mask"] + second["loss_mask"] == [0, 1, 0, 1, 1, 0, 0, 0]


TEXT = st.lists(st.tuples(st.integers(10, 999), st.booleans()), min_size=2, max_size=9)


@settings(deadline=None, max_examples=25)
@given(
    parts=st.lists(st.lists(TEXT, max_size=12), min_size=1, max_size=3), length=st.integers(4, 24)
)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("chat", "packed"), ("pairs", "packed"), ("chat", "padded"), ("kto", "padded")],
)
def test_every_kept_token_stands_once_with_its_flag(tmp_path_factory, kind, layout, parts, length):
    together = 1 if kind == "chat" else 2
    parts = [texts[: len(texts) // together * together] for texts in parts]
    split = write_structured(tmp_path_factory.mktemp("s"), parts, kind)
    rows = PackedSequences(split, sequence_length=length, layout=layout, pad_id=PAD)
    for part, texts in enumerate(parts):
        found: list[list[tuple[int, int, float]]] = []
        for index in range(rows.counts[part]):
            row = rows.read(part, index)
            numbers = [number for number in dict.fromkeys(row.documents.tolist()) if number >= 0]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) % together == 0
            assert layout == "packed" or len(numbers) == together
            pieces = [np.flatnonzero(row.documents == number) for number in numbers]
            assert all(row.positions[piece].tolist() == list(range(len(piece))) for piece in pieces)
            for unit in range(0, len(pieces), together):
                both = np.concatenate(pieces[unit : unit + together])
                found.append(
                    list(zip(row.tokens[both], row.labels[both], row.loss_mask[both], strict=True))
                )
        expected = []
        for unit in range(0, len(texts), together):
            sides = kept_sides(texts[unit : unit + together], length)
            if all(any(flag for _, flag in side[1:]) for side in sides):
                expected.append([entry for side in sides for entry in as_positions(side)])
        assert sorted(map(masked, found)) == sorted(map(masked, expected))


def kept_sides(sides: list[Text], length: int) -> list[Text]:
    if len(sides) == 1:
        return [sides[0][:length]]
    a, b = map(len, sides)
    if a + b > length:
        half = length // 2
        a, b = (a, length - a) if a <= half else (length - b, b) if b <= half else (half, half)
    return [sides[0][:a], sides[1][:b]]


def as_positions(side: Text) -> list[tuple[int, int, float]]:
    following = [*side[1:], (0, False)]
    return [
        (token, label, float(flag))
        for (token, _), (label, flag) in zip(side, following, strict=True)
    ]


def masked(entries: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Labels that are not learned may be anything."""
    return [
        (int(token), int(label) if weight else 0, float(weight)) for token, label, weight in entries
    ]
