"""Memory of one stage of a pipeline: its layers and ends, its shards of them, and its micro-batches in flight."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from bloomery.facts.config import ModelConfig, Stage
from bloomery.model.adapters.settings import shares_head
from bloomery.plan.estimate.activations import activation_bytes, end_bytes
from bloomery.plan.estimate.memory import overhead_bytes, teacher_parts
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.moments import StepMoment, kept_logit_bytes, moments
from bloomery.plan.estimate.reference import reference_bytes
from bloomery.plan.estimate.sharding import sharded_moments, unevenness
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.pipeline import PassInFlight, fullest_passes, stage_of
from bloomery.recipe.schema import PipelineSchedule


class Stages(Protocol):
    """How a model is cut: `estimate.mesh.MeshSplit`."""

    @property
    def shard(self) -> int:
        """Ranks of a stage that share its weights, gradients and states."""

    @property
    def pipeline(self) -> int:
        """Stages."""

    @property
    def schedule(self) -> PipelineSchedule: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each group; none: one even group a stage."""

    @property
    def chunks(self) -> int:
        """Groups of a stage."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class StageModel:
    """The layers and ends of one stage as a model of their own, and so each of its groups of layers."""

    model: TrainedModel
    groups: tuple[TrainedModel, ...]


# A plan asks for the same stages thousands of times, and their counts are kept with them.
@lru_cache(maxsize=512)
def stage_model(
    config: ModelConfig, mode: TrainingMode, index: int, stages: int, layers: tuple[int, ...]
) -> StageModel:
    """The stage of that index; `layers`: of all groups of the pipeline."""
    stage = stage_of(config, index, stages, layers)
    stage_alone = TrainedModel(config, mode, stage)
    if len(stage.groups) == 1:
        return StageModel(stage_alone, (stage_alone,))
    groups = []
    for number, group in enumerate(stage.groups):
        is_first = number == 0
        is_last = number == len(stage.groups) - 1
        part = Stage(
            groups=(group,),
            embeds=stage.embeds and is_first,
            has_embedding=stage.has_embedding and (is_first if stage.embeds else is_last),
            has_head=stage.has_head and is_last,
        )
        groups.append(TrainedModel(config, mode, part))
    return StageModel(stage_alone, tuple(groups))


def stage_models(model: TrainedModel, split: Stages) -> list[StageModel]:
    """Those of all stages, in order."""
    return [
        stage_model(model.config, model.mode, index, split.pipeline, split.layers)
        for index in range(split.pipeline)
    ]


def distinct_stages(model: TrainedModel, split: Stages) -> list[int]:
    """The first of all stages that have alike layers and the same ends: it holds the most micro-batches of them."""
    first_of_kind = dict[object, int]()
    for index, stage in enumerate(stage_models(model, split)):
        layers = tuple((layer.layer.kind, layer.trainable_names) for layer in stage.model.layers)
        first_of_kind.setdefault((layers, stage.model.embeds, stage.model.has_head), index)
    return list(first_of_kind.values())


def fullest_stage_bytes(
    step: StepShape,
    split: Stages,
    micro_batches: int | None = None,
    *,
    limits: tuple[float, ...] = (),
) -> tuple[int, dict[str, float]]:
    """The stage that needs most memory, and its bytes by part.

    `limits`: bytes of the device of each stage, where they are unequal: most is then the largest share of its own.
    """
    stages = range(split.pipeline) if limits else distinct_stages(step.model, split)
    by_stage = {index: stage_bytes(step, split, index, micro_batches) for index in stages}

    def need(index: int) -> float:
        needed_bytes = sum(by_stage[index].values())
        return needed_bytes / limits[index] if limits else needed_bytes

    fullest = max(by_stage, key=need)
    return fullest, by_stage[fullest]


# A plan asks for the same stages when it cuts, and again when it measures.
@lru_cache(maxsize=4096)
def stage_bytes(
    step: StepShape, split: Stages, index: int, micro_batches: int | None = None
) -> dict[str, float]:
    """Bytes by part at the peak of one stage; with so many micro-batches, or enough to fill every stage."""
    stage = stage_model(step.config, step.mode, index, split.pipeline, split.layers)
    return _bytes_of(step, split, index, stage, micro_batches)


def most_layers(
    step: StepShape, split: Stages, index: int, *, limit: float, micro_batches: int
) -> int:
    """The most layers with which a stage of one group stays under so many bytes; 0 where one is too many.

    They begin where the stage begins in `split`, so that they are of its kind where layers differ.
    """
    stage = stage_model(step.config, step.mode, index, split.pipeline, split.layers).model.stage
    assert stage is not None and len(stage.groups) == 1, "one group a stage"
    num_layers = step.config.num_layers

    def fits(count: int) -> bool:
        first = min(stage.layers[0], num_layers - count)
        part = replace(stage, groups=(range(first, first + count),))
        model = _model_of(step.config, step.mode, part)
        parts = _bytes_of(step, split, index, StageModel(model, (model,)), micro_batches)
        return sum(parts.values()) <= limit

    fitting = 0
    too_many = num_layers + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


@lru_cache(maxsize=512)
def _model_of(config: ModelConfig, mode: TrainingMode, stage: Stage) -> TrainedModel:
    return TrainedModel(config, mode, stage)


def layer_model(step: StepShape, number: int) -> TrainedModel:
    """One layer of the model, without the ends."""
    layer = range(number, number + 1)
    stage = Stage(groups=(layer,), embeds=False, has_embedding=False, has_head=False)
    return _model_of(step.config, step.mode, stage)


def end_model(step: StepShape, *, is_head: bool) -> TrainedModel:
    """What the last stage has in addition to its layers, or the first one."""
    stage = Stage(
        groups=(),
        embeds=not is_head,
        has_embedding=not is_head or shares_head(step.config),
        has_head=is_head,
    )
    return _model_of(step.config, step.mode, stage)


def _bytes_of(
    step: StepShape, split: Stages, index: int, stage: StageModel, micro_batches: int | None
) -> dict[str, float]:
    # Once a pipeline is full, further micro-batches change nothing; of GPipe's each one is held.
    filling = 4 * split.pipeline * split.chunks
    if micro_batches is None:
        micro_batches = 2 * split.pipeline
    elif split.schedule != "gpipe":
        micro_batches = min(micro_batches, filling)
    passes = fullest_passes(
        split.schedule,
        stages=split.pipeline,
        stage=index,
        micro_batches=micro_batches,
        chunks=split.chunks,
    )
    peak = max(
        _stage_moments(step, stage, passes, shards=split.shard), key=lambda moment: moment.total
    )
    states = 0.0
    if not step.mode.offload:
        states = stage.model.optimizer_bytes(step.optimizer, step.precision)
    weights = stage.model.weight_bytes(step.precision) + stage.model.adapter_bytes
    parts = {
        "weights": weights / split.shard * unevenness(stage.model.values_by_experts, split.shard),
        "gradients": peak.gradients,
        "optimizer": states
        / split.shard
        * unevenness(stage.model.trainable_by_experts, split.shard),
        "activations": peak.activations,
        "logits": peak.logits,
        "gathered layers" if split.shard > 1 else "half-precision copies": peak.copies,
        "temporaries": peak.temporaries,
    }
    if stage.model.has_head:  # where the teacher is, whole on each rank
        parts |= teacher_parts(step)
    if step.reference != "none":
        of_stage = replace(step, model=stage.model)
        parts["reference model"] = reference_bytes(of_stage, shards=split.shard)
    return parts | overhead_bytes(step, parts)


# What a stage keeps between steps.
KEPT_PARTS = ("weights", "optimizer", "reference model", "teacher")


def most_kept_bytes(step: StepShape, split: Stages) -> dict[str, float]:
    """Bytes by part of the stage that keeps most between steps."""
    by_stage = [
        {name: size for name, size in stage_bytes(step, split, index).items() if name in KEPT_PARTS}
        for index in distinct_stages(step.model, split)
    ]
    return max(by_stage, key=lambda parts: sum(parts.values()))


def _stage_moments(
    step: StepShape, stage: StageModel, passes: tuple[PassInFlight, ...], *, shards: int
) -> Iterator[StepMoment]:
    """The moments of the stage at which its memory can peak: those of the passes that most others wait for.

    Each waiting pass keeps its inputs, the activations of its layers, its logits where they are not computed again and,
    under autocast, the half-precision copies of its own forward. After the first backward all gradients of the
    stage exist.
    """
    all_gradients = stage.model.trainable_bytes(step.precision) / shards
    for in_flight in passes:
        group = stage.groups[in_flight.chunk]
        accumulating = not in_flight.is_first
        group_step = replace(step, model=group, accumulating=accumulating)
        *pass_moments, update = _moments(group_step, shards)
        other_gradients = 0.0
        if accumulating:
            other_gradients = all_gradients - group.trainable_bytes(step.precision) / shards

        waiting_activations = 0.0
        waiting_logits = 0.0
        waiting_copies = 0.0
        for waiting_group, count in zip(stage.groups, in_flight.waiting, strict=True):
            waiting_step = replace(step, model=waiting_group)
            waiting_activations += count * (
                activation_bytes(waiting_step) + end_bytes(waiting_step)
            )
            waiting_logits += count * kept_logit_bytes(waiting_step)
            if shards == 1:  # FSDP2 gathers weights in half precision, and autocast copies none
                _, logits_moment = islice(moments(waiting_step), 2)
                waiting_copies += count * logits_moment.copies
        for moment in pass_moments:
            yield moment._replace(
                gradients=moment.gradients + other_gradients,
                activations=moment.activations + waiting_activations,
                logits=moment.logits + waiting_logits,
                copies=moment.copies + waiting_copies,
            )

    *_, update = _moments(replace(step, model=stage.model, accumulating=True), shards)
    yield update


def _moments(step: StepShape, shards: int) -> list[StepMoment]:
    return list(moments(step)) if shards == 1 else sharded_moments(step, shards)
