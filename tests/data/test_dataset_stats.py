"""Traits of prepared text against counts by hand."""

import numpy as np
import pytest

from bloomery.data.prepare import stats as traits
from bloomery.data.prepare.prepare import prepare
from bloomery.data.prepare.stats import read_stats
from bloomery.data.shards import open_split
from bloomery.recipe.load import load_recipe

RECIPE = """
model: {preset: go-coder-tiny}
tokenizer: {train: {vocab_size: 300}}
data: {path: text, glob: "*.txt", sequence_length: 32, validation: 10%}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traits")
    (folder / "text").mkdir()
    for number in range(60):
        text = (
            "one text that is there twenty times"
            if number % 3 == 0
            else f"a text of its own, number {number}"
        )
        (folder / "text" / f"{number}.txt").write_text(text * 3)
    (folder / "tiny.yaml").write_text(RECIPE)
    prepare(load_recipe(folder / "tiny.yaml"), folder / "prepared")
    return folder / "prepared"


def test_entropy_and_bytes_are_those_of_the_split(prepared):
    split, split_stats = open_split(prepared, "train"), read_stats(prepared)
    counts = np.bincount(split.tokens[0 : len(split.tokens)])
    shares = counts[counts > 0] / counts.sum()
    expected_nats = -(shares * np.log(shares)).sum() + ((counts > 0).sum() - 1) / (2 * counts.sum())
    assert split_stats.unigram_nats == pytest.approx(expected_nats)
    assert split_stats.bytes_per_token == pytest.approx(split.record.bytes / split.record.tokens)
    assert split_stats.tokens == split.record.tokens


def test_repeated_documents_are_counted(prepared):
    split = open_split(prepared, "train")
    texts = [bytes(split.document(i).tobytes()) for i in range(len(split))]
    assert read_stats(prepared).duplicates == pytest.approx(1 - len(set(texts)) / len(texts))
    assert read_stats(prepared).duplicates > 0.25


def test_a_sample_is_spread_over_the_split(prepared, monkeypatch):
    nats_of_all_tokens = read_stats(prepared).unigram_nats
    monkeypatch.setattr(traits, "SAMPLE_TOKENS", 640)
    assert read_stats(prepared).unigram_nats == pytest.approx(nats_of_all_tokens, abs=0.3)
