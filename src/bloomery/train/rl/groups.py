"""The prompts of a rollout with their completions and rewards, and which of them are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

from bloomery.data.order import mix
from bloomery.data.prompts import Prompt
from bloomery.infer.completions import Completion
from bloomery.train.rl.policy_loss import groups_without_variance
from bloomery.train.rl.rewards import ScoredCompletions

COIN = 2**62  # in keys of random numbers: positions of tokens are smaller


@final
@dataclass
class SampledGroups:
    """`num_generations` completions of each prompt, in order. `numbers`: of the prompts in the run.

    `totals`: the rewards that are trained on, those of `scored` but in a control.
    """

    num_generations: int
    numbers: list[int] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    scored: ScoredCompletions = field(default_factory=lambda: ScoredCompletions({}, ()))
    totals: tuple[float, ...] = ()

    def add(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        scored: ScoredCompletions,
        totals: Sequence[float],
    ) -> None:
        """Those of a further round. `Completion.prompt` counts the prompts of the round, and then those of all."""
        num_before = len(self.prompts)
        self.numbers += numbers
        self.prompts += prompts
        self.scored = joined(self.scored, scored, len(self.completions), len(completions))
        self.totals += tuple(totals)
        self.completions += [
            replace(completion, prompt=num_before + completion.prompt) for completion in completions
        ]

    def with_variance(self) -> list[int]:
        """The groups whose completions have different rewards."""
        is_alike = groups_without_variance(self.totals, self.num_generations).tolist()
        return [group for group, alike in enumerate(is_alike) if not alike]

    def chosen(self, count: int) -> list[int]:
        """`count` groups: the first ones with different rewards, filled with the first of the others."""
        with_variance = self.with_variance()[:count]
        others = [group for group in range(len(self.prompts)) if group not in set(with_variance)]
        return sorted(with_variance + others[: count - len(with_variance)])

    def only(self, groups: Sequence[int]) -> "SampledGroups":
        """These groups alone."""
        size = self.num_generations
        places = [group * size + number for group in groups for number in range(size)]
        completions = [
            replace(self.completions[place], prompt=index // size)
            for index, place in enumerate(places)
        ]
        by_name = {
            name: [rewards[place] for place in places]
            for name, rewards in self.scored.by_name.items()
        }
        totals = tuple(self.scored.totals[place] for place in places)
        return SampledGroups(
            size,
            [self.numbers[group] for group in groups],
            [self.prompts[group] for group in groups],
            completions,
            ScoredCompletions(by_name, totals, self.scored.skipped),
            tuple(self.totals[place] for place in places),
        )

    def of_group(self, group: int) -> tuple[float, ...]:
        """The rewards of its completions, without those that have none."""
        size = self.num_generations
        return tuple(
            total for total in self.totals[group * size : (group + 1) * size] if total == total
        )


def control_totals(
    totals: Sequence[float], kind: Literal["none", "random", "shuffled"], keys: Sequence[int]
) -> tuple[float, ...]:
    """What a control trains on: coin flips, or each completion the reward of another one. `keys`: of the completions.

    A completion without a reward stays without one.
    """
    if kind == "none":
        return tuple(totals)
    if kind == "random":
        coins = (float(mix(key, COIN) & 1) for key in keys)
        return tuple(
            coin if total == total else total for coin, total in zip(coins, totals, strict=True)
        )
    known = [place for place, total in enumerate(totals) if total == total]
    others = sorted(known, key=lambda place: mix(keys[place], COIN))
    shuffled = list(totals)
    for place, other in zip(known, others, strict=True):
        shuffled[place] = totals[other]
    return tuple(shuffled)


def joined(
    first: ScoredCompletions, second: ScoredCompletions, num_first: int, num_second: int
) -> ScoredCompletions:
    """One after the other. A reward that is in one of them alone has no numbers in the other."""
    names = dict.fromkeys([*first.by_name, *second.by_name])
    by_name = {
        name: [
            *first.by_name.get(name, [None] * num_first),
            *second.by_name.get(name, [None] * num_second),
        ]
        for name in names
    }
    return ScoredCompletions(
        by_name, (*first.totals, *second.totals), (*first.skipped, *second.skipped)
    )
