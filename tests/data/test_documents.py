"""Every format gives the documents that went in; everything malformed gives one sentence with its place."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bloomery.core.errors import UserError
from bloomery.data.sources.documents import (
    Document,
    ReadStats,
    open_dataset,
    open_datasets,
    read_documents,
)
from bloomery.data.sources.readers import MAX_BYTES
from bloomery.recipe.schema import Data, Source

TEXTS = ["first\nof them", "zweiter, größer", 'third "quoted", with\ttab', "last 🎈"]


def read(
    path: Path, on_error: str = "stop", stats: ReadStats | None = None, **source: object
) -> list[Document]:
    corpus = open_dataset(Source.model_validate({"path": str(path), **source}))
    return list(read_documents(corpus, on_error=on_error, stats=stats or ReadStats()))


def texts(path: Path, **source: object) -> list[str]:
    return [document.text for document in read(path, **source)]


def jsonl(rows: list[object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = [{"id": index, "text": text} for index, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    "pack",
    [lambda data: data, gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data)],
)
def test_json_lines_plain_and_compressed(tmp_path, pack):
    suffix = {b"{": "", b"\x1f": ".gz", b"(": ".zst"}[pack(jsonl(ROWS))[:1]]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(jsonl(ROWS)))
    assert texts(path) == TEXTS


def test_json_list_object_sequence_and_strings(tmp_path):
    path = tmp_path / "a.json"
    for content in (
        json.dumps(ROWS, indent=2),
        json.dumps({"version": 1, "data": ROWS}),
        jsonl(ROWS).decode(),
        json.dumps(TEXTS),
    ):
        path.write_text(content)
        assert texts(path) == TEXTS


def test_json_list_larger_than_any_buffer(tmp_path):
    # 4.5 MB, read 1 MiB at a time
    rows = [{"text": f"{index} " + "x" * 5000} for index in range(900)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    assert texts(path) == [row["text"] for row in rows]


def test_csv_and_tsv_with_quotes_and_line_ends(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,"two\nlines, ""quoted"""\n2,plain\n')
    assert texts(tmp_path / "a.csv") == ['two\nlines, "quoted"', "plain"]
    (tmp_path / "b.tsv").write_text("text\tid\na, b\t1\n")
    assert texts(tmp_path / "b.tsv") == ["a, b"]


def test_parquet_and_arrow(tmp_path):
    table = pa.table({"id": range(4), "text": TEXTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == TEXTS
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    assert texts(tmp_path / "b.arrow") == TEXTS


def test_folders_that_datasets_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert texts(tmp_path / "one") == TEXTS
    tokens = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]}
    )
    datasets.DatasetDict({"train": tokens, "validation": tokens}).save_to_disk(
        str(tmp_path / "both")
    )
    assert [document.tokens for document in read(tmp_path / "both")] == [(1, 2), (3,)]


def test_folder_by_glob_is_sorted_and_survives_link_loops(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.py", "b/a.py", "a.py", "a.go", "b/.hidden.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "b" / "self.py").symlink_to(tmp_path / "b" / "self.py")
    assert texts(tmp_path, glob="*.py") == ["a.py", "b/a.py", "z.py"]
    assert texts(tmp_path, glob="**/*.go") == ["a.go"]


def test_columns_are_found_or_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"prompt": "p", "answer": "a"}]))
    with pytest.raises(
        UserError, match="no column with a usual name for the text; it has: prompt, answer"
    ):
        texts(path)
    assert texts(path, columns={"text": "answer"}) == ["a"]
    with pytest.raises(UserError, match="no column 'reply'"):
        texts(path, columns={"text": "reply"})


MALFORMED = {
    "not JSON": (b'{"text": "a"', "a.jsonl:2", "is not JSON"),
    "NaN": (b'{"text": "a", "score": NaN}', "a.jsonl:2", "NaN is no JSON value"),
    "surrogate": (b'{"text": "a\\ud800b"}', "a.jsonl:2, field text", "half of a surrogate pair"),
    "null": (b'{"text": null}', "a.jsonl:2, field text", "is null"),
    "number": (b'{"text": 3}', "a.jsonl:2, field text", "is a number"),
    "missing": (b'{"txt": "a"}', "a.jsonl:2, field text", "is missing"),
    "list": (b'["a"]', "a.jsonl:2", "is a list"),
    "garbage": (b'{"text": "a"} x', "a.jsonl:2", "is not JSON: extra data"),
    "long number": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "a.jsonl:2", "is not JSON"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"}", "a.jsonl:2", "is nested too deeply"),
    "latin-1": ('{"text": "größer"}'.encode("latin-1"), "a.jsonl:2", "is not UTF-8: byte 0xf6"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_row_stops_or_is_skipped(tmp_path, case):
    line, where, problem = MALFORMED[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "good"}\n' + line + b'\n\n{"text": "better"}\n')
    with pytest.raises(UserError) as caught:
        read(path)
    assert caught.value.where == str(tmp_path / where)
    assert problem in caught.value.problem
    innermost = "field text" if where.endswith("field text") else where
    assert caught.value.problem.startswith(innermost), "an error names its subject"
    assert "Error" not in str(caught.value)
    stats = ReadStats()
    assert [document.text for document in read(path, "skip", stats)] == ["good", "better"]
    assert stats.skipped == 1
    assert stats.first_skipped.startswith(str(tmp_path / where))


def test_files_are_named_as_they_are_found_from_here(tmp_path, monkeypatch):
    """Of two sources with files of one name it can be told which is meant."""
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(b'{"text": "good"}\n')
    sources = [Source(path=str(tmp_path / "one")), Source(path=str(tmp_path / "two" / "a.jsonl"))]
    source_names = [
        document.source
        for corpus in open_datasets(Data(sources=sources))
        for document in read_documents(corpus, on_error="stop", stats=ReadStats())
    ]
    assert source_names == ["one/a.jsonl:1", "two/a.jsonl:1"]
    monkeypatch.chdir(tmp_path / "one")
    assert open_datasets(Data(path=str(tmp_path / "two")))[0].files[0].shown == str(
        tmp_path / "two" / "a.jsonl"
    )
    assert open_datasets(Data(path=str(tmp_path / "one")))[0].files[0].shown == "a.jsonl"


def test_line_of_200_mb_is_refused_in_constant_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "good"}\n{"text": "')
        for _ in range(200):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"text": "better"}\n')
    with pytest.raises(UserError, match=r"longer than 64.0 MiB") as caught:
        read(path)
    assert caught.value.where == str(tmp_path / "a.jsonl:2")
    tracemalloc.start()
    assert [document.text for document in read(path, "skip")] == ["good", "better"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * MAX_BYTES


def test_large_plain_text_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("bloomery.data.sources.readers.MAX_BYTES", 9 * 2**20)
    path = tmp_path / "a.txt"
    line = "a line of some length\n"
    file_text = line * (12 * 2**20 // len(line))
    path.write_text(file_text)
    pieces = texts(path)
    assert "".join(pieces) == file_text
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)


BROKEN = {
    "b.txt": (b"text\0more", "is binary"),
    "u.txt": ("text".encode("utf-16"), "is UTF-16"),
    "l.txt": (b"one\ntwo \xe9t\xe9\n", "is not UTF-8: byte 0xe9 in line 2"),
    "t.jsonl.gz": (gzip.compress(jsonl(ROWS * 50))[:-20], "is truncated or damaged"),
    "g.jsonl.gz": (b"no gzip at all", "is truncated or damaged"),
    "t.jsonl.zst": (
        zstandard.ZstdCompressor().compress(jsonl([{"text": str(i)} for i in range(9999)]))[:-50],
        "is truncated or damaged",
    ),
    "g.jsonl.zst": (b"no zstandard at all", "is truncated or damaged"),
    "t.parquet": (b"PAR1 and then nothing", "is no parquet file"),
    "t.arrow": (b"no arrow", "is no arrow file"),
    "q.csv": (b'text\n"never closed\nmore\n', "is not CSV"),
    "f.csv": (b"text,id\na,1,2\n", "has 3 fields where the header names 2"),
    "t.json": (b'[{"text": "a"}, {"text": ', "is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_or_skipped(tmp_path, name):
    content, problem = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert problem in caught.value.problem
    assert name in caught.value.where
    stats = ReadStats()
    read(path, "skip", stats)
    assert stats.skipped == 1


def test_a_truncated_parquet_file_is_refused(tmp_path):
    pq.write_table(
        pa.table({"text": [str(i) * 50 for i in range(5000)]}), tmp_path / "whole.parquet"
    )
    data = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="is no parquet file, or a damaged one"):
        read(tmp_path / "cut.parquet")


def test_extension_columns_are_not_read(tmp_path):
    field = pa.field(
        "text", pa.string(), metadata={"ARROW:extension:name": "arrow.py_extension_type"}
    )
    pq.write_table(pa.table([["a"]], schema=pa.schema([field])), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="extension type"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "names no dataset"),
        ({"path": "a", "builtin": "stdlib-code"}, "exclude each other"),
        ({"path": "/does/not/exist"}, "no such file or folder"),
        ({"builtin": "stdlib-chat"}, "is not for pretraining"),
    ],
)
def test_impossible_sources_are_refused(data, problem):
    with pytest.raises(UserError, match=problem):
        open_datasets(Data.model_validate(data))


def test_a_folder_without_text_is_refused_with_its_file_types(tmp_path):
    with pytest.raises(UserError, match="the folder is empty"):
        texts(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(UserError, match=r"most are 1 \.bin"):
        texts(tmp_path)
    (tmp_path / "b.md").write_text("b")
    with pytest.raises(
        UserError, match=r"no file matches '\*.go'; most are 1 \.bin, 1 \.md"
    ) as caught:
        texts(tmp_path, glob="*.go")
    assert caught.value.fix == 'set data.glob="*.bin"'
    with pytest.raises(UserError) as caught_path:
        texts(tmp_path.with_name(tmp_path.name + "z"))
    assert caught_path.value.fix == f"did you mean data.path={tmp_path}?"


def test_a_suggested_path_is_similar_in_more_than_its_suffix(tmp_path):
    (tmp_path / "trunc.jsonl").touch()
    for name, fix_text in (("nosuch.jsonl", "set data.path"), ("trnuc.json", "trunc.jsonl")):
        with pytest.raises(UserError) as caught:
            texts(tmp_path / name)
        assert fix_text in caught.value.fix


def test_stdlib_is_code_without_tables_and_tests():
    corpus = open_datasets(Data(builtin="stdlib-code"))[0]
    names = [file.name for file in corpus.files]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert not [
        name
        for name in names
        if {"encodings", "test", "tests", "pydoc_data", "idle_test", "site-packages"}
        & set(name.split("/"))
    ]
