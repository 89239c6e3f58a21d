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
    loaded = recipe_of(path=str(corpus), validation="20%")
    prepare(loaded, tmp_path / "p")
    return tmp_path / "p", loaded


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def read_all(folder, split="train"):
    loader = Loader(folder, sequence_length=16, layout="packed", seed=0, split=split)
    return [loader.batch(Cursor(0, row), 1).tokens.tolist() for row in range(loader.sequences)]


def test_every_flipped_file_is_refused_by_prepare_and_by_reading(sealed):
    folder, loaded = sealed
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert {
        "train-00000.bin",
        "validation-documents.bin",
        "tokenizer_config.json",
        "sources.jsonl",
    } <= set(names)
    for name in names:
        whole = (folder / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 2):
            flip(folder / name, at)
            with pytest.raises(UserError, match=r"changed|damaged") as told:
                prepare(loaded, folder)
            assert told.value.where == str(folder / name)
            assert "prepare again" in told.value.fix
            if name != "sources.jsonl":  # which prepare alone reads
                with pytest.raises(UserError, match=r"changed|damaged"):
                    read_all(folder), read_all(folder, "validation")
            (folder / name).write_bytes(whole)
    assert prepare(loaded, folder) == read_manifest(folder)


def test_zeroed_text_is_refused_by_the_first_row_of_it_and_by_no_other(sealed):
    folder, _ = sealed
    before, path = read_all(folder), folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[512:768] = bytes(256)
    path.write_bytes(content)
    split = open_split(folder, "train")
    assert len(split.tokens[0:256]) == 256  # two blocks of 128 tokens
    for place in (slice(255, 257), slice(256, 257), slice(383, 384), slice(0, len(split.tokens))):
        with pytest.raises(UserError, match="has changed"):
            split.tokens[place]
    assert len(split.tokens[384:400]) == 16
    loader = Loader(folder, sequence_length=16, layout="packed", seed=0)
    same = refused = 0
    for row in range(loader.sequences):
        try:
            assert loader.batch(Cursor(0, row), 1).tokens.tolist() == before[row]
            same += 1
        except UserError:
            refused += 1
    assert refused in (9, 10)  # 128 tokens in rows of 16
    assert same == loader.sequences - refused


def test_a_block_is_hashed_once(sealed, monkeypatch):
    folder, _ = sealed
    split, hashed = open_split(folder, "train"), []
    digest = files.digest_of
    monkeypatch.setattr(files, "digest_of", lambda content: hashed.append(1) or digest(content))
    for _ in range(3):
        for start in range(0, len(split.tokens), 16):
            split.tokens[start : start + 16]
    assert len(hashed) == -(-2 * len(split.tokens) // 256)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.model", "chat_template.jinja"])
def test_a_file_that_is_added_is_refused(sealed, name):
    folder, loaded = sealed
    (folder / name).write_text("{}")
    for read in (lambda: read_manifest(folder), lambda: prepare(loaded, folder)):
        with pytest.raises(UserError, match="was added") as told:
            read()
        assert told.value.where == str(folder / name)
    (folder / name).unlink()
    (folder / "README.md").write_text("where this text is from")
    (folder / ".DS_Store").write_text("")
    assert read_manifest(folder)


@pytest.mark.parametrize("name", ["first", "kto-labels", "loss-mask-00000", "documents"])
def test_what_stands_beside_the_tokens_is_sealed_too(tmp_path, name):
    texts = [[(token, place > 3) for place, token in enumerate(range(1, 9))] for _ in range(12)]
    whole = write_structured(tmp_path, [texts], "kto", marks=[0, 1] * 6)
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
        train=whole.record,
        validation=whole.record,
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
    done = []
    found = files.digests_of_file(tmp_path / "f", done.append)
    blocks = [content[at : at + files.BLOCK] for at in range(0, len(content), files.BLOCK)]
    assert found == tuple(map(files.digest_of, blocks))
    assert sum(done) == len(content)


def test_a_copied_folder_is_as_good(sealed, tmp_path):
    folder, loaded = sealed
    shutil.copytree(folder, tmp_path / "q", ignore=shutil.ignore_patterns("sources.jsonl"))
    assert read_all(tmp_path / "q") == read_all(folder)
    with pytest.raises(UserError, match="is missing"):
        prepare(loaded, tmp_path / "q")
