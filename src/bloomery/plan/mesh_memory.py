"""Bytes of one of several devices: states divided by shards, layers by stages, and what collectives need."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bloomery.model.counting import parameter_count, parameter_shapes
from bloomery.plan.communication import context_bytes
from bloomery.plan.memory import (
    SPREAD,
    Moment,
    Occupancy,
    activation_bytes,
    around,
    estimate_memory,
    moments,
    optimizer_bytes,
)
from bloomery.plan.types import MemoryEstimate

BUCKET = 25 * 2**20  # bytes of gradients that are summed at once when weights are replicated
REDUCED = 4  # of a number whose gradient is summed over shards: float32


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many devices hold copies, shards and stages."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks that read rows of their own."""
        return self.replicate * self.shard

    @property
    def communicators(self) -> int:
        """Groups that each take a context of the collective library."""
        pipeline = 1 if self.pipeline > 1 else 0
        return pipeline + (self.replicate > 1) + (self.shard > 1)


def mesh_memory(load: Occupancy, split: Split, *, vendor: str, limit: float) -> MemoryEstimate:
    """The device of a layout that needs most."""
    if split.pipeline > 1:
        stages = [_stage(load, split, index) for index in (0, split.pipeline - 1)]
        parts = max(stages, key=lambda stage: sum(stage.values()))
    else:
        parts = _sharded(load, split) if split.shard > 1 else estimate_memory(load, limit=limit).parts
    return _with_contexts(parts, split, vendor, limit)


def _with_contexts(parts: dict[str, float], split: Split, vendor: str, limit: float) -> MemoryEstimate:
    found = dict(parts)
    found["collectives"] = context_bytes(vendor, split.communicators)
    if split.replicate > 1 and split.shard == 1:
        found["gradient buckets"] = float(2 * BUCKET)
    whole = sum(found.values())
    return MemoryEstimate(parts=found, low=whole * (1 - SPREAD), high=whole * (1 + SPREAD), limit=limit, origin="table")


def _sharded(load: Occupancy, split: Split) -> dict[str, float]:
    """Full shards of weights, gradients and states, and what is whole at the fullest moment."""
    peak = max(sharded_moments(load, split.shard), key=lambda moment: moment.total)
    whole = parameter_count(load.config) * load.weight
    parts = {
        "weights": whole / split.shard,
        "gradients": peak.gradients,
        "optimizer": optimizer_bytes(load.config, load.optimizer, load.weight) / split.shard,
        "activations": peak.activations,
        "scores": peak.scores,
        "unsharded layers": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(load, sum(parts.values()))


def sharded_moments(load: Occupancy, shards: int) -> list[Moment]:
    """The moments of a step under FSDP2, block by block; `copies` are weights and gradients that are whole meanwhile.

    Weights are gathered in the type of the products, and so are the residual stream and gradients. The embeddings stay
    whole from forward to the end of backward, and so does their gradient. A layer at work lies beside the one that is
    gathered ahead, and beside the float32 gradients of the one before while the network sums them.
    """
    own = replace(load, precision="bfloat16-pure" if load.mixed else load.precision, accumulating=False)
    forward, scores, *layers, embeddings, update = moments(own)
    layer, root = unsharded(load)
    head, e, shard = load.config.vocab_size * load.config.hidden_size, load.element, load.weight / shards
    kept = (len(layers) * layer + root) * shard
    before, blocks = kept if load.accumulating else 0.0, len(layers) * layer * shard
    found = [
        replace(forward, gradients=before, copies=(root + layer) * e),
        replace(scores, gradients=before + head * e, copies=(root + layer) * e),
    ]
    for done, moment in enumerate(layers):
        copies = (root + 2 * layer) * e + (REDUCED * layer if done else 0)
        found.append(replace(moment, gradients=max(before, done * layer * shard) + head * e, copies=copies))
    reached = max(before, blocks)
    found.append(replace(embeddings, gradients=reached + root * e, copies=root * e + REDUCED * layer))
    found.append(replace(embeddings, gradients=reached, copies=root * (e + REDUCED), temporaries=0.0))
    return [*found, replace(update, gradients=kept)]


def unsharded(load: Occupancy) -> tuple[int, int]:
    """Numbers of one layer, and of the embeddings, head and last norm."""
    shapes = parameter_shapes(load.config)
    inside = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    whole = sum(math.prod(shape) for shape in shapes.values())
    return inside // load.config.num_layers, whole - inside


def _stage(load: Occupancy, split: Split, index: int) -> dict[str, float]:
    """A stage of 1F1B: its layers, and what as many micro-batches keep as are under way on it.

    The first stage embeds, the last one scores; each holds its part of what is outside the layers.
    """
    stages, layers = split.pipeline, math.ceil(load.config.num_layers / split.pipeline)
    windows, rotary = load.config.sliding_window[:layers], load.config.rotary_layers[:layers]
    part = replace(load.config, num_layers=layers, sliding_window=windows, rotary_layers=rotary)
    own = replace(load, config=part, accumulating=True)
    layer, root = unsharded(load)
    ends = root if load.config.tie_embeddings else root / 2
    numbers = layer * layers + (ends if index in (0, stages - 1) else 0)
    peak = max(_stage_moments(own, index, stages), key=lambda moment: moment.total)
    parts = {
        "weights": numbers * load.weight,
        "gradients": numbers * load.weight,
        "optimizer": optimizer_bytes(part, load.optimizer, load.weight) * numbers / (layer * layers + root),
        "activations": peak.activations,
        "scores": peak.scores,
        "half-precision copies": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(load, sum(parts.values()))


def _stage_moments(own: Occupancy, index: int, stages: int) -> Iterator[Moment]:
    """Those of one device that the stage has, beside the micro-batches that wait for their backward."""
    forward, scores, *layers, embeddings, update = (replace(moment, gradients=0.0) for moment in moments(own))
    waiting = (stages - index - 1) * activation_bytes(own)
    last = index == stages - 1
    here = [forward, scores, *layers] if last else [replace(forward, scores=0.0), *layers]
    for moment in [*here, *([embeddings] if index == 0 else [])]:
        yield replace(moment, activations=moment.activations + waiting)
    yield update
