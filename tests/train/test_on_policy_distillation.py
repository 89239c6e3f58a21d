"""A teacher scores what the model samples: by enumeration, as TRL has it, and through runs."""

from dataclasses import replace

import pytest
import torch
from rollouts_for_tests import (
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
    write_recipe,
    write_teacher,
)
from test_distillation import logits, models
from test_step import batch
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.divergence import DivergenceMeasure
from bloomery.model.heads import ScoreSettings
from bloomery.model.io.weights import fresh_decoder
from bloomery.recipe.objectives import OnPolicyDistill
from bloomery.train.objectives.distillation import on_policy_head
from bloomery.train.objectives.losses import means, on_policy_loss
from bloomery.train.objectives.objective import Objective, Scoring
from bloomery.train.step import compute_loss
from ranks import fields, losses, on_ranks, train

FULL = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.3}  # TRL's beta of each


def objective(teacher, *, chunk: int = 7, **settings) -> Objective:
    keys = OnPolicyDistill(kind="on_policy_distill", teacher="", jsd_beta=0.3, **settings)
    return Objective(
        head=on_policy_head(keys, teacher, Scoring(ScoreSettings(chunk))),
        loss=lambda output_4BT, batch: on_policy_loss(
            output_4BT, batch.loss_mask, sampled=keys.estimator == "sampled"
        ),
    )


def gradients(model) -> list[torch.Tensor]:
    taken = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return taken


@pytest.mark.parametrize("divergence", FULL)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_losses_and_gradients_are_trls(divergence, temperature):
    trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    student, teacher = models()
    inputs = batch(3)
    keys = {"divergence": divergence, "temperature": temperature}
    ours = compute_loss(student, inputs, objective(teacher, **keys), precision="float32")
    (ours.total / ours.count).backward()
    our_gradients = gradients(student)
    hidden = [
        model.model(inputs.tokens, inputs.positions, inputs.documents, None)
        for model in (student, teacher)
    ]
    theirs, _, _ = trainer._chunked_divergence_loss(
        *hidden,
        student.lm_head.weight,
        teacher.lm_head.weight,
        inputs.loss_mask,
        FULL[divergence],
        temperature=temperature,
        teacher_final_logit_softcapping=5.0,
    )
    theirs.backward()
    # TRL sums over the vocabulary in float32.
    assert (ours.total / ours.count).item() == pytest.approx(theirs.item(), abs=5e-7)
    assert_close(our_gradients, gradients(student), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_a_model_that_equals_its_teacher_learns_nothing(estimator):
    _, teacher = models()
    student = fresh_decoder(
        replace(teacher.config), seed=1, dtype=torch.float64, attention="mask"
    ).requires_grad_()
    loss = compute_loss(
        student, batch(2), objective(teacher, estimator=estimator), precision="float32"
    )
    loss.total.backward()
    assert loss.total.item() == pytest.approx(0, abs=1e-12)
    assert max(float(gradient.abs().max()) for gradient in gradients(student)) < 1e-12
    assert float(means(loss.metrics)["agreement"]) == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_gradient_of_the_whole_vocabulary_in_the_mean(temperature):
    """Of one position every token of the vocabulary is taken once, with its probability."""
    student, teacher = models()
    inputs = batch(1)
    first = int(inputs.loss_mask[0].nonzero()[0])
    mask = torch.zeros_like(inputs.loss_mask)
    mask[0, first] = 1
    inputs = replace(inputs, loss_mask=mask)
    full = objective(teacher, temperature=temperature)
    compute_loss(student, inputs, full, precision="float32").total.backward()
    expected = gradients(student)
    with torch.no_grad():
        shares = torch.softmax(logits(student, inputs)[0, first] / temperature, -1)
    sampled = objective(teacher, temperature=temperature, estimator="sampled")
    values = 0.0
    for token, share in enumerate(shares.tolist()):
        labels = inputs.labels.clone()
        labels[0, first] = token
        loss = compute_loss(
            student, replace(inputs, labels=labels), sampled, precision="float32"
        ).total
        (share * loss).backward()
        values += share * loss.item()
    assert_close(gradients(student), expected, rtol=1e-9, atol=1e-12)
    whole = compute_loss(student, inputs, full, precision="float32").total
    assert values == pytest.approx(float(whole), rel=1e-9)


@pytest.mark.parametrize("divergence", FULL)
def test_finite_differences(divergence):
    measure = DivergenceMeasure(divergence, 1.3, 0.3)
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    teacher = torch.log_softmax(teacher, 1)

    def compared(logits_CV):
        return measure(torch.log_softmax(logits_CV, 1), teacher, is_whole=True)

    assert torch.autograd.gradcheck(compared, (student.requires_grad_(),))
    assert (compared(student) > 0).all()


def test_entries_that_the_teacher_lacks_leave_the_divergence_finite():
    student, teacher = models(vocab_size=90)
    inputs = batch(2)
    inputs = replace(inputs, labels=inputs.labels.clamp(max=89), tokens=inputs.tokens.clamp(max=89))
    for divergence in FULL:
        loss = compute_loss(
            student, inputs, objective(teacher, divergence=divergence), precision="float32"
        )
        loss.total.backward()
        assert loss.total.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients(student))


# Runs

DISTILL = (
    "objective={kind: on_policy_distill, teacher: TEACHER, num_generations: 2, max_completion_length: 8}",
    "rewards=[]",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Prompts, and a teacher with the tokenizer of the dataset."""
    folder = write_recipe(tmp_path_factory.mktemp("on_policy"))
    write_teacher(folder)
    return folder


def plan_with(recipe, *edits):
    distill = [edit.replace("TEACHER", str(recipe / "teacher")) for edit in DISTILL]
    return plan_of(recipe, *distill, *edits)


def test_a_run_comes_closer_to_its_teacher(recipe, tmp_path):
    plan = plan_with(
        recipe, "train.max_steps=25", "optimizer.learning_rate=5e-3", "eval.every=25 steps"
    )
    events = train(plan, tmp_path)
    steps = metrics(events)
    assert losses(events)[1] == pytest.approx(steps[1]["divergence"], rel=1e-5)
    assert steps[25]["divergence"] < 0.5 * steps[1]["divergence"]
    evaluations = fields(events, "EvalDone")
    assert evaluations[-1]["loss"] < 0.6 * steps[1]["divergence"]
    assert 0 <= evaluations[-1]["metrics"]["agreement"] <= 1
    assert "reward" not in steps[1]
    (entry, *_) = completions(tmp_path)["step-00000001.jsonl"]
    assert entry["reward"] is None and entry["rewards"] == {}


CASES = {
    "full": (),
    "sampled": ("objective.estimator=sampled",),
    "several steps": ("objective.num_iterations=2", "objective.divergence=jsd"),
    "nf4": ("objective.teacher_quantize=nf4", "adapter={kind: lora, rank: 4}"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case):
    assert_resumes_to_the_same_bits(plan_with(recipe, *CASES[case]), tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_two_ranks_train_as_one(recipe, tmp_path, axis):
    alone = train(plan_with(recipe), tmp_path / "alone")
    both = train(on_ranks(plan_with(recipe), **{axis: 2}), tmp_path / "both")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


REFUSED = {
    "rewards=[{python: 'my_rewards.py:spaces'}]": "grpo and rloo train on rewards",
    "objective.divergence=jsd": "estimates reverse_kl alone",
    "objective.num_iterations=2": "one step trains on a rollout",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_what_does_not_fit_is_said(recipe, edit):
    with pytest.raises(UserError, match=REFUSED[edit]):
        plan_with(recipe, "objective.estimator=sampled", edit)


def test_the_plan_counts_the_teacher(recipe):
    parts = plan_with(recipe).memory.parts
    assert parts["teacher"] > 0
    small = plan_with(recipe, "objective.teacher_quantize=nf4").memory.parts["teacher"]
    assert small < parts["teacher"]
