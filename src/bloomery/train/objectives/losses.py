"""Losses of tokens, of preference pairs, of KTO responses and of distillation, as sums.

Legend: B batch, T time, S sequence slots, P pair slots. The number of slots is the most that a micro-batch can hold, so
that no shape depends on the data and the host never waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.model.experts import NO_LOADS, RouterLoad

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


# How the names of metrics end that are the extreme of a step, and no mean.
LARGEST = "/max"
LEAST = "/min"


class LossParts(NamedTuple):
    """Sums, never means: the step divides once, by its global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # loss tokens, pairs or responses; hides tuple.count
    metrics: Mapping[str, Tensor] = NOTHING  # by name [2]: sum and count
    # Of the experts that the micro-batch met, where they are counted.
    loads: Mapping[int, RouterLoad] = NO_LOADS


def next_token_loss(scores_BT: Tensor, loss_mask_BT: Tensor) -> LossParts:
    """Negative log-likelihood of the labels; scores are float32 log-probabilities."""
    return LossParts(-(scores_BT * loss_mask_BT).sum(), loss_mask_BT.sum())


def dft_loss(scores_BT: Tensor, loss_mask_BT: Tensor) -> LossParts:
    """The cross-entropy, with the gradient of dynamic fine-tuning: that of a token times its probability
    (arXiv:2508.05629, eq. 7; `loss_type="dft"` of TRL).

    The value stays the cross-entropy: the weighted one also falls where probabilities do.
    """
    weighted_BT = scores_BT.detach().exp() * scores_BT
    scores_BT = weighted_BT + (scores_BT - weighted_BT).detach()
    return next_token_loss(scores_BT, loss_mask_BT)


def sequence_sums(values_BT: Tensor, sequences_BT: Tensor) -> Tensor:
    """[S], S even: the sum over each sequence's positions; 0 for an empty slot. Padding is -1."""
    slots = sequences_BT.flatten()
    values = torch.where(slots >= 0, values_BT.flatten(), 0)
    sums_S = values_BT.new_zeros(len(slots) + len(slots) % 2)
    return sums_S.index_add(0, slots.clamp(min=0), values)


def sum_and_count(values: Tensor, present: Tensor) -> Tensor:
    """[2]: sum and count of the values where `present`, detached."""
    total = torch.where(present, values.detach(), 0).sum()
    return torch.stack([total, present.sum().to(values.dtype)])


def extreme(values: Tensor, present: Tensor, *, smallest: bool = False) -> Tensor:
    """[2], of a metric whose name ends in LARGEST or LEAST: the largest of the values where `present`, and 1."""
    nothing = math.inf if smallest else -math.inf
    values_or_nothing = torch.where(present, values.detach(), nothing)
    result = values_or_nothing.min() if smallest else values_or_nothing.max()
    return torch.stack([result, torch.ones_like(result)])


def no_metric(name: str, like: Tensor) -> Tensor:
    """[2]: a metric of that name over nothing, which changes no sum and no extreme. `like`: of its dtype and device."""
    if name.endswith((LARGEST, LEAST)):
        nothing = like.new_full((), math.inf if name.endswith(LEAST) else -math.inf)
        return torch.stack([nothing, torch.ones_like(nothing)])
    return like.new_zeros(2)


def joined_metrics(
    sums: Mapping[str, Tensor], more_sums: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Metrics of two micro-batches: their sums, and the larger or the smaller of two extremes."""
    metrics = dict(sums)
    for name, metric in more_sums.items():
        if name not in sums:
            metrics[name] = metric
        elif name.endswith(LARGEST):
            metrics[name] = torch.maximum(sums[name], metric)
        elif name.endswith(LEAST):
            metrics[name] = torch.minimum(sums[name], metric)
        else:
            metrics[name] = sums[name] + metric
    return metrics


def means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The finite means. The host waits for the device."""
    if not sums:
        return {}
    values = torch.stack([total / count for total, count in sums.values()]).tolist()
    return {name: value for name, value in zip(sums, values, strict=True) if math.isfinite(value)}


class ResponseScores(NamedTuple):
    """One side of each pair, [P]: the log-probability of its response, and its number of loss tokens."""

    score_P: Tensor
    labels_P: Tensor

    @property
    def mean_P(self) -> Tensor:
        return self.score_P / self.labels_P.clamp(min=1)


class PairScores(NamedTuple):
    chosen: ResponseScores
    rejected: ResponseScores
    present_P: Tensor  # bool: the slot holds a pair


def pairs_of(scores_BT: Tensor, loss_mask_BT: Tensor, sequences_BT: Tensor) -> PairScores:
    """Sequences 2i and 2i + 1 are the chosen and the rejected response of pair i, anywhere in the micro-batch."""
    scores_P2 = sequence_sums(scores_BT * loss_mask_BT, sequences_BT).view(-1, 2)
    labels_P2 = sequence_sums(loss_mask_BT.to(scores_BT.dtype), sequences_BT).view(-1, 2)
    chosen, rejected = (ResponseScores(scores_P2[:, side], labels_P2[:, side]) for side in (0, 1))
    return PairScores(chosen, rejected, present_pairs(sequences_BT))


def present_pairs(sequences_BT: Tensor) -> Tensor:
    """bool [P]: both sequences of the pair are in the micro-batch."""
    positions_S = sequence_sums(torch.ones_like(sequences_BT), sequences_BT)
    return (positions_S.view(-1, 2) > 0).all(1)


def pair_parts(losses_P: Tensor, rewards_P: tuple[Tensor, Tensor], present_P: Tensor) -> LossParts:
    """Sums over pairs. `rewards_P`: of the chosen and the rejected responses."""
    chosen_P, rejected_P = rewards_P
    metrics = {
        "accuracy": sum_and_count((chosen_P > rejected_P).to(losses_P.dtype), present_P),
        "margin": sum_and_count(chosen_P - rejected_P, present_P),
        "chosen_reward": sum_and_count(chosen_P, present_P),
        "rejected_reward": sum_and_count(rejected_P, present_P),
    }
    return LossParts(torch.where(present_P, losses_P, 0).sum(), present_P.sum(), metrics)


def dpo_loss(
    pairs: PairScores, reference: PairScores, *, beta: float, label_smoothing: float
) -> LossParts:
    """-log sigmoid(beta * (log-ratio of the chosen - log-ratio of the rejected response)); arXiv:2305.18290, eq. 7.

    `label_smoothing` e, the share of swapped labels: (1 - e) of it and e of the loss of the swapped pair (Mitchell,
    "cDPO", 2023).
    """
    chosen_P = beta * (pairs.chosen.score_P - reference.chosen.score_P)
    rejected_P = beta * (pairs.rejected.score_P - reference.rejected.score_P)
    margins_P = chosen_P - rejected_P
    losses_P = (
        -F.logsigmoid(margins_P) * (1 - label_smoothing)
        - F.logsigmoid(-margins_P) * label_smoothing
    )
    return pair_parts(losses_P, (chosen_P, rejected_P), pairs.present_P)


def ipo_loss(pairs: PairScores, reference: PairScores, *, beta: float) -> LossParts:
    """(difference of log-ratios - 1 / (2 beta))^2; arXiv:2310.12036, eq. 17.

    Log-ratios are means per token, as in TRL, which asked the authors: a sum grows with the response's length.
    """
    chosen_P = pairs.chosen.mean_P - reference.chosen.mean_P
    rejected_P = pairs.rejected.mean_P - reference.rejected.mean_P
    losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return pair_parts(losses_P, (beta * chosen_P, beta * rejected_P), pairs.present_P)


def simpo_loss(pairs: PairScores, *, beta: float, gamma: float) -> LossParts:
    """-log sigmoid(beta * difference of mean log-probabilities - gamma); arXiv:2405.14734, eq. 6."""
    chosen_P = beta * pairs.chosen.mean_P
    rejected_P = beta * pairs.rejected.mean_P
    return pair_parts(
        -F.logsigmoid(chosen_P - rejected_P - gamma), (chosen_P, rejected_P), pairs.present_P
    )


def orpo_loss(pairs: PairScores, *, beta: float) -> LossParts:
    """Cross-entropy of the chosen response - beta * log sigmoid(log odds ratio); arXiv:2403.07691, eq. 6 and 7.

    The probability of a response is the geometric mean of its tokens' probabilities.
    """
    chosen_P, rejected_P = (
        torch.where(pairs.present_P, side.mean_P, -1.0) for side in (pairs.chosen, pairs.rejected)
    )
    odds_P = log_odds(chosen_P) - log_odds(rejected_P)
    parts = pair_parts(
        -chosen_P - beta * F.logsigmoid(odds_P),
        (beta * chosen_P, beta * rejected_P),
        pairs.present_P,
    )
    nats = sum_and_count(-chosen_P, pairs.present_P)
    log_odds_sums = sum_and_count(odds_P, pairs.present_P)
    return parts._replace(metrics={**parts.metrics, "nats": nats, "log_odds": log_odds_sums})


def reward_loss(values_BT: Tensor, sequences_BT: Tensor) -> LossParts:
    """-log sigmoid(value of the chosen - value of the rejected response), at the last token of each.

    The Bradley-Terry model as in arXiv:2203.02155, eq. 1, with one comparison per prompt.
    """
    following_BT = F.pad(sequences_BT[:, 1:], (0, 1), value=-1)
    last_BT = (sequences_BT != following_BT).to(values_BT.dtype)
    chosen_P, rejected_P = sequence_sums(values_BT * last_BT, sequences_BT).view(-1, 2).unbind(1)
    present_P = present_pairs(sequences_BT)
    return pair_parts(-F.logsigmoid(chosen_P - rejected_P), (chosen_P, rejected_P), present_P)


def kto_kl(mismatched: ResponseScores, reference: ResponseScores, present_P: Tensor) -> Tensor:
    """[2]: the summed log-ratio of policy and reference model over the mismatched responses, and their number."""
    return sum_and_count(mismatched.score_P - reference.score_P, present_P)


def kto_loss(
    pairs: PairScores,
    reference: PairScores,
    desirable_P: Tensor,
    kl: Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> LossParts:
    """weight * (1 - sigmoid(beta * (r - kl))) of a desirable response, beta * (kl - r) of an undesirable one.

    arXiv:2402.01306, eq. 7. r is the log-ratio of policy and reference model. The rejected side of a pair is its
    prompt with the response of another prompt. `kl`: the estimated KL term, non-negative and constant. `weights`: of
    desirable and undesirable responses.
    """
    rewards_P = pairs.chosen.score_P - reference.chosen.score_P
    present_P = pairs.present_P
    lead_P = torch.where(desirable_P, rewards_P - kl, kl - rewards_P)
    losses_P = torch.where(desirable_P, *weights) * (1 - torch.sigmoid(beta * lead_P))
    metrics = {
        "accuracy": sum_and_count((lead_P > 0).to(losses_P.dtype), present_P),
        "chosen_reward": sum_and_count(beta * rewards_P, present_P & desirable_P),
        "rejected_reward": sum_and_count(beta * rewards_P, present_P & ~desirable_P),
        "kl": sum_and_count(kl.expand_as(rewards_P), present_P),
    }
    return LossParts(torch.where(present_P, losses_P, 0).sum(), present_P.sum(), metrics)


def log_odds(scores: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, with p at most 1 - 1e-6 to stay finite."""
    scores = scores.clamp(max=-1e-6)
    return scores - torch.log(-torch.expm1(scores))


def distillation_loss(
    output_BT: Tensor, loss_mask_BT: Tensor, *, kd_ratio: float, temperature: float
) -> LossParts:
    """kd_ratio * temperature^2 * KL(teacher || model) + (1 - kd_ratio) * cross-entropy, summed over the loss tokens.

    arXiv:1503.02531, section 2: the square keeps the gradient's size independent of the temperature. `output_BT`: the
    log-probabilities of the labels first, then the divergences.
    """
    scores_BT, divergence_BT = output_BT[:2]
    is_loss_token_BT = loss_mask_BT != 0
    losses_BT = kd_ratio * temperature**2 * divergence_BT - (1 - kd_ratio) * scores_BT
    metrics = {
        "kl": sum_and_count(divergence_BT, is_loss_token_BT),
        "nats": sum_and_count(-scores_BT, is_loss_token_BT),
    }
    return LossParts((losses_BT * loss_mask_BT).sum(), loss_mask_BT.sum(), metrics)


class LossTerm(NamedTuple):
    """A term of a loss: its sum over a micro-batch, the tokens or responses summed over, and its weight in the loss.

    `scale`: the weight over the number of the whole step, so that scaled terms add up.
    """

    name: str
    parts: LossParts
    scale: Tensor | float


def sum_of_terms(terms: Sequence[LossTerm], count: Tensor) -> LossParts:
    """Their scaled sum, and as metrics the mean of each, `loss/NAME`, beside those of its own. `count`: of the sum."""
    scaled = [term.parts.total * term.scale for term in terms]
    metrics: dict[str, Tensor] = {}
    for name, parts, _ in terms:
        total = parts.total.detach()
        metrics |= parts.metrics
        metrics[f"loss/{name}"] = torch.stack([total, parts.count.to(total.dtype)])
    return LossParts(torch.stack(scaled).sum(), count, metrics)


def on_policy_loss(output_4BT: Tensor, loss_mask_BT: Tensor, *, sampled: bool) -> LossParts:
    """The divergence from the teacher, summed over the tokens that the model sampled.

    `sampled`: of each token the log ratio of both models alone, less which is its advantage in a policy gradient. Over
    all tokens that could have been sampled, the mean of its gradient is that of KL(model || teacher).
    """
    scores_BT, divergence_BT, teacher_scores_BT, agree_BT = output_4BT
    losses_BT = divergence_BT
    ratios_BT = scores_BT - teacher_scores_BT
    if sampled:
        # Its value is the log ratio; its gradient that of the log-probability, weighed by the log ratio.
        advantages_BT = -ratios_BT.detach()
        losses_BT = ratios_BT.detach() - advantages_BT * (scores_BT - scores_BT.detach())
    is_loss_token_BT = loss_mask_BT != 0
    metrics = {
        "log_ratio": sum_and_count(ratios_BT, is_loss_token_BT),
        "divergence": sum_and_count(divergence_BT, is_loss_token_BT),
        "agreement": sum_and_count(agree_BT, is_loss_token_BT),
    }
    return LossParts((losses_BT * loss_mask_BT).sum(), loss_mask_BT.sum(), metrics)
