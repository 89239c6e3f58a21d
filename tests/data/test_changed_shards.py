"""Prepared text that changed after it was prepared is refused, wherever the change is."""

import shutil

import numpy as np
import pytest
from structured import write_structured

from bloomery.core import files
from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.prepare.prepare import prepare
from bloomery.data.shards import Manifest, open_split, read_manifest, write_manifest


@pytest.fixture
def sealed(corpus, tmp_path, recipe_of, monkeypatch):
    """A prepared folder of many blocks, and its recipe."""
    monkeypatch.setattr(files, "BLOCK", 256)
    loaded_recipe = recipe_of(path=str(corpus), validation="20%")
    prepare(loaded_recipe, tmp_path / "p")
    return tmp_path / "p", loaded_recipe


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def read_all(folder, split="train"):
    loader = Loader(folder, sequence_length=16, layout="packed", seed=0, split=split)
    return [loader.batch(Cursor(0, row), 1).tokens.tolist() for row in range(loader.sequences)]


def test_every_flipped_file_is_refused_by_prepare_and_by_reading(sealed):
    folder, loaded_recipe = sealed
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert {
        "train-00000.bin",
        "validation-documents.bin",
        "tokenizer_config.json",
        "sources.jsonl",
    } <= set(names)
    for name in names:
        content = (folder / name).read_bytes()
        for position in (0, len(content) // 2, len(content) - 2):
            flip(folder / name, position)
            with pytest.raises(UserError, match=r"changed|damaged") as caught:
                prepare(loaded_recipe, folder)
            assert caught.value.where == str(folder / name)
            assert "prepare again" in caught.value.fix
            if name != "sources.jsonl":  # which prepare alone reads
                with pytest.raises(UserError, match=r"changed|damaged"):
                    read_all(folder), read_all(folder, "validation")
            (folder / name).write_bytes(content)
    assert prepare(loaded_recipe, folder) == read_manifest(folder)


def test_zeroed_text_is_refused_by_the_first_row_of_it_and_by_no_other(sealed):
    folder, _ = sealed
    rows_before, path = read_all(folder), folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[512:768] = bytes(256)
    path.write_bytes(content)
    split = open_split(folder, "train")
    assert len(split.tokens[0:256]) == 256  # two blocks of 128 tokens
    for token_range in (
        slice(255, 257),
        slice(256, 257),
        slice(383, 384),
        slice(0, len(split.tokens)),
    ):
        with pytest.raises(UserError, match="has changed"):
            split.tokens[token_range]
    assert len(split.tokens[384:400]) == 16
    loader = Loader(folder, sequence_length=16, layout="packed", seed=0)
    num_equal = num_refused = 0
    for row in range(loader.sequences):
        try:
            assert loader.batch(Cursor(0, row), 1).tokens.tolist() == rows_before[row]
            num_equal += 1
        except UserError:
            num_refused += 1
    assert num_refused in (9, 10)  # 128 tokens in rows of 16
    assert num_equal == loader.sequences - num_refused


def test_a_block_is_hashed_once(sealed, monkeypatch):
    folder, _ = sealed
    split, hashed_blocks = open_split(folder, "train"), []
    digest = files.digest_of
    monkeypatch.setattr(
        files, "digest_of", lambda content: hashed_blocks.append(1) or digest(content)
    )
    for _ in range(3):
        for start in range(0, len(split.tokens), 16):
            split.tokens[start : start + 16]
    assert len(hashed_blocks) == -(-2 * len(split.tokens) // 256)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.model", "chat_template.jinja"])
def test_a_file_that_is_added_is_refused(sealed, name):
    folder, loaded_recipe = sealed
    (folder / name).write_text("{}")
    for reading in (lambda: read_manifest(folder), lambda: prepare(loaded_recipe, folder)):
        with pytest.raises(UserError, match="was added") as caught:
            reading()
        assert caught.value.where == str(folder / name)
    (folder / name).unlink()
    (folder / "README.md").write_text("where this text is from")
    (folder / ".DS_Store").write_text("")
    assert read_manifest(folder)


@pytest.mark.parametrize("name", ["first", "kto-labels", "loss-mask-00000", "documents"])
def test_a_changed_file_beside_the_tokens_is_refused(tmp_path, name):
    texts = [
        [(token, position > 3) for position, token in enumerate(range(1, 9))] for _ in range(12)
    ]
    split = write_structured(tmp_path, [texts], "kto", marks=[0, 1] * 6)
    manifest = Manifest(
        recipe="r",
        identity="i",
        tokenizer_hash="t",
        vocab_size=1000,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=9,
        dtype="uint16",
        shard_tokens=7,
        sources=(),
        kind="kto",
        train=split.record,
        validation=split.record,
    )
    write_manifest(tmp_path, manifest)
    flip(tmp_path / f"train-{name}.bin", 3)
    with pytest.raises(UserError, match="has changed"):
        read_all(tmp_path)


def test_digests_of_blocks_by_threads_are_those_of_the_file_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 2**12)
    monkeypatch.setattr(files, "_TASK", 2**14)
    content = np.random.default_rng(0).integers(0, 256, 2**20 + 17, np.uint8).tobytes()
    (tmp_path / "f").write_bytes(content)
    block_sizes = []
    digests = files.digests_of_file(tmp_path / "f", block_sizes.append)
    blocks = [content[start : start + files.BLOCK] for start in range(0, len(content), files.BLOCK)]
    assert digests == tuple(map(files.digest_of, blocks))
    assert sum(block_sizes) == len(content)


def test_a_copied_folder_reads_as_the_original(sealed, tmp_path):
    folder, loaded_recipe = sealed
    shutil.copytree(folder, tmp_path / "q", ignore=shutil.ignore_patterns("sources.jsonl"))
    assert read_all(tmp_path / "q") == read_all(folder)
    with pytest.raises(UserError, match="is missing"):
        prepare(loaded_recipe, tmp_path / "q")
