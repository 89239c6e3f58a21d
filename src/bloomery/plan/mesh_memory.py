"""Bytes of one of several devices: states divided by shards, layers by stages, and what collectives need."""

import math
from dataclasses import dataclass, replace

from bloomery.model.counting import parameter_shapes
from bloomery.plan.communication import context_bytes
from bloomery.plan.memory import SPREAD, Occupancy, estimate_memory
from bloomery.plan.types import NOT_TENSORS, MemoryEstimate

BUCKET = 25 * 2**20  # bytes of gradients that are summed at once when weights are replicated


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
        parts = estimate_memory(load, limit=limit).parts
        parts = _sharded(load, parts, split) if split.shard > 1 else parts
    return _with_contexts(parts, split, vendor, limit)


def _with_contexts(parts: dict[str, float], split: Split, vendor: str, limit: float) -> MemoryEstimate:
    found = dict(parts)
    found["collectives"] = context_bytes(vendor, split.communicators)
    if split.replicate > 1 and split.shard == 1:
        found["gradient buckets"] = float(2 * BUCKET)
    whole = sum(found.values())
    return MemoryEstimate(parts=found, low=whole * (1 - SPREAD), high=whole * (1 + SPREAD), limit=limit, origin="table")


def _sharded(load: Occupancy, parts: dict[str, float], split: Split) -> dict[str, float]:
    """Full shards of weights, gradients and states; two layers and the embeddings whole while they are used."""
    found = dict(parts)
    for name in ("weights", "gradients", "optimizer"):
        found[name] = parts[name] / split.shard
    found.pop("half-precision copies", None)  # what is gathered is the copy
    layer, root = unsharded(load)
    gathered = (2 * layer + root) * load.element  # the layer at work and the one ahead; the embeddings stay
    reduced = layer * load.weight
    found["unsharded layers"] = gathered + reduced
    return _refragmented(found, parts)


def unsharded(load: Occupancy) -> tuple[int, int]:
    """Numbers of one layer, and of the embeddings, head and last norm."""
    shapes = parameter_shapes(load.config)
    inside = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    whole = sum(math.prod(shape) for shape in shapes.values())
    return inside // load.config.num_layers, whole - inside


def _refragmented(found: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Fragmentation is a share of what is allocated: the same share of less."""
    if "fragmentation" not in before:
        return found
    share = before["fragmentation"] / sum(size for name, size in before.items() if name not in NOT_TENSORS)
    found["fragmentation"] = share * sum(size for name, size in found.items() if name not in NOT_TENSORS)
    return found


def _stage(load: Occupancy, split: Split, index: int) -> dict[str, float]:
    """A stage of 1F1B: its layers, and the activations of as many micro-batches as are under way on it."""
    stages, layers = split.pipeline, math.ceil(load.config.num_layers / split.pipeline)
    windows = load.config.sliding_window[:layers]
    part = replace(
        load.config, num_layers=layers, sliding_window=windows, rotary_layers=load.config.rotary_layers[:layers]
    )
    parts = dict(estimate_memory(replace(load, config=part), limit=0.0).parts)
    before = dict(parts)
    parts["activations"] *= stages - index
    layer, root = unsharded(load)
    ends = root if load.config.tie_embeddings else root / 2  # the first stage embeds, the last one scores
    own = layer * layers + (ends if index in (0, stages - 1) else 0)
    for name in ("weights", "gradients", "optimizer", "half-precision copies"):
        if name in parts:
            parts[name] *= own / (layer * layers + root)
    if index != stages - 1:
        parts["scores"] = 0.0
    return _refragmented(parts, before)
