"""Rules for runs that are judged by rewards, whose loss says nothing: each gives a problem, its evidence and a fix.

The first rollouts are compared with the newest ones. A reward that still rises is a healthy run, whatever else changes.
"""

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import fmean, variance

from bloomery.monitor.events import StepDone
from bloomery.monitor.history import (
    FEW_ROLLOUTS,
    Diagnosis,
    PlanFacts,
    RunHistory,
    equal_rewards,
)

EARLY = 2 * FEW_ROLLOUTS  # rollouts before the reward of a run is judged
LATER = 4 * FEW_ROLLOUTS  # before a change of lengths or entropy is
NOISE = 2.0  # standard errors between two means, above which a reward has risen

SAME_REWARD = 0.8  # share of the prompts whose completions all have one reward
ROUNDING = 1e-6  # relative: deviations of equal float32 numbers
NOT_ENDED = 0.9  # share of the completions
SOLVED = 0.95  # of the highest reward that is possible
LONGER = 1.5  # times the length of the first completions
# Nats per token: pretrained models sample with 0.3 to 2, a model that repeats one completion with less than 0.05.
COLLAPSED = 0.05
COLLAPSED_SHARE = 0.1  # of the first entropy
# Nats per token. Runs with a penalty stay below 0.1 (DeepSeekMath, arXiv:2402.03300, and TRL's examples).
FAR_FROM_REFERENCE = 1.0


def why_rewards_do_not_rise(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """Nothing for a run that does not train on rewards, for a young one, and for one whose reward rises or is as high
    as can be.
    """
    if not history.first_rollouts or not facts.trains_on_rewards:
        return
    highest = facts.highest_reward
    if highest is not None and _mean(history.newest_rollouts, "reward") >= SOLVED * highest:
        # A task that is solved before the first step trains nothing, either.
        if all(_is_constant(rollout) for rollout in history.first_rollouts):
            yield from _same_rewards(history)
        return
    yield from _same_rewards(history)
    yield from _far_from_reference(history, facts)
    if history.num_rollouts < EARLY or _rises(history.first_rollouts, history.newest_rollouts):
        return
    yield from _truncated(history, facts)
    if history.num_rollouts >= LATER:
        yield from _longer(history)
        yield from _collapsed(history, facts)


def _same_rewards(history: RunHistory) -> Iterator[Diagnosis]:
    """A completion is compared with the others of its prompt: where all have one reward, it has no gradient.

    Completions that are alone in their prompt are compared with those of the whole rollout.
    """
    rollouts = history.newest_rollouts
    if len(rollouts) < FEW_ROLLOUTS:
        return
    if all(_is_constant(rollout) for rollout in rollouts):
        rewards = sorted({f"{rollout.metrics['reward']:.3g}" for rollout in rollouts})
        evidence = (
            f"{' or '.join(rewards[:3])} for every completion of the last {len(rollouts)} rollouts"
        )
        fix = "check what the reward compares: `bloomery prepare RECIPE --preview 3` shows its columns, the files of"
        fix += " completions/ what it scored"
        problem = (
            "the rewards do not tell completions apart: all completions of a prompt have one reward"
        )
        yield Diagnosis("same-rewards", problem, evidence, fix)
        return
    share = fmean(equal_rewards(rollout) for rollout in rollouts)
    if share < SAME_REWARD:
        return
    evidence = (
        f"{share:.0%} of the prompts in the last {len(rollouts)} rollouts; {_reward(history)}"
    )
    fix = "check that the reward reads the completion; " if share == 1.0 else ""
    fix += "use easier prompts where the reward is low and harder ones where it is high, a reward with more than two"
    fix += " values, or a larger objective.num_generations"
    yield Diagnosis("same-rewards", "all completions of a prompt have one reward", evidence, fix)


def _is_constant(rollout: StepDone) -> bool:
    """Whether every completion of a rollout has the same rewards."""
    metrics = rollout.metrics
    deviations = [
        value
        for name, value in metrics.items()
        if name.startswith("rewards/") and name.endswith("/std")
    ]
    rounding = ROUNDING * max(1.0, abs(metrics["reward"]))
    return bool(deviations) and max(deviations) <= rounding


def _truncated(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    share = _mean(history.newest_rollouts, "completions/clipped_ratio")
    if share < NOT_ENDED:
        return
    max_length = facts.max_completion_length
    evidence = f"{share:.0%} of the completions reach objective.max_completion_length"
    evidence += f" ({max_length:,})" if max_length else ""
    fix = f"set objective.max_completion_length={2 * max_length or 1024}, or reward short completions:"
    fix += f" {_length_reward(history)}"
    yield Diagnosis(
        "truncated",
        "completions are cut before they end",
        f"{evidence}; {_reward(history)}",
        fix,
    )


def _longer(history: RunHistory) -> Iterator[Diagnosis]:
    """Length hacking: a loss that favors long completions, or a reward that does."""
    first_length = _mean(history.first_rollouts, "completions/mean_length")
    length = _mean(history.newest_rollouts, "completions/mean_length")
    if length < LONGER * first_length or not first_length:
        return
    yield Diagnosis(
        "length",
        "completions grow longer and the reward does not rise",
        f"{first_length:,.0f} tokens in the first rollouts, {length:,.0f} now; {_reward(history)}",
        f"add a reward for short completions: {_length_reward(history)}; or set objective.loss_type=dr_grpo",
    )


def _collapsed(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    first_entropy = _mean(history.first_rollouts, "entropy")
    entropy = _mean(history.newest_rollouts, "entropy")
    if entropy > COLLAPSED or entropy > COLLAPSED_SHARE * first_entropy:
        return
    rate = facts.learning_rate / 3
    yield Diagnosis(
        "entropy",
        "entropy collapse: the model samples nearly the same completion every time",
        f"entropy {first_entropy:.2f} nats per token in the first rollouts, {entropy:.3f} now; {_reward(history)}",
        f"start again with optimizer.learning_rate={rate:.1g} and objective.{facts.clip_key}=0.28, and use the best"
        " checkpoint of this run meanwhile (`--step best`)",
    )


def _far_from_reference(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    rollouts = [step for step in history.newest_rollouts if "kl" in step.metrics]
    if len(rollouts) < FEW_ROLLOUTS:
        return
    divergence = _mean(rollouts, "kl")
    if divergence < FAR_FROM_REFERENCE:
        return
    weight = facts.kl_weight or 0.0
    fix = f"set objective.{facts.kl_key}={10 * weight:g} (now {weight:g})"
    if not weight:
        fix = f"set objective.{facts.kl_key}=0.04"
    rate = facts.learning_rate
    yield Diagnosis(
        "kl",
        "the model runs away from its reference model",
        f"KL divergence {divergence:.2f} nats per token in the last {len(rollouts)} rollouts; {_reward(history)}",
        f"{fix}, or optimizer.learning_rate={rate / 3:.1g}",
    )


def _rises(first: Sequence[StepDone], newest: Sequence[StepDone]) -> bool:
    """Whether the mean reward is higher by more than the noise of both means."""
    before = [step.metrics["reward"] for step in first]
    after = [step.metrics["reward"] for step in newest]
    if len(before) < 2 or len(after) < 2:
        return False
    error = sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) - fmean(before) > NOISE * error


def _reward(history: RunHistory) -> str:
    first = _mean(history.first_rollouts, "reward")
    return f"reward {first:.3g} at first, {_mean(history.newest_rollouts, 'reward'):.3g} now"


def _length_reward(history: RunHistory) -> str:
    """A verifier that keeps completions at the length of the first ones; a token has about four characters."""
    characters = round(4 * _mean(history.first_rollouts, "completions/mean_length"), -1)
    return f"{{verifier: length, max_characters: {max(20, characters):.0f}, weight: 0.2}}"


def _mean(rollouts: Sequence[StepDone], name: str) -> float:
    """Of a metric that every rollout has; 0 without any."""
    values = [step.metrics[name] for step in rollouts if name in step.metrics]
    return fmean(values) if values else 0.0
