"""Text that cannot be learned from: one sentence each, and nothing but the file it names."""

import gzip
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import assert_clear, here

from bloomery.core.errors import UserError

GOOD_ROW = json.dumps({"text": "hello there " * 20})


def put(name, content):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def rows(*lines):
    return put("a.jsonl", "\n".join(lines))


def parquet(cut=None, columns=None):
    def write(folder):
        pq.write_table(pa.table(columns or {"text": ["hello " * 50] * 200}), folder / "a.parquet")
        content = (folder / "a.parquet").read_bytes()
        (folder / "a.parquet").write_bytes(content[: cut(len(content))] if cut else content)

    return write


def links(folder):
    (folder / "loop").symlink_to(folder)
    (folder / "itself.txt").symlink_to(folder / "itself.txt")
    (folder / "nowhere.txt").symlink_to("/nowhere")


GZ = gzip.compress(os.urandom(20_000).hex().encode())
CASES = {
    "no files": (lambda folder: None, "empty"),
    "links to nowhere": (links, "text"),
    "an empty file": (put("a.txt", ""), "is empty"),
    "an empty gz": (put("a.txt.gz", ""), "is empty"),
    "an empty table": (put("a.csv", "text\n"), "is empty"),
    "less than a sequence": (put("a.txt", "hi there"), "less than one sequence"),
    "bytes": (put("a.txt", bytes(range(256)) * 10), "a.txt"),
    "noise": (put("a.txt", os.urandom(5000).replace(b"\0", b"\xff")), "a.txt"),
    "utf-16": (put("a.txt", ("hello " * 99).encode("utf-16")), "UTF-16"),
    "utf-16 without a mark": (put("a.txt", ("hello " * 99).encode("utf-16-le")), "UTF-16LE"),
    "latin-1": (put("a.txt", ("café " * 99).encode("latin-1")), "0xe9"),
    "shift-jis": (put("a.txt", ("日本語" * 99).encode("shift-jis")), "UTF-8"),
    "NaN": (rows(GOOD_ROW, '{"text": NaN}'), "a.jsonl:2"),
    "an infinite number": (rows(GOOD_ROW, '{"text": 1e400}'), "a.jsonl:2"),
    "half a character": (rows(GOOD_ROW, '{"text": "\\ud800"}'), "surrogate"),
    "5,000 digits": (rows(GOOD_ROW, '{"text": ' + "1" * 5000 + "}"), "a.jsonl:2"),
    "lists 100,000 deep": (rows(GOOD_ROW, "[" * 100_000 + "]" * 100_000), "nested"),
    "objects 100,000 deep": (rows(GOOD_ROW, '{"a":' * 100_000 + "1" + "}" * 100_000), "nested"),
    "one document 100,000 deep": (put("a.json", '[{"text":' + "[" * 100_000), "nested"),
    "something after the object": (rows(GOOD_ROW, GOOD_ROW + "x"), "column"),
    "null": (rows(GOOD_ROW, "null"), "null"),
    "a list": (rows(GOOD_ROW, "[1, 2]"), "a list"),
    "another column": (rows(GOOD_ROW, '{"txt": "a"}'), "field text"),
    "an id beyond 32 bits": (rows(json.dumps({"input_ids": [1, 2**70]})), "input_ids"),
    "an open quote": (put("a.csv", 'text\n"abc\nfoo\n'), "quote"),
    "latin-1 in a table": (put("a.csv", b"text\ncaf\xe9\n"), "a.csv:2"),
    "half a gz": (put("a.txt.gz", GZ[: len(GZ) // 2]), "truncated"),
    "no gz": (put("a.jsonl.gz", "not gz"), "a.jsonl.gz"),
    "no zst": (put("a.txt.zst", "not zst"), "a.txt.zst"),
    "half a parquet": (parquet(cut=lambda size: size // 2), "a.parquet"),
    "a parquet without its last byte": (parquet(cut=lambda size: size - 1), "a.parquet"),
    "an empty parquet file": (parquet(cut=lambda size: 0), "a.parquet"),
    "a parquet of no rows": (parquet(columns={"text": pa.array([], pa.string())}), "is empty"),
    "a null in a parquet": (parquet(columns={"text": ["a", None]}), "row 2"),
    "a parquet of numbers": (parquet(columns={"x": [1, 2]}), "column"),
}


@pytest.mark.parametrize("case", CASES)
def test_text_that_cannot_be_learned(workshop, case):
    for path in (workshop / "text").iterdir():
        path.unlink()
    write, word = CASES[case]
    write(workshop / "text")
    assert_clear(here("prepare", "tiny.yaml"), mentions=[word])
    assert not list(workshop.glob("prepared/*/manifest.json")) or "sequence" in word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.path=nowhere"], "nowhere"),
        (["data.path=/dev/zero"], "/dev/zero"),
        (["data.validation=nowhere"], "nowhere"),
        (['data.glob="[["'], "data.glob"),
        (["data.prepared=tiny.yaml"], "tiny.yaml"),
        (["data.prepared=tiny.yaml/below"], "data.prepared"),
        (["data.prepared=text"], "text"),
        (["tokenizer.train.vocab_size=10"], "tokenizer.train.vocab_size"),
        (["tokenizer.train=null", "tokenizer.from=/nowhere"], "/nowhere"),
        (["tokenizer.train=null", "tokenizer.from=text"], "text"),
        (["data.on_error=skip", 'data.glob="*.bin"'], "*.bin"),
    ],
)
def test_places_that_cannot_be(workshop, words, said):
    assert_clear(here("prepare", "tiny.yaml", *words), mentions=[said])
    assert len(list((workshop / "text").glob("*.txt"))) == 30


@pytest.mark.parametrize(
    "word", ["data.path=" + "a" * 5000, "data.prepared=" + "a" * 300, 'data.prepared="a\\0b"']
)
def test_names_that_no_file_system_takes(workshop, word):
    assert_clear(here("prepare", "tiny.yaml", word), code=2, mentions=["data.p"])


def test_a_vocabulary_that_no_memory_holds_is_refused_before_anything_is_allocated(workshop):
    refused = here("prepare", "tiny.yaml", "tokenizer.train.vocab_size=100000000000")
    assert_clear(refused, code=2, mentions=["tokenizer.train.vocab_size"])


def test_rows_that_were_all_skipped_are_told(workshop):
    for path in (workshop / "text").iterdir():
        path.write_bytes(b"\xff\xff\0")
    refused = here("prepare", "tiny.yaml", "data.on_error=skip")
    assert_clear(refused, mentions=["30 rows skipped", "0.txt"])


def test_a_line_of_200_mb_is_refused_in_constant_memory(workshop):
    with (workshop / "text/long.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(25):
            file.write(b"x" * 8_000_000)
        file.write(b'"}\n')
    code = (
        "import runpy\n"
        "try: runpy.run_module('bloomery', run_name='__main__')\n"
        "finally: print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    words = ["prepare", "tiny.yaml", "data.path=text/long.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=workshop, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "long.jsonl:1" in done.stderr and "longer than" in done.stderr and "fix:" in done.stderr
    assert int(done.stdout.split()[-2]) < 400 * 1024


def rename_a_token(path):
    described = json.loads(path.read_text())
    text = json.dumps(described).replace('"<pad>"', '"<other>"')
    path.write_text(text)


def test_a_tokenizer_that_is_not_the_shards_own(workshop):
    assert here("prepare", "tiny.yaml", "data.prepared=shards").code == 0
    before = (workshop / "shards/train-00000.bin").read_bytes()
    rename_a_token(workshop / "shards/tokenizer.json")
    assert_clear(
        here("prepare", "tiny.yaml", "data.prepared=shards"), mentions=["tokenizer", "shards"]
    )
    assert (workshop / "shards/train-00000.bin").read_bytes() == before


def test_a_damaged_shard_is_named_before_it_reaches_the_model(workshop):
    from bloomery.data.loader import Loader
    from bloomery.data.order import Cursor

    assert here("prepare", "tiny.yaml", "data.prepared=shards").code == 0
    shard = workshop / "shards/train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10:12] = b"\xff\xff"
    shard.write_bytes(content)
    loader = Loader(workshop / "shards", sequence_length=32, layout="packed", seed=0)
    with pytest.raises(UserError, match="has changed"):
        loader.batch(Cursor(0, 0), loader.sequences)
