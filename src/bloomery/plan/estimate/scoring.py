"""Bytes and seconds of a teacher or a reward model that scores on a device of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers, parameter_count
from bloomery.plan.estimate.memory import estimate_of, overhead_bytes, teacher_weight_bytes
from bloomery.plan.estimate.speed import Rate, step_parts, total, work_of
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.stream_time import WAITING_FOR_TEACHER
from bloomery.plan.types import Estimate, MemoryEstimate


def forward_activation_bytes(config: ModelConfig, step: StepShape) -> float:
    """Bytes of a forward without gradients over a micro-batch of the step: the widest layer, and the hidden states that
    leave it.
    """
    widest = max(layer.intermediate_size for layer in layers(config))
    values = 2 * widest + 5 * config.hidden_size
    return float(step.element_bytes * step.tokens_per_micro_batch * values)


def scoring_memory(
    step: StepShape, reward_models: Sequence[ModelConfig], *, limit: float
) -> MemoryEstimate:
    """Of one scoring device, at the forward of a micro-batch of the step, with its teacher if it has one."""
    parts = dict[str, float]()
    configs = list(reward_models)
    if step.teacher is not None:
        on_device = replace(step, teacher_place="device")
        parts["teacher"] = teacher_weight_bytes(step.teacher, on_device)
        configs.append(step.teacher)
    if reward_models:
        num_parameters = sum(map(parameter_count, reward_models))
        parts["reward models"] = float(num_parameters * step.element_bytes)
    sizes = [forward_activation_bytes(config, step) for config in configs]
    parts["activations"] = max(sizes, default=0.0)
    parts["logits"] = 0.0
    parts |= overhead_bytes(step, parts)
    return estimate_of(parts, limit=limit)


def scoring_seconds(step: StepShape, rate: Rate, tokens: int) -> float:
    """That a scoring device computes for the `tokens` of a step of each rank that it serves; 0 without a teacher there.

    `rate`: of that device. Reward models score between two steps, and are not counted.
    """
    if step.teacher is None or step.teacher_place == "device":
        return 0.0

    def seconds(of_step: StepShape) -> float:
        return total(step_parts(work_of(of_step, tokens=tokens), rate)).value

    forward = seconds(replace(step, teacher_place="device")) - seconds(step)
    return forward * step.ranks_per_scorer


def with_scoring(
    parts: Mapping[str, Estimate], step: StepShape, rate: Rate, tokens: int
) -> dict[str, Estimate]:
    """The parts of a step whose micro-batches are scored one after the other, while those before them train.

    The first one is waited for, unless it is of a step that was sent ahead, and all of them where scoring takes longer.
    Processes of a CPU share its cores, so that nothing is hidden.
    """
    scoring = scoring_seconds(step, rate, tokens)
    training = total(parts).value
    micro_batches = max(1, tokens // step.tokens_per_micro_batch)
    waiting = scoring
    if step.on_gpu:
        seconds = max(scoring + training / micro_batches, scoring / micro_batches + training)
        if step.scored_ahead:
            seconds = max(scoring, training)
        waiting = seconds - training
    estimate = Estimate(value=waiting, low=waiting * 0.8, high=waiting * 1.5, origin="table")
    return {**parts, WAITING_FOR_TEACHER: estimate}
