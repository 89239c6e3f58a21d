"""Data and tokenizers made to take all memory or all time, and names that no terminal has: refused, or bounded work."""

import errno
import gzip
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import assert_clear, here, process, write_workshop

from bloomery.core.errors import UserError, one_line
from bloomery.data.prepare.workers import cores, count_workers, fewer_workers
from bloomery.data.sources.documents import Document, ReadStats, open_dataset, read_documents
from bloomery.data.tokenizer.tokenizer import check_growth, load_tokenizer
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.recipe.schema import Source, TrainTokenizer

SECONDS = 2.0


def read(path: Path, *, on_error: str = "stop", stats: ReadStats | None = None) -> list[Document]:
    return list(
        read_documents(
            open_dataset(Source(path=str(path))), on_error=on_error, stats=stats or ReadStats()
        )
    )


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["some text to learn from"]), TrainTokenizer(vocab_size=300), folder)
    return json.loads((folder / "tokenizer.json").read_text())


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


A = {"String": "a"}
BOMBS = {
    "stacked": {"normalizer": {"type": "Sequence", "normalizers": [replace(A, "a" * 1000)] * 4}},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [replace(A, "a" * 9)] * 2}],
        }
    },
    "expression": {"normalizer": replace({"Regex": "x*"}, "x" * 100)},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [replace(A, "a" * 1000)] * 4}},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_that_blows_texts_up_is_refused(bomb, tokenizer_json, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json | BOMBS[bomb]))
    began = time.process_time()
    with pytest.raises(UserError, match="times as long"):
        load_tokenizer(tmp_path)
    assert time.process_time() - began < SECONDS


def test_tokenizers_that_replace_as_others_do_are_taken(tokenizer_json, tmp_path):
    for normalizer in (
        None,
        replace({"String": " "}, "▁"),
        {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")],
        },
        {"type": "Sequence", "normalizers": [replace({"Regex": " {2,}"}, "▁")] * 12},
        {
            "type": "Sequence",
            "normalizers": [
                replace({"String": "``"}, '"'),
                {"type": "NFKD"},
                {"type": "Lowercase"},
            ],
        },
    ):
        assert check_growth({"normalizer": normalizer}, "x") <= 2.0


def test_what_a_normalizer_adds_counts_as_text(tokenizer_json, tmp_path):
    grown = tokenizer_json | {"normalizer": replace(A, "a" * 60)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(grown))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("a" * 10)) <= 600
    for encode in (
        tokenizer.encode,
        tokenizer.encode_array,
        lambda text: tokenizer.encode_places([text]),
    ):
        with pytest.raises(UserError, match="in one piece"):
            encode("a" * 100_000)


def test_a_tokenizer_without_a_vocabulary_is_refused(tokenizer_json, tmp_path):
    for empty in ({}, []):
        hollow = tokenizer_json | {
            "model": {**tokenizer_json["model"], "vocab": empty, "merges": []}
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(hollow))
        with pytest.raises(UserError, match="vocabulary is empty"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["a.json.gz", "a.txt.gz", "a.jsonl.zst", pytest.param("a.jsonl.gz", marks=pytest.mark.soak)],
)
def test_white_space_without_end_is_not_read_to_its_end(tmp_path, file):
    """2 GB of it in some 9 MB took minutes, in silence."""
    zstandard = pytest.importorskip("zstandard")
    name, _, packed = file.rpartition(".")
    compress = gzip.compress if packed == "gz" else zstandard.ZstdCompressor().compress
    unit = compress(b"\n" * 2**24)  # members of gzip and frames of zstd may follow each other
    (tmp_path / f"{name}.{packed}").write_bytes(unit * 128)
    stats, began = ReadStats(), time.process_time()
    with pytest.raises(UserError, match="of white space in a row"):
        read(tmp_path / f"{name}.{packed}")
    found = read(tmp_path / f"{name}.{packed}", on_error="skip", stats=stats)
    assert all(document.text.isspace() for document in found) and stats.skipped == 1
    assert time.process_time() - began < 3 * SECONDS  # twice; all of it: a thousand times as long


def test_ordinary_blank_lines_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "\n" * 100_000 + '{"text": "two"}\n')
    assert [document.text for document in read(tmp_path / "a.jsonl")] == ["one", "two"]


def not_utf8(path: Path) -> Path:
    """A table whose third row holds a byte that is no letter."""
    offsets, data = (
        pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"),
        pa.py_buffer(b"ab\xffd"),
    )
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(4, offsets, data)}), path)
    return path


def test_bytes_that_are_no_text_are_named_by_file_and_row(tmp_path):
    path, stats = not_utf8(tmp_path / "a.parquet"), ReadStats()
    with pytest.raises(UserError, match="not UTF-8: byte 0xff") as caught:
        read(path)
    assert caught.value.where.endswith("a.parquet, row 3")
    assert [document.text for document in read(path, on_error="skip", stats=stats)] == [
        "a",
        "b",
        "d",
    ]
    assert stats.skipped == 1


def test_a_page_that_differs_from_its_checksum_is_noticed(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"row number {number}" for number in range(500)]
    settings = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"text": texts}), path, write_page_checksum=True, **settings)
    assert [document.text for document in read(path)] == texts
    content = bytearray(path.read_bytes())
    content[content.index(b"number 250")] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        read(path)


def test_no_more_processes_than_cores():
    assert count_workers(1000, 1e12) == count_workers("auto", 1e12) == cores()
    assert count_workers(1, 1e12) == 1 and count_workers("auto", 0) == 1
    assert fewer_workers("auto") is None and fewer_workers(cores()) is None
    assert "starts" in fewer_workers(1000)


def test_names_are_one_line_of_plain_text():
    for name, shown in (
        ("a\nb", "a\\nb"),
        ("\udcffx", "\\xffx"),
        ("\x1b[31m", "\\x1b[31m"),
        ("ü日", "ü日"),
    ):
        assert one_line(name) == shown
    error = UserError("cannot be read", where="a\nfix: rm -rf /", fix="check it")
    assert len(str(error).splitlines()) == 3


@pytest.mark.parametrize(
    "name", [b"\xff.jsonl", b"a\nb.jsonl", b"\x1b]0;x\x07.jsonl", "caf\u00e9.jsonl".encode()]
)
def test_files_of_any_name_are_read_and_named(workshop, name):
    folder = workshop / "named"
    folder.mkdir()
    path = os.fsdecode(os.fsencode(folder) + b"/" + name)
    Path(path).write_text('{"text": "one two three four five six seven"}\n' * 40 + '{"text": 1}\n')
    result = here("prepare", "tiny.yaml", "data.path=named", "data.prepared=p", "data.validation=0")
    assert_clear(result, mentions=[":41"])
    result = here(
        "prepare",
        "tiny.yaml",
        "data.path=named",
        "data.prepared=p",
        "data.validation=0",
        "data.on_error=skip",
        "--check",
    )
    assert result.code == 0, result.err
    assert "1 row skipped" in result.out or "skipped    1 row" in result.out
    assert (
        here(
            "prepare",
            "tiny.yaml",
            "data.path=named",
            "data.prepared=p",
            "data.validation=0",
            "data.on_error=skip",
        ).code
        == 0
    )


def test_without_a_locale_names_are_refused_or_read(tmp_path):
    write_workshop(tmp_path)
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    (folder / "\u00fc.jsonl").write_text('{"text": "one two three four five six seven"}\n' * 40)
    (tmp_path / "named").symlink_to(folder)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["prepare", "tiny.yaml", "data.validation=0", "data.prepared=p"]
    read = process(*words, "data.path=named", folder=tmp_path, environment=plain)
    assert read.code == 0, read.err
    refused = process(*words, "data.path=caf\u00e9", folder=tmp_path, environment=plain)
    assert (
        refused.code in (1, 2) and "stumbled" not in refused.err and "Traceback" not in refused.err
    )


def test_a_folder_that_may_not_be_read_is_named(workshop, monkeypatch):
    closed, scandir = workshop / "text" / "closed", os.scandir
    closed.mkdir()

    def refuse(path="."):
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = here("prepare", "tiny.yaml")
    assert_clear(result, mentions=["cannot be read", str(closed), "permissions"])
