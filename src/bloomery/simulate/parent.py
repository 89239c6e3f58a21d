"""Starts the simulation in a child, so that whoever plans never imports torch, and waits no longer than allowed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.types import LayoutPlan, Plan

SECONDS = 300.0  # that a simulation may take; the packaged recipes take under 20
MODULE = "bloomery.simulate.child"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline; `number` counts from 1."""

    number: int
    under_way: int  # micro-batches that it holds at most
    parts: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Simulated:
    """Bytes of live tensors on one device at the peak of a step, by what holds them; no parts: not simulated.

    `stages`: of a pipeline the first, the second and the last; `parts` are then those of the fullest.
    """

    parts: dict[str, float]
    notes: tuple[str, ...]  # what stands in for a kernel, and what is not in the figure
    seconds: float = 0.0  # that it took
    stages: tuple[Stage, ...] = ()

    @property
    def peak(self) -> float:
        """What torch.cuda.max_memory_allocated counts and `MemoryEstimate.allocated` foretells."""
        return sum(self.parts.values())


def simulate(
    plan: Plan,
    machine: Machine,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda _text: None,
) -> Simulated:
    """Runs two steps of the plan's own code on fake tensors for its device, which need not be here; the second's peak.

    Of several devices the first is simulated, in a process group of the layout's size that is not there: where the
    layout shards, FSDP2 cuts weights, gradients and states block by block. Of a pipeline one stage of each kind is
    simulated, with as many micro-batches as are under way on it. `progress` gets a line when a step begins.
    Raises UserError without torch, after `seconds`, and when the simulation fails.
    """
    if find_spec("torch") is None:
        raise UserError(
            "the simulation runs the training code itself, and PyTorch is not installed here",
            remedy="run `bloomery doctor`, which says how to install it; the plan without --simulate needs none",
        )
    layout = None if plan.parallel is None else plan.parallel.layout
    missing = None if layout is None else _missing(plan, layout)
    if missing is not None:
        return Simulated({}, (f"not yet for {missing}: this layout is counted from shapes alone",))
    started = time.monotonic()
    fused = build_profile(machine).attention.value == "fused"
    job = {"plan": plan.model_dump(mode="json"), "fused": fused, "cut": _cut(layout)}
    found = _found(job, seconds, progress)
    stages = tuple(Stage(*stage) for stage in found.get("stages", ()))
    parts = max(stages, key=lambda stage: stage.peak).parts if stages else found["parts"]
    return Simulated(parts, tuple(found["notes"]), time.monotonic() - started, stages)


def _missing(plan: Plan, layout: LayoutPlan) -> str | None:
    """What of the layout this version has no code for that could run."""
    return f"{plan.optimizer.kind} over shards" if layout.shard > 1 and plan.optimizer.kind != "adamw" else None


def _cut(layout: LayoutPlan | None) -> tuple[int, int, int]:
    """Copies, shards and stages."""
    return (1, 1, 1) if layout is None else (layout.replicate, layout.shard, layout.pipeline)


def _found(job: dict[str, Any], seconds: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """The child's last words. Raises UserError when it dies or takes too long."""
    until = time.monotonic() + seconds
    with Child(MODULE, job, environment=os.environ) as child:
        while True:
            told = child.next(max(0.0, until - time.monotonic()))
            if told == "silent":
                raise UserError(
                    f"the simulation took longer than {seconds:.0f} s and was ended",
                    remedy="plan without --simulate, or simulate fewer layers: model.num_layers=4",
                )
            if told == "ended":
                raise UserError(
                    f"the simulation failed: {child.ending()}",
                    remedy="plan without --simulate: the analytic figure stands without it",
                )
            if "notes" in told:
                return told
            progress(f"simulating on fake tensors: {told['doing']}")
