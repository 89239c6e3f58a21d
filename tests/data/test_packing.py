"""Rows against a hand computation and against a reference that goes token by token."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.packing import PackedSequences, count_plain_sequences
from bloomery.data.shards import (
    Manifest,
    Split,
    SplitProgress,
    SplitRecord,
    SplitWriter,
    file_record,
)

PAD = 9


def write_split(folder: Path, parts: list[list[list[int]]], shard_tokens: int = 7) -> Split:
    """Documents of each source as a split of many small shards."""
    records: dict[str, SplitRecord] = {}
    for name, sources in (("train", parts), ("validation", [])):
        writer = SplitWriter(folder, name, "uint16", shard_tokens, SplitProgress())
        for documents in sources:
            writer.begin_part()
            for document in documents:
                writer.add(np.array(document, np.uint16), np.array([len(document)], np.uint64), 0)
        records[name] = writer.finish([1.0] * len(sources))
    manifest = Manifest(
        recipe="r",
        identity="i",
        tokenizer_hash="t",
        vocab_size=100,
        bos_id=1,
        eos_id=2,
        pad_id=PAD,
        unk_id=0,
        dtype="uint16",
        shard_tokens=shard_tokens,
        sources=(),
        **records,
    )
    return Split(folder, manifest, "train")


def rows_of(split: Split, layout: str, length: int) -> list[dict[str, list[float]]]:
    rows = PackedSequences(split, sequence_length=length, layout=layout, pad_id=PAD)
    read_rows = [
        rows.read(part, index) for part, count in enumerate(rows.counts) for index in range(count)
    ]
    names = ("tokens", "labels", "loss_mask", "positions", "documents")
    return [{name: getattr(row, name).tolist() for name in names} for row in read_rows]


def test_packed_rows_by_hand(tmp_path):
    split = write_split(tmp_path, [[[1, 5, 6, 2], [1, 7, 2], [1, 8, 8, 8, 2]]])
    first_row, second_row, third_row = rows_of(split, "packed", 4)
    assert first_row == {
        "tokens": [1, 5, 6, 2],
        "labels": [5, 6, 2, 1],
        "loss_mask": [1, 1, 1, 0],
        "positions": [0, 1, 2, 3],
        "documents": [0, 0, 0, 0],
    }
    assert second_row == {
        "tokens": [1, 7, 2, 1],
        "labels": [7, 2, 1, 8],
        "loss_mask": [1, 1, 0, 1],
        "positions": [0, 1, 2, 0],
        "documents": [0, 0, 0, 1],
    }
    assert third_row == {
        "tokens": [8, 8, 8, PAD],
        "labels": [8, 8, 2, PAD],
        "loss_mask": [1, 1, 1, 0],
        "positions": [0, 1, 2, 0],
        "documents": [0, 0, 0, -1],
    }


def test_padded_rows_by_hand(tmp_path):
    split = write_split(tmp_path, [[[1, 7, 2], [1, 3, 4, 5, 6, 2]]])
    short_row, cut_row = rows_of(split, "padded", 4)
    assert short_row == {
        "tokens": [1, 7, PAD, PAD],
        "labels": [7, 2, PAD, PAD],
        "loss_mask": [1, 1, 0, 0],
        "positions": [0, 1, 0, 0],
        "documents": [0, 0, -1, -1],
    }
    assert cut_row == {
        "tokens": [1, 3, 4, 5],
        "labels": [3, 4, 5, 6],
        "loss_mask": [1] * 4,
        "positions": [0, 1, 2, 3],
        "documents": [0] * 4,
    }


def test_fixed_rows_by_hand(tmp_path):
    split = write_split(tmp_path, [[[1, 5, 2], [1, 7, 2]]])
    first_row, second_row = rows_of(split, "fixed", 4)
    assert first_row == {
        "tokens": [1, 5, 2, 1],
        "labels": [5, 2, 1, 7],
        "loss_mask": [1] * 4,
        "positions": [0, 1, 2, 3],
        "documents": [0] * 4,
    }
    assert second_row == {
        "tokens": [7, PAD, PAD, PAD],
        "labels": [2, PAD, PAD, PAD],
        "loss_mask": [1, 0, 0, 0],
        "positions": [0, 0, 0, 0],
        "documents": [0, -1, -1, -1],
    }


def reference(parts: list[list[list[int]]], layout: str, length: int) -> list[dict[str, list[int]]]:
    """Token by token, from the sentences of the layouts' description."""
    rows = []
    for documents in parts:
        stream = [
            (token, number) for number, document in enumerate(documents) for token in document
        ]
        if layout == "padded":
            pieces = [
                [(token, number) for token in document[: length + 1]]
                for number, document in enumerate(documents)
            ]
        else:
            pieces = [
                stream[start : start + length + 1]
                for start in range(0, max(len(stream) - 1, 0), length)
            ]
        for piece in pieces:
            names = ("tokens", "labels", "loss_mask", "positions", "documents")
            row: dict[str, list[int]] = {name: [] for name in names}
            documents_before: list[int] = []
            for (token, number), (label, next_number) in pairwise(piece):
                number, next_number = (0, 0) if layout == "fixed" else (number, next_number)
                row["tokens"].append(token)
                row["labels"].append(label)
                row["loss_mask"].append(int(number == next_number))
                row["positions"].append(documents_before.count(number))
                documents_before.append(number)
                row["documents"].append(sorted(set(documents_before)).index(number))
            num_padding = length - len(row["tokens"])
            for name, fill in (
                ("tokens", PAD),
                ("labels", PAD),
                ("loss_mask", 0),
                ("positions", 0),
                ("documents", -1),
            ):
                row[name] += [fill] * num_padding
            rows.append(row)
    return rows


DOCUMENTS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=9), max_size=7)


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(DOCUMENTS, min_size=1, max_size=3),
    length=st.integers(1, 6),
    shard_tokens=st.integers(1, 9),
)
@pytest.mark.parametrize("layout", ["packed", "padded", "fixed"])
def test_rows_equal_the_reference(tmp_path_factory, layout, parts, length, shard_tokens):
    split = write_split(tmp_path_factory.mktemp("s"), parts, shard_tokens)
    assert rows_of(split, layout, length) == reference(parts, layout, length)
    layout_settings = {"sequence_length": length, "layout": layout}
    counts = [
        count_plain_sequences(p.tokens, p.documents, **layout_settings) for p in split.record.parts
    ]
    assert sum(counts) == len(reference(parts, layout, length))


def test_every_token_with_a_successor_is_learned_once_when_packed(tmp_path):
    documents = [[1] + [3] * n + [2] for n in range(20)]
    rows = rows_of(write_split(tmp_path, [documents]), "packed", 16)
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(
        len(document) - 1 for document in documents
    )


def test_every_shard_but_the_last_is_full(tmp_path):
    split = write_split(tmp_path, [[[1] * 10, [2] * 10]], shard_tokens=8)
    assert [shard.bytes for shard in split.record.shards] == [16, 16, 8]
    assert split.tokens[5:18].tolist() == [1] * 5 + [2] * 8
    assert split.document(1).tolist() == [2] * 10
    assert split.record.shards[0] == file_record(tmp_path / "train-00000.bin")
