"""Runs a simulation in a child process, so that a plan never imports torch, and compares it with the plan."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.model.attention.support import FLASH_LIKE
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.page import joined, unit_of
from bloomery.plan.types import RunPlan

SECONDS = 300.0  # that a simulation may take; the packaged recipes take under 20
CHILD = "bloomery.simulate.child"


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
    notes: tuple[str, ...]  # replacements of kernels, and parts that are not in the figure
    seconds: float = 0.0  # that it took
    stages: tuple[Stage, ...] = ()

    @property
    def peak(self) -> float:
        """As torch.cuda.max_memory_allocated counts it and `MemoryEstimate.allocated` estimates it."""
        return sum(self.parts.values())


def simulate(
    plan: RunPlan,
    machine: Machine,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda _text: None,
) -> Simulated:
    """Runs two steps of the plan's own code on fake tensors for its device, which need not be here; the second's peak.

    Of several devices the first is simulated, in a process group of the layout's size that is not there: where the
    layout shards, FSDP2 shards weights, gradients and states block by block. Of a pipeline one stage of each kind is
    simulated, with as many micro-batches as are under way on it. `progress` gets a line when a step begins.
    Raises UserError without torch, after `seconds`, and when the simulation fails.
    """
    if find_spec("torch") is None:
        raise UserError(
            "--simulate runs the training code and needs PyTorch, which is not installed",
            fix="run `bloomery doctor` for the install command, or leave out --simulate",
        )
    split = ONE_DEVICE
    if plan.parallel is not None:
        layout = plan.parallel.layout
        split = MeshSplit(replicate=layout.replicate, shard=layout.shard, pipeline=layout.pipeline)
    started = time.monotonic()
    fused = build_profile(machine).attention.value == "fused"
    job = {"plan": plan.model_dump(mode="json"), "fused": fused, "split": vars(split)}
    with Child(CHILD, job, environment=os.environ) as child:
        while True:
            reply = child.next(max(0.0, started + seconds - time.monotonic()))
            if reply == "silent":
                raise UserError(
                    f"the simulation exceeded its time limit: {seconds:.0f} s",
                    fix="plan without --simulate, or simulate fewer layers: model.num_layers=4",
                )
            if reply == "ended":
                raise UserError(
                    f"the simulation failed: {child.ending()}",
                    fix="leave out --simulate: the estimate from shapes does not need it",
                )
            assert isinstance(reply, dict)
            if "stages" in reply:
                break
            progress(f"simulating on fake tensors: {reply['doing']}")
    stages = tuple(Stage(*stage) for stage in reply["stages"])
    parts = max(stages, key=lambda stage: stage.peak).parts
    notes = tuple(notes_of(plan, fused=fused, split=split))
    return Simulated(parts, notes, time.monotonic() - started, stages if split.pipeline > 1 else ())


def notes_of(plan: RunPlan, *, fused: bool, split: MeshSplit) -> list[str]:
    """Parts of the simulation that differ from the real run."""
    notes = []
    gpu = plan.train.device != "cpu"
    attention = plan.model.attention
    if gpu and attention in FLASH_LIKE and fused:
        notes.append(
            f"{attention} attention is counted as FlashAttention-2: its kernel needs the GPU"
        )
    elif gpu and attention in FLASH_LIKE | {"mask"}:
        notes.append(
            f"{attention} attention is counted with every score kept: this GPU has no flash attention"
        )
    if plan.train.compile:
        notes.append(
            "compiled blocks are counted as torch.compile partitions their graphs, without its kernels"
        )
    if split.shard > 1:
        copies = f"in {split.replicate} copies, " if split.replicate > 1 else ""
        devices = f"{split.shard} devices, {copies}with a fake process group"
        notes.append(f"FSDP2 shards weights, gradients and states over {devices}")
    elif split.pipeline > 1:
        replicas = (
            f"; one of {split.replicate} copies, without gradient buckets"
            if split.replicate > 1
            else ""
        )
        notes.append(
            f"stages are simulated one by one, with the micro-batches in flight of 1F1B{replicas}"
        )
    elif split.replicate > 1:
        notes.append(f"one of {split.replicate} whole copies; gradient buckets are not included")
    return notes


@dataclass(frozen=True)
class SimulationResult:
    """The simulated memory of a plan, compared with the estimate from shapes."""

    plan: RunPlan
    simulated: Simulated

    @property
    def total(self) -> float:
        """With the plan's fragmentation and contexts."""
        reply = self.plan.memory
        loose = reply.parts.get("fragmentation", 0.0)
        return (
            self.simulated.peak * (1 + loose / reply.allocated)
            + reply.total
            - reply.allocated
            - loose
        )

    @property
    def fits(self) -> bool:
        """The plan's own answer where nothing was simulated."""
        return self.total <= self.plan.memory.limit if self.simulated.parts else self.plan.fits

    def lines(self) -> list[str]:
        """The peak by part, the difference from the plan's figure, and notes."""
        figures = list(self._figures()) if self.simulated.parts else []
        return [*figures, *(line for note in self.simulated.notes for line in joined([note]))]

    def _figures(self) -> Iterator[str]:
        memory = self.plan.memory
        peak = self.simulated.peak
        stages = self.simulated.stages
        unit, size = unit_of(peak)
        digits = 1 if size == GIB else 0
        apart = round(memory.allocated / peak - 1, 2)
        compared = f"{abs(apart):.0%} {'more' if apart > 0 else 'less'}" if apart else "the same"
        counted = f"estimated from shapes {memory.allocated / size:.{digits}f}, {compared}"
        where = (
            f"the peak of the fullest of {stages[-1].number} stages"
            if stages
            else "the peak of the second step"
        )
        yield from joined([f"{peak / size:.{digits}f} {unit} of tensors at {where}", counted])
        yield from joined(
            [
                f"stage {stage.number}: {stage.peak / size:.{digits}f} {unit} with {stage.under_way} "
                f"micro-batch{'es' if stage.under_way > 1 else ''}"
                for stage in stages
            ]
        )
        parts = sorted(self.simulated.parts.items(), key=lambda part: -part[1])
        least = 0.5 * size / 10**digits  # parts that round to 0 are left out
        yield from joined(
            [f"{name} {value / size:.{digits}f}" for name, value in parts if value >= least]
        )
        unit, size = unit_of(memory.limit)
        added = (
            "Python and PyTorch"
            if self.plan.train.device == "cpu"
            else "fragmentation and contexts"
        )
        verdict = "fits" if self.fits else "too much"
        yield f"with {added} {self.total / size:.1f} of {memory.limit / size:,.1f} {unit}: {verdict}"

    def document(self) -> dict[str, Any]:
        """In GiB; figures are null where nothing was simulated, `stages` is empty where there are none."""
        some = bool(self.simulated.parts)
        return {
            "parts": _in_gib(self.simulated.parts),
            "peak": self.simulated.peak / GIB if some else None,
            "counted": self.plan.memory.allocated / GIB,
            "total": self.total / GIB if some else None,
            "fits": self.fits if some else None,
            "seconds": self.simulated.seconds,
            "notes": self.simulated.notes,
            "stages": [
                {
                    "stage": stage.number,
                    "micro_batches": stage.under_way,
                    "parts": _in_gib(stage.parts),
                    "peak": stage.peak / GIB,
                }
                for stage in self.simulated.stages
            ],
        }


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: value / GIB for name, value in parts.items()}
