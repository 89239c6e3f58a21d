"""Proximal policy optimization: the reward of each token, its advantage by a value head, and the loss of both heads.

Formulas of TRL's PPOTrainer (removed in September 2026), of arXiv:1707.06347, arXiv:1506.02438 and arXiv:1909.08593.
One thing differs: TRL gives a completion that ended one more position behind its end token, with the score as its only
reward. Here the score is a part of the last token's reward, as in arXiv:1909.08593; for completions that reach their
longest length TRL does the same.

Legend: B batch, T time, N completions, L tokens of the longest one; shorter ones are padded at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.train.objectives.losses import LossParts, sum_and_count
from bloomery.train.rl.policy_loss import gap_metrics, mean_of, sampling_gaps
from bloomery.train.rl.rollout import TokenTargets

LARGEST_SCORE = 1e18  # its square, an error of the value head, is finite in float32
VARIANCE_FLOOR = 1e-8  # added to a variance that is divided by, as in TRL

Numbers = Sequence[Sequence[float]]  # of each token of each completion


@dataclass(frozen=True)
class TokenRewards:
    """What a rollout is trained towards, and the metrics of it under TRL's names."""

    targets: tuple[TokenTargets, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class TokenRewarding:
    """How the score of a completion becomes rewards, advantages and returns of its tokens.

    `kl_coef`: the weight of the divergence from the reference model, whose estimate of a token is the difference of
    log-probabilities (k1), or one that is never negative (k3; Schulman, "Approximating KL Divergence", 2020).
    `missing_eos_penalty`: taken off the score of a completion without an end token. `gamma`: the discount of later
    rewards. `lam`: 0 takes the value of the next token for everything that follows, 1 the rewards that followed.
    """

    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"
    missing_eos_penalty: float = 0.0
    whiten_rewards: bool = False
    gamma: float = 1.0
    lam: float = 0.95

    def __call__(
        self,
        rewards: Sequence[float],
        is_truncated: Sequence[bool],
        *,
        logps: Numbers,
        reference_logps: Numbers | None,
        values: Numbers,
    ) -> TokenRewards:
        """`rewards`: of whole completions; one without any (NaN) counts nowhere. `reference_logps`: None without KL."""
        # 1. Everything as padded tensors. The order of the sums is that of the completions, on any number of ranks.
        # In float64: the square of a score of 1e20 is infinite in float32, and all advantages would be 0.
        scores_N = torch.tensor(rewards, dtype=torch.float64)
        scores_N = scores_N - self.missing_eos_penalty * torch.tensor(is_truncated).double()
        is_scored_N = ~scores_N.isnan()
        _refuse_large(scores_N)
        lengths_N = torch.tensor([len(completion) for completion in logps])
        is_token_NL = torch.arange(int(lengths_N.max())) < lengths_N[:, None]
        is_token_NL = is_token_NL & is_scored_N[:, None]
        logps_NL = _padded(logps) * is_token_NL
        values_NL = _padded(values) * is_token_NL

        # 2. Each token is charged for leaving the reference model; the last one has the score of the whole.
        kl_NL = torch.zeros_like(logps_NL)
        if reference_logps is not None:
            log_ratio_NL = _padded(reference_logps) * is_token_NL - logps_NL
            kl_NL = -log_ratio_NL
            if self.kl_estimator == "k3":
                kl_NL = log_ratio_NL.exp() - 1 - log_ratio_NL
        penalties_NL = -self.kl_coef * kl_NL
        rewards_NL = penalties_NL.clone()
        rewards_NL[torch.arange(len(lengths_N)), lengths_N - 1] += scores_N.nan_to_num(0.0)
        if self.whiten_rewards:
            rewards_NL = whitened(rewards_NL, is_token_NL, shifts_mean=False)

        # 3. Advantages, and the returns that values are trained towards.
        advantages_NL = generalized_advantages(
            rewards_NL, values_NL, gamma=self.gamma, lam=self.lam
        )
        returns_NL = advantages_NL + values_NL
        advantages_NL = whitened(advantages_NL, is_token_NL)
        targets = tuple(
            TokenTargets(
                tuple(advantages_NL[index, :length].float().tolist()),
                tuple(values_NL[index, :length].float().tolist()),
                tuple(returns_NL[index, :length].float().tolist()),
            )
            for index, length in enumerate(lengths_N.tolist())
        )

        # 4. Means over completions, of sums over their tokens; `kl` is a mean over tokens, as GRPO and RLOO report it.
        num_scored = max(1, int(is_scored_N.sum()))
        mean_score = mean_of(scores_N) if is_scored_N.any() else 0.0
        metrics = {
            "objective/scores": mean_score,
            "objective/entropy": float(-logps_NL.sum()) / num_scored,
        }
        if reference_logps is not None:
            mean_penalty = float(penalties_NL.sum()) / num_scored
            metrics |= {
                "kl": float(kl_NL.sum()) / max(1, int(is_token_NL.sum())),
                "objective/kl": float(kl_NL.sum()) / num_scored,
                "objective/non_score_reward": mean_penalty,
                "objective/rlhf_reward": mean_penalty + mean_score,
            }
        return TokenRewards(targets, metrics)


def generalized_advantages(
    rewards_NL: Tensor, values_NL: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """[N, L]: generalized advantage estimation (arXiv:1506.02438, equation 16). Nothing follows the last token.

    Rewards and values of padding are 0, and so are its advantages.
    """
    advantages_NL = torch.zeros_like(rewards_NL)
    next_values_N = torch.zeros_like(rewards_NL[:, 0])
    advantage_N = torch.zeros_like(rewards_NL[:, 0])
    for position in reversed(range(rewards_NL.shape[1])):
        surprise_N = rewards_NL[:, position] + gamma * next_values_N - values_NL[:, position]
        advantage_N = surprise_N + gamma * lam * advantage_N
        advantages_NL[:, position] = advantage_N
        next_values_N = values_NL[:, position]
    return advantages_NL


def whitened(numbers_NL: Tensor, is_token_NL: Tensor, *, shifts_mean: bool = True) -> Tensor:
    """[N, L]: divided by the unbiased standard deviation over all tokens, around a mean of 0 or around their own.

    Padding is 0.
    """
    count = is_token_NL.sum()
    mean = (numbers_NL * is_token_NL).sum() / count.clamp(min=1)
    squares = ((numbers_NL - mean).square() * is_token_NL).sum()
    scale = torch.rsqrt(squares / (count - 1).clamp(min=1) + VARIANCE_FLOOR)
    result = (numbers_NL - mean) * scale
    if not shifts_mean:
        result = result + mean
    return result * is_token_NL


def _padded(numbers: Numbers) -> Tensor:
    tensors = [torch.tensor(completion, dtype=torch.float64) for completion in numbers]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _refuse_large(scores_N: Tensor) -> None:
    """Raises UserError for a score whose return, in float32, is not finite or has an infinite squared error."""
    largest = float(scores_N.abs().nan_to_num(0.0, posinf=math.inf).max())
    if largest > LARGEST_SCORE:
        raise UserError(
            f"a completion has a reward of {largest:.3g}: the value head learns rewards of at most {LARGEST_SCORE:g}",
            where="rewards",
            fix="set a smaller weight of the reward, or divide its numbers by a constant",
        )


@dataclass(frozen=True)
class PpoLoss:
    """The clipped losses of policy and value head, as sums over the tokens of completions.

    `cliprange`: how far the ratio of new to old probability may leave 1 before its gradient ends. `cliprange_value`:
    how far a value may leave its old one. `vf_coef`: the weight of the value head's loss. `entropy_coef`: that of the
    entropy bonus.
    """

    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    entropy_coef: float = 0.0

    def __call__(
        self, scores_BT: Tensor, entropies_BT: Tensor, values_BT: Tensor, batch: Batch
    ) -> LossParts:
        """The summed loss of a micro-batch, its count and its metrics.

        `scores_BT`: the log-probabilities of the completions' tokens under the model that trains, at the temperature at
        which they were sampled. `values_BT`: what the value head expects before each of them.
        """
        mask_BT = batch.loss_mask
        is_token_BT = mask_BT != 0
        advantages_BT = batch.extras["advantages"]
        old_logps_BT = batch.extras["old_logps"]
        old_values_BT = batch.extras["values"]
        returns_BT = batch.extras["returns"]

        # The policy: of the clipped and the unclipped loss the larger one.
        log_ratio_BT = (scores_BT - old_logps_BT) * mask_BT
        ratio_BT = log_ratio_BT.exp()
        clipped_ratio_BT = ratio_BT.clamp(1 - self.cliprange, 1 + self.cliprange)
        free_losses_BT = -advantages_BT * ratio_BT
        clipped_losses_BT = -advantages_BT * clipped_ratio_BT
        policy_losses_BT = torch.max(free_losses_BT, clipped_losses_BT)

        # The value head, likewise: a value that has left the range around its old one has no gradient.
        clipped_values_BT = torch.clamp(
            values_BT, old_values_BT - self.cliprange_value, old_values_BT + self.cliprange_value
        )
        free_errors_BT = (values_BT - returns_BT).square()
        clipped_errors_BT = (clipped_values_BT - returns_BT).square()
        value_losses_BT = 0.5 * torch.max(free_errors_BT, clipped_errors_BT)

        losses_BT = policy_losses_BT + self.vf_coef * value_losses_BT
        if self.entropy_coef:
            losses_BT = losses_BT - self.entropy_coef * entropies_BT
        metrics = {
            "entropy": sum_and_count(entropies_BT, is_token_BT),
            "loss/policy_avg": sum_and_count(policy_losses_BT, is_token_BT),
            "loss/value_avg": sum_and_count(value_losses_BT, is_token_BT),
            "policy/approxkl_avg": sum_and_count(0.5 * log_ratio_BT.square(), is_token_BT),
            "policy/clipfrac_avg": sum_and_count(
                (clipped_losses_BT > free_losses_BT).float(), is_token_BT
            ),
            "val/clipfrac_avg": sum_and_count(
                (clipped_errors_BT > free_errors_BT).float(), is_token_BT
            ),
            "val/ratio": sum_and_count(ratio_BT, is_token_BT),
            **gap_metrics(sampling_gaps(old_logps_BT, batch), batch),
        }
        return LossParts((losses_BT * mask_BT).sum(), mask_BT.sum(), metrics)
