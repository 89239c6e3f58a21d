"""Bytes of one of several devices: sharded states, pipeline stages, and collectives."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bloomery.core.units import GIB
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_shapes
from bloomery.plan.estimate.memory import (
    INPUT_BYTES,
    SPREAD,
    StepMoment,
    activation_bytes,
    around,
    estimate_memory,
    moments,
)
from bloomery.plan.estimate.states import StepShape, TrainedModel, numbers
from bloomery.plan.types import MemoryEstimate

FIRST_CONTEXT = {"amd": 0.95 * GIB, "nvidia": 1.5 * GIB}  # measured on MI250X; ml-engineering, two ranks of CUDA
NEXT_CONTEXT = {"amd": 0.65 * GIB, "nvidia": 0.3 * GIB}
BUCKET = 25 * 2**20  # bytes of gradients per all-reduce when weights are replicated
REDUCED = 4  # bytes per value of a reduce-scatter: float32


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """How many devices hold copies, shards and stages."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks with different sequences."""
        return self.replicate * self.shard

    @property
    def communicators(self) -> int:
        """Process groups, each with a context of the collective library."""
        return (self.pipeline > 1) + (self.replicate > 1) + (self.shard > 1)


ONE_DEVICE = MeshSplit()


def mesh_memory(
    step: StepShape, split: MeshSplit, *, vendor: str, limit: float, micro_batches: int | None = None
) -> MemoryEstimate:
    """The device of a layout that needs most; a step has so many micro-batches, or enough to fill every stage."""
    if split.pipeline > 1:
        stages = [stage_bytes(step, split.pipeline, index, micro_batches) for index in kinds_of_stages(split.pipeline)]
        parts = max(stages, key=lambda stage: sum(stage.values()))
    else:
        parts = _sharded(step, split) if split.shard > 1 else estimate_memory(step, limit=limit).parts
    found = dict(parts)
    contexts = 0 if vendor == "cpu" else split.communicators  # of the collective library, outside PyTorch's allocator
    found["collectives"] = FIRST_CONTEXT[vendor] + NEXT_CONTEXT[vendor] * (contexts - 1) if contexts else 0.0
    if split.replicate > 1 and split.shard == 1:
        found["gradient buckets"] = float(2 * BUCKET)
    whole = sum(found.values())
    return MemoryEstimate(parts=found, low=whole * (1 - SPREAD), high=whole * (1 + SPREAD), limit=limit, origin="table")


def _sharded(step: StepShape, split: MeshSplit) -> dict[str, float]:
    """Shards of weights, gradients and states, and the gathered weights at the peak."""
    peak = max(sharded_moments(step, split.shard), key=lambda moment: moment.total)
    held = step.model.held_bytes(step.precision) + step.model.adapter_bytes
    states = 0.0 if step.mode.away else step.model.optimizer_bytes(step.optimizer, step.precision)
    parts = {
        "weights": held / split.shard,
        "gradients": peak.gradients,
        "optimizer": states / split.shard,
        "activations": peak.activations,
        "logits": peak.logits,
        "gathered layers": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(step, parts)


def sharded_moments(step: StepShape, shards: int) -> list[StepMoment]:
    """The moments of a step under FSDP2, block by block; `copies` are weights and gradients that are whole meanwhile.

    Weights of layers are gathered in the dtype of matmuls, and so are their gradients. The embeddings and their
    gradient have their own dtype and stay whole from forward to the end of backward. Next to the current layer, the
    prefetched layer and the float32 gradients of the layer in reduce-scatter are alive.
    """
    forward, logits, *layers, embeddings, update = moments(replace(step, gathered=True, accumulating=False))
    layer, root = gathered_layers(step)
    learning, e, shard = step.model.trained_in_layer, step.element, step.weight / shards
    root_bytes = root * (e if step.mode.frozen else step.weight)
    trained_root = step.model.trained_count - len(layers) * learning
    head = step.config.vocab_size * step.config.hidden_size if step.model.head_learns else 0
    kept = (len(layers) * learning + trained_root) * shard
    before, blocks = kept if step.accumulating else 0.0, len(layers) * learning * shard
    found = [
        replace(forward, gradients=before, copies=root_bytes + layer * e),
        replace(logits, gradients=before + head * step.weight, copies=root_bytes + layer * e),
    ]
    for done, moment in enumerate(layers):
        ahead = 2 if done < len(layers) - 1 else 1  # nothing is prefetched behind the first layer
        copies = root_bytes + ahead * layer * e + (REDUCED * learning if done else 0)
        reached = max(before, done * learning * shard) + head * step.weight
        found.append(replace(moment, gradients=reached, copies=copies))
    reached = max(before, blocks)
    whole = trained_root * step.weight
    found.append(replace(embeddings, gradients=reached + whole, copies=root_bytes + REDUCED * learning))
    summed = root_bytes + trained_root * REDUCED
    found.append(replace(embeddings, gradients=reached, copies=summed, temporaries=0.0))
    return [*found, replace(update, gradients=kept)]


def gathered_layers(step: StepShape) -> tuple[int, int]:
    """Parameters of one layer, and of the embeddings, head and last norm."""
    shapes = parameter_shapes(step.config)
    inside = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    whole = sum(math.prod(shape) for shape in shapes.values())
    return inside // step.config.num_layers, whole - inside


def stage_config(config: ModelConfig, stages: int) -> ModelConfig:
    """That of a stage's layers: no stage has more; over stages a tied head is a matrix of its own."""
    layers = math.ceil(config.num_layers / stages)
    windows, rotary = config.sliding_window[:layers], config.rotary_layers[:layers]
    return replace(config, num_layers=layers, sliding_window=windows, rotary_layers=rotary, tie_embeddings=False)


def kinds_of_stages(stages: int) -> list[int]:
    """The first, the fullest of those between, the last."""
    return sorted({0, 1, stages - 1})


def stage_bytes(step: StepShape, stages: int, index: int, micro_batches: int | None = None) -> dict[str, float]:
    """A stage of 1F1B: its layers, and the activations of its micro-batches in flight."""
    layers = TrainedModel(stage_config(step.config, stages), step.mode)  # as if it had both ends
    held = replace(layers, stage=(index, stages))
    whole = held.learning_bytes(step.precision)
    micro_batches = stages + 1 if micro_batches is None else micro_batches
    peak = max(
        _stage_moments(replace(step, model=layers), index, stages, micro_batches, whole),
        key=lambda moment: moment.total,
    )
    parts = {
        "weights": held.held_bytes(step.precision) + float(numbers(held.adapter) * step.mode.adapter_bytes),
        "gradients": peak.gradients,
        "optimizer": 0.0 if step.mode.away else held.optimizer_bytes(step.optimizer, step.precision),
        "activations": peak.activations,
        "logits": peak.logits,
        "half-precision copies": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(step, parts)


def _stage_moments(own: StepShape, index: int, stages: int, micro_batches: int, whole: float) -> Iterator[StepMoment]:
    """Those of the stage; `whole`: bytes of its gradients.

    With more micro-batches than stages, memory peaks with gradients. Otherwise it peaks once, before the first
    gradient.
    """
    full = stages - index
    if micro_batches <= full:
        head, first = own.config.vocab_size * own.config.hidden_size * own.weight, replace(own, accumulating=False)
        for moment in _stage_with_waiting(first, index, stages, micro_batches - 1):
            reached = moment.gradients - (0 if index == stages - 1 else head)
            yield replace(moment, gradients=max(0.0, min(reached, whole)))
    waiting = min(full, micro_batches - 1) - 1
    for moment in (
        _stage_with_waiting(replace(own, accumulating=True), index, stages, max(0, waiting))
        if micro_batches > 1
        else ()
    ):
        yield replace(moment, gradients=whole)


def _stage_with_waiting(own: StepShape, index: int, stages: int, waiting: int) -> Iterator[StepMoment]:
    """The moments of a stage, with the micro-batches that wait for their backward.

    Each of them keeps its inputs and, under autocast, the half-precision copies of its own forward.
    """
    forward, logits, *layers, embeddings, update = moments(own)
    kept = waiting * (activation_bytes(own) + INPUT_BYTES * own.tokens_per_micro_batch)
    here = [forward, logits, *layers] if index == stages - 1 else [replace(forward, logits=0.0), *layers]
    for moment in [*here, *([embeddings] if index == 0 else [])]:
        copies = moment.copies + waiting * logits.copies
        yield replace(moment, activations=moment.activations + kept, copies=copies)
    yield update
