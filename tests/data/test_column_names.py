"""Rows of questions and answers are known by the usual names of their columns, and what was guessed is said."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import UserError
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.recipe.schema import Source

QUESTION_COLUMNS = [
    ("question", "answer"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "response"),
    ("query", "answer"),
    ("Question", "Answer"),
    ("user", "assistant"),
    ("human", "bot"),
    ("problem", "solution"),
    ("input", "target"),
]


def read(path, required_format="sft", **source):
    stats = ReadStats()
    corpus = open_dataset(Source(path=str(path), **source), required_format)
    return list(read_documents(corpus, on_error="stop", stats=stats)), stats


def turns_of(document):
    (turns,) = document.example.responses
    return [(turn.role, turn.content) for turn in turns]


def write(path, row):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("question_column", "answer_column"), QUESTION_COLUMNS)
def test_a_question_and_its_answer_are_found(question_column, answer_column, suffix, tmp_path):
    row = {"id": 7, question_column: "What is iron?", answer_column: "A metal."}
    (document,), stats = read(write(tmp_path / f"qa.{suffix}", row))
    assert turns_of(document) == [("user", "What is iron?"), ("assistant", "A metal.")]
    (format_text,) = stats.formats
    assert (
        format_text.startswith("alpaca (") and f"{answer_column} " in format_text
    ) or answer_column == "output"


def test_context_and_system_columns_are_read_with_the_question(tmp_path):
    row = {"instruction": "Sum up.", "context": "Iron is a metal.", "response": "A metal."}
    row["system_prompt"] = "Be brief."
    (document,), stats = read(write(tmp_path / "dolly.jsonl", row))
    assert turns_of(document) == [
        ("system", "Be brief."),
        ("user", "Sum up.\nIron is a metal."),
        ("assistant", "A metal."),
    ]
    assert stats.formats == {
        "alpaca (response is the output, context the input, system_prompt the system)"
    }


def test_the_question_of_a_pair(tmp_path):
    row = {"question": "What is iron?", "chosen": "A metal.", "rejected": "A cheese."}
    (document,), stats = read(write(tmp_path / "pairs.jsonl", row), "pairs")
    assert (
        document.example.prompt == "What is iron?"
        or document.example.prompt[0].content == "What is iron?"
    )
    assert stats.formats == {"preference (question is the prompt)"}


def test_what_a_recipe_says_of_columns_is_not_guessed_at(tmp_path):
    path = write(
        tmp_path / "qa.jsonl", {"question": "What is iron?", "answer": "A metal.", "hint": "Fe"}
    )
    (document,), stats = read(
        path, format="alpaca", columns={"instruction": "hint", "output": "answer"}
    )
    assert turns_of(document)[0] == ("user", "Fe") and stats.formats == {"alpaca"}


def test_text_stays_text(tmp_path):
    row = {"text": "Iron is a metal.", "question": "What is iron?", "answer": "A metal."}
    (document,), stats = read(write(tmp_path / "text.jsonl", row))
    assert document.text == "Iron is a metal." and not stats.formats


def test_a_column_that_is_no_text_is_no_answer(tmp_path):
    path = write(tmp_path / "qa.jsonl", {"question": "What is iron?", "answer": 7, "note": "x"})
    with pytest.raises(UserError, match="'answer', the response to 'question', is a number"):
        read(path)
