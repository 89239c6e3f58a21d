"""Shards that equal the undisturbed ones after any kill, and refuse to be what they are not."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_text import sentences
from test_example_documents import write_rows

import preloaded
from bloomery.core.errors import UserError
from bloomery.data.prepare.pipeline import Limits
from bloomery.data.prepare.prepare import (
    changed_source,
    finished_manifest,
    locked,
    prepare,
    prepared_folder,
)
from bloomery.data.prepare.split import content_key, make_splitter, repeated_lines
from bloomery.data.shards import open_split, read_manifest, write_manifest
from bloomery.data.sources.documents import (
    Document,
    ReadStats,
    open_datasets,
    read_documents,
    unpadded,
)
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.recipe.load import LoadedRecipe

SMALL = Limits(shard_tokens=500, batch_bytes=300, journal_seconds=0.0)


def contents(folder: Path) -> dict[str, str]:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def decoded(folder: Path, name: str) -> list[str]:
    split, tokenizer = open_split(folder, name), load_tokenizer(folder)
    documents = [split.document(index).tolist() for index in range(len(split))]
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in documents)
    return [tokenizer.decode(ids[1:-1]) for ids in documents]


def test_text_comes_back_from_the_shards(corpus, tmp_path, recipe_of):
    manifest = prepare(recipe_of(path=str(corpus), validation="10%"), tmp_path / "p", limits=SMALL)
    train, validation = decoded(tmp_path / "p", "train"), decoded(tmp_path / "p", "validation")
    assert sorted(train + validation) == sorted(sentences(60))
    assert not set(train) & set(validation)
    assert manifest.train.bytes == sum(len(text.encode()) for text in train)
    assert len(manifest.train.shards) > 1
    assert (
        manifest
        == read_manifest(tmp_path / "p")
        == finished_manifest(recipe_of(path=str(corpus), validation="10%"), tmp_path / "p")
    )


def test_several_processes_write_the_same_bytes(corpus, tmp_path, recipe_of):
    for workers in (0, 3):
        prepare(
            recipe_of(path=str(corpus), num_proc=workers), tmp_path / str(workers), limits=SMALL
        )
    assert contents(tmp_path / "0") == contents(tmp_path / "3")


def test_folder_depends_on_what_changes_tokens_only(corpus, tmp_path, recipe_of):
    def folder(**data) -> Path:
        return prepared_folder(recipe_of(path=str(corpus), **data), tmp_path)

    assert folder() == folder(sequence_length=99, packing=False, prefetch=3, num_proc=2)
    assert folder().parent == tmp_path / "prepared"
    assert folder().name.startswith("small-")
    assert (
        len({folder(), folder(validation="7%"), folder(glob="*.txt"), folder(on_error="skip")}) == 4
    )
    assert folder(prepared="/elsewhere") == Path("/elsewhere")


CHILD = """
import sys
from pathlib import Path
from bloomery.data.prepare.prepare import prepare
from bloomery.data.prepare.pipeline import Limits
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe
recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_bytes())
print("started", flush=True)
limits = Limits(shard_tokens=4000, batch_bytes=2000, journal_seconds=0.0)
prepare(LoadedRecipe(recipe, "small"), Path(sys.argv[2]), limits=limits)
"""


def kill_after(seconds: float, recipe: Path, folder: Path) -> int:
    """Runs `prepare` in a process, kills it so long after it has begun, and returns its exit code."""
    with preloaded.Popen(
        [sys.executable, "-c", CHILD, str(recipe), str(folder)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return process.wait()


def killed_runs(count: int, tmp_path: Path, recipe_of) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text(
        "".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences(1200, 30))
    )
    loaded_recipe = recipe_of(path=str(text), validation="5%", num_proc=2)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(loaded_recipe.recipe.model_dump_json(by_alias=True))
    # What forks takes longer to start than any of these runs: its first answer is awaited here.
    assert preloaded.run([sys.executable, "-c", ""]).returncode == 0
    started = time.monotonic()
    assert kill_after(120, recipe, tmp_path / "whole") == 0
    whole_seconds, chance = time.monotonic() - started, random.Random(count)
    kills = 0
    while kills < count:
        code = kill_after(chance.uniform(0, 0.6 * whole_seconds), recipe, tmp_path / "killed")
        kills += 1
        if code == 0:
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
            shutil.rmtree(tmp_path / "killed")
    assert kill_after(120, recipe, tmp_path / "killed") == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_killed_and_run_again_gives_the_same_bytes(tmp_path, recipe_of):
    killed_runs(2, tmp_path, recipe_of)


@pytest.mark.soak
def test_killed_twenty_times_gives_the_same_bytes(tmp_path, recipe_of):
    killed_runs(20, tmp_path, recipe_of)


class Stop(Exception):
    """Ends a `prepare` where a test wants it."""


def journal_of_stopped(loaded_recipe: LoadedRecipe, folder: Path, batches: int) -> dict:
    """What `prepare` vouches for that was ended after so many batches of tokens."""
    remaining_batches = iter(range(batches))

    def stopping(phase: str, progress: float, total: float) -> None:
        if phase == "tokens" and next(remaining_batches, None) is None:
            raise Stop

    with pytest.raises(Stop):
        prepare(loaded_recipe, folder, report=stopping, limits=SMALL)
    return json.loads((folder / "preparing.json").read_text())


@pytest.mark.parametrize("batches", [1, 4, 9])
def test_work_that_the_journal_records_is_not_done_again(
    corpus, tmp_path, recipe_of, batches, monkeypatch
):
    loaded_recipe = recipe_of(path=str(corpus), validation="10%")
    prepare(loaded_recipe, tmp_path / "whole", limits=SMALL)
    journal = journal_of_stopped(loaded_recipe, tmp_path / "p", batches)
    size = sum(path.stat().st_size for path in (tmp_path / "p").glob("*-0*.bin"))
    assert size == 2 * sum(
        tokens for split in ("train", "validation") for tokens, _ in journal[split]["parts"]
    )
    # a second training would fail
    monkeypatch.setattr("bloomery.data.prepare.pipeline.train_tokenizer", None)
    phases = []
    prepare(
        loaded_recipe, tmp_path / "p", report=lambda phase, *_: phases.append(phase), limits=SMALL
    )
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")
    assert "tokenizer" not in phases


def test_shards_shorter_than_the_journal_are_made_again(corpus, tmp_path, recipe_of):
    loaded_recipe = recipe_of(path=str(corpus))
    prepare(loaded_recipe, tmp_path / "whole", limits=SMALL)
    journal_of_stopped(loaded_recipe, tmp_path / "p", 3)
    os.truncate(tmp_path / "p" / "train-00000.bin", 10)
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_stale_foreign_and_damaged_folders_are_refused(corpus, tmp_path, recipe_of):
    loaded_recipe, folder = recipe_of(path=str(corpus)), tmp_path / "p"
    prepare(loaded_recipe, folder)
    with pytest.raises(UserError, match="other data or tokenizer settings"):
        prepare(recipe_of(path=str(corpus), validation="9%"), folder)
    (corpus / "003.txt").touch()
    prepare(loaded_recipe, folder)  # another time, the same text
    assert changed_source(loaded_recipe.recipe, folder) is None
    original_text = (corpus / "003.txt").read_text()
    (corpus / "003.txt").write_text(original_text.upper())
    with pytest.raises(UserError, match=r"changed after it was prepared: .*003\.txt") as caught:
        prepare(loaded_recipe, folder)
    assert "rm -r" in caught.value.fix
    assert Path(changed_source(loaded_recipe.recipe, folder) or "").name == "003.txt"
    (corpus / "003.txt").write_text(original_text)
    (corpus / "new.txt").write_text("more")
    with pytest.raises(UserError, match=r"new\.txt"):
        prepare(loaded_recipe, folder)
    (corpus / "new.txt").unlink()
    (corpus / "004.txt").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"004\.txt"):
        prepare(loaded_recipe, folder)
    (tmp_path / "away").rename(corpus / "004.txt")
    with (folder / "train-00000.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"bytes instead of the .* in the manifest"):
        prepare(loaded_recipe, folder)
    (folder / "train-00000.bin").unlink()
    with pytest.raises(UserError, match="is missing"):
        read_manifest(folder)
    (folder / "manifest.json").write_text('{"format": 1')
    with pytest.raises(UserError, match="is damaged"):
        read_manifest(folder)
    with pytest.raises(UserError, match="no prepared dataset"):
        read_manifest(tmp_path)


def test_prepared_tokens_are_valid_without_their_text(corpus, tmp_path, recipe_of):
    loaded_recipe = recipe_of(path=str(corpus))
    prepare(loaded_recipe, tmp_path / "p")
    shutil.rmtree(corpus)
    assert finished_manifest(loaded_recipe, tmp_path / "p")


def test_another_tokenizer_beside_the_shards_is_refused(corpus, tmp_path, recipe_of):
    prepare(recipe_of(path=str(corpus)), tmp_path / "p")
    prepare(recipe_of(path=str(corpus), tokenizer={"train": {"vocab_size": 290}}), tmp_path / "q")
    shutil.copy(tmp_path / "q" / "tokenizer.json", tmp_path / "p" / "tokenizer.json")
    with pytest.raises(UserError, match=r"content has changed|bytes instead of"):
        read_manifest(tmp_path / "p")


def test_a_folder_with_other_files_is_left_alone(corpus, tmp_path, recipe_of):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("do not touch")
    with pytest.raises(UserError, match=r"`prepare` did not write: thesis\.tex"):
        prepare(recipe_of(path=str(corpus)), tmp_path / "p")
    assert [path.name for path in (tmp_path / "p").iterdir() if path.name != ".lock"] == [
        "thesis.tex"
    ]


def test_unfinished_folder_of_changed_text_starts_over(corpus, tmp_path, recipe_of):
    loaded_recipe = recipe_of(path=str(corpus))

    def stop(phase: str, progress: float, total: float) -> None:
        if phase == "tokens":
            raise Stop

    with pytest.raises(Stop):
        prepare(loaded_recipe, tmp_path / "p", report=stop, limits=SMALL)
    (corpus / "000.txt").write_text("something else")
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    prepare(loaded_recipe, tmp_path / "q", limits=SMALL)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


def test_a_second_process_in_one_folder_is_refused(corpus, tmp_path, recipe_of):
    (tmp_path / "p").mkdir()
    with locked(tmp_path / "p"), pytest.raises(UserError, match="another process is preparing"):
        prepare(recipe_of(path=str(corpus)), tmp_path / "p")


def test_a_full_disk_is_reported_and_the_next_run_resumes(corpus, tmp_path, recipe_of, monkeypatch):
    loaded_recipe, free_bytes = recipe_of(path=str(corpus)), 1500
    prepare(loaded_recipe, tmp_path / "whole", limits=SMALL)

    class FullDisk:
        def __init__(self, path: Path) -> None:
            self._file = path.open("ab", buffering=0)

        def write(self, data: bytes) -> int:
            nonlocal free_bytes
            if free_bytes <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            free_bytes -= len(data)
            return self._file.write(data)

        def fileno(self) -> int:
            return self._file.fileno()

        def close(self) -> None:
            self._file.close()

    monkeypatch.setattr("bloomery.data.shards.open_to_append", FullDisk)
    with pytest.raises(UserError, match="the disk is full") as caught:
        prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert "run the same command again" in caught.value.fix and "resumes" in caught.value.fix
    journal = json.loads((tmp_path / "p" / "preparing.json").read_text())
    size = sum(path.stat().st_size for path in (tmp_path / "p").glob("*-0*.bin"))
    assert size == 2 * sum(
        tokens for split in ("train", "validation") for tokens, _ in journal[split]["parts"]
    )
    monkeypatch.undo()
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_reported(corpus, tmp_path, recipe_of, number, monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "prepared")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(UserError, match=f"cannot write: {os.strerror(number)}") as caught:
        prepare(recipe_of(path=str(corpus)), tmp_path / "p")
    assert "data.prepared" in caught.value.fix


def test_empty_and_tiny_corpora_are_refused(tmp_path, recipe_of):
    text = tmp_path / "a.txt"
    text.write_text("")
    with pytest.raises(UserError, match="is empty"):
        prepare(recipe_of(path=str(text)), tmp_path / "empty")
    text.write_text("two words")
    with pytest.raises(UserError, match="less than one sequence of 512") as caught:
        prepare(recipe_of(path=str(text), sequence_length=512), tmp_path / "tiny")
    assert caught.value.where == "data.sequence_length"
    with pytest.raises(UserError, match="less than one sequence"):
        finished_manifest(recipe_of(path=str(text), sequence_length=512), tmp_path / "tiny")
    assert finished_manifest(
        recipe_of(path=str(text), sequence_length=512, packing=False), tmp_path / "tiny"
    )


def test_skipped_rows_are_counted_and_named(tmp_path, recipe_of):
    text = tmp_path / "a.jsonl"
    good_lines = [json.dumps({"text": sentence}) for sentence in sentences(30)]
    text.write_text("\n".join([*good_lines[:10], '{"text": 3}', *good_lines[10:], "{", ""]))
    with pytest.raises(UserError, match="is a number, not a text"):
        prepare(recipe_of(path=str(text)), tmp_path / "p")
    manifest = prepare(recipe_of(path=str(text), on_error="skip"), tmp_path / "q")
    assert manifest.skipped == 2
    assert manifest.first_skipped == f"{text}:11, field text: is a number, not a text"


def test_pretokenized_rows_keep_their_ids(tmp_path, recipe_of, corpus):
    prepare(recipe_of(path=str(corpus)), tmp_path / "first")
    rows = [[1, 40 + n, 50, 2] for n in range(40)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
    )
    with pytest.raises(UserError, match="names no tokenizer") as caught:
        prepare(recipe_of(path=str(tmp_path / "a.jsonl")), tmp_path / "none")
    assert caught.value.where == "tokenizer.from"
    tokenized_recipe = recipe_of(
        path=str(tmp_path / "a.jsonl"), validation=0, tokenizer={"from": str(tmp_path / "first")}
    )
    prepare(tokenized_recipe, tmp_path / "p")
    split = open_split(tmp_path / "p", "train")
    assert [split.document(index).tolist() for index in range(len(split))] == rows
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 999]}) + "\n")
    with pytest.raises(UserError, match="token id 999 is outside the tokenizer's vocabulary"):
        prepare(tokenized_recipe, tmp_path / "q")


@pytest.mark.parametrize("mask", ["attention_mask", None], ids=["attention mask", "padding token"])
@pytest.mark.parametrize("objective", ["pretrain", "sft"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_padding_of_pretokenized_rows_is_not_trained_on(
    tmp_path, recipe_of, corpus, suffix, objective, mask
):
    prepare(recipe_of(path=str(corpus)), tmp_path / "first")
    pad = load_tokenizer(tmp_path / "first").pad_id
    rows = [{"input_ids": [pad] * 3 + [1, 40 + n, 50, 2] + [pad] * (n % 5)} for n in range(40)]
    rows.append({"input_ids": [pad] * 6})
    for row in rows:
        size = len(row["input_ids"])
        row["labels"] = [-100 if token in (pad, 50) else token for token in row["input_ids"]]
        if mask is not None:  # this alone decides, also where it keeps what would be padding
            row[mask] = [int(token != pad) for token in row["input_ids"]]
            row[mask][0] = int(size == 7)
    path = write_rows(tmp_path / f"a.{suffix}", rows)
    padded_recipe = recipe_of(
        path=str(path),
        validation=0,
        tokenizer={"from": str(tmp_path / "first")},
        objective=objective,
    )
    manifest = prepare(padded_recipe, tmp_path / "p", limits=SMALL)
    split = open_split(tmp_path / "p", "train")
    unpadded_rows = [
        [pad] * (mask is not None and n % 5 == 0) + [1, 40 + n, 50, 2] for n in range(40)
    ]
    assert [split.document(index).tolist() for index in range(len(split))] == unpadded_rows
    assert manifest.empty == 1
    assert manifest.padding == sum(len(row["input_ids"]) for row in rows) - sum(
        map(len, unpadded_rows)
    )
    if objective == "sft":
        assert split.loss_mask[:].tolist() == [
            int(token not in (pad, 50)) for ids in unpadded_rows for token in ids
        ]


def test_one_end_token_stays_where_it_is_also_the_padding_token():
    texts = [
        ((1, 5, 2, 2, 2), (1, 5, 2)),
        ((2, 2, 5, 6), (2, 5, 6)),
        ((5, 2), (5, 2)),
        ((5, 2, 6),) * 2,
        ((2,), ()),
    ]
    for tokens, unpadded_tokens in texts:
        assert (
            unpadded(Document("a", tokens=tokens), pad_id=2, ends=(1, 2)).tokens == unpadded_tokens
        )
    assert unpadded(Document("a", tokens=(3, 5, 3)), pad_id=3, ends=(1, 2)).tokens == (5,)
    document_without_padding = Document("a", tokens=(5, 3), padding=0)
    assert unpadded(document_without_padding, pad_id=3, ends=()) == document_without_padding


def test_tokens_prepared_by_a_version_that_kept_padding_are_refused(tmp_path, recipe_of, corpus):
    prepare(recipe_of(path=str(corpus)), tmp_path / "first")
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 40 + n, 50, 2]} for n in range(40)])
    tokenized_recipe = recipe_of(path=str(path), tokenizer={"from": str(tmp_path / "first")})
    prepare(tokenized_recipe, tmp_path / "p")
    write_manifest(
        tmp_path / "p", read_manifest(tmp_path / "p").model_copy(update={"padding": None})
    )
    with pytest.raises(UserError, match="with their padding"):
        prepare(tokenized_recipe, tmp_path / "p")


@pytest.mark.parametrize("form", ["saved", "files"])
def test_the_validation_split_of_a_dataset_is_used(tmp_path, recipe_of, form):
    datasets = pytest.importorskip("datasets")
    texts = {
        "train": sentences(40),
        "validation": [f"held {text}" for text in sentences(9)],
        "test": ["never read"],
    }
    if form == "saved":
        splits = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in texts.items()}
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
    else:
        (tmp_path / "d").mkdir()
        for name, rows in texts.items():
            write_rows(
                tmp_path / "d" / f"{name}-00000-of-00001.parquet", [{"text": text} for text in rows]
            )
    loaded_recipe = recipe_of(path=str(tmp_path / "d"))
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert decoded(tmp_path / "p", "train") == texts["train"]
    assert decoded(tmp_path / "p", "validation") == texts["validation"]
    assert finished_manifest(loaded_recipe, tmp_path / "p") is not None
    prepare(recipe_of(path=str(tmp_path / "d"), validation="10%"), tmp_path / "share", limits=SMALL)
    assert not set(decoded(tmp_path / "share", "validation")) - set(texts["train"])
    prepare(recipe_of(path=str(tmp_path / "d"), validation="test"), tmp_path / "test", limits=SMALL)
    assert decoded(tmp_path / "test", "validation") == texts["test"]
    with pytest.raises(UserError, match="no such file, folder or split") as caught:
        prepare(recipe_of(path=str(tmp_path / "d"), validation="tset"), tmp_path / "none")
    assert caught.value.where == "data.validation: tset" and "test, validation" in caught.value.fix


def test_copies_stay_together_and_both_sides_have_text(tmp_path, recipe_of):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["one"] * 5 + ["two"] * 5)
    )
    for share in ("1%", "50%", "99%"):
        data = recipe_of(path=str(tmp_path / "a.jsonl"), validation=share).recipe.data
        corpora = open_datasets(data)
        splitter = make_splitter(corpora, data)
        documents = read_documents(corpora[0], on_error="stop", stats=ReadStats())
        sides = {document.text: splitter.keeps(content_key(document)) for document in documents}
        assert sorted(sides.values()) == [False, True]


@pytest.mark.parametrize(
    ("rows", "letters", "share", "expected"),
    [
        (200, 30, "5%", range(20, 21)),  # the share alone would be 11 rows
        (50, 30, "1%", range(10, 11)),  # a fifth
        (2, 30, "1%", range(1, 2)),
        (1000, 30, "5%", range(35, 66)),  # enough: the share itself
        (200, 9000, "1%", range(2, 5)),  # two rows have 16 KiB of text
        (40, 30, "0", range(1)),
    ],
)
def test_a_validation_set_can_measure_where_the_dataset_allows_it(
    tmp_path, recipe_of, rows, letters, share, expected
):
    texts = [f"{index} " + "a" * letters for index in range(rows)]
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = recipe_of(path=str(tmp_path / "a.jsonl"), validation=share).recipe.data
    corpora = open_datasets(data)
    splitter = make_splitter(corpora, data)
    keys = [content_key(Document("a", text)) for text in texts]
    assert sum(map(splitter.keeps, keys)) in expected
    if share != "0":  # the lowest keys, whatever the order of the rows
        assert (
            splitter.threshold >= round(float(share.rstrip("%")) / 100 * 2**64)
            or max(keys) == splitter.threshold
        )
        write_rows(tmp_path / "a.jsonl", [{"text": text} for text in reversed(texts)])
        reversed_splitter = make_splitter(corpora, data)
        assert set(filter(reversed_splitter.keeps, keys)) == set(filter(splitter.keeps, keys))


def test_rows_of_the_validation_set_are_counted_by_file_also_after_a_kill(tmp_path, recipe_of):
    texts = sentences(40)
    (tmp_path / "d").mkdir()
    for name, rows in {
        "a": texts[:20],
        "b": texts[20:],
        "validation": [*texts[:3], texts[30], "new"],
    }.items():
        write_rows(tmp_path / "d" / f"{name}.jsonl", [{"text": text} for text in rows])
    loaded_recipe = recipe_of(path=str(tmp_path / "d"), glob="*.jsonl")
    held_files = ((str(tmp_path / "d" / "a.jsonl"), 3), (str(tmp_path / "d" / "b.jsonl"), 1))
    assert prepare(loaded_recipe, tmp_path / "p", limits=SMALL).held_files == held_files
    assert journal_of_stopped(loaded_recipe, tmp_path / "stopped", 4)["held_files"]
    assert prepare(loaded_recipe, tmp_path / "stopped", limits=SMALL).held_files == held_files


def test_validation_of_its_own_keeps_its_documents_out_of_train(tmp_path, recipe_of):
    texts = sentences(40)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:3], "new one"])
    )
    loaded_recipe = recipe_of(
        path=str(tmp_path / "train.jsonl"), validation=str(tmp_path / "held.jsonl")
    )
    manifest = prepare(loaded_recipe, tmp_path / "p")
    assert decoded(tmp_path / "p", "train") == texts[3:]
    assert decoded(tmp_path / "p", "validation") == [*texts[:3], "new one"]
    assert manifest.held_back == 3


@pytest.mark.parametrize(
    ("rows", "problem"), [("", "set is empty\n"), ("\n7\n", "1 row skipped, the first: .*held")]
)
def test_validation_without_a_row_is_refused(tmp_path, recipe_of, rows, problem):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in sentences(5))
    )
    (tmp_path / "held.jsonl").write_text(rows)
    loaded_recipe = recipe_of(
        path=str(tmp_path / "train.jsonl"), validation=str(tmp_path / "held.jsonl"), on_error="skip"
    )
    with pytest.raises(UserError, match=problem) as caught:
        prepare(loaded_recipe, tmp_path / "p")
    assert caught.value.where == f"data.validation: {tmp_path / 'held.jsonl'}"
    assert "data.validation" in caught.value.fix and "1%" in caught.value.fix


def test_share_of_repeated_lines():
    assert repeated_lines(["a\n\n  b\nc\n"], ["x\na\n", "  b"]) == 2 / 3
    assert repeated_lines([], ["a"]) == 0.0
