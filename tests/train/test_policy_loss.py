"""Policy losses and advantages. Oracles: `_compute_loss` of TRL on the same logits, and hand computations."""

import dataclasses
import math
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.train.objectives.losses import extreme, joined_metrics, means
from bloomery.train.rl.policy_loss import (
    PolicyLoss,
    SamplingCorrection,
    deviation_of,
    group_advantages,
    leave_one_out_advantages,
    mean_of,
    share_without_variance,
)

LENGTHS = (6, 1, 4, 3)
LONGEST, VOCABULARY = 6, 11
ADVANTAGES = torch.tensor([1.5, -0.7, 0.2, -1.0])


def case(seed=0):
    """Logits [B, T, V] of a policy, drawn ids, the old and the reference log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(LENGTHS)
    logits = torch.randn(rows, LONGEST, VOCABULARY, generator=generator)
    ids = torch.randint(0, VOCABULARY, (rows, LONGEST), generator=generator)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
    logps = logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    old = logps + 0.4 * torch.randn(logps.shape, generator=generator)
    reference = logps + 0.3 * torch.randn(logps.shape, generator=generator)
    return logits, ids, mask, old, reference


def sampled_logps(logits, ids, old):
    """Log-probabilities in generation: near those in training for most tokens, far for some."""
    generator = torch.Generator().manual_seed(5)
    training = scores_and_entropies(logits, ids)[0].detach() if old is None else old
    noise = torch.randn(training.shape, generator=generator)
    return training - torch.where(noise > 1, noise, 0.3 * noise)


def scores_and_entropies(logits, ids):
    logprobs = logits.log_softmax(-1)
    scores = logprobs.gather(2, ids[..., None]).squeeze(2)
    return scores, -(logprobs.exp() * logprobs).sum(-1)


def batch_of(ids, mask, old, reference, sampled=None):
    is_completion = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    sequences = torch.where(is_completion, torch.arange(len(ids))[:, None], -1)
    extras = {
        "advantages": ADVANTAGES[:, None] * is_completion,
        "reference": reference * mask,
        "sampled_logps": torch.zeros_like(mask) if sampled is None else sampled * mask,
    }
    if old is not None:
        extras["old_logps"] = old * mask
    extras["completions_per_token"] = torch.full_like(mask, len(ids) / float(mask.sum()))
    zeros = torch.zeros_like(ids)
    return Batch(zeros, ids, mask, zeros, zeros, sequences, extras)


def trl_ratios(correction, old, sampled, mask):
    """As `_generate_and_score_completions` of TRL 1.16 computes them, and the metrics that it notes."""
    differences = (old - sampled) * mask
    of_sequence = correction.mode.startswith("sequence")
    ratios = torch.exp(differences.sum(-1, keepdim=True) if of_sequence else differences)
    if correction.mode.endswith("truncate"):
        ratios = ratios.clamp(max=correction.clip_max)
    else:
        ratios = ratios.masked_fill(ratios > correction.clip_max, 0.0)
    flat = ratios.flatten() if of_sequence else ratios[mask.bool()]
    name = "sampling/importance_sampling_ratio"
    metrics = {f"{name}/min": flat.min(), f"{name}/mean": flat.mean(), f"{name}/max": flat.max()}
    gaps = (old - sampled).abs()[mask.bool()]
    name = "sampling/sampling_logp_difference"
    metrics |= {f"{name}/mean": gaps.mean(), f"{name}/max": gaps.max()}
    return ratios, {name: float(value) for name, value in metrics.items()}


def trl_loss(loss, logits, ids, mask, old, reference, ratios=None):
    """The loss and the metrics of TRL, of one process and one micro-batch."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda tensor, reduction: tensor,
        gather=lambda tensor: tensor,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            *scores_and_entropies(logits, ids),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=loss.level,
        beta=loss.beta,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        loss_type=loss.type,
        epsilon_low=loss.epsilon,
        epsilon_high=loss.epsilon_high,
        use_vllm=ratios is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=loss.max_completion_length,
        accelerator=accelerator,
        _entropy_bonus_enabled=loss.entropy_coef != 0.0,
        entropy_coef=loss.entropy_coef,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": ADVANTAGES,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": ratios,
    }
    if loss.type == "rloo":
        drawn = scores_and_entropies(logits, ids)[0].detach() if old is None else old
        inputs["old_logps"] = (drawn * mask).sum(1)
        total = RLOOTrainer._compute_loss(trainer, None, inputs)
        return total, {name: values[0] for name, values in trainer._metrics["train"].items()}
    if old is not None:
        inputs["old_per_token_logps"] = old
    total = GRPOTrainer._compute_loss(trainer, None, inputs)
    return total, {name: values[0] for name, values in trainer._metrics["train"].items()}


CASES = {
    "dapo": PolicyLoss(),
    "dapo, clip higher": PolicyLoss(epsilon_high=0.28),
    "dapo with KL": PolicyLoss(beta=0.05),
    "grpo with KL": PolicyLoss(type="grpo", beta=0.04),
    "dr_grpo": PolicyLoss(type="dr_grpo", max_completion_length=9),
    "cispo": PolicyLoss(type="cispo", epsilon_high=1.3),
    "GSPO": PolicyLoss(type="grpo", level="sequence", epsilon=3e-2, epsilon_high=4e-2),
    "rloo": PolicyLoss(type="rloo"),
    "GSPO with KL": PolicyLoss(level="sequence", beta=0.1),
    "dapo with entropy": PolicyLoss(entropy_coef=0.3),
    "cispo with entropy": PolicyLoss(type="cispo", epsilon_high=1.3, entropy_coef=0.1),
    "grpo with entropy": PolicyLoss(type="grpo", beta=0.04, entropy_coef=0.3),
    "dr_grpo with entropy": PolicyLoss(type="dr_grpo", max_completion_length=9, entropy_coef=0.3),
}


@pytest.mark.parametrize("pass_", ["first", "second"])
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(name, pass_):
    loss = CASES[name]
    logits, ids, mask, old, reference = case()
    old = old if pass_ == "second" else None
    theirs = logits.clone().requires_grad_()
    expected, expected_metrics = trl_loss(loss, theirs, ids, mask, old, reference)
    expected.backward()

    ours = logits.clone().requires_grad_()
    batch = batch_of(ids, mask, old, reference)
    total, count, metrics, _ = loss(*scores_and_entropies(ours, ids), batch)
    (total / count).backward()
    assert float(count) == loss.count(batch)
    torch.testing.assert_close(total / count, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    assert ours.grad.abs().max() > 0
    means = {
        metric: float(sums[0] / sums[1])
        for metric, sums in metrics.items()
        if not metric.startswith("sampling/")
    }
    assert means == pytest.approx({metric: expected_metrics[metric] for metric in means}, abs=1e-6)
    assert "entropy" in means and ("kl" in means) == (loss.beta > 0)


MODES = ("sequence_mask", "token_mask", "sequence_truncate", "token_truncate")


@pytest.mark.parametrize("pass_", ["first", "second"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["dapo", "grpo with KL", "dr_grpo", "cispo", "GSPO"])
def test_the_correction_of_sampling_is_that_of_trl(name, mode, pass_):
    """Of the log-probabilities with which a generator of another precision sampled the tokens."""
    correction = SamplingCorrection(mode, clip_max=1.7)
    loss = dataclasses.replace(CASES[name], correction=correction)
    logits, ids, mask, old, reference = case()
    old = old if pass_ == "second" else None
    sampled = sampled_logps(logits, ids, old)
    training = scores_and_entropies(logits, ids)[0] if old is None else old
    ratios, expected_metrics = trl_ratios(correction, training, sampled, mask)
    # Some ratios are above the limit, and some are not.
    limited = (ratios == 0) if mode.endswith("mask") else (ratios == 1.7)
    assert 0 < limited.sum() < ratios.numel()

    theirs = logits.clone().requires_grad_()
    expected, _ = trl_loss(loss, theirs, ids, mask, old, reference, ratios.detach())
    expected.backward()
    ours = logits.clone().requires_grad_()
    batch = batch_of(ids, mask, old, reference, sampled)
    total, count, metrics, _ = loss(*scores_and_entropies(ours, ids), batch)
    (total / count).backward()
    torch.testing.assert_close(total / count, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    means = {metric: float(sums[0] / sums[1]) for metric, sums in metrics.items()}
    assert {name: means[name] for name in expected_metrics} == pytest.approx(
        expected_metrics, abs=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_a_masked_completion_counts_as_in_trl(name):
    """`mask_truncated_completions`: it has no loss token, and a mean over completions counts it."""
    loss = CASES[name]
    logits, ids, mask, old, reference = case()
    mask[0] = 0.0
    theirs = logits.clone().requires_grad_()
    expected, expected_metrics = trl_loss(loss, theirs, ids, mask, old, reference)
    expected.backward()
    ours = logits.clone().requires_grad_()
    batch = batch_of(ids, mask, old, reference)
    total, count, metrics, _ = loss(*scores_and_entropies(ours, ids), batch)
    (total / count).backward()
    assert float(count) == loss.count(batch)
    torch.testing.assert_close(total / count, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    assert not ours.grad[0].any()
    clipped = [metric for metric in metrics if metric.startswith("clip_ratio")]
    assert {name: float(metrics[name][0] / metrics[name][1]) for name in clipped} == pytest.approx(
        {name: expected_metrics[name] for name in clipped}, abs=1e-6
    )


def test_extremes_of_two_micro_batches_are_no_sums():
    first = torch.tensor([[1.0, -3.0]])
    second = torch.tensor([[0.5, 2.0]])
    present = torch.tensor([[True, False]])
    sums = joined_metrics(
        {"a/max": extreme(first, present), "a/min": extreme(first, present, smallest=True)},
        {"a/max": extreme(second, ~present), "a/min": extreme(second, ~present, smallest=True)},
    )
    assert means(sums) == {"a/max": 2.0, "a/min": 1.0}
    nothing = extreme(first, torch.zeros_like(present))
    assert means(joined_metrics({"a/max": nothing}, {"a/max": extreme(first, present)})) == {
        "a/max": 1.0
    }


def test_parts_of_a_batch_add_up():
    loss = PolicyLoss(type="grpo", beta=0.04)
    logits, ids, mask, old, reference = case(1)
    scores, entropies = scores_and_entropies(logits, ids)
    whole = loss(scores, entropies, batch_of(ids, mask, old, reference))
    total = count = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        batch = batch_of(ids, mask, old, reference)
        part = batch.map_tensors(lambda tensor, rows=rows: tensor[rows])
        parts = loss(scores[rows], entropies[rows], part)
        total += float(parts.total)
        count += float(parts.count)
    assert (total, count) == pytest.approx((float(whole.total), float(whole.count)))


def test_advantages_are_those_of_trl_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    deviation = (4 * 0.25 / 3) ** 0.5
    expected = [0.5, -0.5, -0.5, 0.5]
    scaled = group_advantages(rewards, 4, scale="group")
    assert scaled.tolist() == pytest.approx([a / (deviation + 1e-4) for a in expected] + 4 * [0.0])
    assert group_advantages(rewards, 4, scale="none").tolist() == pytest.approx(
        expected + 4 * [0.0]
    )
    overall = float(rewards.std())
    assert group_advantages(rewards, 4, scale="batch").tolist() == pytest.approx(
        [a / (overall + 1e-4) for a in expected] + 4 * [0.0]
    )
    assert share_without_variance(rewards.tolist(), 4) == 0.5


def test_a_completion_without_a_reward_has_no_advantage_and_moves_no_mean():
    rewards = torch.tensor([1.0, float("nan"), 0.0, 0.5])
    advantages = group_advantages(rewards, 4, scale="none").tolist()
    assert advantages == pytest.approx([0.5, 0.0, -0.5, 0.0])


LARGE = {
    "2**70": [2.0**70, 0.0, 0.0, 0.0],
    "1e20": [0.0, 1e20, 2e20, 3e20],
    "1e39": [1e39, 0.0, 1e39, 0.0],
    "1e308": [1e308, -1e308, 1e308, -1e308],
    "1e9 and digits": [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3],
    "1e15 and digits": [1e15, 1e15 + 1, 1e15 + 2, 1e15 + 3],
}


def exact_deviation(numbers):
    """Of rational numbers, without a rounding but that of the root."""
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    squares = sum((number - mean) ** 2 for number in exact) / (len(exact) - 1)
    root = Fraction(math.isqrt(int(squares * 2**80))) / 2**40
    return [float((number - mean) / (root + Fraction(1, 10000))) for number in exact]


@pytest.mark.parametrize("rewards", LARGE.values(), ids=LARGE)
def test_large_rewards_have_the_advantages_of_their_differences(rewards):
    """In float32 their squares overflow or their digits are lost, and all advantages would be 0."""
    for scale in ("group", "batch"):
        advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, scale=scale)
        assert advantages.dtype == torch.float32
        assert advantages.tolist() == pytest.approx(exact_deviation(rewards), rel=1e-6)
    assert share_without_variance(rewards, 4) == 0.0
    assert mean_of(torch.tensor(rewards, dtype=torch.float64)) == pytest.approx(
        float(sum(map(Fraction, rewards)) / 4)
    )
    assert deviation_of(torch.tensor(rewards, dtype=torch.float64)) > 0


def test_a_difference_that_float32_does_not_hold_is_refused():
    rewards = torch.tensor([1e39, 0.0, 0.0, 0.0], dtype=torch.float64)
    with pytest.raises(UserError, match="float32"):
        group_advantages(rewards, 4, scale="none")
    with pytest.raises(UserError, match="float32"):
        leave_one_out_advantages(rewards, 4)
    small = torch.tensor([1e9, 1e9 + 1], dtype=torch.float64)
    assert leave_one_out_advantages(small, 2).tolist() == [-1.0, 1.0]


def test_ordinary_rewards_have_the_advantages_of_trl_to_the_last_but_one_bit():
    draw = torch.Generator().manual_seed(0)
    rewards = torch.rand(64, generator=draw)
    groups = rewards.view(-1, 4)
    theirs = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ours = group_advantages(rewards, 4, scale="group")
    torch.testing.assert_close(ours, theirs.flatten(), atol=1e-6, rtol=1e-6)


def test_leave_one_out_leaves_out_completions_without_a_reward():
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, nan, nan, 2.0])
    assert leave_one_out_advantages(rewards, 3).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.5, 3.0, 3.0, 0.0])
    assert leave_one_out_advantages(rewards, 3).tolist() == pytest.approx(
        [0.75, -0.75, 0.0, 1.5, 1.5, -3.0]
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tiles", [1, 3])
def test_the_head_divides_by_the_temperature_and_gives_the_entropy(bias, softcap, tiles):
    from bloomery.model.heads import SCORE_OPERATORS

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    output = torch.nn.Linear(8, VOCABULARY, bias=bias)
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    logits = output(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    scores, entropies = scores_and_entropies(logits / 0.7, labels)
    (scores * mask).sum().backward()
    expected_gradient, hidden.grad = hidden.grad, None

    operators = dataclasses.replace(
        SCORE_OPERATORS, tile_size=lambda weight: -(-VOCABULARY // tiles)
    )
    head = LabelScores(
        labels, mask, ScoreSettings(4, operators=operators, temperature=0.7, entropy=True)
    )
    found = head(hidden, output, softcap)
    torch.testing.assert_close(found[0], scores * mask)
    torch.testing.assert_close(found[1], entropies * mask)
    found[0].sum().backward()
    torch.testing.assert_close(hidden.grad, expected_gradient)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_head_gives_the_gradient_of_entropies(bias, softcap, tiles, dtype):
    """With any upstream gradients of scores and entropies: that of autograd through all logits."""
    from bloomery.model.heads import SCORE_OPERATORS

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, 8, generator=generator, dtype=dtype).requires_grad_()
    output = torch.nn.Linear(8, VOCABULARY, bias=bias, dtype=dtype)
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 1, 0]], dtype=dtype)
    upstream = torch.randn(2, 2, 5, generator=generator, dtype=dtype)
    logits = output(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.stack(scores_and_entropies(logits / 0.7, labels)) * mask
    inputs = (hidden, *output.parameters())
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)

    operators = dataclasses.replace(
        SCORE_OPERATORS, tile_size=lambda weight: -(-VOCABULARY // tiles)
    )
    settings = ScoreSettings(
        4, operators=operators, temperature=0.7, entropy=True, entropy_gradient=True, native=True
    )
    found = LabelScores(labels, mask, settings)(hidden, output, softcap)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, inputs, upstream)
    torch.testing.assert_close(gradients, expected_gradients)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
