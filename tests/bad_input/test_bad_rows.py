"""Rows that an objective cannot learn from: one sentence each, before any training step."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import assert_clear, here

from bloomery.data.sources import builtin

TALK = {
    "messages": [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "four"},
    ]
}
PAIR = {"prompt": "two and two?", "chosen": "four", "rejected": "five"}
MARK = {"prompt": "two and two?", "completion": "four", "label": True}
MANY = [{**MARK, "prompt": f"{n} and two?", "completion": f"{n + 2}"} for n in range(20)]

CASES = {
    "conversations for dpo": (
        "dpo",
        [TALK],
        [],
        ["rows.jsonl:1", "conversations", "objective.kind=sft"],
    ),
    "pairs for sft": (
        "sft",
        [PAIR],
        [],
        ["rows.jsonl:1", "preference pairs", "objective.kind=dpo"],
    ),
    "marks for sft": ("sft", [MARK], [], ["KTO labels", "objective.kind=kto"]),
    "text for kto": ("kto", [{"text": "words"}], [], ["plain text", "labeled desirable"]),
    "one prompt for kto": ("kto", [MARK] * 9, [], ["every row has the same prompt"]),
    "a pair after conversations": ("sft", [TALK] * 9 + [PAIR], [], ["rows.jsonl:10", "messages"]),
    "a fixed layout for pairs": (
        "dpo",
        [PAIR],
        ["data.document_masking=false"],
        ["data.document_masking=true"],
    ),
    "a role that is none": (
        "sft",
        [TALK],
        ["data.columns={mesages: talk}"],
        ["mesages", "messages"],
    ),
    "a column that is not there": (
        "sft",
        [TALK],
        ["data.format=messages", "data.columns={messages: talk}"],
        ["has no column 'talk'", "data.columns"],
    ),
    "another format than is said": (
        "sft",
        [TALK],
        ["data.format=alpaca"],
        ["has no column 'instruction'"],
    ),
    "columns that mean nothing": (
        "sft",
        [{"number": "a", "remark": "b"}],
        [],
        [
            "number, remark",
            "data.format=alpaca data.columns='{instruction: number, output: remark}'",
        ],
    ),
    "columns of other data": (
        "sft",
        [{"instruction": "a", "output": "b"}],
        ["data.columns={output: response}"],
        ["instruction, output", "data.columns={}"],
    ),
    "answers beyond the rows": (
        "sft",
        [TALK] * 9,
        ["data.sequence_length=2"],
        ["no loss tokens", "raise it"],
    ),
    "no template": (
        "sft",
        [TALK],
        ["data.chat.template="],
        ["the tokenizer has no chat template", "chatml"],
    ),
    "a template that fails": (
        "sft",
        [TALK] * 9,
        ["data.chat.template='{{ 1 / 0 }}'"],
        ["division by zero"],
    ),
    "a template that fails in every process": (
        "sft",
        [TALK] * 9,
        ["data.chat.template='{{ 1 / 0 }}'", "data.num_proc=2"],
        ["division by zero", "data.chat.template"],
    ),
    "questions of the library for pairs": (
        "dpo",
        [],
        ["data.path=", "data.builtin=stdlib-chat"],
        ["conversations"],
    ),
    "the library's code for kto": (
        "kto",
        [],
        ["data.path=", "data.builtin=stdlib-code"],
        ["plain text"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_cannot_be_learned(workshop, case, monkeypatch):
    objective, rows, overrides, said = CASES[case]
    library = builtin.stdlib_files()[:40]  # no case needs all of it
    monkeypatch.setattr(builtin, "stdlib_files", lambda: library)
    (workshop / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "data.path=rows.jsonl",
        f"objective.kind={objective}",
        "data.chat.template=chatml",
        *overrides,
    ]
    kept = {word.partition("=")[0]: word for word in words}
    result = here(
        "prepare", "tiny.yaml", *(word for word in kept.values() if not word.endswith("="))
    )
    assert_clear(result, mentions=said)
    assert not list(workshop.glob("prepared/*/manifest.json")) or "beyond" in case


def test_a_parquet_of_pairs_for_sft(workshop):
    turns = [[{"role": "assistant", "content": text}] for text in ("four", "five")]
    rows = [{"prompt": TALK["messages"][:1], "chosen": turns[0], "rejected": turns[1]}]
    pq.write_table(pa.Table.from_pylist(rows), workshop / "rows.parquet")
    result = here("prepare", "tiny.yaml", "data.path=rows.parquet", "objective.kind=sft")
    assert_clear(result, mentions=["rows.parquet, row 1", "preference pairs", "objective.kind=dpo"])
