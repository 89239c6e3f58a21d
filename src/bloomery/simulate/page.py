"""The simulated peak beside the plan's own, as lines of its page and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.core.units import GIB
from bloomery.plan.report.page import joined, unit_of
from bloomery.plan.types import Plan
from bloomery.simulate.parent import Simulated, Stage


@dataclass(frozen=True)
class Beside:
    """What was simulated of a plan, beside what the plan counts from shapes."""

    plan: Plan
    found: Simulated

    @property
    def total(self) -> float:
        """With what a device holds beside tensors, as the plan counts it: fragmentation's share, and contexts."""
        told = self.plan.memory
        loose = told.parts.get("fragmentation", 0.0)
        return self.found.peak * (1 + loose / told.allocated) + told.total - told.allocated - loose

    @property
    def fits(self) -> bool:
        """The plan's own answer where nothing was simulated."""
        return self.total <= self.plan.memory.limit if self.found.parts else self.plan.fits

    def lines(self) -> list[str]:
        """The peak by part, how far the plan's figure is from it, and what is not in it."""
        figures = list(self._figures()) if self.found.parts else []
        return [*figures, *(line for note in self.found.notes for line in joined([note]))]

    def _figures(self) -> Iterator[str]:
        told, peak = self.plan.memory.allocated, self.found.peak
        unit, size = unit_of(peak)
        digits = 1 if size == GIB else 0
        apart = round(told / peak - 1, 2)
        beside = f"{abs(apart):.0%} {'more' if apart > 0 else 'less'}" if apart else "the same"
        counted = f"from shapes {told / size:.{digits}f}, {beside}"
        stages = self.found.stages
        where = f"the peak of the fullest of {stages[-1].number} stages" if stages else "the peak of the second step"
        yield from joined([f"{peak / size:.{digits}f} {unit} of tensors at {where}", counted])
        yield from joined([_of_stage(stage, f"{stage.peak / size:.{digits}f} {unit}") for stage in stages])
        parts = sorted(self.found.parts.items(), key=lambda part: -part[1])
        least = 0.5 * size / 10**digits  # what rounds to nothing is not named
        yield from joined([f"{name} {value / size:.{digits}f}" for name, value in parts if value >= least])
        yield self._verdict()

    def _verdict(self) -> str:
        limit = self.plan.memory.limit
        unit, size = unit_of(limit)
        added = "what Python and PyTorch hold" if self.plan.train.device == "cpu" else "fragmentation and contexts"
        return (
            f"with {added} {self.total / size:.1f} of {limit / size:,.1f} {unit}: {'fits' if self.fits else 'too much'}"
        )

    def document(self) -> dict[str, Any]:
        """In GiB; figures are null where nothing was simulated, `stages` is empty where there are none."""
        some = bool(self.found.parts)
        return {
            "parts": _in_gib(self.found.parts),
            "peak": self.found.peak / GIB if some else None,
            "counted": self.plan.memory.allocated / GIB,
            "total": self.total / GIB if some else None,
            "fits": self.fits if some else None,
            "seconds": self.found.seconds,
            "notes": self.found.notes,
            "stages": [_stage_document(stage) for stage in self.found.stages],
        }


def _of_stage(stage: Stage, figure: str) -> str:
    return f"stage {stage.number}: {figure} with {stage.under_way} micro-batch{'es' if stage.under_way > 1 else ''}"


def _stage_document(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.number,
        "micro_batches": stage.under_way,
        "parts": _in_gib(stage.parts),
        "peak": stage.peak / GIB,
    }


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: value / GIB for name, value in parts.items()}
