"""Losses of pairs by hand, and what a step over them must not depend on."""

import math
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from torch.testing import assert_close

from bloomery.data.batch import Batch
from bloomery.recipe.objectives import Kto, OrPo, Preference, SimPo
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.losses import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    means,
    orpo_loss,
    pairs_of,
    simpo_loss,
)
from bloomery.train.state import build_state
from bloomery.train.step import compute_loss, train_step

# One row: a pair whose rejected answer lies first, a place of padding; the first label of each text is its prompt.
SEQUENCES = torch.tensor([[1, 1, 1, 0, 0, 0, 0, -1]])
WEIGHTS = torch.tensor([[0.0, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.float64)
SCORES = torch.tensor([[-9.0, -1, -2, -9, -0.5, -0.25, -1, -9]], dtype=torch.float64)
REFERENCE = torch.tensor([[-8.0, -1.5, -1, -8, -1, -1, -0.5, -8]], dtype=torch.float64)
POLICY, START = (pairs_of(scores, WEIGHTS, SEQUENCES) for scores in (SCORES, REFERENCE))
KINDS = [
    Preference(kind="dpo"),
    Preference(kind="dpo", beta=0.3, label_smoothing=0.2),
    Preference(kind="ipo"),
    SimPo(kind="simpo"),
    OrPo(kind="orpo"),
    Kto(kind="kto", desirable_weight=2.0),
]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_dpo_by_hand():
    chosen, rejected = 0.1 * (-1.75 + 2.5), 0.1 * (-3 + 2.5)
    parts = dpo_loss(POLICY, START, beta=0.1, label_smoothing=0.0)
    assert parts.total.item() == pytest.approx(-log_sigmoid(chosen - rejected), rel=1e-12)
    assert parts.count == 1
    expected = {
        "accuracy": 1,
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    assert means(parts.metrics) == pytest.approx(expected)
    smoothed = dpo_loss(POLICY, START, beta=0.1, label_smoothing=0.2).total.item()
    expected_smoothed = -0.8 * log_sigmoid(chosen - rejected) - 0.2 * log_sigmoid(rejected - chosen)
    assert smoothed == pytest.approx(expected_smoothed, rel=1e-12)


def test_ipo_by_hand():
    lead = (-1.75 + 2.5) / 3 - (-3 + 2.5) / 2
    assert ipo_loss(POLICY, START, beta=0.1).total.item() == pytest.approx(
        (lead - 5) ** 2, rel=1e-12
    )


def test_simpo_by_hand():
    expected = -log_sigmoid(2.0 * (-1.75 / 3) - 2.0 * (-3 / 2) - 1.5)
    assert simpo_loss(POLICY, beta=2.0, gamma=1.5).total.item() == pytest.approx(
        expected, rel=1e-12
    )


def test_orpo_by_hand():
    chosen, rejected = math.exp(-1.75 / 3), math.exp(-3 / 2)
    ratio = math.log(chosen / (1 - chosen)) - math.log(rejected / (1 - rejected))
    parts = orpo_loss(POLICY, beta=0.1)
    assert parts.total.item() == pytest.approx(1.75 / 3 - 0.1 * log_sigmoid(ratio), rel=1e-12)
    assert means(parts.metrics)["log_odds"] == pytest.approx(ratio)
    assert means(parts.metrics)["nats"] == pytest.approx(1.75 / 3)


@pytest.mark.parametrize("desirable", [True, False])
def test_kto_by_hand(desirable):
    reward, kl = -1.75 + 2.5, 0.25
    lead = 0.1 * (reward - kl) * (1 if desirable else -1)
    parts = kto_loss(
        POLICY,
        START,
        torch.full((4,), desirable),
        torch.tensor(kl).double(),
        beta=0.1,
        weights=(1.5, 0.5),
    )
    assert parts.total.item() == pytest.approx(
        (1.5 if desirable else 0.5) / (1 + math.exp(lead)), rel=1e-12
    )
    metrics = means(parts.metrics)
    assert metrics == pytest.approx(
        {
            "accuracy": float(desirable),
            "kl": kl,
            "chosen_reward" if desirable else "rejected_reward": 0.1 * reward,
        }
    )


def test_a_certain_answer_does_not_make_orpo_infinite():
    scores = torch.zeros(1, 8, requires_grad=True)
    parts = orpo_loss(pairs_of(scores, WEIGHTS.float(), SEQUENCES), beta=0.1)
    parts.total.backward()
    assert parts.total.isfinite()
    assert scores.grad.isfinite().all()


def batch_of_pairs(rows: int, *, pairs: int = 2, seed: int = 0) -> Batch:
    """Rows of `pairs` pairs each, of texts of 3 to 7 tokens whose first two are the prompt; the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    length = 32
    tensors = {
        name: torch.zeros(rows, length, dtype=torch.int64)
        for name in ("tokens", "labels", "positions")
    }
    documents, sequences = (torch.full((rows, length), -1) for _ in range(2))
    loss_mask = torch.zeros(rows, length)
    for row in range(rows):
        start = 0
        for document in range(2 * pairs):
            size = int(torch.randint(3, 8, (), generator=generator))
            text = torch.randint(97, (size,), generator=generator)
            places = slice(start, start + size)
            tensors["tokens"][row, places] = text
            tensors["labels"][row, start : start + size - 1] = text[1:]
            tensors["positions"][row, places] = torch.arange(size)
            documents[row, places] = document
            sequences[row, places] = row * 2 * pairs + document
            loss_mask[row, start + 1 : start + size - 1] = 1
            start += size
    reference = torch.where(loss_mask > 0, -torch.rand(rows, length, generator=generator) * 14, 0)
    kto_labels = (sequences // 2) % 2
    batch = Batch(**tensors, documents=documents, loss_mask=loss_mask, sequences=sequences)
    return batch.with_extras(reference=reference, kto_labels=kto_labels)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some rows, their sequences numbered anew from 0."""
    some_rows = batch.map_tensors(lambda tensor: tensor[rows])
    is_text = some_rows.sequences >= 0
    first = some_rows.sequences[is_text].min()
    return replace(some_rows, sequences=torch.where(is_text, some_rows.sequences - first, -1))


def padded(batch: Batch) -> Batch:
    """Every text in a row of its own."""
    rows = []
    for number in range(int(batch.sequences.max()) + 1):
        row, places = batch.sequences.eq(number).nonzero().T

        def moved_to_start(
            tensor: torch.Tensor, fill: int = 0, *, row=row, places=places
        ) -> torch.Tensor:
            text = torch.full((1, 32), fill, dtype=tensor.dtype)
            text[0, : len(places)] = tensor[row, places]
            return text

        documents = torch.where(torch.arange(32)[None] < len(places), 0, -1)
        row_batch = replace(batch.map_tensors(moved_to_start), documents=documents)
        rows.append(replace(row_batch, sequences=moved_to_start(batch.sequences, -1)))
    extras = {name: torch.cat([row.extras[name] for row in rows]) for name in batch.extras}
    fields = {name: torch.cat([vars(row)[name] for row in rows]) for name in FIELDS}
    return Batch(**fields, extras=extras)


FIELDS = ("tokens", "labels", "loss_mask", "positions", "documents", "sequences")


def model_and_optimizer(objective_keys, **sections):
    plan = tiny_plan(**sections).model_copy(update={"objective": objective_keys})
    return build_state(plan).model_and_optimizer, build_objective(plan), plan.train


def gradients(objective_keys, batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    """Of the mean over all pairs."""
    learner, objective, _ = model_and_optimizer(objective_keys)
    count = sum(objective.count(batch) for batch in batches)
    total = 0.0
    for batch in batches:
        parts = compute_loss(learner.model, batch, objective, precision="float32")
        (parts.total / count).backward()
        total += parts.total.item()
    return total / count, [
        parameter.grad for parameter in learner.model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("objective_keys", KINDS)
def test_accumulation_takes_the_step_of_one_large_batch(objective_keys):
    large_batch = batch_of_pairs(5)
    results = []
    for batches in (
        [large_batch],
        [rows_of(large_batch, slice(0, 1)), rows_of(large_batch, slice(1, 5))],
    ):
        learner, objective, plan = model_and_optimizer(objective_keys)
        result = train_step(learner, batches, objective, plan=plan, lr_scale=1.0)
        results.append(
            (result, [parameter.detach().clone() for parameter in learner.model.parameters()])
        )
    # of kto the first estimates the drift in its forward, the other before it
    (single_step, weights), (accumulated_step, accumulated_weights) = results
    assert single_step.loss == pytest.approx(accumulated_step.loss, rel=1e-6)
    assert single_step.grad_norm == pytest.approx(accumulated_step.grad_norm, rel=1e-5)
    assert single_step.metrics == pytest.approx(accumulated_step.metrics, rel=1e-5)
    assert single_step.metrics.get("kl", 1.0) > 0
    assert set(single_step.metrics) >= {"accuracy", "chosen_reward", "rejected_reward"}
    assert_close(weights, accumulated_weights, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_drift_of_kto_has_no_dropout_however_a_step_is_cut(rate):
    learner, objective, _ = model_and_optimizer(
        Kto(kind="kto"), config=tiny_config(residual_dropout=rate)
    )
    large_batch = batch_of_pairs(5)
    micro_batches = [rows_of(large_batch, slice(0, 1)), rows_of(large_batch, slice(1, 5))]

    def kl(batches: list[Batch]) -> float:
        first_batch = objective.before(learner.model, batches)[0]
        return means(
            compute_loss(learner.model, first_batch, objective, precision="float32").metrics
        )["kl"]

    assert kl([large_batch]) == pytest.approx(kl(micro_batches), rel=1e-5)
    assert kl([large_batch]) > 0
    has_baseline = (
        objective.before(learner.model, [large_batch])[0].extras.get("baseline") is not None
    )
    assert has_baseline == (rate > 0)  # a forward that drops nothing tells it itself


@pytest.mark.parametrize("objective_keys", KINDS)
def test_packed_rows_train_as_padded_ones_do(objective_keys):
    packed = batch_of_pairs(2, pairs=3)
    (loss, packed_gradients), (padded_loss, padded_gradients) = (
        gradients(objective_keys, [packed]),
        gradients(objective_keys, [padded(packed)]),
    )
    assert loss == pytest.approx(padded_loss, rel=1e-6)
    assert_close(packed_gradients, padded_gradients, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("objective_keys", KINDS)
def test_a_pairs_loss_does_not_depend_on_what_else_is_in_its_row(objective_keys):
    learner, objective, _ = model_and_optimizer(objective_keys)
    row = batch_of_pairs(1, pairs=3)
    is_other_pair = row.sequences >= 2
    changed_row = replace(
        row,
        tokens=torch.where(is_other_pair, 5, row.tokens),
        labels=torch.where(is_other_pair, 7, row.labels),
        sequences=row.sequences.clamp(max=1),
        loss_mask=torch.where(is_other_pair, 0, row.loss_mask),
    )
    row_of_one_pair = replace(
        row,
        sequences=torch.where(is_other_pair, -1, row.sequences),
        loss_mask=changed_row.loss_mask,
    )
    changed_row = replace(changed_row, sequences=row_of_one_pair.sequences)
    with torch.no_grad():
        losses = [
            compute_loss(learner.model, batch, objective, precision="float32").total
            for batch in (row_of_one_pair, changed_row)
        ]
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("objective_keys", KINDS)
def test_gradients_are_those_of_finite_differences(objective_keys):
    objective = build_objective(tiny_plan().model_copy(update={"objective": objective_keys}))
    batch = batch_of_pairs(1, pairs=2)
    batch = replace(batch, loss_mask=batch.loss_mask.double())
    batch = batch.with_extras(
        reference=-torch.rand(1, 32, dtype=torch.float64),
        baseline=torch.tensor(0.3).double(),  # which no gradient flows through
    )
    scores = (-3 * torch.rand(1, 32, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: objective.loss(scores, batch).total, (scores,))


def test_counts_are_known_before_the_forward():
    objective = build_objective(tiny_plan().model_copy(update={"objective": KINDS[0]}))
    batch = batch_of_pairs(3, pairs=2)
    assert objective.count(batch) == 6 == objective.loss(torch.zeros(3, 32), batch).count
