"""Runs a simulation in a child process, so that a plan never imports torch, and compares it with the plan."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.facts.attention import FLASH_LIKE
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.estimate.stages import distinct_stages
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.page_text import joined, unit_of
from bloomery.plan.pipeline import most_in_flight
from bloomery.plan.types import RunPlan

SECONDS = 300.0  # that a simulation may take; the packaged recipes take under 20
CHILD = "bloomery.simulate.child"


@dataclass(frozen=True)
class SimulatedStage:
    """One stage of a pipeline; `number` counts from 1."""

    number: int
    under_way: int  # micro-batches that it holds at most; of interleaved stages, passes through a group of layers
    parts: dict[str, float]
    sent: dict[str, float]  # bytes that a device sends in a step, by axis

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Simulated:
    """Bytes of live tensors on one device at the peak of a step, by what holds them; no parts: not simulated.

    `stages`: of a pipeline one of each kind; `parts` are then those of the fullest.
    """

    parts: dict[str, float]
    notes: tuple[str, ...]  # replacements of kernels, and parts that are not in the figure
    seconds: float = 0.0  # that it took
    sent: dict[str, float] = field(
        default_factory=dict
    )  # bytes that a device sends in a step, by axis
    stages: tuple[SimulatedStage, ...] = ()

    @property
    def peak(self) -> float:
        """As the allocator of a GPU counts it and `MemoryEstimate.allocated` estimates it."""
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
    if plan.train.expert > 1 and plan.train.pipeline > 1:
        raise UserError(
            "--simulate does not divide experts in the stages of a pipeline",
            where=f"parallel.expert={plan.train.expert}",
            fix="leave out --simulate: the estimate from shapes counts them",
        )
    # The child gets all that decides memory and that this machine may not have: the GPU's kernels
    # and the devices.
    split = ONE_DEVICE if plan.parallel is None else MeshSplit.of(plan.parallel.layout)
    indices = stages_of_kinds(plan, split) if split.pipeline > 1 else []
    start = time.monotonic()
    fused = build_profile(machine).attention.value == "fused"
    job = {
        "plan": plan.model_dump(mode="json"),
        "fused": fused,
        "split": vars(split),
        "stages": indices,
    }

    # Its replies are lines of progress, then the stages; the limit is one of all of them together.
    with Child(CHILD, job, environment=os.environ) as child:
        while True:
            reply = child.next(max(0.0, start + seconds - time.monotonic()))
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

    stages = tuple(
        SimulatedStage(number, passes_in_flight(plan, split, number - 1), parts, sent)
        for number, (parts, sent) in reply["stages"]
    )
    limits = () if plan.parallel is None else plan.parallel.layout.stage_limits
    fullest_stage = fullest(stages, limits)
    return Simulated(
        parts=fullest_stage.parts | parts_with_pictures(plan),
        notes=tuple(simulation_notes(plan, fused=fused, split=split)),
        seconds=time.monotonic() - start,
        sent=fullest_stage.sent,
        stages=stages if split.pipeline > 1 else (),
    )


def parts_with_pictures(plan: RunPlan) -> dict[str, float]:
    """Bytes of a tower and its pictures, which no fake tensors stand for: the plan's own."""
    parts = plan.memory.parts
    return {name: parts[name] for name in ("vision tower", "pictures") if name in parts}


def fullest(stages: Sequence[SimulatedStage], limits: Sequence[float]) -> SimulatedStage:
    """The stage that a plan has to fit: of unequal devices, with these limits, the one with the largest share of its
    own.
    """
    return max(
        stages, key=lambda stage: stage.peak / limits[stage.number - 1] if limits else stage.peak
    )


def stages_of_kinds(plan: RunPlan, split: MeshSplit) -> list[int]:
    """One stage of each kind, by their numbers from 0: the first of those that are alike, which holds most. All of
    them where their devices are unequal.
    """
    if plan.parallel is not None and plan.parallel.layout.stage_limits:
        return list(range(split.pipeline))
    model = TrainedModel.of(plan, plan.model.config)
    return distinct_stages(model, split)


def passes_in_flight(plan: RunPlan, split: MeshSplit, index: int) -> int:
    """The most passes that a stage of a pipeline holds at once; 1 without a pipeline."""
    return most_in_flight(
        split.schedule,
        stages=split.pipeline,
        stage=index,
        micro_batches=plan.train.accumulation,
        chunks=split.chunks,
    )


def simulation_notes(plan: RunPlan, *, fused: bool, split: MeshSplit) -> list[str]:
    """Parts of the simulation that differ from the real run."""
    notes = []
    is_gpu = plan.train.device != "cpu"
    attention = plan.model.attention

    # Kernels that fake tensors cannot run.
    if is_gpu and attention in FLASH_LIKE and fused:
        notes.append(
            f"{attention} attention is counted as FlashAttention-2: its kernel needs the GPU"
        )
    elif is_gpu and attention in FLASH_LIKE | {"mask"}:
        notes.append(
            f"{attention} attention is counted with every score kept: this GPU has no flash attention"
        )
    if plan.train.compile:
        notes.append(
            "compiled blocks are counted as torch.compile partitions their graphs, without its kernels"
        )

    if parts_with_pictures(plan):
        notes.append(
            "the tower and its pictures are counted from shapes, beside the peak of the language model"
        )

    # Devices that are not there.
    if split.shard > 1:
        copies = f"in {split.replicate} copies, " if split.replicate > 1 else ""
        devices = f"{split.shard} devices, {copies}with a fake process group"
        notes.append(f"FSDP2 shards weights, gradients and states over {devices}")
    elif split.replicate > 1 and split.pipeline == 1:
        notes.append(f"one of {split.replicate} whole copies; gradient buckets are not included")
    if split.expert > 1:
        notes.append(
            f"one of {split.expert} devices that divide the experts, each of which gets as many rows"
        )
    if split.context > 1:
        notes.append(f"one of {split.context} devices that share each sequence")
    if split.pipeline > 1:
        is_copy = split.replicate > 1 and split.shard == 1
        replicas = f"; one of {split.replicate} copies, without gradient buckets" if is_copy else ""
        notes.append(
            f"stages are simulated one by one, in the order of {split.schedule}, without links{replicas}"
        )
    return notes


@dataclass(frozen=True)
class SimulationResult:
    """The simulated memory of a plan, compared with the estimate from shapes."""

    plan: RunPlan
    simulated: Simulated

    @property
    def total(self) -> float:
        """Bytes on a device: the simulated tensors, with the plan's fragmentation and contexts.

        Fragmentation grows with the tensors; contexts, all else in the plan's total, do not.
        """
        memory = self.plan.memory
        fragmentation = memory.parts.get("fragmentation", 0.0)
        return (
            self.simulated.peak * (1 + fragmentation / memory.allocated)
            + memory.total
            - memory.allocated
            - fragmentation
        )

    @property
    def num_stages(self) -> int:
        return self.plan.parallel.layout.pipeline if self.plan.parallel is not None else 1

    @property
    def is_interleaved(self) -> bool:
        return self.plan.train.pipeline_chunks > 1

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit; the plan's own answer where nothing was simulated."""
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

        # The two figures side by side: a large difference means that one of them is wrong.
        difference = round(memory.allocated / peak - 1, 2)
        direction = "more" if difference > 0 else "less"
        comparison = f"{abs(difference):.0%} {direction}" if difference else "the same"
        estimate = f"estimated from shapes {memory.allocated / size:.{digits}f}, {comparison}"
        moment = (
            f"the peak of the fullest of {self.num_stages} stages"
            if stages
            else "the peak of the second step"
        )
        unit_in_flight = "pass" if self.is_interleaved else "micro-batch"
        yield from joined([f"{peak / size:.{digits}f} {unit} of tensors at {moment}", estimate])
        yield from joined(
            [
                f"stage {stage.number}: {stage.peak / size:.{digits}f} {unit} with {stage.under_way} "
                f"{unit_in_flight}{'es' if stage.under_way > 1 else ''}"
                for stage in stages
            ]
        )

        # Parts that round to 0 are left out.
        parts = sorted(self.simulated.parts.items(), key=lambda part: -part[1])
        smallest_part = 0.5 * size / 10**digits
        yield from joined(
            [f"{name} {value / size:.{digits}f}" for name, value in parts if value >= smallest_part]
        )

        # The limit is of everything on the device, so the verdict is about more than tensors.
        limit_unit, limit_size = unit_of(memory.limit)
        other_memory = (
            "Python and PyTorch"
            if self.plan.train.device == "cpu"
            else "fragmentation and contexts"
        )
        verdict = "fits" if self.fits else "too much"
        yield (
            f"with {other_memory} {self.total / limit_size:.1f} of "
            f"{memory.limit / limit_size:,.1f} {limit_unit}: {verdict}"
        )

        # A ring of n devices sends (n - 1) / n of what it gathers or scatters, and twice that to sum it on all.
        if self.simulated.sent:
            sizes = {axis: (sent, *unit_of(sent)) for axis, sent in self.simulated.sent.items()}
            texts = [
                f"{axis} {sent / size:.1f} {unit}" for axis, (sent, unit, size) in sizes.items()
            ]
            yield from joined([f"each device sends in a step: {texts[0]}", *texts[1:]])

    def document(self) -> dict[str, Any]:
        """The comparison as JSON, in GiB; figures are null where nothing was simulated."""
        is_simulated = bool(self.simulated.parts)
        return {
            "parts": _in_gib(self.simulated.parts),
            "peak": self.simulated.peak / GIB if is_simulated else None,
            "counted": self.plan.memory.allocated / GIB,
            "total": self.total / GIB if is_simulated else None,
            "fits": self.fits if is_simulated else None,
            "seconds": self.simulated.seconds,
            "sent": _in_gib(self.simulated.sent),
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
