"""How the rewards of a rollout become advantages: of whole completions, or of each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, Protocol, final

import torch

from bloomery.recipe.objectives import Grpo, OnPolicyDistill, Ppo, Rloo, Rollouts
from bloomery.train.rl.policy_loss import group_advantages, leave_one_out_advantages
from bloomery.train.rl.policy_scores import LOGPS, VALUES, PolicyScores
from bloomery.train.rl.ppo import TokenRewarding
from bloomery.train.rl.rollout import TARGETS, MicroBatchShape, RolloutSample, TokenTargets

# What the reward of a completion is compared with.
Scale = Literal["group", "batch", "none", "leave_one_out"]


@final
@dataclass(frozen=True)
class JudgedSamples:
    """Samples with their advantages, and metrics of how these came about."""

    samples: tuple[RolloutSample, ...]
    metrics: dict[str, float]


class Advantages(Protocol):
    """By how much each completion, or each of its tokens, was better than expected."""

    def judge(
        self,
        samples: Sequence[RolloutSample],
        rewards: Sequence[float],
        is_truncated: Sequence[bool],
        *,
        num_steps: int,
        shape: MicroBatchShape,
    ) -> JudgedSamples:
        """`rewards`: of whole completions, NaN without any. `num_steps`: how many train on the rollout.

        It may take forwards of the model and of its reference: all ranks call it together.
        """


@final
@dataclass(frozen=True)
class CompletionAdvantages:
    """GRPO and RLOO: each completion is compared with the others of its prompt.

    `reward_beta`: of RLOO, the weight of the KL divergence that is taken off the rewards.
    """

    scores: PolicyScores
    scale: Scale
    num_generations: int
    reward_beta: float = 0.0

    def judge(
        self,
        samples: Sequence[RolloutSample],
        rewards: Sequence[float],
        is_truncated: Sequence[bool],
        *,
        num_steps: int,
        shape: MicroBatchShape,
    ) -> JudgedSamples:
        del is_truncated
        # Of several steps the first changes the model, which then is no more the one that sampled: its
        # log-probabilities are computed before.
        old_logps: list[list[float]] | None = None
        if num_steps > 1 or self.reward_beta:
            old_logps = self.scores.logps(samples, shape)

        # The divergence of a completion from the reference model, where that is a part of its reward.
        penalties = [0.0] * len(samples)
        metrics = {}
        if self.reward_beta:
            assert old_logps is not None
            reference_logps = self.scores.logps(samples, shape, of_reference=True)
            divergences = [
                sum(logps) - sum(reference)
                for logps, reference in zip(old_logps, reference_logps, strict=True)
            ]
            penalties = [self.reward_beta * divergence for divergence in divergences]
            num_tokens = sum(sample.num_sampled for sample in samples if sample.has_loss)
            metrics["kl"] = sum(divergences) / max(1, num_tokens)

        advantages = self._compared(
            [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        )
        judged_samples = tuple(
            replace(
                sample,
                advantage=advantage,
                old_logps=None if num_steps == 1 or old_logps is None else tuple(old_logps[index]),
            )
            for index, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        )
        return JudgedSamples(judged_samples, metrics)

    def _compared(self, rewards: Sequence[float]) -> list[float]:
        numbers = torch.tensor(rewards, dtype=torch.float64)
        if self.scale == "leave_one_out":
            advantages = leave_one_out_advantages(numbers, self.num_generations)
        else:
            advantages = group_advantages(numbers, self.num_generations, scale=self.scale)
        of_completions: list[float] = advantages.tolist()
        return of_completions


@final
@dataclass(frozen=True)
class TokenAdvantages:
    """PPO: each sampled token has a target, by the model's value head. A completion without any reward has no loss.

    What tools answered is no action, but a part of the step from the last token of a turn to the first one of the next:
    of an episode its sampled tokens alone follow each other, and the last of them has the reward. So does verl's
    `compute_gae_advantage_return`, which steps over masked tokens.
    """

    scores: PolicyScores
    rewarding: TokenRewarding

    def judge(
        self,
        samples: Sequence[RolloutSample],
        rewards: Sequence[float],
        is_truncated: Sequence[bool],
        *,
        num_steps: int,
        shape: MicroBatchShape,
    ) -> JudgedSamples:
        del num_steps
        logps, values = self.scores.rows_of_head(samples, shape, (LOGPS, VALUES))
        reference_logps = None
        if self.rewarding.kl_coef:
            reference_logps = _of_sampled_tokens(
                samples, self.scores.logps(samples, shape, of_reference=True)
            )
        rewarded = self.rewarding(
            rewards,
            is_truncated,
            logps=_of_sampled_tokens(samples, logps),
            reference_logps=reference_logps,
            values=_of_sampled_tokens(samples, values),
        )
        judged_samples = tuple(
            replace(
                sample,
                old_logps=tuple(old_logps),
                targets=_with_given_tokens(sample, targets),
                has_loss=sample.has_loss and reward == reward,
            )
            for sample, old_logps, targets, reward in zip(
                samples, logps, rewarded.targets, rewards, strict=True
            )
        )
        return JudgedSamples(judged_samples, rewarded.metrics)


def _of_sampled_tokens(
    samples: Sequence[RolloutSample], numbers: Sequence[Sequence[float]]
) -> list[list[float]]:
    """`numbers`: of all tokens of each completion."""
    return [
        list(compress(of_completion, sample.is_sampled))
        for sample, of_completion in zip(samples, numbers, strict=True)
    ]


def _with_given_tokens(sample: RolloutSample, targets: TokenTargets) -> TokenTargets:
    """`targets`: of the sampled tokens; tokens that were given have targets of 0, and no loss."""
    columns = [iter(getattr(targets, name)) for name in TARGETS]
    return TokenTargets(
        *(
            tuple(next(column) if is_sampled else 0.0 for is_sampled in sample.is_sampled)
            for column in columns
        )
    )


@final
@dataclass(frozen=True)
class NoAdvantages:
    """A teacher judges each token in the step itself."""

    def judge(
        self,
        samples: Sequence[RolloutSample],
        rewards: Sequence[float],
        is_truncated: Sequence[bool],
        *,
        num_steps: int,
        shape: MicroBatchShape,
    ) -> JudgedSamples:
        del rewards, is_truncated, num_steps, shape
        return JudgedSamples(tuple(samples), {})


def advantages_of(objective: Rollouts, scores: PolicyScores) -> Advantages:
    """How the objective turns rewards into advantages."""
    if isinstance(objective, OnPolicyDistill):
        return NoAdvantages()
    if isinstance(objective, Ppo):
        return TokenAdvantages(
            scores,
            TokenRewarding(
                kl_coef=objective.kl_coef,
                kl_estimator=objective.kl_estimator,
                missing_eos_penalty=objective.missing_eos_penalty,
                whiten_rewards=objective.whiten_rewards,
                gamma=objective.gamma,
                lam=objective.lam,
            ),
        )
    if isinstance(objective, Rloo):
        return CompletionAdvantages(
            scores, "leave_one_out", objective.num_generations, reward_beta=objective.beta
        )
    assert isinstance(objective, Grpo)
    return CompletionAdvantages(scores, objective.scale_rewards, objective.num_generations)
