"""Memory of one stage of a pipeline under 1F1B: its layers, and the activations of its micro-batches in flight."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from bloomery.model.config import ModelConfig, Stage
from bloomery.plan.estimate.activations import INPUT_BYTES, activation_bytes
from bloomery.plan.estimate.memory import overhead_bytes
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.moments import StepMoment, moments
from bloomery.plan.estimate.states import TrainedModel, count_values
from bloomery.plan.estimate.step import StepShape


def kinds_of_stages(stages: int) -> list[int]:
    """The first, the fullest of those between, the last: all that differ where layers are alike."""
    return sorted({0, 1, stages - 1})


def fullest_stage_bytes(
    step: StepShape, stages: int, micro_batches: int | None = None
) -> dict[str, float]:
    """Bytes by part of the stage that needs most."""
    layers_are_alike = len(set(step.model.layers)) == 1
    indices = kinds_of_stages(stages) if layers_are_alike else range(stages)
    candidates = [stage_bytes(step, stages, index, micro_batches) for index in indices]
    return max(candidates, key=lambda parts: sum(parts.values()))


# A plan asks for the same stages thousands of times, and their counts are kept with them.
@lru_cache(maxsize=64)
def _stage_models(
    config: ModelConfig, mode: TrainingMode, stages: int, index: int
) -> tuple[TrainedModel, TrainedModel]:
    """The layers of a stage as if it had both ends, and with the ends that it has."""
    # Every stage is counted with as many layers as the fullest one.
    most_layers = math.ceil(config.num_layers / stages)
    first = min(index * config.num_layers // stages, config.num_layers - most_layers)
    layers = range(first, first + most_layers)
    both_ends = Stage(layers=layers, has_embedding=True, has_head=True)
    own_ends = Stage(layers=layers, has_embedding=index == 0, has_head=index == stages - 1)
    # Over stages a tied head is a matrix of its own.
    untied = replace(config, tie_embeddings=False)
    return TrainedModel(untied, mode, both_ends), TrainedModel(untied, mode, own_ends)


def stage_bytes(
    step: StepShape, stages: int, index: int, micro_batches: int | None = None
) -> dict[str, float]:
    """Bytes by part at the peak of one stage; with so many micro-batches, or enough to fill every stage."""
    with_both_ends, stage_model = _stage_models(step.config, step.mode, stages, index)
    stage_step = replace(step, model=with_both_ends)
    gradients = stage_model.trainable_bytes(step.precision)
    micro_batches = stages + 1 if micro_batches is None else micro_batches
    peak = max(
        _stage_moments(stage_step, index, stages, micro_batches, gradients),
        key=lambda moment: moment.total,
    )
    adapter_values = count_values(stage_model.adapter.values())
    parts = {
        "weights": stage_model.weight_bytes(step.precision)
        + float(adapter_values * step.mode.adapter_bytes),
        "gradients": peak.gradients,
        "optimizer": 0.0
        if step.mode.offload
        else stage_model.optimizer_bytes(step.optimizer, step.precision),
        "activations": peak.activations,
        "logits": peak.logits,
        "half-precision copies": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | overhead_bytes(step, parts)


def _stage_moments(
    step: StepShape, index: int, stages: int, micro_batches: int, all_gradients: float
) -> Iterator[StepMoment]:
    """The moments of the stage at which its memory can peak; `all_gradients`: bytes of its gradients.

    With more micro-batches than stages, memory peaks with gradients. Otherwise it peaks once, before the first
    gradient.
    """
    in_flight = stages - index  # micro-batches of a stage when the pipeline is full
    if micro_batches <= in_flight:
        # The head's gradient exists on the last stage alone.
        head_gradient = step.config.vocab_size * step.config.hidden_size * step.weight_bytes
        absent_gradient = 0 if index == stages - 1 else head_gradient
        first_backward = replace(step, accumulating=False)
        for moment in _moments_with_waiting(first_backward, index, stages, micro_batches - 1):
            gradients = max(0.0, min(moment.gradients - absent_gradient, all_gradients))
            yield replace(moment, gradients=gradients)
    if micro_batches > 1:
        waiting = max(0, min(in_flight, micro_batches - 1) - 1)
        later_backward = replace(step, accumulating=True)
        for moment in _moments_with_waiting(later_backward, index, stages, waiting):
            yield replace(moment, gradients=all_gradients)


def _moments_with_waiting(
    step: StepShape, index: int, stages: int, waiting: int
) -> Iterator[StepMoment]:
    """The moments of a stage, with so many micro-batches that wait for their backward.

    Each of them keeps its inputs and, under autocast, the half-precision copies of its own forward.
    """
    forward, logits, *layer_moments, embeddings, update = moments(step)
    input_bytes = INPUT_BYTES * step.tokens_per_micro_batch
    waiting_activations = waiting * (activation_bytes(step) + input_bytes)
    waiting_copies = waiting * logits.copies

    stage_moments = [forward, logits] if index == stages - 1 else [replace(forward, logits=0.0)]
    stage_moments += layer_moments
    if index == 0:
        stage_moments.append(embeddings)
    for moment in stage_moments:
        yield replace(
            moment,
            activations=moment.activations + waiting_activations,
            copies=moment.copies + waiting_copies,
        )
    yield update
