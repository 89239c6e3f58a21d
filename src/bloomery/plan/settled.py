"""What is settled of a step before its plan is written down, and how a choice is told."""

from dataclasses import dataclass
from typing import Any

from bloomery.choice import Choice
from bloomery.model.quantize_facts import Reader
from bloomery.plan import batch, lengths, speed
from bloomery.plan.activations import keeps_scores, kept_layers, quadratic_bytes
from bloomery.plan.types import Decision, Estimate, MeshPlan
from bloomery.units import GIB


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Choices that depend on each other. `parts`: seconds of a step by what takes them; None where nothing is known."""

    tokens: Choice[int]
    precision: Choice[str]
    attention: Choice[str]
    compiled: Choice[bool]
    reader: Choice[Reader]
    scale: lengths.Scale
    cut: batch.Cut
    parts: dict[str, Estimate] | None
    mesh: MeshPlan | None

    @property
    def seconds(self) -> Estimate | None:
        return speed.total(self.parts) if self.parts else None

    @property
    def told_precision(self) -> Choice[str]:
        """float16 never trains without loss scaling, and the plan says so."""
        scaled = self.precision.value == "float16"
        return Choice("float16 + loss scaling", self.precision.because) if scaled else self.precision

    @property
    def told_compile(self) -> Choice[str]:
        return Choice("compiled" if self.compiled.value else "uncompiled", self.compiled.because)

    @property
    def priced_attention(self) -> Choice[str]:
        """With what the fallback that was not taken would have cost."""
        load = self.cut.load
        if keeps_scores(load):
            return self.attention
        layers = max(1, kept_layers(load.checkpointing, load.config.num_layers))
        price = quadratic_bytes(load) * layers / GIB
        added = f"{int(price * 10 + 0.5) / 10:.1f} GiB"
        return Choice(self.attention.value, f"{self.attention.because}; PyTorch's fallback would add {added}")


def decision(key: str, choice: Choice[Any]) -> Decision:
    value = choice.value
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return Decision(key=key, value=str(value), because=choice.because)
