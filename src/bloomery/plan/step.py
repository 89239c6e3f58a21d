"""The step of a plan, without "auto": its batch, how it computes, and how it runs on its devices."""

from dataclasses import dataclass
from typing import final

from bloomery.core import Choice
from bloomery.facts.limits import Dequantizer
from bloomery.plan import lengths
from bloomery.plan.estimate.step import ReferencePlace
from bloomery.plan.layout import StepLayout
from bloomery.plan.types import MemoryEstimate
from bloomery.recipe.schema import AnyObjective


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """The choices about a step that depend on each other. `scale`: the step in sequences, tokens and epochs."""

    tokens: Choice[int]
    precision: Choice[str]
    attention: Choice[str]
    compiled: Choice[bool]
    dequantizer: Choice[Dequantizer]
    scale: lengths.Scale
    layout: StepLayout
    reference: ReferencePlace
    objective: AnyObjective

    @property
    def computed_sequences(self) -> int:
        """Of a step, on each device: completions are packed."""
        micro_batches = self.accumulation
        if self.layout.rollout is not None:
            micro_batches = self.layout.rollout.micro_batches
        return micro_batches * self.layout.micro_batching.micro_batch_size.value

    @property
    def memory(self) -> MemoryEstimate:
        """Of the moment that needs most: a step, or the sampling of completions."""
        return self.layout.micro_batching.memory

    @property
    def accumulation(self) -> int:
        """Micro-batches per step and device."""
        if self.layout.parallel is not None:
            return self.layout.parallel.layout.accumulation
        return self.scale.sequences_per_step // self.layout.micro_batching.micro_batch_size.value

    @property
    def trained_tokens(self) -> float:
        rollout = self.layout.rollout
        return self.tokens.value if rollout is None else rollout.tokens_per_step
