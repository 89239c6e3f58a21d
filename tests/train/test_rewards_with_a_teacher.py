"""Rewards and a teacher in one loss: its terms by hand, each by its own count, and through runs."""

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
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.model.heads import ScoreSettings
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.recipe.objectives import Grpo, Rloo
from bloomery.train.objectives.losses import means
from bloomery.train.objectives.objective import ObjectiveInputs, Scoring
from bloomery.train.objectives.policies import policy
from bloomery.train.rl.rollout import RolloutSample, pack
from bloomery.train.step import compute_loss
from ranks import fields, losses, on_ranks, train

TEACHER_COEF = 0.7
CE_COEF = 0.3


def samples(*lengths: int, masked: int | None = None) -> list[RolloutSample]:
    """Completions of these lengths, every second one better than its group."""
    generator = torch.Generator().manual_seed(len(lengths))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 80, (count,), generator=generator).tolist())

    return [
        RolloutSample(
            ids(4),
            ids(length),
            tuple((-torch.rand(length, generator=generator)).tolist()),
            advantage=0.9 if number % 2 else -0.2,
            has_loss=number != masked,
        )
        for number, length in enumerate(lengths)
    ]


def micro_batches() -> list[Batch]:
    """Two of them, with other numbers of tokens and of completions."""
    (first,), _ = pack(samples(5, 3, 6, masked=2), length=40, rows=1)
    (second,), _ = pack(samples(2, 7), length=40, rows=1)
    return [first, second]


def settings_of(kind: str, **keys) -> Grpo | Rloo:
    keys = {"teacher": "T", "teacher_kl_coef": TEACHER_COEF, "ce_coef": CE_COEF, **keys}
    if kind == "rloo":
        return Rloo(kind="rloo", beta=0.0, **keys)
    return Grpo(kind="grpo", loss_type=kind, importance_sampling_correction=False, **keys)


def objective_of(settings, teacher):
    scoring = Scoring(ScoreSettings(7))
    return policy(ObjectiveInputs(settings, "float32", scoring, None, SINGLE_RANK, lambda: teacher))


def step_of(student, objective) -> tuple[float, dict[str, float], list[torch.Tensor]]:
    """The loss of a step of both micro-batches, its metrics, and its gradients, as `train_step` adds them up."""
    batches = micro_batches()
    count = sum(objective.count(batch) for batch in batches)
    if objective.before is not None:
        batches = objective.before(student, batches)
    total = 0.0
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        parts = compute_loss(student, batch, objective, precision="float32")
        (parts.total / count).backward()
        total += parts.total.item() / count
        for name, metric in parts.metrics.items():
            sums[name] = sums.get(name, 0) + metric
    gradients = [parameter.grad.clone() for parameter in student.parameters()]
    student.zero_grad()
    return total, means(sums), gradients


def by_hand(student, teacher, kind: str, divergence: str) -> dict[str, torch.Tensor]:
    """The terms of the step from whole logits: the policy gradient, the divergence, the better half's cross-entropy."""
    rl, of_teacher, of_better = [], [], []
    num_completions = 0
    for batch in micro_batches():
        mask = batch.loss_mask[0] != 0
        ours = torch.log_softmax(logits(student, batch)[0].double(), -1)
        with torch.no_grad():
            theirs = torch.log_softmax(logits(teacher, batch)[0].double(), -1)
        scores = ours.gather(1, batch.labels[0][:, None])[:, 0]
        advantages = batch.extras["advantages"][0].double()
        first, second = (theirs, ours) if divergence == "forward_kl" else (ours, theirs)
        of_teacher.append((first.exp() * (first - second)).sum(1)[mask])
        of_better.append(-scores[mask & (advantages > 0)])
        sequences = batch.sequences[0]
        for number in range(int(sequences.max()) + 1):
            of_completion = (sequences == number) & (advantages != 0)
            num_completions += 1
            learned = of_completion & mask
            # The ratio to the model that sampled is 1, and has the gradient of the log-probability.
            gains = advantages[learned] * (scores[learned] - scores[learned].detach() + 1)
            if kind == "grpo":
                rl.append(-gains.mean() if len(gains) else gains.sum())
            elif kind == "rloo":
                log_ratio = (scores[learned] - scores[learned].detach()).sum()
                rl.append(-advantages[of_completion][0] * log_ratio.exp())
            else:
                rl.append(-gains)
    policy_loss = (
        torch.cat(rl).mean() if kind == "dapo" else torch.stack(rl).sum() / num_completions
    )
    return {
        "rl": policy_loss,
        "teacher": torch.cat(of_teacher).mean(),
        "ce": torch.cat(of_better).mean(),
    }


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("kind", ["dapo", "grpo", "rloo"])
def test_each_term_is_divided_by_its_own_count(kind, divergence):
    student, teacher = models()
    settings = settings_of(kind, divergence=divergence)
    loss, step_metrics, gradients = step_of(student, objective_of(settings, teacher))

    terms = by_hand(student, teacher, kind, divergence)
    expected = terms["rl"] + TEACHER_COEF * terms["teacher"] + CE_COEF * terms["ce"]
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_close(
        gradients, [parameter.grad for parameter in student.parameters()], rtol=1e-4, atol=1e-7
    )
    for name, term in terms.items():
        assert step_metrics[f"loss/{name}"] == pytest.approx(term.item(), rel=1e-5)
    assert step_metrics["divergence"] == step_metrics["loss/teacher"]


def test_weights_of_zero_leave_the_policy_gradient_and_its_metrics():
    student, teacher = models()
    plain = step_of(student, objective_of(settings_of("grpo", teacher=None, ce_coef=0.0), None))
    weighted = settings_of("grpo", teacher_kl_coef=0.0, ce_coef=0.0)
    loss, step_metrics, gradients = step_of(student, objective_of(weighted, teacher))
    assert loss == pytest.approx(plain[0], rel=1e-6)
    assert_close(gradients, plain[2], rtol=1e-4, atol=1e-7)
    for name, metric in plain[1].items():
        assert step_metrics[name] == pytest.approx(metric, rel=1e-5), name
    assert "loss/rl" not in plain[1]


def test_a_sampled_token_estimates_the_divergence_beside_rewards():
    """Of one position every token is taken once, with its probability: the mean is the sum over the vocabulary."""
    student, teacher = models()
    (batch,), _ = pack(samples(1), length=8, rows=1)
    batch = batch.with_extras(advantages=torch.zeros_like(batch.loss_mask))
    position = int(batch.loss_mask[0].nonzero()[0])

    def gradients_of(settings, labels=None) -> list[torch.Tensor]:
        objective = objective_of(settings, teacher)
        used = batch if labels is None else replace(batch, labels=labels)
        (completed,) = objective.before(student, [used])
        compute_loss(student, completed, objective, precision="float32").total.backward()
        taken = [parameter.grad.clone() for parameter in student.parameters()]
        student.zero_grad()
        return taken

    full = gradients_of(settings_of("grpo", ce_coef=0.0))
    with torch.no_grad():
        shares = torch.softmax(logits(student, batch)[0, position], -1).tolist()
    total = [torch.zeros_like(gradient) for gradient in full]
    for token, share in enumerate(shares):
        labels = batch.labels.clone()
        labels[0, position] = token
        sampled = gradients_of(settings_of("grpo", ce_coef=0.0, estimator="sampled"), labels)
        total = [sum_ + share * gradient for sum_, gradient in zip(total, sampled, strict=True)]
    assert_close(total, full, rtol=1e-6, atol=1e-9)


# Runs


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("rewarded"))
    write_teacher(folder)
    return folder


def plan_with(recipe, *edits):
    return plan_of(recipe, f"objective.teacher={recipe / 'teacher'}", *edits)


def test_a_run_comes_closer_to_its_teacher_and_reports_its_terms(recipe, tmp_path):
    terms = ("objective.teacher_kl_coef=50", "objective.ce_coef=0.1")
    length = ("train.max_steps=20", "eval.every=20 steps", "optimizer.learning_rate=5e-3")
    events = train(plan_with(recipe, *terms, *length), tmp_path)
    steps = metrics(events)
    for step, loss in losses(events).items():
        of_step = steps[step]
        of_better = 0.1 * of_step.get("loss/ce", 0.0)
        assert loss == pytest.approx(
            of_step["loss/rl"] + 50 * of_step["loss/teacher"] + of_better, rel=1e-4
        )
    assert steps[20]["divergence"] < 0.6 * steps[1]["divergence"]
    assert {"reward", "entropy", "agreement"} <= steps[1].keys()
    held_out = fields(events, "EvalDone")[-1]
    assert held_out["loss"] == -held_out["metrics"]["reward"]
    assert held_out["metrics"]["divergence"] < steps[1]["divergence"]
    (entry, *_) = completions(tmp_path)["step-00000001.jsonl"]
    assert entry["reward"] is not None


CASES = {
    "grpo": ("objective.beta=0.1", "adapter={kind: lora, rank: 4}"),
    "sampled": ("objective.estimator=sampled", "objective.loss_type=dr_grpo"),
    "several steps": ("objective.num_iterations=2", "objective.ce_coef=0.2"),
    "rloo": ("objective.kind=rloo",),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case):
    assert_resumes_to_the_same_bits(plan_with(recipe, *CASES[case]), tmp_path)


def test_two_ranks_train_as_one(recipe, tmp_path):
    edits = ("objective.loss_type=grpo", "objective.ce_coef=0.2", "train.max_steps=3")
    alone = train(plan_with(recipe, *edits), tmp_path / "alone")
    both = train(on_ranks(plan_with(recipe, *edits), replicate=2), tmp_path / "both")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


def test_what_does_not_fit_is_said(recipe):
    edits = ("objective.estimator=sampled", "objective.steps_per_generation=2")
    with pytest.raises(UserError, match="one step trains on a rollout"):
        plan_with(recipe, *edits)
    with pytest.raises(UserError, match="alone, not jsd"):
        plan_with(recipe, "objective.estimator=sampled", "objective.divergence=jsd")


def test_the_plan_counts_the_teacher(recipe):
    assert plan_with(recipe).memory.parts["teacher"] > 0
    assert "teacher" not in plan_of(recipe).memory.parts
