"""Text beside conversations: each source has the tokens, flags and rows that it has alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_text import sentences
from test_prepare import SMALL, contents, journal_of_stopped
from test_prepare_examples import TOKENIZER, chat_rows, pair_rows, stored

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.packing import PackedSequences
from bloomery.data.prepare.prepare import preparation, prepare
from bloomery.data.prepare.stats import check_dataset, packing_stats, preview
from bloomery.data.shards import open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.evals.evaluate import read_texts
from bloomery.infer.forward import forward
from bloomery.model.io.weights import fresh_decoder
from bloomery.recipe.load import LoadedRecipe
from bloomery.train.evaluation.answers import validation_prompts
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import next_token_loss
from models_for_tests import make_config

LENGTH = 200
TEXTS = ["".join(sentences(40)), *sentences(20)[9:], "one"]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A tokenizer's folder, and files of each kind."""
    from bloomery.data.tokenizer.training import train_tokenizer
    from bloomery.recipe.schema import TrainTokenizer

    folder = tmp_path_factory.mktemp("places")
    (folder / "t").mkdir()
    tokenizer = train_tokenizer(
        iter(sentences(40)), TrainTokenizer(**TOKENIZER["train"]), folder / "t"
    )
    tokens = [{"input_ids": tokenizer.encode(text)} for text in sentences(20)]
    texts = [{"text": text} for text in TEXTS]
    rows = {"chats": chat_rows(24), "texts": texts, "tokens": tokens, "pairs": pair_rows(9)}
    for name, kind_rows in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kind_rows))
    return folder


@pytest.fixture
def recipe(places, recipe_of):
    def make(*names: str, objective: str = "sft", **data) -> LoadedRecipe:
        paths = [str(places / f"{name}.jsonl") for name in names]
        sources = [{"path": path, "weight": 1 + 0.5 * index} for index, path in enumerate(paths)]
        settings = {
            "chat": {"template": "chatml"},
            "sequence_length": LENGTH,
            "validation": 0,
            **data,
        }
        return recipe_of(
            tokenizer={"from": str(places / "t")}, objective=objective, sources=sources, **settings
        )

    return make


def test_each_source_has_the_tokens_that_it_has_alone(recipe, tmp_path):
    manifest = prepare(recipe("chats", "texts", "tokens"), tmp_path / "mixed", limits=SMALL)
    assert (manifest.kind, manifest.formats, manifest.turns) == ("chat", ("messages",), True)
    assert [(part.plain, part.weight) for part in manifest.train.parts] == [
        (False, 1),
        (True, 1.5),
        (True, 2),
    ]
    split, number, num_learned = open_split(tmp_path / "mixed", "train"), 0, 0
    for name in ("chats", "texts", "tokens"):
        prepare(recipe(name), tmp_path / name, limits=SMALL)
        source_split = open_split(tmp_path / name, "train")
        assert (source_split.kind == "text") == (name != "chats")
        for index in range(len(source_split)):
            ids = tuple(source_split.document(index).tolist())
            flags = (
                (1,) * len(ids)
                if source_split.loss_mask is None
                else stored(source_split, index)[1]
            )
            assert stored(split, number) == (ids, flags)
            assert split.is_plain(number) == (name != "chats")
            number, num_learned = number + 1, num_learned + sum(flags)
    assert (number, num_learned) == (len(split), manifest.train.loss_tokens)


@pytest.mark.parametrize("layout", ["packed", "padded", "fixed"])
def test_each_source_has_the_rows_that_it_has_alone(recipe, tmp_path, layout):
    names = ("texts", "chats", "tokens")
    prepare(recipe(*names), tmp_path / "mixed")
    split = open_split(tmp_path / "mixed", "train")
    rows = PackedSequences(split, sequence_length=LENGTH, layout=layout, pad_id=3)
    for part, name in enumerate(names):
        manifest = prepare(recipe(name), tmp_path / name)
        source_rows = PackedSequences(
            open_split(tmp_path / name, "train"), sequence_length=LENGTH, layout=layout, pad_id=3
        )
        assert rows.counts[part] == source_rows.counts[0]
        for index in range(source_rows.counts[0]):
            mixed_row, source_row = vars(rows.read(part, index)), vars(source_rows.read(0, index))
            offsets = np.where(source_row["label_indices"] < 0, 0, split.part_starts[part][0])
            assert all(
                np.array_equal(
                    mixed_row[key], source_row[key] + (offsets if key == "label_indices" else 0)
                )
                for key in mixed_row
                if key not in ("extras", "pictures")
            )
        if name == "texts" and layout == "packed":
            num_learned = sum(
                rows.read(part, index).loss_mask.sum() for index in range(rows.counts[part])
            )
            assert num_learned == manifest.train.tokens - manifest.train.documents, (
                "a long text loses nothing"
            )
    fill = packing_stats(split, sequence_length=LENGTH, layout=layout)
    if layout == "fixed":
        assert fill is None
        return
    mixed_rows = [
        rows.read(part, index) for part, count in enumerate(rows.counts) for index in range(count)
    ]
    assert fill.positions == sum(int((row.documents >= 0).sum()) for row in mixed_rows)
    assert (fill.cut > 0) == (layout == "padded")


def test_a_mixed_batch_costs_what_its_sources_cost(recipe, tmp_path):
    folders = {
        name: tmp_path / "-".join(name) for name in (("chats", "texts"), ("chats",), ("texts",))
    }
    for names, folder in folders.items():
        prepare(recipe(*names), folder)
    model = fresh_decoder(
        make_config(load_tokenizer(folders["chats",])), seed=1, attention="mask"
    ).double()

    def cost(names: tuple[str, ...], visits: list[int] | None = None) -> tuple[float, float]:
        loader = Loader(folders[names], sequence_length=LENGTH, layout="packed", seed=3)
        batch = loader.batch(Cursor(3, 0), loader.sequences)
        batch = replace(batch, loss_mask=batch.loss_mask.double())
        if visits is not None:
            visits += [loader.locate(index)[0] for index in range(loader.sequences)]
        head = pretraining(score_chunk=64).head(batch)
        with torch.no_grad():
            output = forward(model, batch, head, precision="float32")
        parts = next_token_loss(output.head, batch.loss_mask)
        return float(parts.total), float(parts.count)

    visits: list[int] = []
    total, count = cost(("chats", "texts"), visits)
    chats, texts = cost(("chats",)), cost(("texts",))
    rows = Loader(folders["texts",], sequence_length=LENGTH, layout="packed", seed=3).sequences
    assert visits.count(1) == round(1.5 * rows) > rows, "the weight of the text counts its rows"
    text_visits = [index for index in range(len(visits)) if visits[index] == 1]
    loader = Loader(folders["chats", "texts"], sequence_length=LENGTH, layout="packed", seed=3)
    visited_rows = [loader.locate(index)[1] for index in text_visits]
    repeated_rows = [row for row in visited_rows if visited_rows.count(row) == 2]
    assert len(set(repeated_rows)) == len(text_visits) - rows
    twice_total, twice_count = 0.0, 0.0
    for row in set(repeated_rows):
        batch = loader.batch(
            Cursor(3, next(i for i in text_visits if loader.locate(i)[1] == row)), 1
        )
        batch = replace(batch, loss_mask=batch.loss_mask.double())
        head = pretraining(score_chunk=64).head(batch)
        with torch.no_grad():
            output = forward(model, batch, head, precision="float32")
        parts = next_token_loss(output.head, batch.loss_mask)
        twice_total, twice_count = (
            twice_total + float(parts.total),
            twice_count + float(parts.count),
        )
    assert count == chats[1] + texts[1] + twice_count
    assert total / count == pytest.approx((chats[0] + texts[0] + twice_total) / count, rel=1e-12)


def test_several_processes_and_a_second_start_write_the_same_bytes(recipe, tmp_path):
    names = ("texts", "chats", "tokens")
    prepare(recipe(*names), tmp_path / "whole", limits=SMALL)
    prepare(recipe(*names, num_proc=2), tmp_path / "two", limits=SMALL)
    journal_of_stopped(recipe(*names), tmp_path / "again", 3)
    prepare(recipe(*names), tmp_path / "again", limits=SMALL)
    assert (
        contents(tmp_path / "whole") == contents(tmp_path / "two") == contents(tmp_path / "again")
    )


def test_text_mixes_with_conversations_of_another_source_only(recipe, places, tmp_path, recipe_of):
    with pytest.raises(UserError, match="is plain text; the objective needs pairs"):
        prepare(recipe("pairs", "texts", objective="dpo"), tmp_path / "p")
    with pytest.raises(
        UserError, match="plain text here and preference pairs before: a run trains"
    ):
        prepare(recipe("pairs", "texts", objective="pretrain"), tmp_path / "q")
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("chats", "texts"):
        (folder / f"{name}.jsonl").write_bytes((places / f"{name}.jsonl").read_bytes())
    loaded_recipe = recipe_of(
        tokenizer={"from": str(places / "t")},
        objective="sft",
        path=str(folder),
        validation=0,
        chat={"template": "chatml"},
    )
    with pytest.raises(
        UserError, match="plain text here and conversations before: one source has one"
    ) as caught:
        prepare(loaded_recipe, tmp_path / "r")
    assert "texts.jsonl:1" in caught.value.where and "data.sources" in caught.value.fix


def test_text_does_not_stand_in_for_conversations_without_answers(
    recipe, places, tmp_path, recipe_of
):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
            ]
        }
    ] * 3
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(tmp_path / "none.jsonl")}, {"path": str(places / "texts.jsonl")}]
    loaded_recipe = recipe_of(
        tokenizer={"from": str(places / "t")},
        objective="sft",
        sources=sources,
        validation=0,
        chat={"template": "chatml"},
    )
    with pytest.raises(UserError, match="all labels are masked"):
        prepare(loaded_recipe, tmp_path / "p")


def test_a_preview_tells_what_each_document_is(recipe, tmp_path):
    loaded_recipe = recipe("chats", "texts")
    with preparation(loaded_recipe, tmp_path / "p") as work:
        documents = list(preview(work, 4, sequence_length=LENGTH, layout="packed"))
    assert [document.kind for document in documents] == [
        "conversation",
        "conversation",
        "text",
        "text",
    ]
    assert [document.sequences for document in documents[2:]] == [
        -(-len(documents[2].ids) // LENGTH),
        1,
    ]
    assert (
        documents[2].sequences > 1
        and documents[2].cut == 0
        and documents[2].loss_mask == [True] * len(documents[2].ids)
    )


def test_a_summary_tells_each_source_and_its_kind(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [
        {"path": str(places / "chats.jsonl")},
        {"path": str(places / "texts.jsonl"), "weight": 0.5},
    ]
    (tmp_path / "mix.yaml").write_text(
        json.dumps(
            {
                "model": {"preset": "go-coder-tiny"},
                "tokenizer": {"from": str(places / "t")},
                "objective": {"kind": "sft"},
                "data": {
                    "sources": sources,
                    "sequence_length": LENGTH,
                    "validation": 0,
                    "chat": {"template": "chatml"},
                },
            }
        )
    )
    output = (
        CliRunner().invoke(cli, ["prepare", "mix.yaml", "--check"], catch_exceptions=False).stdout
    )
    lines = output.splitlines()
    assert (
        lines[0]
        == f"dataset    24 conversations and {len(TEXTS)} documents for training, 0 for validation"
    )
    assert any(line.endswith("tokens") and ": 24 conversations, " in line for line in lines)
    assert any(
        f": {len(TEXTS)} documents of text, " in line and "0.5 times per epoch" in line
        for line in lines
    )
    assert any("; 1 text longer, 0 tokens truncated" in line for line in lines)
    output = (
        CliRunner()
        .invoke(cli, ["prepare", "mix.yaml", "--preview", "2"], catch_exceptions=False)
        .stdout
    )
    assert (
        "train · conversation · " in output and "train · text · " in output and "of 200" in output
    )


def test_held_out_text_and_conversations_are_examined_as_such(recipe, places, tmp_path):
    loaded_recipe = recipe("chats", "texts", validation="30%")
    manifest = prepare(loaded_recipe, tmp_path / "p")
    chats, plain = (part.documents for part in manifest.validation.parts)
    assert chats and plain
    tokenizer: Tokenizer = load_tokenizer(tmp_path / "p")
    texts = list(read_texts(tmp_path / "p", tokenizer))
    assert [text.loss_mask is None for text in texts] == [False] * chats + [True] * plain
    assert len(validation_prompts(tmp_path / "p", 99)) == chats
    manifest_read = read_manifest(tmp_path / "p")
    check = check_dataset(
        tmp_path / "p", manifest_read, tokenizer, sequence_length=LENGTH, layout="packed"
    )
    assert (check.units, check.unit_name) == (manifest.train.documents, "texts")
    assert check.other_eos == manifest.train.parts[0].documents, (
        "texts are not asked how an answer ends"
    )
