"""Which prompts a run samples and trains on: dynamic sampling, oversampling, and prompts that are left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bloomery.recipe.objectives import GroupRollouts, Rollouts
from bloomery.train.rl.prompt_history import Treatment


@final
@dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """The recipe's keys of the same names. `max_resample_times`: 0 without dynamic sampling."""

    max_resample_times: int = 0
    oversampling: float = 1.0
    easy_prompts: Treatment = "keep"
    hard_prompts: Treatment = "keep"
    easy_threshold: float = 1.0
    hard_threshold: float = 0.0

    @classmethod
    def of(cls, objective: Rollouts) -> "PromptChoice":
        """Of objectives that compare the completions of a prompt; others train on every prompt."""
        if not isinstance(objective, GroupRollouts):
            return cls()
        return cls(
            max_resample_times=objective.max_resample_times if objective.dynamic_sampling else 0,
            oversampling=objective.oversampling,
            easy_prompts=objective.easy_prompts,
            hard_prompts=objective.hard_prompts,
            easy_threshold=objective.easy_threshold,
            hard_threshold=objective.hard_threshold,
        )

    @property
    def prefers_variance(self) -> bool:
        """Whether prompts whose completions differ in reward are trained on first."""
        return self.max_resample_times > 0 or self.oversampling > 1

    @property
    def leaves_out(self) -> bool:
        return (self.easy_prompts, self.hard_prompts) != ("keep", "keep")

    @property
    def is_active(self) -> bool:
        return self.prefers_variance or self.leaves_out

    def is_easy(self, totals: Sequence[float]) -> bool:
        """Whether all completions of a prompt were right. `totals`: their rewards."""
        return bool(totals) and min(totals) >= self.easy_threshold

    def is_hard(self, totals: Sequence[float]) -> bool:
        """Whether all of them were wrong."""
        return bool(totals) and max(totals) <= self.hard_threshold

    def treatment(self, totals: Sequence[float]) -> Treatment:
        """Of the prompt from now on."""
        if self.is_easy(totals):
            return self.easy_prompts
        return self.hard_prompts if self.is_hard(totals) else "keep"
