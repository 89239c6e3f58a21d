"""Rows of files as examples: by what the recipe says, what they plainly are, and what the objective learns from."""

import ast
import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import UserError
from bloomery.data.examples import Example, Message, from_wire, texts_of, to_wire
from bloomery.data.prepare.split import content_key
from bloomery.data.sources import builtin
from bloomery.data.sources.documents import (
    Document,
    ReadStats,
    open_dataset,
    open_datasets,
    read_documents,
)
from bloomery.data.sources.files import list_files, other_splits, unread_files
from bloomery.recipe.schema import Data, Source

TALK = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
TALK_MESSAGES = (Message("user", "two and two?"), Message("assistant", "four"))


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            texts = [
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
                for row in rows
            ]
            writer.writerows(texts)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    return path


def read(
    path: Path, required_format: str = "sft", stats: ReadStats | None = None, **source
) -> list[Document]:
    corpus = open_dataset(Source(path=str(path), **source), required_format)
    return list(read_documents(corpus, on_error="stop", stats=stats or ReadStats()))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("row", "format", "responses"),
    [
        ({"id": "a", "messages": TALK}, "messages", (TALK_MESSAGES,)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "two and two?"},
                    {"from": "gpt", "value": "four"},
                ]
            },
            "sharegpt",
            (TALK_MESSAGES,),
        ),
        (
            {
                "instruction": "two and two?",
                "input": "",
                "output": "four",
                "text": "### Instruction ...",
            },
            "alpaca",
            (TALK_MESSAGES,),
        ),
        ({"prompt": "two and two?", "completion": " four"}, "completion", (" four",)),
    ],
)
def test_answers_are_found_in_every_file_format(tmp_path, suffix, row, format, responses):
    stats = ReadStats()
    (document,) = read(write_rows(tmp_path / f"a.{suffix}", [row]), stats=stats)
    assert document.example is not None
    assert document.example.responses == responses
    assert stats.formats == {format}
    assert from_wire(document.wire.decode(), document.source) == document.example


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_pairs_and_labels_are_found_in_every_file_format(tmp_path, suffix):
    pair = {
        "prompt": TALK[:1],
        "chosen": TALK[1:],
        "rejected": [{"role": "assistant", "content": "five"}],
    }
    path = write_rows(tmp_path / f"a.{suffix}", [pair])
    (document,) = read(path, "pairs")
    assert document.example and document.example.prompt == TALK_MESSAGES[:1]
    assert document.example.responses == (TALK_MESSAGES[1:], (Message("assistant", "five"),))
    chosen_document, rejected_document = read(path, "kto")
    assert chosen_document.example and rejected_document.example
    assert (chosen_document.example.desirable, rejected_document.example.desirable) == (True, False)
    assert (chosen_document.example.responses, rejected_document.example.responses) == tuple(
        (answer,) for answer in document.example.responses
    )
    path_of_marks = write_rows(
        tmp_path / f"b.{suffix}", [{"prompt": "a", "completion": "b", "label": False}]
    )
    (document,) = read(path_of_marks, "kto")
    assert document.example and document.example.desirable is False


def test_the_recipe_names_columns_of_other_names(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"dialogue": TALK, "text": "no"}])
    (document,) = read(path, columns={"messages": "dialogue"})
    assert document.example and document.example.responses == (TALK_MESSAGES,)
    (document,) = read(path, columns={"messages": "dialogue"}, format="messages")
    assert document.example and document.example.responses == (TALK_MESSAGES,)
    (document,) = read(path, columns={"text": "text"})
    assert (document.text, document.example) == ("no", None)
    with pytest.raises(UserError, match="unknown role: chosen; the roles are messages, system"):
        read(path, columns={"chosen": "x"}, format="messages")
    with pytest.raises(UserError, match="unknown role: wat"):
        read(path, columns={"wat": "x"})


def test_text_stays_text(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "plain", "prompt": "a", "completion": "b"}])
    assert [document.text for document in read(path, "any")] == ["plain"]
    assert [document.text for document in read(path, "text")] == ["plain"]
    path = write_rows(tmp_path / "b.parquet", [{"text": "plain"}])
    assert [document.text for document in read(path, "sft")] == ["plain"]
    (tmp_path / "c.txt").write_text("words")
    assert [document.text for document in read(tmp_path / "c.txt", "sft")] == ["words"]
    for suffix in ("jsonl", "parquet"):
        path_of_both = write_rows(
            tmp_path / f"both.{suffix}", [{"text": "plain", "messages": TALK}]
        )
        assert [document.text for document in read(path_of_both, "any")] == ["plain"]
        assert read(path_of_both, "sft")[0].example is not None
    # plainly a conversation, whatever is trained
    path = write_rows(tmp_path / "d.jsonl", [{"messages": TALK}])
    assert read(path, "any")[0].example is not None


@pytest.mark.parametrize(
    ("row", "required_format", "problem", "fix"),
    [
        (
            {"messages": TALK},
            "pairs",
            "rows are conversations; the objective needs pairs",
            "kind=sft",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "sft",
            "rows are preference pairs",
            "kind=dpo",
        ),
        ({"text": "words"}, "pairs", "is plain text; the objective needs pairs", "kind=sft"),
        ({"prompt": "a", "completion": "b"}, "kto", "rows are completions", "kind=sft"),
        (
            {"riddle": "a", "secret": "b"},
            "sft",
            "no column with a usual name for the messages or a response",
            "data.format=alpaca data.columns='{instruction: riddle, output: secret}'",
        ),
    ],
)
def test_rows_of_another_objective_are_refused(tmp_path, row, required_format, problem, fix):
    for suffix in ("jsonl", "parquet"):
        with pytest.raises(UserError, match=problem) as caught:
            read(write_rows(tmp_path / f"a.{suffix}", [row]), required_format)
        assert fix in (caught.value.fix or "")


def test_tables_come_before_their_description(tmp_path):
    (tmp_path / "README.md").write_text("about")
    write_rows(tmp_path / "train.json", [{"messages": TALK}])
    assert len(read(tmp_path)) == 1
    assert read(tmp_path)[0].example is not None
    assert [document.text for document in read(tmp_path, "any")] == ["about"]


def test_of_a_folder_of_splits_train_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        rows = [{"messages": [TALK[0], {**TALK[1], "content": split}]}]
        write_rows(tmp_path / "data" / f"{split}.parquet", rows)
    texts = [document.example.responses[0][1].content for document in read(tmp_path)]
    assert texts == ["train-00000-of-00002", "train-00001-of-00002"]
    (test,) = other_splits(Source(path=str(tmp_path)), rows=True)["test"]
    assert test.name == "data/test-00000-of-00001.parquet"
    assert len(read(tmp_path, glob="*.parquet")) == 2
    assert len(read(tmp_path, glob="test-*")) == 1, "a glob that names a split asks for it"


@pytest.mark.parametrize(
    ("names", "train_names"),
    [
        (["train.jsonl", "test.jsonl", "more.jsonl"], ["train.jsonl", "more.jsonl"]),
        (["a.jsonl", "test.jsonl"], ["a.jsonl"]),
        (["train.csv", "Validation.csv", "dev2.csv.gz", "eval/b.csv"], ["train.csv"]),
        (
            ["a.jsonl", "validation/a.jsonl", "test/deep/b.jsonl", "tests/c.jsonl"],
            ["a.jsonl", "tests/c.jsonl"],
        ),
        (["chats.jsonl", "chats-val.jsonl", "chats_test.jsonl"], ["chats.jsonl"]),
        (["go.jsonl", "test-driven.jsonl", "dev-team.jsonl"], None),
        (
            ["train_prefs-00000-of-00001.parquet", "test_prefs-00000-of-00001.parquet"],
            ["train_prefs-00000-of-00001.parquet"],
        ),
        (["part1-00000-of-00002.parquet", "part2-00000-of-00001.parquet"], None),
        (
            ["train-00000-of-00001-0a1b2c.parquet", "extra-00000-of-00001.parquet"],
            ["train-00000-of-00001-0a1b2c.parquet"],
        ),
        (["train.py", "test.py"], None),
        (["train.txt", "test.txt"], ["train.txt"]),
        (["about.txt", "test.txt"], None),
        (["test-00000-of-00001.parquet"], None),
        (["training.jsonl", "tests.jsonl", "train.jsonl"], None),
    ],
)
def test_files_of_evaluation_splits_are_known_by_name(names, train_names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [file.name for file in list_files(Source(path=str(tmp_path)))] == sorted(
        train_names or names
    )


def test_evaluation_splits_stay_out_with_a_glob(tmp_path):
    """A glob used to switch the names of splits off, and validation and test files were trained on without a word."""
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl", "extra.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    source = Source(path=str(tmp_path), glob="*.jsonl")
    assert [file.name for file in list_files(source)] == ["extra.jsonl", "train.jsonl"]
    assert {
        split: [file.name for file in files] for split, files in other_splits(source).items()
    } == {
        "validation": ["validation.jsonl"],
        "test": ["test.jsonl"],
    }


def test_a_dataset_of_the_hub_is_divided_as_a_folder_is(tmp_path, monkeypatch):
    """The folder that the Hub's library leaves: links to blobs in a snapshot."""
    cached_dataset = tmp_path / "hub" / "datasets--org--chats"
    (cached_dataset / "refs").mkdir(parents=True)
    (cached_dataset / "refs" / "main").write_text("abc")
    (cached_dataset / "blobs").mkdir()
    (cached_dataset / "snapshots/abc/data").mkdir(parents=True)
    for name in ("train-00000-of-00001", "validation-00000-of-00001", "test-00000-of-00001"):
        write_rows(cached_dataset / "blobs" / f"{name}.parquet", [{"text": name}])
        (cached_dataset / f"snapshots/abc/data/{name}.parquet").symlink_to(
            f"../../../blobs/{name}.parquet"
        )
    monkeypatch.setattr(
        "bloomery.data.sources.files.data_place", lambda path: cached_dataset / "snapshots/abc"
    )
    for glob in (None, "*.parquet", "data/*.parquet"):
        source = Source(path="hub:org/chats", glob=glob)
        assert [file.name for file in list_files(source)] == ["data/train-00000-of-00001.parquet"]
        assert set(other_splits(source)) == {"validation", "test"}


def test_evaluation_splits_alone_are_refused(tmp_path):
    for name in ("validation.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        UserError, match="no file to train on: all are of evaluation splits"
    ) as caught:
        list_files(Source(path=str(tmp_path)))
    assert caught.value.fix == 'to train on one of them, name it: data.glob="*test*"'


def test_splits_without_one_called_train_are_to_be_named(tmp_path):
    for split in ("train_prefs", "test_prefs", "train_sft", "test_sft", "raw"):
        (tmp_path / f"{split}-00000-of-00001.parquet").write_text("")
    with pytest.raises(
        UserError, match="none of its splits is called train: raw, test_prefs, test_sft, train_p"
    ) as caught:
        list_files(Source(path=str(tmp_path)))
    assert caught.value.fix == (
        'name one: data.glob="train_sft-*" (sft) or data.glob="train_prefs-*" (dpo and other pairs)'
    )
    (named_file,) = list_files(Source(path=str(tmp_path), glob="train_prefs-*"))
    assert named_file.name == "train_prefs-00000-of-00001.parquet"


def unread_warning(folder, *names, rows=True, **fields):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return unread_files(Source(path=str(folder), **fields), rows=rows)


def test_tables_beside_data_files_are_named_with_the_glob_that_reads_them(tmp_path):
    """A folder of a.jsonl and c.json used to be read without c.json, and nobody said so."""
    assert unread_warning(tmp_path, "a.jsonl", "b.jsonl") is None
    assert (
        unread_warning(
            tmp_path, "config.json", "dataset_infos.json", "test.json", "README.md", "notes.txt"
        )
        is None
    )
    warning = unread_warning(tmp_path / "some", "a.jsonl", "more/c.json")
    assert (
        warning == '1 file that may be data is not read: more/c.json; data.glob="*.json*" reads all'
    )
    read_names = [
        file.name
        for file in list_files(Source(path=str(tmp_path / "some"), glob="*.json*"), rows=True)
    ]
    assert sorted(read_names) == ["a.jsonl", "more/c.json"]
    warning = unread_warning(tmp_path / "mixed", "a.parquet", "b.csv", "c.csv", "README.md")
    assert (
        warning
        == '2 files that may be data are not read, such as b.csv; data.glob="*.csv*" reads such files instead'
    )
    assert unread_warning(tmp_path / "mixed", glob="*.csv") is None
    assert unread_warning(tmp_path / "plain", "a.jsonl", "b.txt", rows=False).endswith(
        'b.txt; data.glob="*" reads all'
    )
    assert (
        unread_warning(tmp_path / "code", "a.py", "package-lock.json", "sizes.json", rows=False)
        is None
    )
    assert "sizes.json" in unread_warning(tmp_path / "code", rows=True)


def test_a_bad_row_is_named_by_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"messages": TALK}) + "\n[1]\n" + json.dumps({"messages": TALK[:1]}) + "\n"
    )
    with pytest.raises(UserError) as caught:
        read(path, format="messages")
    assert caught.value.where == f"{path}:2"
    stats = ReadStats()
    corpus = open_dataset(Source(path=str(path)), "sft")
    assert len(list(read_documents(corpus, on_error="skip", stats=stats))) == 1
    assert stats.skipped == 2


TEXT = st.text(max_size=8)
CALLS = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT, max_size=3
)
MESSAGE = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.lists(CALLS, max_size=2).map(tuple),
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | TEXT,
    st.booleans(),
)
TURNS = TEXT | st.lists(MESSAGE, max_size=3).map(tuple)


@given(
    st.builds(
        Example,
        TEXT,
        st.sampled_from(["chat", "completion", "pair", "kto", "prompt"]),
        TURNS,
        st.lists(TURNS, max_size=2).map(tuple),
        st.none() | st.booleans(),
        st.lists(CALLS, max_size=2).map(tuple),
        st.booleans(),
        st.dictionaries(
            TEXT, st.none() | st.integers() | TEXT | st.lists(st.floats(0, 1)), max_size=2
        ),
    )
)
def test_an_example_comes_back_from_its_wire_format(example):
    assert from_wire(to_wire(example), example.source) == example


def test_hashed_json_stays_as_it_was():
    """It decides what is held out: a dataset that is prepared again has the same validation set."""
    turns = (Message("user", "a"), Message("assistant", "b", trained_on=False))
    examples = {
        Example("s", "chat", (), (turns,)): '["chat",[],[[{"role":"user","content":"a"},'
        '{"role":"assistant","content":"b","learned":false}]],null,[]]',
        Example("s", "kto", "a", ("b",), desirable=True): '["kto","a",["b"],true,[]]',
        Example("s", "pair", "a", ("b", "c"), implicit=True): '["pair","a",["b","c"],null,[],true]',
    }
    for example, wire in examples.items():
        assert to_wire(example) == wire


@pytest.fixture(params=[100, pytest.param(100_000, marks=pytest.mark.soak)])
def library(request, monkeypatch):
    """The first files of the standard library, and textwrap."""
    files = builtin.stdlib_files()
    library_files = [
        file
        for index, file in enumerate(files)
        if index < request.param or file.name == "textwrap.py"
    ]
    monkeypatch.setattr(builtin, "stdlib_files", lambda: library_files)
    return library_files


def stdlib(name: str, required_format: str) -> list[Example]:
    corpus = open_datasets(Data(builtin=name), required_format)[0]
    return [
        document.example
        for document in read_documents(corpus, on_error="stop", stats=ReadStats())
        if document.example
    ]


def test_the_standard_library_answers_questions(library):
    examples = stdlib("stdlib-chat", "sft")
    assert len(examples) > min(2000, 4 * len(library))
    questions = [texts_of(example)[0] for example in examples]
    responses = [texts_of(example)[1] for example in examples]
    assert len(set(questions)) == len(questions)
    assert len(set(responses)) == len(responses)
    assert all(len(answer) <= 1500 for answer in responses)
    assert not any(ast.get_docstring(ast.parse(answer).body[0]) for answer in responses)
    assert len({question.split()[0] + question.split()[1] for question in questions}) >= 4
    textwrap_examples = [
        example for example in examples if example.source.startswith("textwrap.py:")
    ]
    assert any("def dedent(text):" in texts_of(example)[1] for example in textwrap_examples)


def test_the_standard_library_prefers_answers(library):
    examples = stdlib("stdlib-pairs", "pairs")
    assert examples == stdlib("stdlib-pairs", "pairs")
    assert len(examples) > min(2000, 4 * len(library))
    for example in examples:
        chosen_code, rejected_code = (answer[0].content for answer in example.responses)
        ast.parse(chosen_code)
        with pytest.raises(SyntaxError):
            ast.parse(rejected_code)
        assert sorted(chosen_code.splitlines()) == sorted(rejected_code.splitlines()), (
            "neither length nor words tell them apart"
        )


def test_marked_answers_to_one_question_are_kept_for_the_same_split():
    """Else the held-out loss of KTO would be told by questions that were trained on."""

    def key(kind, prompt, answer, desirable=None):
        example = Example("a:1", kind, prompt, (answer,), desirable=desirable)
        return content_key(Document("a:1", example))

    assert (
        key("kto", "why?", "so", True)
        == key("kto", "why?", "no", False)
        != key("kto", "how?", "so", True)
    )
    assert key("completion", "why?", "so") != key("completion", "why?", "no")
