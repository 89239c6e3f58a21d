"""Samples of a rollout in checkpoints and in micro-batches."""

import torch

from bloomery.train.rl.rollout import Rollout, RolloutSample, completion_span, pack

SAMPLES = (
    RolloutSample((5, 6, 7), (8, 9, 0), (-1.0, -2.0, -0.5), 0.5),
    RolloutSample((5, 6, 7), (4,), (-0.25,), -0.5),
    RolloutSample((3,), (1, 2, 3, 4, 5), (-1.0, -1.5, -2.0, -2.5, -3.0), 1.0),
    RolloutSample((9, 9), (9, 0), (-0.125, -0.75), 0.0),
)


def test_a_checkpoint_brings_a_rollout_back():
    rollout = Rollout(7, 4, 3, SAMPLES)
    assert Rollout.of(rollout.tensors(), rollout.scalars()) == rollout
    with_old = rollout.with_old_logps([sample.sampled_logps for sample in SAMPLES])
    assert Rollout.of(with_old.tensors(), with_old.scalars()) == with_old
    assert [rollout.is_over(step) for step in (7, 10, 11)] == [False, False, True]


def test_every_sample_is_a_document_whose_completion_has_the_loss():
    batches, places = pack(SAMPLES, length=10, rows=1)
    assert len(batches) == 2  # 6 + 4 tokens, then 6 + 4
    for sample, place in zip(SAMPLES, places, strict=True):
        batch = batches[place.micro_batch]
        ids = [*sample.prompt_ids, *sample.completion_ids]
        span = slice(place.start, place.start + len(ids))
        assert batch.tokens[place.row, span].tolist() == ids
        assert batch.positions[place.row, span].tolist() == list(range(len(ids)))
        assert len(batch.documents[place.row, span].unique()) == 1
        scored = completion_span(sample, place)
        assert batch.labels[place.row, scored].tolist() == list(sample.completion_ids)
        assert batch.loss_mask[place.row, scored].tolist() == [1.0] * len(sample.completion_ids)
        assert batch.extras["advantages"][place.row, scored].unique().tolist() == [sample.advantage]
        drawn = batch.extras["sampled_logps"][place.row, scored]
        assert drawn.tolist() == list(sample.sampled_logps)
    total = sum(float(batch.loss_mask.sum()) for batch in batches)
    assert total == sum(len(sample.completion_ids) for sample in SAMPLES)
    for batch in batches:
        numbers = batch.sequences[batch.sequences >= 0].unique().tolist()
        assert numbers == list(range(len(numbers)))


def test_rows_of_padding_complete_the_last_micro_batch():
    (batch,), _ = pack(SAMPLES[:1], length=8, rows=3)
    assert batch.tokens.shape == (3, 8)
    assert (batch.documents[1:] == -1).all() and (batch.sequences[1:] == -1).all()
    assert not batch.loss_mask[1:].any()
    assert torch.equal(batch.documents[0] >= 0, torch.arange(8) < 6)
