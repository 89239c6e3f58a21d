"""Tables and JSON as people save them: delimiters, encodings, quotes, and rows in the wrong brackets."""

import csv
import gzip
import io
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.examples import BadRow
from bloomery.data.sources.documents import describe_rows, peek
from bloomery.data.sources.readers import DELIMITERS, MIB, Value, find_delimiter, read_values
from bloomery.recipe.schema import Source

ROWS = [(f"What is {n}?", f"It is {n}, or {n},5.") for n in range(40)]
LINES = "".join(f"{question};{answer}\n" for question, answer in ROWS)


def read(path, format="csv"):
    return list(read_values(path, path.name, format))


def contents_of(path, format="csv"):
    values = read(path, format)
    assert all(isinstance(value, Value) for value in values), values
    return [tuple(value.content.values()) for value in values]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("question;answer\n" + LINES, "semicolons"),
        ("question;answer\r\n" + LINES.replace("\n", "\r\n"), "semicolons"),
        ("sep=;\r\nquestion;answer\r\n" + LINES.replace("\n", "\r\n"), "semicolons"),
        ("\ufeffquestion;answer\n" + LINES, "semicolons"),
        ("\n\nquestion;answer\n" + LINES, "semicolons"),
        ("question\tanswer\n" + LINES.replace(";", "\t"), "tabs"),
        ("question|answer\n" + LINES.replace(";", "|"), "vertical bars"),
        (
            "question,answer\n" + "".join(f'{question},"{answer}"\n' for question, answer in ROWS),
            None,
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_the_delimiter_is_found_and_announced(tmp_path, text, delimiter, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert contents_of(path) == ROWS
    assert peek(Source(path=str(path))) == (
        "alpaca",
        {"instruction": "question", "output": "answer"},
    )
    line = describe_rows(Source(path=str(path)), "sft")
    assert ("separated by" in line) == (delimiter is not None)
    assert f"separated by {delimiter or ''}" in line or delimiter is None
    assert "question is the instruction, answer the output" in line


def test_a_tsv_with_commas_is_read_too(tmp_path):
    (tmp_path / "a.tsv").write_text("question,answer\nq,a\n")
    assert contents_of(tmp_path / "a.tsv", "tsv") == [("q", "a")]
    assert "separated by commas" in describe_rows(Source(path=str(tmp_path / "a.tsv")), "sft")


cell = st.text(st.sampled_from("ab ;,|\t\n\"'é9"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(cell, cell, cell), min_size=3, max_size=8), st.sampled_from(DELIMITERS))
def test_a_table_of_python_s_csv_writer_is_read_again(tmp_path_factory, rows, delimiter):
    """The oracle is Python's own writer, whatever the cells hold."""
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter).writerows([("question", "answer", "note"), *rows])
    path = tmp_path_factory.mktemp("t") / "a.csv"
    path.write_bytes(buffer.getvalue().encode())
    assert contents_of(path) == [tuple(row) for row in rows]


def test_a_large_table_is_cut_for_the_choice_alone(tmp_path):
    generator = random.Random(0)
    rows = [(f"q{n}", '"' + "x, y;\n" * generator.randrange(2000) + '"') for n in range(60)]
    (tmp_path / "a.csv").write_text("question;answer\n" + "".join(f"{a};{b}\n" for a, b in rows))
    assert contents_of(tmp_path / "a.csv") == [(a, b.strip('"')) for a, b in rows]


def test_one_column_needs_quotes_around_commas(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\n" + '"two, and three"\nfour; five\n')
    assert contents_of(tmp_path / "a.csv") == [("one",), ("two, and three",), ("four; five",)]
    assert find_delimiter(["text; notes\n", "a, b\n", "c\n"]) == ","
    (tmp_path / "b.csv").write_text("text\none, two\n")
    (bad_row,) = read(tmp_path / "b.csv")
    assert bad_row.reason == "has 2 fields where the header names 1 (separated by comma)"
    assert bad_row.fix.startswith("put a text that holds a comma in double quotes")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("question,answer\na,b\nc;d\n", "a.csv:3 has 1 field where the header names 2"),
        (
            "question^answer\na^b\n",
            "has one column, 'question^answer': the delimiter is none of comma",
        ),
        ("question,answer,answer\na,b,c\n", "has the column 'answer' twice"),
        ('question,answer\n"a,b\nc,d\n', "is a quote unbalanced?"),
    ],
)
def test_a_malformed_table_is_refused_with_its_line(tmp_path, data, problem):
    (tmp_path / "a.csv").write_text(data)
    bad_row = read(tmp_path / "a.csv")[-1]
    assert isinstance(bad_row, BadRow)
    assert problem in f"{bad_row.where} {bad_row.problem}"


@pytest.mark.parametrize("data", ["", "question;answer\n", "\n\n"])
def test_a_table_without_rows_is_empty(tmp_path, data):
    (tmp_path / "a.csv").write_text(data)
    assert read(tmp_path / "a.csv") == []
    with pytest.raises(Exception, match="the dataset is empty"):
        peek(Source(path=str(tmp_path / "a.csv")))


@pytest.mark.parametrize(
    ("encoding", "problem", "fix"),
    [
        ("utf-16", "a.csv:1 is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"),
        ("utf-16-le", "a.csv:1 is UTF-16LE, not UTF-8", "iconv -f UTF-16LE -t UTF-8"),
        ("utf-16-be", "a.csv:1 is UTF-16BE, not UTF-8", "iconv -f UTF-16BE -t UTF-8"),
        (
            "cp1252",
            'a.csv:2 is not UTF-8: byte 0xe9 at byte 4 of the line, "é" in Windows-1252',
            "iconv -f WINDOWS-1252 -t UTF-8",
        ),
    ],
)
def test_another_encoding_is_named_with_its_conversion(tmp_path, encoding, problem, fix):
    text = "question;answer\nCafé?;Yes.\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    with pytest.raises(BadRow) as caught:
        peek(Source(path=str(tmp_path / "a.csv")))
    assert caught.value.problem.startswith(problem)
    assert fix in caught.value.fix
    # what the fix does
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.csv").read_bytes().decode(encoding).encode())
    assert contents_of(tmp_path / "a.csv") == [("Café?", "Yes.")]


OBJECTS = [{"question": question, "answer": answer} for question, answer in ROWS]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("before", ["", "\ufeff", "\n  "])
def test_jsonl_that_is_one_json_list_is_read(tmp_path, indent, before):
    (tmp_path / "a.jsonl").write_text(before + json.dumps(OBJECTS, indent=indent))
    assert contents_of(tmp_path / "a.jsonl", "jsonl") == ROWS


def test_a_huge_list_on_one_line_is_streamed(tmp_path):
    """Longer than the limit of one line."""
    row = json.dumps({"text": "a" * MIB})
    (tmp_path / "a.jsonl").write_text("[" + ", ".join([row] * 66) + "]")
    assert (
        sum(isinstance(value, Value) for value in read_values(tmp_path / "a.jsonl", "a", "jsonl"))
        == 66
    )


@pytest.mark.parametrize("lines", [1, 3])
def test_lists_of_messages_are_no_rows(tmp_path, lines):
    """Read one by one, messages used to become documents for pretraining."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text((json.dumps(turns) + "\n") * lines)
    (bad_row,) = read(tmp_path / "a.jsonl", "jsonl")
    assert "is one message, not a row" in bad_row.problem
    assert bad_row.fix == 'write each conversation as a row: {"messages": [...]}'


def test_lists_of_lists_are_no_rows(tmp_path):
    (tmp_path / "a.json").write_text('[[{"a": 1}, {"a": 2}], [{"a": 3}]]')
    (bad_row,) = read(tmp_path / "a.json", "json")
    assert "is a list of lists" in bad_row.problem


def test_a_bad_row_names_the_line_and_the_byte(tmp_path):
    lines = [json.dumps(row) for row in OBJECTS]
    lines[4] = lines[4][:-1]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b"\n" + b'{"text": "caf\xe9"}\n')
    brace_row, encoding_row = (
        value for value in read(tmp_path / "a.jsonl", "jsonl") if isinstance(value, BadRow)
    )
    end = f"column {len(lines[4]) + 1}, where it ends: is a closing brace missing?"
    assert brace_row.where == "a.jsonl:5" and brace_row.problem.endswith(end)
    assert encoding_row.problem.startswith(
        "a.jsonl:41 is not UTF-8: byte 0xe9 at byte 14 of the line"
    )
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    assert "byte 0xe9 in line 3" in read(tmp_path / "a.txt", "text")[0].problem
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"},\n{"text": "caf\xe9"}]')
    assert "byte 0xe9 in line 2" in read(tmp_path / "a.json", "json")[0].problem


def test_plain_text_among_other_columns_is_announced(tmp_path):
    """A table of questions and answers never becomes pretraining without a word."""
    (tmp_path / "a.csv").write_text("question,answer,text\nq,a,q a\n")
    source = Source(path=str(tmp_path / "a.csv"))
    assert peek(source) is None
    line = describe_rows(source, "sft")
    assert (
        "column 'text' is plain text, every token of it is trained on; not read: question, answer"
        in line
    )
    assert "data.format=alpaca data.columns='{instruction: question, output: answer}'" in line
    (tmp_path / "b.csv").write_text("question,answer\nq,a\n")
    pretrained = describe_rows(Source(path=str(tmp_path / "b.csv")), "any")
    assert pretrained.endswith(
        "question is the instruction, answer the output; every token of them is trained on"
    )
    (tmp_path / "c.jsonl").write_text('{"text": "a", "url": "b"}\n')
    assert describe_rows(Source(path=str(tmp_path / "c.jsonl")), "any") is None
