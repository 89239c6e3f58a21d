"""Batches of conversations and pairs: numbered, marked, with references, and worth the same in every layout."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structured import write_structured

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.reference_scores import ReferenceWriter
from bloomery.data.shards import Manifest, Split, write_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.forward import forward
from bloomery.model.io.weights import fresh_decoder
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import next_token_loss
from models_for_tests import make_config, make_tokenizer

LENGTH = 48


def texts(count: int, texts_per_unit: int, seed: int = 0) -> list[list[tuple[int, bool]]]:
    """Random tokens of which a later stretch is learned; answers of a pair share their prompt."""
    numbers, texts_of_source = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = numbers.integers(10, 300, int(numbers.integers(2, 9))).tolist()
        for _ in range(texts_per_unit):
            answer = numbers.integers(10, 300, int(numbers.integers(2, 14))).tolist()
            texts_of_source.append([(t, False) for t in prompt] + [(t, True) for t in answer])
    return texts_of_source


@pytest.fixture
def folder(tmp_path: Path):
    def make(kind: str, count: int = 30, parts: int = 1) -> Path:
        path = tmp_path / f"{kind}-{count}-{parts}"
        path.mkdir()
        tokenizer = make_tokenizer(path)
        texts_per_unit = 1 if kind == "chat" else 2
        sources = [texts(count, texts_per_unit, seed) for seed in range(parts)]
        marks = [number // 2 % 3 == 0 for number in range(2 * count * parts)]
        split = write_structured(path, sources, kind, 64, [int(mark) for mark in marks])
        write_manifest(path, _manifest(split, path, tokenizer))
        return path

    return make


def _manifest(split: Split, folder: Path, tokenizer: Tokenizer) -> Manifest:
    empty_record = split.record.model_copy(
        update={"tokens": 0, "documents": 0, "parts": (), "shards": (), "loss_mask": ()}
    )
    return Manifest(
        recipe="r",
        identity="i",
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        unk_id=0,
        dtype="uint16",
        shard_tokens=64,
        sources=(),
        kind=split.kind,
        train=split.record,
        validation=empty_record,
    )


def loader(folder: Path, layout: str = "packed", **options) -> Loader:
    return Loader(folder, **{"sequence_length": LENGTH, "layout": layout, "seed": 3, **options})


def epoch_batch(data: Loader) -> Batch:
    return data.batch(Cursor(3, 0), data.sequences)


def test_sequences_are_numbered_through_the_micro_batch(folder):
    batch = epoch_batch(loader(folder("chat")))
    assert batch.sequences is not None
    assert not batch.extras
    inside_documents = batch.documents >= 0
    assert (batch.sequences[~inside_documents] == -1).all()
    assert batch.sequences[inside_documents].unique().tolist() == list(range(30))
    changes = batch.sequences[:, 1:] != batch.sequences[:, :-1]
    assert torch.equal(changes, batch.documents[:, 1:] != batch.documents[:, :-1])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_pairs_are_neighbours_in_every_micro_batch_of_every_rank(folder, layout):
    path = folder("pairs")
    data = loader(path, layout)
    batches = [
        loader(path, layout, data_rank=rank, data_world=2).batch(Cursor(3, 4), 4)
        for rank in range(2)
    ]
    batches += [data.batch(Cursor(3, index), 1) for index in range(3)]
    for batch in batches:
        numbers = batch.sequences[batch.sequences >= 0].unique().tolist()
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 2 == 0
        for chosen_number in numbers[::2]:
            sides = [
                batch.tokens[batch.sequences == number]
                for number in (chosen_number, chosen_number + 1)
            ]
            assert torch.equal(sides[0][:2], sides[1][:2])  # one prompt


def test_a_kto_label_is_on_every_token_of_its_text(folder):
    batch = epoch_batch(loader(folder("kto")))
    labels = batch.extras["kto_labels"]
    assert set(labels.unique().tolist()) == {0, 1}
    assert (labels[batch.sequences < 0] == 0).all()
    marks = [set(labels[batch.sequences == number].tolist()) for number in range(60)]
    assert all(len(labels_of_text) == 1 for labels_of_text in marks)
    assert marks[::2] == marks[1::2]
    assert sum(labels_of_text == {1} for labels_of_text in marks[::2]) == 10


@pytest.mark.parametrize(
    ("kind", "layout"), [("chat", "packed"), ("pairs", "packed"), ("chat", "padded")]
)
def test_a_reference_comes_back_at_its_labels(folder, tmp_path, kind, layout):
    path, file = folder(kind, parts=2), tmp_path / "reference.bin"
    data = loader(path, layout)
    num_visits = Counter()
    with ReferenceWriter(file, data.tokens) as writer:
        for batch, label_indices in data.stored_batches(4):
            assert torch.equal(
                label_indices >= 0, torch.where(batch.loss_mask > 0, True, label_indices >= 0)
            )
            num_visits.update(label_indices[batch.loss_mask > 0].tolist())
            writer.add(
                label_indices.numpy(),
                (batch.labels * 1000 + batch.tokens).numpy().astype(np.float32),
            )
    assert set(num_visits.values()) == {1}
    batch = epoch_batch(loader(path, layout, reference=file))
    expected = (batch.labels * 1000 + batch.tokens).float() * (batch.loss_mask > 0)
    assert torch.equal(batch.extras["reference"], expected)
    with pytest.raises(UserError, match="has no value for a loss token"):
        epoch_batch(
            loader(path, layout, reference=reference_without_last_label(path, file, layout))
        )
    with pytest.raises(UserError, match="is missing"):
        loader(path, layout, reference=tmp_path / "none")


def reference_without_last_label(path: Path, file: Path, layout: str) -> Path:
    """A reference that lacks the last token that is learned."""
    values = np.fromfile(file, np.float32)
    scored_labels = np.flatnonzero(~np.isnan(values))[:-1]
    with ReferenceWriter(file.with_name("partial.bin"), len(values)) as writer:
        writer.add(scored_labels, values[scored_labels])
    return file.with_name("partial.bin")


def test_an_epoch_visits_every_conversation_once(folder):
    data = loader(folder("chat", parts=2))
    places = [data.locate(index) for index in range(2 * data.sequences)]
    assert (
        sorted(places[: data.sequences]) == sorted(places[data.sequences :]) == sorted(set(places))
    )
    loss_mask = epoch_batch(data).loss_mask.sum()
    assert loss_mask == sum(
        flag for source in range(2) for text in texts(30, 1, source) for _, flag in text
    )


def gradients(
    path: Path, layout: str, tokenizer: Tokenizer
) -> tuple[float, dict[str, torch.Tensor]]:
    """Sums over an epoch, in float64."""
    model = fresh_decoder(make_config(tokenizer), seed=1, attention="mask").double()
    objective = pretraining(score_chunk=64)
    data, total = loader(path, layout), 0.0
    for index in range(0, data.sequences, 4):
        batch = data.batch(Cursor(3, index), min(4, data.sequences - index))
        batch = replace(batch, loss_mask=batch.loss_mask.double())
        output = forward(model, batch, objective.head(batch), precision="float32")
        loss = next_token_loss(output.head, batch.loss_mask).total
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_packed_and_unpacked_give_the_same_gradients(folder):
    path = folder("chat", 24)
    tokenizer = make_tokenizer(path)
    loss, packed_gradients = gradients(path, "packed", tokenizer)
    padded_loss, padded_gradients = gradients(path, "padded", tokenizer)
    assert loader(path).sequences < loader(path, "padded").sequences / 2
    assert loss == pytest.approx(padded_loss, rel=1e-12)
    assert packed_gradients.keys() == padded_gradients.keys()
    for name, gradient in packed_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, padded_gradients[name], atol=1e-9, rtol=0)


def test_an_empty_validation_split_is_refused(folder):
    with pytest.raises(UserError, match="the validation split is empty"):
        loader(folder("chat"), split="validation")


def test_a_split_without_loss_tokens_is_refused(folder):
    with pytest.raises(UserError, match="no loss tokens in the train split"):
        loader(folder("pairs"), sequence_length=4)


def test_validation_visits_every_pair_once_in_padded_batches(folder):
    data = loader(folder("kto"))
    batches = list(data.validation_batches(4))
    assert {batch.tokens.shape for batch in batches} == {(4, LENGTH)}
    assert all(batch.sequences is not None and "kto_labels" in batch.extras for batch in batches)
    assert sum(int(batch.sequences.max()) + 1 for batch in batches) == 60
