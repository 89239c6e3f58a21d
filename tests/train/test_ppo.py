"""PPO: rewards, advantages and returns of tokens, and the losses of policy and value head.

Oracles: TRL's formulas (those of `PPOTrainer.train`, up to TRL 1.15, on padded tensors), and sums by hand.
"""

import math

import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.model.heads import LabelScores, ScoresAndValues, ScoreSettings
from bloomery.train.objectives.losses import means
from bloomery.train.rl.ppo import PpoLoss, TokenRewarding, generalized_advantages, whitened

LENGTHS = (6, 1, 4, 3)
LONGEST, VOCABULARY = 6, 11
SCORES = [1.5, -0.7, 0.2, -1.0]
TRUNCATED = [True, False, False, True]


def numbers(seed, spread=1.0, lengths=LENGTHS):
    """Of each token of each completion."""
    generator = torch.Generator().manual_seed(seed)
    return [(spread * torch.randn(length, generator=generator)).tolist() for length in lengths]


def padded(values):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in values], batch_first=True)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def masked_whiten(values, mask, shift_mean=True):
    """TRL's: with the correction of the variance for a sample."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return white if shift_mean else white + mean


def trl_targets(rewarding, scores, logps, reference, values, lengths=LENGTHS):
    """Advantages and returns [N, L] as `PPOTrainer.train` computes them; the score is the last token's."""
    lengths = torch.tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    logps, reference, values = padded(logps), padded(reference), padded(values)
    log_ratio = reference - logps
    kl = -log_ratio if rewarding.kl_estimator == "k1" else (log_ratio.exp() - 1) - log_ratio
    rewards = -rewarding.kl_coef * kl
    rewards[torch.arange(len(lengths)), lengths - 1] += torch.tensor(scores)
    if rewarding.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False) * mask
    last, advantages = 0.0, []
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        delta = rewards[:, t] + rewarding.gamma * following - values[:, t]
        last = delta + rewarding.gamma * rewarding.lam * last
        advantages.append(last)
    advantages = torch.stack(advantages[::-1], axis=1)
    returns = advantages + values
    return masked_whiten(advantages, mask) * mask, returns


CASES = {
    "defaults": TokenRewarding(),
    "discounted": TokenRewarding(gamma=0.9, lam=0.5),
    "k3": TokenRewarding(kl_coef=0.3, kl_estimator="k3"),
    "whitened": TokenRewarding(whiten_rewards=True, lam=1.0),
    "no lookahead": TokenRewarding(lam=0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_targets_are_those_of_trl(name):
    rewarding = CASES[name]
    logps, reference, values = numbers(1), numbers(2), numbers(3)
    found = rewarding(
        SCORES, [False] * 4, logps=logps, reference_logps=reference, values=values
    ).targets
    advantages, returns = trl_targets(rewarding, SCORES, logps, reference, values)
    for row, (targets, length) in enumerate(zip(found, LENGTHS, strict=True)):
        assert targets.advantages == pytest.approx(advantages[row, :length].tolist(), abs=1e-6)
        assert targets.returns == pytest.approx(returns[row, :length].tolist(), abs=1e-6)
        assert targets.values == pytest.approx(values[row])


def test_an_advantage_is_the_discounted_sum_of_what_surprised_by_hand():
    rewards = torch.tensor([[0.1, -0.2, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.4, -0.3]], dtype=torch.float64)
    gamma, lam = 0.9, 0.8
    surprises = [0.1 + gamma * 0.4 - 0.5, -0.2 + gamma * -0.3 - 0.4, 1.0 + 0.3]
    expected = [
        sum((gamma * lam) ** (later - start) * surprises[later] for later in range(start, 3))
        for start in range(3)
    ]
    found = generalized_advantages(rewards, values, gamma=gamma, lam=lam)
    assert found[0].tolist() == pytest.approx(expected)
    # With lambda 1 nothing of the values is left but the first one: the rewards that followed, less what was expected.
    found = generalized_advantages(rewards, values, gamma=1.0, lam=1.0)
    assert found[0].tolist() == pytest.approx([0.9 - 0.5, 0.8 - 0.4, 1.0 + 0.3])


def test_metrics_are_sums_over_completions():
    logps, reference = numbers(1), numbers(2)
    rewarding = TokenRewarding(kl_coef=0.1)
    metrics = rewarding(
        SCORES, TRUNCATED, logps=logps, reference_logps=reference, values=numbers(3)
    ).metrics
    kl = sum(
        ours - theirs
        for row, other in zip(logps, reference, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    )
    assert metrics["objective/kl"] == pytest.approx(kl / 4, abs=1e-6)
    assert metrics["kl"] == pytest.approx(kl / sum(LENGTHS), abs=1e-6)
    assert metrics["objective/entropy"] == pytest.approx(-sum(map(sum, logps)) / 4, abs=1e-6)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.1 * kl / 4, abs=1e-6)
    assert metrics["objective/scores"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["objective/rlhf_reward"] == pytest.approx(-0.1 * kl / 4, abs=1e-6)


def test_without_a_reference_model_rewards_are_the_scores():
    rewarding = TokenRewarding(kl_coef=0.0, lam=1.0)
    zeros = [[0.0] * length for length in LENGTHS]
    rewarded = rewarding(SCORES, TRUNCATED, logps=numbers(1), reference_logps=None, values=zeros)
    for targets, score, length in zip(rewarded.targets, SCORES, LENGTHS, strict=True):
        assert targets.returns == pytest.approx([score] * length)
    assert "kl" not in rewarded.metrics and "objective/kl" not in rewarded.metrics


def test_a_completion_without_end_token_pays_the_penalty():
    """As in TRL: off the score, before everything else."""
    logps, reference, values = numbers(1), numbers(2), numbers(3)
    arguments = {"logps": logps, "reference_logps": reference, "values": values}
    found = TokenRewarding(missing_eos_penalty=2.0)(SCORES, TRUNCATED, **arguments)
    scores = [score - 2.0 * cut for score, cut in zip(SCORES, TRUNCATED, strict=True)]
    assert found == TokenRewarding()(scores, [False] * 4, **arguments)
    assert found.metrics["objective/scores"] == pytest.approx(-1.0)


def test_a_completion_without_any_reward_counts_nowhere():
    logps, reference, values = numbers(1), numbers(2), numbers(3)
    rewarding = TokenRewarding(whiten_rewards=True)
    kept = [0, 1, 3]
    found = rewarding(
        [1.5, -0.7, math.nan, -1.0],
        TRUNCATED,
        logps=logps,
        reference_logps=reference,
        values=values,
    )
    alone = rewarding(
        [SCORES[row] for row in kept],
        [TRUNCATED[row] for row in kept],
        logps=[logps[row] for row in kept],
        reference_logps=[reference[row] for row in kept],
        values=[values[row] for row in kept],
    )
    assert found.metrics == pytest.approx(alone.metrics)
    for row, targets in zip(kept, alone.targets, strict=True):
        assert found.targets[row].advantages == pytest.approx(targets.advantages, abs=1e-6)
        assert found.targets[row].returns == pytest.approx(targets.returns, abs=1e-6)
    assert set(found.targets[2].advantages) == {0.0}


def test_large_scores_have_the_advantages_of_their_differences():
    """In float32 their squares overflow and every advantage would be 0."""
    arguments = {"logps": numbers(1), "reference_logps": numbers(2), "values": numbers(3)}
    large = TokenRewarding(kl_coef=0.0)([2e17 * score for score in SCORES], TRUNCATED, **arguments)
    zeros = {**arguments, "values": [[0.0] * length for length in LENGTHS]}
    small = TokenRewarding(kl_coef=0.0)([1e4 * score for score in SCORES], TRUNCATED, **zeros)
    for ours, expected in zip(large.targets, small.targets, strict=True):
        assert ours.advantages == pytest.approx(expected.advantages, rel=1e-5)
    with pytest.raises(UserError, match="1e\\+20"):
        TokenRewarding()([1e20, 0.0, 0.0, 0.0], TRUNCATED, **arguments)
    with pytest.raises(UserError, match="value head"):
        TokenRewarding()([math.inf, 0.0, 0.0, 0.0], TRUNCATED, **arguments)


def test_one_token_alone_has_no_deviation():
    ones = torch.ones(1, 1)
    assert whitened(3 * ones, ones.bool()).tolist() == [[0.0]]
    nothing = whitened(3 * ones, torch.zeros(1, 1, dtype=torch.bool))
    assert nothing.tolist() == [[0.0]]


# ---- losses


def case(seed=0):
    """Logits and values of the model that trains; ids, mask, and the batch with what was noted at sampling."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = len(LENGTHS)
    logits = draw(rows, LONGEST, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (rows, LONGEST), generator=generator)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
    logps = logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    values = draw(rows, LONGEST)
    extras = {
        "old_logps": (logps + 0.4 * draw(rows, LONGEST)) * mask,
        "advantages": draw(rows, LONGEST) * mask,
        "values": (values + 0.4 * draw(rows, LONGEST)) * mask,
        "returns": (values + draw(rows, LONGEST)) * mask,
    }
    extras["sampled_logps"] = extras["old_logps"]
    sequences = torch.where(mask > 0, torch.arange(rows)[:, None], -1)
    zeros = torch.zeros_like(ids)
    return logits, values, Batch(zeros, ids, mask, zeros, zeros, sequences, extras)


def scores_and_entropies(logits, ids):
    logprobs = logits.log_softmax(-1)
    scores = logprobs.gather(2, ids[..., None]).squeeze(2)
    return scores, -(logprobs.exp() * logprobs).sum(-1)


def trl_loss(loss, logits, values, batch):
    """The lines of `PPOTrainer.train` for one mini-batch, and their metrics."""
    mask = batch.loss_mask.bool()
    extras = batch.extras
    new_logprobs, entropy = scores_and_entropies(logits, batch.labels)
    vpred = values.masked_fill(~mask, 0)
    vpredclipped = torch.clamp(
        vpred, extras["values"] - loss.cliprange_value, extras["values"] + loss.cliprange_value
    )
    vf_losses1 = torch.square(vpred - extras["returns"])
    vf_losses2 = torch.square(vpredclipped - extras["returns"])
    vf_loss = 0.5 * masked_mean(torch.max(vf_losses1, vf_losses2), mask)
    difference = (new_logprobs - extras["old_logps"]).masked_fill(~mask, 0.0)
    ratio = torch.exp(difference)
    pg_losses = -extras["advantages"] * ratio
    pg_losses2 = -extras["advantages"] * torch.clamp(
        ratio, 1.0 - loss.cliprange, 1.0 + loss.cliprange
    )
    pg_loss = masked_mean(torch.max(pg_losses, pg_losses2), mask)
    metrics = {
        "entropy": masked_mean(entropy, mask),
        "loss/policy_avg": pg_loss,
        "loss/value_avg": vf_loss,
        "policy/approxkl_avg": masked_mean(0.5 * difference**2, mask),
        "policy/clipfrac_avg": masked_mean((pg_losses2 > pg_losses).float(), mask),
        "val/clipfrac_avg": masked_mean((vf_losses2 > vf_losses1).float(), mask),
        "val/ratio": masked_mean(ratio, mask),
    }
    return pg_loss + loss.vf_coef * vf_loss, {
        name: float(one.detach()) for name, one in metrics.items()
    }


LOSSES = {
    "defaults": PpoLoss(),
    "narrow": PpoLoss(cliprange=0.05, cliprange_value=0.1, vf_coef=0.5),
    "policy alone": PpoLoss(vf_coef=0.0),
    "never clipped": PpoLoss(cliprange=100.0, cliprange_value=100.0, vf_coef=1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_and_metrics_are_those_of_trl(name):
    loss = LOSSES[name]
    logits, values, batch = case()
    theirs = logits.clone().requires_grad_(), values.clone().requires_grad_()
    expected, expected_metrics = trl_loss(loss, *theirs, batch)
    expected.backward()

    ours = logits.clone().requires_grad_(), values.clone().requires_grad_()
    total, count, metrics, _ = loss(*scores_and_entropies(ours[0], batch.labels), ours[1], batch)
    (total / count).backward()
    assert float(count) == sum(LENGTHS)
    torch.testing.assert_close(total / count, expected, rtol=1e-6, atol=1e-7)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-8)
    assert ours[0].grad.abs().max() > 0
    assert bool(ours[1].grad.abs().max() > 0) == (loss.vf_coef > 0)
    found = means(metrics)
    assert {name: found[name] for name in expected_metrics} == pytest.approx(
        expected_metrics, abs=1e-6
    )
    if name == "narrow":
        assert 0 < found["policy/clipfrac_avg"] < 1 and 0 < found["val/clipfrac_avg"] < 1
    if name == "never clipped":
        assert found["policy/clipfrac_avg"] == found["val/clipfrac_avg"] == 0


def test_a_value_that_left_its_range_has_no_gradient():
    """By hand: the old value is 0, the return 1; a value of 0.5 has moved further than 0.2 already."""
    _, _, batch = case()
    row = torch.zeros_like(batch.loss_mask)
    extras = {name: row.clone() for name in ("advantages", "old_logps", "sampled_logps", "values")}
    extras["returns"] = torch.ones_like(row)
    mask = row.clone()
    mask[0, :2] = 1.0
    batch = Batch(
        batch.tokens, batch.labels, mask, batch.positions, batch.documents, batch.sequences, extras
    )
    values = row.clone()
    values[0, :2] = torch.tensor([0.5, 0.1])
    values.requires_grad_()
    total = PpoLoss(vf_coef=1.0)(row, row, values, batch).total
    # The first one is clipped to 0.2: the larger of 0.5^2 and 0.8^2. The second is free: 0.9^2.
    assert float(total.detach()) == pytest.approx(0.5 * (0.8**2 + 0.9**2))
    total.backward()
    assert values.grad[0, :2].tolist() == pytest.approx([0.0, -0.9])


def test_parts_of_a_batch_add_up():
    loss = LOSSES["narrow"]
    logits, values, batch = case(1)
    scores, entropies = scores_and_entropies(logits, batch.labels)
    scores, entropies, values = scores.double(), entropies.double(), values.double()
    whole = loss(scores, entropies, values, batch)
    total = count = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part = batch.map_tensors(lambda tensor, rows=rows: tensor[rows])
        parts = loss(scores[rows], entropies[rows], values[rows], part)
        total += float(parts.total)
        count += float(parts.count)
    assert (total, count) == pytest.approx((float(whole.total), float(whole.count)))


def test_the_head_gives_scores_entropies_and_values():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    output, value_head = (
        torch.nn.Linear(8, VOCABULARY, bias=False),
        torch.nn.Linear(8, 1, bias=False),
    )
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    expected_scores, entropies = scores_and_entropies(output(hidden) / 0.7, labels)
    expected_values = value_head(hidden).squeeze(-1)
    ((expected_scores + expected_values) * mask).sum().backward()
    expected_gradients = hidden.grad, value_head.weight.grad
    hidden.grad = value_head.weight.grad = None

    head = ScoresAndValues(
        LabelScores(labels, mask, ScoreSettings(4, temperature=0.7, entropy=True)), value_head
    )
    scores, found_entropies, values = head(hidden, output, None)
    torch.testing.assert_close(scores, expected_scores * mask)
    torch.testing.assert_close(found_entropies, entropies * mask)
    torch.testing.assert_close(values, expected_values)
    ((scores + values) * mask).sum().backward()
    torch.testing.assert_close((hidden.grad, value_head.weight.grad), expected_gradients)
