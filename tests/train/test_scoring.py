"""Scores of single tokens, against one forward per token."""

import numpy as np
import pytest
import torch

from bloomery.core.progress import told_to
from bloomery.facts.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.train.evaluation import scoring
from bloomery.train.evaluation.scoring import Window, score_documents, windows

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=8,
)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def nats_one_by_one(decoder, tokens, context):
    """Each token from a forward of its own over what its window shows."""
    nats, scored = [], 1
    for start in range(0, len(tokens), context // 2):
        end = min(start + context, len(tokens))
        for target in range(scored, end):
            with torch.no_grad():
                logits = decoder(torch.tensor([tokens[start:target]])).head[0, -1]
            nats.append(-torch.log_softmax(logits.double(), -1)[tokens[target]].item())
        scored = end
        if end == len(tokens):
            return nats
    return nats


@pytest.mark.parametrize("length", [2, 5, 8, 9, 12, 13, 40])
@pytest.mark.parametrize("context", [8, 4, 5])
def test_scores_equal_one_forward_per_token(decoder, length, context):
    tokens = torch.randint(
        0, 37, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    (nats,) = score_documents(decoder, [tokens], context=context)
    np.testing.assert_allclose(nats, nats_one_by_one(decoder, tokens, context), atol=1e-5)


def test_documents_of_many_lengths_keep_their_order_and_do_not_touch(decoder):
    generator = torch.Generator().manual_seed(1)
    documents = [
        torch.randint(0, 37, (n,), generator=generator).tolist() for n in (3, 40, 1, 9, 0, 8, 2)
    ]
    together = list(score_documents(decoder, documents))
    assert [len(nats) for nats in together] == [2, 39, 0, 8, 0, 7, 1]
    for tokens, nats in zip(documents, together, strict=True):
        (alone,) = score_documents(decoder, [tokens])
        np.testing.assert_allclose(nats, alone, atol=1e-5)


def test_groups_do_not_matter(decoder, monkeypatch):
    documents = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]] * 5
    whole = list(score_documents(decoder, documents))
    monkeypatch.setattr(scoring, "_TOKENS_A_GROUP", 12)
    monkeypatch.setattr(scoring, "_TOKENS_A_FORWARD_OF_CPU", 9)
    np.testing.assert_allclose(list(score_documents(decoder, documents)), whole, atol=1e-5)


def test_whoever_waits_is_told_how_many_tokens_are_scored(decoder, monkeypatch):
    monkeypatch.setattr(scoring, "_TOKENS_A_FORWARD_OF_CPU", 9)
    told = []
    with told_to(told.append):
        list(score_documents(decoder, [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12]]))
    assert told == ["6 of 9 tokens", "9 of 9 tokens"]


@pytest.mark.parametrize("context", [2, 3, 8, 9])
def test_every_token_but_the_first_is_scored_once_with_half_a_context_before_it(context):
    for length in range(2, 60):
        pieces = list(windows(length, context))
        scored = [index for piece in pieces for index in range(piece.scored, piece.end)]
        assert scored == list(range(1, length))
        assert all(piece.end - piece.start <= context for piece in pieces), length
        assert all(piece.scored - piece.start >= context // 2 for piece in pieces[1:]), length


def test_a_text_within_the_context_is_one_window():
    assert list(windows(8, 8)) == [Window(0, 0, 8, 1)]
    assert list(windows(9, 8)) == [Window(0, 0, 8, 1), Window(0, 4, 9, 8)]


def test_the_mode_of_the_model_is_left_as_it_was(decoder):
    decoder.train()
    next(score_documents(decoder, [[1, 2, 3]]))
    assert decoder.training
