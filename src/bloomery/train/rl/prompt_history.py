"""What a run knows of its prompts: how many it sampled, and which taught nothing; a part of every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final


@dataclass
class PromptCounts:
    """Of the whole run. A prompt that two rollouts sample counts twice.

    `without_variance`: whose completions had one reward, `filled`: of them, those that were trained on for want of
    others. `rounds`: of further prompts in place of such.
    """

    sampled: int = 0
    without_variance: int = 0
    rounds: int = 0
    filled: int = 0

    def metrics(self) -> dict[str, float]:
        """Of one rollout."""
        return {f"prompts/{name}": float(count) for name, count in asdict(self).items()}

    def add(self, others: "PromptCounts") -> None:
        for name, count in asdict(others).items():
            setattr(self, name, getattr(self, name) + count)


@final
@dataclass
class PromptHistory:
    """The state of a run's choice of prompts."""

    counts: PromptCounts = field(default_factory=PromptCounts)

    def scalars(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"counts": asdict(self.counts)}

    @classmethod
    def of(cls, scalars: Mapping[str, Any] | None) -> "PromptHistory":
        """From a checkpoint; None: of a version that kept none."""
        if scalars is None:
            return cls()
        return cls(PromptCounts(**scalars["counts"]))
