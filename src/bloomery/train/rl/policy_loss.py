"""Losses of reinforcement learning: sampled completions, weighted by how much better than others they are.

Legend: B batch, T time, S sequence slots. Completions are the loss tokens of a micro-batch, numbered by
`Batch.sequences`; `Batch.extras` hold their advantages and the log-probabilities with which they were sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.train.objectives.losses import LossParts, extreme, sequence_sums, sum_and_count

PolicyLossType = Literal["dapo", "grpo", "dr_grpo", "cispo", "rloo"]
CorrectionMode = Literal["sequence_mask", "token_mask", "sequence_truncate", "token_truncate"]
# In `Batch.extras`, at each token: the completions of the step over its loss tokens, all ranks together.
COMPLETIONS_PER_TOKEN = "completions_per_token"
DEVIATION_FLOOR = 1e-4  # added to the deviation of a group's rewards, as in TRL


@dataclass(frozen=True)
class SamplingCorrection:
    """Weighs tokens by how much likelier they are in training than they were in generation.

    The two compute with other kernels, and often in another precision: the tokens are from a slightly other
    distribution than the one that is trained. `mode`: the ratio is that of a token or of the whole completion; above
    `clip_max` it is clamped (truncate) or set to 0 (mask). TRL has the same as `vllm_importance_sampling_*`.
    """

    mode: CorrectionMode = "sequence_mask"
    clip_max: float = 3.0

    def ratios(self, gaps_BT: Tensor, batch: Batch) -> Tensor:
        """[B, T]: the weight of each token. `gaps_BT`: the log-probability in training less that in generation; 0 for
        positions without loss.
        """
        if self.mode in ("sequence_mask", "sequence_truncate"):
            sequences_BT = _sequences(batch)
            gaps_BT = sequence_sums(gaps_BT, sequences_BT)[sequences_BT.clamp(min=0)]
        ratios_BT = gaps_BT.exp()
        if self.mode in ("sequence_truncate", "token_truncate"):
            return ratios_BT.clamp(max=self.clip_max)
        return torch.where(ratios_BT > self.clip_max, 0.0, ratios_BT)

    def metrics(self, ratios_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The least, mean and largest ratio: over tokens, or over completions where a completion has one ratio."""
        is_counted_BT = batch.loss_mask != 0
        if self.mode in ("sequence_mask", "sequence_truncate"):
            is_counted_BT = _first_positions(batch)
        name = "sampling/importance_sampling_ratio"
        return {
            f"{name}/min": extreme(ratios_BT, is_counted_BT, smallest=True),
            f"{name}/mean": sum_and_count(ratios_BT, is_counted_BT),
            f"{name}/max": extreme(ratios_BT, is_counted_BT),
        }


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of a policy loss.

    `type`: dapo (arXiv:2503.14476) is a mean over all tokens of a step, grpo (arXiv:2402.03300) one over completions of
    the mean over their tokens, dr_grpo (arXiv:2503.20783) divides by completions times the longest that is allowed,
    cispo (arXiv:2506.13585) clips the weight of a token and not its gradient. rloo (arXiv:2402.14740) has one ratio
    for each completion, of the probabilities of the whole, and is a mean over completions; its KL divergence is a part
    of the rewards. `level`: one ratio for each token, or one for each sequence (GSPO, arXiv:2507.18071). `beta`: the
    weight of the KL divergence from the reference model. `entropy_coef`: that of the entropy bonus, a mean over tokens
    whatever the type.
    """

    type: PolicyLossType = "dapo"
    level: Literal["token", "sequence"] = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    entropy_coef: float = 0.0
    max_completion_length: int = 512
    correction: SamplingCorrection | None = None

    @property
    def divides_by_tokens(self) -> bool:
        """Whether a step divides the sum of its losses by its loss tokens, and not by its completions."""
        return self.type in ("dapo", "cispo")

    def count(self, batch: Batch) -> float:
        """The number of tokens or of completions by which a step divides the sum of the losses."""
        if self.divides_by_tokens:
            return float(batch.loss_mask.sum())
        return float(_completions(batch).sum())

    def __call__(self, scores_BT: Tensor, entropies_BT: Tensor, batch: Batch) -> LossParts:
        """`policy_parts` less the entropy bonus."""
        parts = self.policy_parts(scores_BT, entropies_BT, batch)
        if not self.entropy_coef:
            return parts
        weights_BT = batch.loss_mask
        if not self.divides_by_tokens:
            weights_BT = weights_BT * batch.extras[COMPLETIONS_PER_TOKEN]
        bonus = self.entropy_coef * (entropies_BT * weights_BT).sum()
        return parts._replace(total=parts.total - bonus)

    def policy_parts(self, scores_BT: Tensor, entropies_BT: Tensor, batch: Batch) -> LossParts:
        """The summed loss of a micro-batch, its count and its metrics.

        `scores_BT`: the log-probabilities of the completions' tokens under the model that trains, at the temperature at
        which they were sampled. Without `old_logps` in the batch that is still the model that sampled: every ratio is
        1, and has a gradient.
        """
        mask_BT = batch.loss_mask
        is_token_BT = mask_BT != 0
        advantages_BT = batch.extras["advantages"]
        old_logps_BT = batch.extras.get("old_logps", scores_BT.detach())

        metrics = {"entropy": sum_and_count(entropies_BT, is_token_BT)}

        sampling_gaps_BT = sampling_gaps(old_logps_BT, batch)
        metrics |= gap_metrics(sampling_gaps_BT, batch)

        # How much more likely a token, or the whole completion, has become since it was sampled.
        log_ratio_BT = (scores_BT - old_logps_BT) * mask_BT
        if self.type == "rloo":
            parts = self._whole_completions(log_ratio_BT, advantages_BT, batch)
            return parts._replace(metrics={**metrics, **parts.metrics})
        if self.level == "sequence":
            log_ratio_BT = _means_of_sequences(log_ratio_BT, batch) * mask_BT
        ratio_BT = log_ratio_BT.exp()

        # A token whose ratio has left the clip range in the direction of its advantage has no gradient.
        low = 1 - self.epsilon
        high = 1 + self.epsilon_high
        if self.type == "cispo":
            losses_BT = -ratio_BT.clamp(max=self.epsilon_high).detach() * advantages_BT * scores_BT
        else:
            clipped_BT = ratio_BT.clamp(low, high) * advantages_BT
            losses_BT = -torch.min(ratio_BT * advantages_BT, clipped_BT)
        metrics |= self._clip_metrics(ratio_BT, advantages_BT, batch)

        if self.correction is not None:
            correction_BT = self.correction.ratios(sampling_gaps_BT, batch)
            losses_BT = losses_BT * correction_BT
            metrics |= self.correction.metrics(correction_BT, batch)

        # The k3 estimator of the KL divergence (Schulman, "Approximating KL Divergence", 2020), times the ratio: its
        # gradient is then that of the divergence of the policy that trains.
        if self.beta:
            reference_gap_BT = (batch.extras["reference"] - scores_BT) * mask_BT
            divergence_BT = (reference_gap_BT.exp() - reference_gap_BT - 1) * ratio_BT
            losses_BT = losses_BT + self.beta * divergence_BT
            metrics["kl"] = sum_and_count(divergence_BT, is_token_BT)

        total = (losses_BT * self._weights(batch) * mask_BT).sum()
        count = mask_BT.sum() if self.divides_by_tokens else _completions(batch).sum()
        return LossParts(total, count, metrics)

    def _whole_completions(
        self, log_ratio_BT: Tensor, advantages_BT: Tensor, batch: Batch
    ) -> LossParts:
        """The loss of RLOO, in which a completion has one ratio: the product of those of its tokens."""
        present_S = _completions(batch)
        ratio_S = sequence_sums(log_ratio_BT, _sequences(batch)).exp()
        # Every token of a completion has the completion's advantage, with or without loss: their mean gives it back.
        num_advantages_S = sequence_sums((advantages_BT != 0).to(ratio_S.dtype), _sequences(batch))
        advantages_S = sequence_sums(advantages_BT, _sequences(batch)) / num_advantages_S.clamp(
            min=1
        )
        low = 1 - self.epsilon
        high = 1 + self.epsilon_high
        losses_S = -torch.min(ratio_S * advantages_S, ratio_S.clamp(low, high) * advantages_S)
        is_low_S = (ratio_S < low) & (advantages_S < 0)
        is_high_S = (ratio_S > high) & (advantages_S > 0)
        metrics = {
            "clip_ratio/low_mean": sum_and_count(is_low_S.float(), present_S),
            "clip_ratio/high_mean": sum_and_count(is_high_S.float(), present_S),
            "clip_ratio/region_mean": sum_and_count((is_low_S | is_high_S).float(), present_S),
        }
        return LossParts(torch.where(present_S, losses_S, 0).sum(), present_S.sum(), metrics)

    def _weights(self, batch: Batch) -> Tensor | float:
        """The weight of each token in the sum over the step."""
        if self.type == "grpo":
            lengths_S = sequence_sums(batch.loss_mask, _sequences(batch))
            return 1 / lengths_S.clamp(min=1)[_sequences(batch).clamp(min=0)]
        return 1 / self.max_completion_length if self.type == "dr_grpo" else 1.0

    def _clip_metrics(
        self, ratio_BT: Tensor, advantages_BT: Tensor, batch: Batch
    ) -> dict[str, Tensor]:
        """The share of tokens whose ratio has left the clip range: below, above, and either."""
        if self.type == "cispo":
            is_clipped_BT = (ratio_BT > self.epsilon_high) & (advantages_BT > 0)
            return {"cispo_clip_ratio": self._share(is_clipped_BT, batch)}
        is_low_BT = (ratio_BT < 1 - self.epsilon) & (advantages_BT < 0)
        is_high_BT = (ratio_BT > 1 + self.epsilon_high) & (advantages_BT > 0)
        return {
            "clip_ratio/low_mean": self._share(is_low_BT, batch),
            "clip_ratio/high_mean": self._share(is_high_BT, batch),
            "clip_ratio/region_mean": self._share(is_low_BT | is_high_BT, batch),
        }

    def _share(self, condition_BT: Tensor, batch: Batch) -> Tensor:
        """The share of tokens with that condition, as a metric: over all tokens, or as a mean over completions."""
        share_BT = condition_BT.to(torch.float32)
        if self.level == "token":
            return sum_and_count(share_BT, batch.loss_mask != 0)
        lengths_S = sequence_sums(batch.loss_mask, _sequences(batch))
        sums_S = sequence_sums(share_BT * batch.loss_mask, _sequences(batch))
        return sum_and_count(sums_S / lengths_S.clamp(min=1), _completions(batch))


def sampling_gaps(old_logps_BT: Tensor, batch: Batch) -> Tensor:
    """[B, T]: how much training and generation disagree about the same tokens under the same weights."""
    return (old_logps_BT.detach() - batch.extras["sampled_logps"]) * batch.loss_mask


def gap_metrics(sampling_gaps_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
    """The mean and the largest of them."""
    is_token_BT = batch.loss_mask != 0
    name = "sampling/sampling_logp_difference"
    return {
        f"{name}/mean": sum_and_count(sampling_gaps_BT.abs(), is_token_BT),
        f"{name}/max": extreme(sampling_gaps_BT.abs(), is_token_BT),
    }


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale: Literal["group", "batch", "none"]
) -> Tensor:
    """[N]: by how much the reward of each completion exceeds the mean of its group: of `num_generations` in a row.

    `scale`: the difference is divided by the standard deviation of the group's rewards, of all rewards ("batch"), or
    not at all. A reward of NaN (a completion without any reward) counts in no mean and has the advantage 0. Raises
    UserError as `_as_float32`.
    """
    unit = float64_unit(rewards)
    rewards_GN = rewards.double().view(-1, num_generations) / unit
    advantages_GN = rewards_GN - rewards_GN.nanmean(1, keepdim=True)
    floor = DEVIATION_FLOOR / unit
    if scale == "group":
        advantages_GN = advantages_GN / (_deviation(rewards_GN) + floor)
    elif scale == "batch":
        advantages_GN = advantages_GN / (_deviation(rewards_GN.view(1, -1)) + floor)
    else:
        advantages_GN = advantages_GN * unit
    return _as_float32(advantages_GN.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf).flatten())


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """[N]: the reward of each completion less the mean of the others of its group (RLOO, arXiv:2402.14740).

    A reward of NaN (a completion without any reward) counts in no mean. Its advantage is 0, and so is that of a
    completion that is alone in its group. Raises UserError as `_as_float32`.
    """
    unit = float64_unit(rewards)
    rewards_GN = rewards.double().view(-1, num_generations) / unit
    num_others_GN = rewards_GN.isfinite().sum(1, keepdim=True) - 1
    sums_G1 = rewards_GN.nansum(1, keepdim=True)
    mean_of_others_GN = (sums_G1 - rewards_GN) / num_others_GN.clamp(min=1)
    advantages_GN = (rewards_GN - mean_of_others_GN) * unit
    is_compared_GN = rewards_GN.isfinite() & (num_others_GN > 0)
    return _as_float32(torch.where(is_compared_GN, advantages_GN, 0.0).flatten())


def float64_unit(rewards: Tensor) -> float:
    """A power of two that large rewards are divided by, so that no sum and no square of them overflows; else 1.

    Rewards are compared in float64: in float32 1e9 + 1 equals 1e9, and the square of 1e20 is infinite.
    """
    largest = float(rewards.double().abs().nan_to_num(0.0).max()) if rewards.numel() else 0.0
    return 2.0 ** max(0, math.frexp(largest)[1] - 1)


def mean_of(numbers: Tensor) -> float:
    """Their mean without NaN, in float64."""
    unit = float64_unit(numbers)
    return float((numbers.double() / unit).nanmean()) * unit


def deviation_of(numbers: Tensor, *, correction: int = 1) -> float:
    """Their standard deviation without NaN, in float64; 0 for fewer than two, infinite where float64 ends."""
    unit = float64_unit(numbers)
    known = numbers[numbers.isfinite()].double() / unit
    return float(known.std(correction=correction)) * unit if len(known) > 1 else 0.0


def _as_float32(advantages: Tensor) -> Tensor:
    """As the loss takes them. Raises UserError for one that float32 does not hold."""
    numbers = advantages.float()
    if not numbers.isfinite().all():
        largest = float(advantages.abs().max())
        raise UserError(
            f"a reward differs from the others of its prompt by {largest:.3g}: float32, in which the loss is computed,"
            f" ends at {torch.finfo(torch.float32).max:.3g}",
            where="rewards",
            fix="set a smaller weight of the reward, or divide its numbers by a constant",
        )
    return numbers


def _deviation(rewards_GN: Tensor) -> Tensor:
    """[G, 1]: the unbiased standard deviation of each row without its NaN; 0 for a row of a single number."""
    mean_G1 = rewards_GN.nanmean(1, keepdim=True)
    count_G1 = rewards_GN.isfinite().sum(1, keepdim=True)
    squares_G1 = (rewards_GN - mean_G1).square().nansum(1, keepdim=True)
    return (squares_G1 / (count_G1 - 1).clamp(min=1)).sqrt()


def share_without_variance(rewards: Sequence[float], num_generations: int) -> float:
    """The share of groups whose completions all have one reward, so that nothing can be learned from them."""
    return float(groups_without_variance(rewards, num_generations).float().mean())


def groups_without_variance(rewards: Sequence[float], num_generations: int) -> Tensor:
    """bool [G]: which groups these are."""
    numbers = torch.tensor(rewards, dtype=torch.float64)
    unit = float64_unit(numbers)
    return _deviation(numbers.view(-1, num_generations) / unit).squeeze(1) < 1e-8 / unit


def _means_of_sequences(values_BT: Tensor, batch: Batch) -> Tensor:
    """[B, T]: at each token the mean over its completion."""
    sums_S = sequence_sums(values_BT, _sequences(batch))
    lengths_S = sequence_sums(batch.loss_mask, _sequences(batch))
    return (sums_S / lengths_S.clamp(min=1))[_sequences(batch).clamp(min=0)]


def _completions(batch: Batch) -> Tensor:
    """bool [S]: whether a slot holds a completion, with or without loss."""
    return sequence_sums(torch.ones_like(batch.loss_mask), _sequences(batch)) > 0


def _first_positions(batch: Batch) -> Tensor:
    """bool [B, T]: whether a position is the first one of its completion."""
    slots = _sequences(batch).flatten()
    positions = torch.arange(len(slots), device=slots.device)
    first_S = torch.full_like(slots, len(slots)).scatter_reduce(
        0, slots.clamp(min=0), torch.where(slots >= 0, positions, len(slots)), "amin"
    )
    is_first = (slots >= 0) & (first_S[slots.clamp(min=0)] == positions)
    return is_first.view_as(_sequences(batch))


def _sequences(batch: Batch) -> Tensor:
    assert batch.sequences is not None, "completions are numbered"
    return batch.sequences
