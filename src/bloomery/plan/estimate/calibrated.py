"""Measurements of a device correct the estimates: each is multiplied by measured over estimated."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pydantic import TypeAdapter, ValidationError

from bloomery.core.units import GIB
from bloomery.hardware.calibration import OWN, Calibration, Point, calibrations
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.model.config import ModelConfig
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.states import FULL, StepShape, TrainedModel
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan
from bloomery.recipe.schema import Recipe

NEAR = 2.0  # doublings of width between a measured model and this one, beyond which a measurement is ignored
SPREAD = {True: 0.10, False: 0.25}  # half an interval, of the value: own measurements, contributed ones
SPREAD_PER_DOUBLING = 0.10  # of the model's width, and as much again for each doubling of the micro-batch's tokens

MEMORY_SPREAD = 0.05  # for the same micro-batch; as much again for each doubling, and twice that for a contributed one

TableMemory = Callable[[StepShape], MemoryEstimate]
TableSeconds = Callable[[StepShape, int], float | None]  # of a step over so many tokens


@dataclass(frozen=True, kw_only=True)
class NearestMeasurement:
    """The measurement nearest to the planned step."""

    source: Calibration
    point: Point
    distance: float  # doublings

    @property
    def own(self) -> bool:
        return self.source.contributor == OWN

    @property
    def reason(self) -> str:
        who = (
            "measured on this machine" if self.own else f"measured by {self.source.contributor} on {self.source.device}"
        )
        return f"{who} on {self.source.day} with {self.point.micro_batch_size} x {self.point.sequence_length:,} tokens"


def corrected(
    parts: Mapping[str, Estimate], step: StepShape, measurements: Sequence[Calibration], *, seconds: TableSeconds
) -> dict[str, Estimate]:
    """The parts of a step, each times measured over estimated seconds of the nearest measured step.

    Without a measurement that is near enough they stay unchanged.
    """
    known = nearest(step, measurements)
    there = None if known is None else measured_step(known, step)
    if known is None or there is None:  # nothing is near enough, or a model that is unknown
        return dict(parts)
    tokens = known.point.micro_batch_size * known.point.accumulation * known.point.sequence_length
    expected = seconds(there, tokens)
    if not expected:
        return dict(parts)
    factor = tokens / known.point.tokens_per_second / expected
    spread = 1 + SPREAD[known.own] + SPREAD_PER_DOUBLING * known.distance
    return {name: _around(part.value * factor, spread, by=known.reason) for name, part in parts.items()}


def corrected_memory(
    table: MemoryEstimate, step: StepShape, measurements: Sequence[Calibration], *, memory: TableMemory
) -> MemoryEstimate:
    """The estimate times measured over estimated peak of the same model with nearly as many tokens."""
    known = nearest(step, [source for source in measurements if _shape(_config(source)) == _shape(step.config)])
    unlike = known is None or known.distance > NEAR or known.point.setting != step.setting
    there = None if known is None or unlike else measured_step(known, step)
    if known is None or there is None:
        return table
    expected = memory(there)
    counted = expected.allocated if step.on_gpu else expected.total
    factor = known.point.peak_gib * GIB / counted
    if not step.on_gpu:  # a run also maps the dataset, evaluates and copies checkpoints; a measured step does not
        factor = max(1.0, factor)
    parts = {name: part if name == "context" else part * factor for name, part in table.parts.items()}
    spread, total = 1 + MEMORY_SPREAD * (1 + known.distance) * (1 if known.own else 2), sum(parts.values())
    ends = {"parts": parts, "low": total / spread, "high": total * spread, "origin": "measured"}
    return table.model_copy(update=ends)


def _around(value: float, spread: float, *, by: str) -> Estimate:
    return Estimate(value=value, low=value / spread, high=value * spread, origin="measured", by=by)


def compile_gain(
    measurements: Sequence[Calibration], *, model: ModelConfig, precision: str, setting: str
) -> float | None:
    """Uncompiled over compiled step time of this model; None where no measurement of the device has both."""
    for source in measurements:
        if _shape(_config(source)) != _shape(model):
            continue
        best = {True: 0.0, False: 0.0}
        for point in source.points:
            if (point.precision, point.setting) == (precision, setting):
                best[point.compiled] = max(best[point.compiled], point.tokens_per_second)
        if all(best.values()):
            return best[True] / best[False]
    return None


def nearest(step: StepShape, measurements: Sequence[Calibration]) -> NearestMeasurement | None:
    """Among points of the same precision and compilation; own measurements before contributed ones."""
    found = []
    for source, point in ((each, point) for each in measurements for point in each.points):
        if (point.precision, point.compiled) != (step.precision, step.compiled) or _width(source) is None:
            continue
        if point.setting in ("", step.setting):
            sequences = abs(math.log2(point.micro_batch_size * point.sequence_length / step.tokens_per_micro_batch))
            settings = (point.activation_checkpointing != step.checkpointing) + (point.attention != step.attention)
            distance = _width_doublings(step, source) + sequences + 0.5 * settings
            found.append(NearestMeasurement(source=source, point=point, distance=distance))
    near = [known for known in found if _width_doublings(step, known.source) <= NEAR]
    return min(near, key=lambda k: (not k.own, k.point.setting != step.setting, k.distance), default=None)


def measured_step(known: NearestMeasurement, step: StepShape) -> StepShape | None:
    """The measured step on the device of `step`; None for a model that this version cannot read."""
    config = _config(known.source)
    if config is None:
        return None
    point = known.point
    plain = replace(step, extra_forwards=0, teacher=None, offloading=False, loss_share=1.0)
    return replace(
        step if point.setting else plain,
        model=TrainedModel(config, step.mode if point.setting else FULL),
        sequence_length=point.sequence_length,
        micro_batch_size=point.micro_batch_size,
        optimizer=point.optimizer,
        attention=point.attention,
        checkpointing=point.activation_checkpointing,
        score_chunk=point.micro_batch_size * point.sequence_length,
    )


def _width_doublings(step: StepShape, source: Calibration) -> float:
    width = _width(source)
    return math.inf if width is None else abs(math.log2(width / step.config.hidden_size))


def _width(source: Calibration) -> int | None:
    width = source.model.get("hidden_size")
    return width if isinstance(width, int) and width > 0 else None


def _config(source: Calibration) -> ModelConfig | None:
    return _parsed(json.dumps(source.model, sort_keys=True))


@cache
def _parsed(text: str) -> ModelConfig | None:
    try:
        return TypeAdapter(ModelConfig).validate_json(text)
    except ValidationError:
        return None


def _shape(config: ModelConfig | None) -> ModelConfig | None:
    """Without ids of special tokens, which are unknown before `prepare`."""
    return None if config is None else replace(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@dataclass(frozen=True, kw_only=True)
class StepEstimator:
    """Bytes and seconds of any step on one device, corrected by measurements of that device.

    `limit`: bytes that a plan may use of it. `clips`: whether gradients are clipped.
    """

    machine: Machine
    profile: Profile
    measurements: tuple[Calibration, ...]
    limit: float
    clips: bool

    @classmethod
    def of(cls, asked: Recipe | RunPlan, machine: Machine, profile: Profile) -> "StepEstimator":
        device, share = profile.accelerator, profile.memory_share.value
        limit = share * device.usable_bytes if device else float(machine.host.memory_free_bytes)
        clips = asked.train.max_grad_norm is not None
        return cls(machine=machine, profile=profile, measurements=calibrations(machine), limit=limit, clips=clips)

    def memory(self, step: StepShape) -> MemoryEstimate:
        def table(other: StepShape) -> MemoryEstimate:
            return estimate_memory(other, limit=self.limit)

        return corrected_memory(table(step), step, self.measurements, memory=table)

    def rate(self, step: StepShape) -> speed.Rate | None:
        width = step.config.hidden_size
        return speed.device_rate(
            self.profile, self.machine, precision=step.precision, width=width, compiled=step.compiled
        )

    def step_parts(self, step: StepShape, tokens: int) -> dict[str, Estimate] | None:
        """Seconds of a step over so many tokens, by operation; None where the device is unknown."""

        def table(other: StepShape, tokens: int) -> dict[str, Estimate] | None:
            rate = self.rate(other)
            return (
                None if rate is None else speed.step_parts(speed.work_of(other, tokens=tokens, clips=self.clips), rate)
            )

        def seconds(other: StepShape, tokens: int) -> float | None:
            parts = table(other, tokens)
            return None if parts is None else speed.total(parts).value

        parts = table(step, tokens)
        return None if parts is None else corrected(parts, step, self.measurements, seconds=seconds)
