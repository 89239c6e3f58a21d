"""Measurements of a device correct its estimates: each is multiplied by measured over estimated."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pydantic import TypeAdapter, ValidationError

from bloomery.core.units import GIB
from bloomery.facts.config import ModelConfig
from bloomery.hardware.calibration import OWN, Calibration, Point, calibrations
from bloomery.hardware.host_links import HostLink, host_link
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.plan.estimate.kernels import kernel_runs, score_seconds
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.mode import FULL
from bloomery.plan.estimate.scoring import with_scoring
from bloomery.plan.estimate.speed import Rate, device_rate, step_parts, total, work_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.stream_time import streamed_parts, with_teacher
from bloomery.plan.estimate.streaming import passes_over
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan
from bloomery.recipe.schema import Recipe

# Doublings of width between a measured model and this one, beyond which a measurement is ignored.
MOST_DOUBLINGS = 2.0
# Half an interval of seconds, as a share of the value: of own measurements and of contributed ones.
OWN_SPREAD = 0.10
CONTRIBUTED_SPREAD = 0.25
# As much again for each doubling of the model's width or of the micro-batch's tokens.
SPREAD_PER_DOUBLING = 0.10
# Half an interval of bytes for the same micro-batch; as much again for each doubling, and twice that for a contributed
# measurement.
MEMORY_SPREAD = 0.05

TableMemory = Callable[[StepShape], MemoryEstimate]
TableSeconds = Callable[[StepShape, int], float | None]  # of a step over so many tokens


@dataclass(frozen=True, kw_only=True)
class NearestMeasurement:
    """The measurement nearest to the planned step."""

    calibration: Calibration
    point: Point
    distance: float  # doublings

    @property
    def own(self) -> bool:
        return self.calibration.contributor == OWN

    @property
    def reason(self) -> str:
        origin = (
            "measured on this machine"
            if self.own
            else f"measured by {self.calibration.contributor} on {self.calibration.device}"
        )
        size = f"{self.point.micro_batch_size} x {self.point.sequence_length:,} tokens"
        return f"{origin} on {self.calibration.day} with {size}"


def corrected(
    parts: Mapping[str, Estimate],
    step: StepShape,
    measurements: Sequence[Calibration],
    *,
    seconds: TableSeconds,
) -> dict[str, Estimate]:
    """The parts of a step, each times measured over estimated seconds of the nearest measured step.

    Without a measurement that is near enough they stay unchanged.
    """
    measurement = nearest(step, measurements)
    measured = None if measurement is None else measured_step(measurement, step)
    if measurement is None or measured is None:
        return dict(parts)
    point = measurement.point
    tokens = point.micro_batch_size * point.accumulation * point.sequence_length
    estimated_seconds = seconds(measured, tokens)
    if not estimated_seconds:
        return dict(parts)

    factor = tokens / point.tokens_per_second / estimated_seconds
    base_spread = OWN_SPREAD if measurement.own else CONTRIBUTED_SPREAD
    spread = 1 + base_spread + SPREAD_PER_DOUBLING * measurement.distance

    def scaled(part: Estimate) -> Estimate:
        value = part.value * factor
        return Estimate(
            value=value,
            low=value / spread,
            high=value * spread,
            origin="measured",
            by=measurement.reason,
        )

    return {name: scaled(part) for name, part in parts.items()}


def corrected_memory(
    table: MemoryEstimate,
    step: StepShape,
    measurements: Sequence[Calibration],
    *,
    memory: TableMemory,
) -> MemoryEstimate:
    """The estimate times measured over estimated peak of the same model with nearly as many tokens."""
    same_model = [
        calibration
        for calibration in measurements
        if _without_special_ids(_config_of(calibration)) == _without_special_ids(step.config)
    ]
    measurement = nearest(step, same_model)
    if (
        measurement is None
        or measurement.distance > MOST_DOUBLINGS
        or measurement.point.setting != step.setting
    ):
        return table
    measured = measured_step(measurement, step)
    if measured is None:
        return table

    estimate = memory(measured)
    estimated_bytes = estimate.allocated if step.on_gpu else estimate.total
    factor = measurement.point.peak_gib * GIB / estimated_bytes
    # A run on a CPU also maps the dataset, evaluates and copies checkpoints; a measured step does not.
    if not step.on_gpu:
        factor = max(1.0, factor)
    parts = {
        name: part if name == "context" else part * factor for name, part in table.parts.items()
    }
    contributed_factor = 1 if measurement.own else 2
    spread = 1 + MEMORY_SPREAD * (1 + measurement.distance) * contributed_factor
    peak = sum(parts.values())
    return table.model_copy(
        update={
            "parts": parts,
            "low": peak / spread,
            "high": peak * spread,
            "origin": "measured",
        }
    )


def compile_gain(
    measurements: Sequence[Calibration], *, model: ModelConfig, precision: str, setting: str
) -> float | None:
    """Uncompiled over compiled step time of this model; None where no measurement of the device has both."""
    for calibration in measurements:
        if _without_special_ids(_config_of(calibration)) != _without_special_ids(model):
            continue
        # The best rate, by whether blocks were compiled.
        best = {True: 0.0, False: 0.0}
        for point in calibration.points:
            if (point.precision, point.setting) == (precision, setting):
                best[point.compiled] = max(best[point.compiled], point.tokens_per_second)
        if all(best.values()):
            return best[True] / best[False]
    return None


def nearest(step: StepShape, measurements: Sequence[Calibration]) -> NearestMeasurement | None:
    """Among points of the same precision and compilation; own measurements before contributed ones."""
    candidates = []
    for calibration in measurements:
        width_doublings = _width_doublings(step, calibration)
        if width_doublings > MOST_DOUBLINGS:
            continue
        for point in calibration.points:
            if (point.precision, point.compiled) != (step.precision, step.compiled):
                continue
            if point.setting not in ("", step.setting):
                continue
            point_tokens = point.micro_batch_size * point.sequence_length
            token_doublings = abs(math.log2(point_tokens / step.tokens_per_micro_batch))
            other_settings = (point.activation_checkpointing != step.checkpointing) + (
                point.attention != step.attention
            )
            distance = width_doublings + token_doublings + 0.5 * other_settings
            candidates.append(
                NearestMeasurement(calibration=calibration, point=point, distance=distance)
            )
    return min(
        candidates,
        key=lambda candidate: (
            not candidate.own,
            candidate.point.setting != step.setting,
            candidate.distance,
        ),
        default=None,
    )


def measured_step(measurement: NearestMeasurement, step: StepShape) -> StepShape | None:
    """The measured step on the device of `step`; None for a model that this version cannot read."""
    config = _config_of(measurement.calibration)
    if config is None:
        return None
    point = measurement.point
    # A point without a setting measured plain full fine-tuning.
    plain = replace(step, extra_forwards=0, teacher=None, offload_activations=False, loss_share=1.0)
    return replace(
        step if point.setting else plain,
        model=TrainedModel(config, step.mode if point.setting else FULL),
        sequence_length=point.sequence_length,
        micro_batch_size=point.micro_batch_size,
        optimizer=point.optimizer,
        attention=point.attention,
        checkpointing=point.activation_checkpointing,
        score_chunk=point.micro_batch_size * point.sequence_length,
        context=1,
        reference="none",
        stream="off",
        stream_micro_batches=1,
    )


def _width_doublings(step: StepShape, calibration: Calibration) -> float:
    """Between the widths of the measured model and of this one; infinite where the measured one is unknown."""
    width = calibration.model.get("hidden_size")
    if not isinstance(width, int) or width <= 0:
        return math.inf
    return abs(math.log2(width / step.config.hidden_size))


def _config_of(calibration: Calibration) -> ModelConfig | None:
    return _parsed_config(json.dumps(calibration.model, sort_keys=True))


@cache
def _parsed_config(text: str) -> ModelConfig | None:
    try:
        return TypeAdapter(ModelConfig).validate_json(text)
    except ValidationError:
        return None


def _without_special_ids(config: ModelConfig | None) -> ModelConfig | None:
    """Ids of special tokens are unknown before `prepare`."""
    if config is None:
        return None
    return replace(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)


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
    def of(cls, recipe: Recipe | RunPlan, machine: Machine, profile: Profile) -> "StepEstimator":
        return cls(
            machine=machine,
            profile=profile,
            measurements=calibrations(machine),
            limit=_limit_of(profile, machine),
            clips=recipe.train.max_grad_norm is not None,
        )

    def peers(self) -> tuple["StepEstimator", ...]:
        """That of each of unequal GPUs that train together, in the order of ranks; none: all are alike."""
        return tuple(
            replace(self, profile=peer, measurements=(), limit=_limit_of(peer, self.machine))
            for peer in self.profile.peers
        )

    def memory(self, step: StepShape) -> MemoryEstimate:
        def table(other_step: StepShape) -> MemoryEstimate:
            return estimate_memory(other_step, limit=self.limit)

        if step.stream != "off":  # nobody measures a device that holds a part of the model
            return table(step)
        return corrected_memory(table(step), step, self.measurements, memory=table)

    def rate(self, step: StepShape) -> Rate | None:
        rate = device_rate(
            self.profile,
            self.machine,
            precision=step.precision,
            width=step.config.hidden_size,
            compiled=step.compiled,
        )
        if rate is None or step.attention != "triton":
            return rate
        # Where heads differ in width, the slowest kernels stand for all.
        runs = kernel_runs(
            step.config, self.profile, precision=step.precision, length=step.sequence_length
        )
        return replace(rate, kernels=score_seconds(self.profile, runs[0]) if runs else None)

    def step_parts(self, step: StepShape, tokens: int) -> dict[str, Estimate] | None:
        """Seconds of a step over so many tokens, by operation; None where the device is unknown."""

        def table(other_step: StepShape, tokens: int) -> dict[str, Estimate] | None:
            rate = self.rate(other_step)
            if rate is None:
                return None
            return step_parts(work_of(other_step, tokens=tokens, clips=self.clips), rate)

        def seconds(other_step: StepShape, tokens: int) -> float | None:
            parts = table(other_step, tokens)
            return None if parts is None else total(parts).value

        parts = table(step, tokens)
        if parts is None:
            return None
        parts = corrected(parts, step, self.measurements, seconds=seconds)
        link = self.host_link
        if step.teacher_stream and link is not None:
            parts = with_teacher(
                parts, step, link, lambda other_step: seconds(other_step, tokens) or 0.0
            )
        rate = self.rate(step)
        if step.teacher is not None and step.teacher_place != "device" and rate is not None:
            parts = with_scoring(parts, step, rate, tokens)
        if step.stream == "off" or link is None:
            return parts
        work = work_of(step, tokens=tokens, clips=self.clips)
        return streamed_parts(parts, step, work.update, passes_over(step, tokens), link)

    @cached_property
    def host_link(self) -> HostLink | None:
        """None where the device shares the memory of its host, and where the table has no link of it."""
        return host_link(self.profile, self.machine)


def _limit_of(profile: Profile, machine: Machine) -> float:
    """The bytes of the device that a plan may use."""
    device = profile.accelerator
    if device is None:
        return float(machine.host.memory_free_bytes)
    return profile.memory_share.value * device.usable_bytes
