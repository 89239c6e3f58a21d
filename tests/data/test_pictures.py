"""Conversations with pictures are prepared, packed and batched: tokens, masks, positions and bytes."""

import json

import numpy as np
import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.pictures.batches import axis_positions
from bloomery.data.prepare.prepare import prepare
from bloomery.data.shards import open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.recipe.load import load_recipe
from pictures_for_tests import BLUE, RED, TEXT, png, prepared_rows, row
from tiny_processors import MARKS


@pytest.fixture
def prepared(tmp_path):
    """A function that prepares rows for a kind of model."""

    def make(rows, kind="qwen3_vl", on_error="stop"):
        return prepared_rows(tmp_path, rows, kind=kind, on_error=on_error)

    return make


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_vl",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "smolvlm",
        "mistral3",
        "internvl",
        "lfm2_vl",
    ],
)
def test_a_picture_becomes_its_tokens_which_are_no_targets(prepared, kind):
    folder = prepared([row(RED, TEXT, BLUE)], kind)
    split = open_split(folder, "train")
    tokenizer = load_tokenizer(folder)
    picture = tokenizer.id_of(MARKS["qwen" if kind == "qwen3_vl" else kind][0])
    tokens = split.document(0)
    assert (tokens == picture).sum() > 2
    assert not split.loss_mask[0 : len(tokens)][tokens == picture].any()
    trained = tokens[split.loss_mask[0 : len(tokens)] > 0]
    assert tokenizer.decode(trained.tolist()).startswith("red")
    assert [split.pictures[number] for number in split.pictures.of_document(0)] == [
        png(color="red"),
        png(color="blue"),
    ]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_in_three_axes_are_those_of_transformers(kind):
    from tiny_composites import PICTURE, composite

    grids = [(2, 3), (1, 2)]
    tokens = [5, 6, *[PICTURE] * 6, 7, *[PICTURE] * 2, 8, 9]
    ids = torch.tensor([tokens])
    theirs, _ = composite(kind).model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == PICTURE).int(),
        image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]),
    )
    documents = np.zeros(len(tokens), np.int64)
    ours = axis_positions(np.array(tokens), documents, grids, picture=PICTURE)
    assert ours.tolist() == theirs[:, 0].tolist()
    # Positions begin again with each document, and padding has no pictures.
    twice = axis_positions(
        np.array([*tokens, *tokens, PICTURE]),
        np.array([*documents, *(documents + 1), -1]),
        grids + grids,
        picture=PICTURE,
    )
    assert twice[:, : len(tokens)].tolist() == twice[:, len(tokens) : -1].tolist() == ours.tolist()


def test_a_batch_has_the_pictures_of_its_sequences(prepared):
    rows = [row(RED, TEXT), row(TEXT, BLUE, RED, answer="both"), row(TEXT, answer="none")]
    folder = prepared(rows)
    loader = Loader(folder, sequence_length=512, layout="padded", seed=0)
    batch = loader.batch(Cursor(0, 0), 3)
    per_picture = 2  # 40 x 60 becomes 32 x 64
    assert batch.pictures.inputs["image_grid_thw"].tolist() == [[1, 4, 2]] * 3
    assert len(batch.pictures.places) == 3 * per_picture
    picture = load_tokenizer(folder).id_of("<|image_pad|>")
    assert (batch.tokens.flatten()[batch.pictures.places] == picture).all()
    assert batch.axes.shape == (3, 3, 512)
    has_picture = (batch.tokens == picture).any(1)
    text_axes = batch.axes[:, ~has_picture]
    assert (text_axes == batch.positions[~has_picture]).all()
    # Packed, all three share a sequence: the same pictures, each beside its text.
    packed = Loader(folder, sequence_length=512, layout="packed", seed=0).batch(Cursor(0, 0), 1)
    assert len(packed.pictures.places) == 3 * per_picture


def test_a_row_that_does_not_fit_is_dropped_and_never_cut(prepared):
    folder = prepared([row(RED, TEXT), row(RED, {"type": "text", "text": "word " * 200})])
    manifest = read_manifest(folder)
    assert manifest.train.pictures is not None
    loader = Loader(folder, sequence_length=512, layout="packed", seed=0)
    assert loader.sequences == 1
    assert len(loader.batch(Cursor(0, 0), 1).pictures.places) == 2


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([row({"type": "image", "image": "gone.png"}, TEXT)], "is not there"),
        ([row({"type": "image", "image": "../base/config.json"}, TEXT)], "outside of the dataset"),
        ([row({"type": "image", "image": "/etc/hostname"}, TEXT)], "outside of the dataset"),
        ([row({"type": "image", "image": "train.jsonl"}, TEXT)], "is none of JPEG"),
        ([row({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}})], "on the network"),
        ([row({"type": "image", "image": "data:image/png;base64,!!"}, TEXT)], "base64"),
        ([row({"type": "image"}, TEXT)], "marks 1 place of pictures, and names no"),
        ([row(TEXT) | {"images": ["red.png", {"x": 1}]}], "object without bytes"),
        ([row(RED, {"type": "text", "text": "\ufffc"})], "U\\+FFFC"),
        ([row(RED, {"type": "text", "text": "<|image_pad|>"})], "2 times for 1 pictures"),
        ([row({"type": "audio", "audio": "a.wav"})], "part of type 'audio'"),
    ],
)
def test_bad_pictures_are_named_with_their_row(prepared, rows, problem):
    with pytest.raises(UserError, match=problem) as caught:
        prepared(rows)
    assert "train.jsonl:1" in caught.value.where
    manifest = read_manifest(prepared([*rows, row(RED, TEXT)], on_error="skip"))
    assert (manifest.skipped, manifest.train.documents) == (1, 1)


def test_pictures_of_a_column_take_the_places_that_turns_mark(prepared):
    llava = {
        "conversations": [
            {"from": "human", "value": "<image>\nColor?"},
            {"from": "gpt", "value": "red"},
        ],
        "image": "red.png",
    }
    of_trl = {
        "messages": [
            {"role": "user", "content": "Color?"},
            {"role": "assistant", "content": "red"},
        ],
        "images": ["red.png"],
    }
    of_ollama = {
        "messages": [
            {"role": "user", "content": "Color?", "images": ["red.png"]},
            {"role": "assistant", "content": "red"},
        ]
    }
    folder = prepared([llava, of_trl, of_ollama])
    split = open_split(folder, "train")
    tokenizer = load_tokenizer(folder)
    texts = [tokenizer.decode(split.document(number).tolist()) for number in range(3)]
    assert "<|vision_end|>\nColor?" in texts[0]
    assert "<|vision_end|>Color?" in texts[1]
    assert texts[2] == texts[1]
    assert len(split.pictures) == 3


def test_bytes_of_a_table_are_read(prepared, tmp_path):
    import pyarrow
    import pyarrow.parquet

    prepared([row(RED, TEXT)])
    (tmp_path / "rows" / "train.jsonl").unlink()
    messages = [
        {"role": "user", "content": "Color?"},
        {"role": "assistant", "content": "red"},
    ]
    table = pyarrow.table(
        {"messages": [messages], "images": [[{"bytes": png(color="green"), "path": "g.png"}]]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows" / "train.parquet")
    folder = tmp_path / "of-a-table"
    prepare(load_recipe(tmp_path / "recipe.yaml"), folder)
    assert open_split(folder, "train").pictures[0] == png(color="green")


def test_a_model_of_text_refuses_pictures(prepared, tmp_path):
    prepared([row(RED, TEXT)])
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config["text_config"]))
    with pytest.raises(UserError, match="has pictures, and the model reads text alone"):
        prepare(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "text")


def test_a_length_below_every_picture_is_named_with_the_shortest_row(prepared, tmp_path):
    prepared([row(RED, TEXT)])
    recipe = (tmp_path / "recipe.yaml").read_text().replace("512", "16")
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(
        UserError, match="no conversation with pictures fits into 16 tokens"
    ) as caught:
        prepare(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "short")
    longest = int(open_split(tmp_path / "prepared-stop", "train").bounds[1])
    assert caught.value.fix == f"set data.sequence_length={longest}"
