"""The matrix of what trains on several devices: every feature by every axis, tested or refused with a reason."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers
from bloomery.facts.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.facts.optimizers import OPTIMIZERS, PLAIN_SETTINGS
from bloomery.recipe.objectives import GroupRollouts
from bloomery.recipe.schema import Lora, Peft, Recipe

Axis = Literal["replicate", "shard", "pipeline", "context"]
# Those over which a model is put onto several devices; `context` is about the sequences of the first two.
AXES: tuple[Axis, ...] = ("replicate", "shard", "pipeline")
ALL_AXES: tuple[Axis, ...] = (*AXES, "context")


@dataclass(frozen=True)
class Feature:
    """A row of the matrix. `is_used_by`: whether a recipe uses it. `replicate`, `shard`, `pipeline`, `context`: why it
    does not train over that axis; "" where it does.

    `in_model`: whether a model has it, where the recipe does not decide. `fix`: what to set instead. `untested`: why
    no test over several devices can fail where it trains.
    """

    name: str
    is_used_by: Callable[[Recipe], bool]
    replicate: str = ""
    shard: str = ""
    pipeline: str = ""
    context: str = ""
    fix: str = ""
    in_model: Callable[[ModelConfig], bool] | None = None
    untested: str = ""

    def applies(self, recipe: Recipe, config: ModelConfig | None) -> bool:
        """Whether training uses it. `config`: None where the model is not read yet."""
        in_model = self.in_model is not None and config is not None and self.in_model(config)
        return in_model or self.is_used_by(recipe)

    def reason(self, axis: Axis) -> str:
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "pipeline": self.pipeline,
            "context": self.context,
        }[axis]


def _lora(recipe: Recipe) -> Lora | None:
    return recipe.adapter if isinstance(recipe.adapter, Lora) else None


ONE_GRADIENT = "its updates run inside backward, before gradients are summed over devices"
WHOLE_WEIGHT = "it reads whole weight matrices, and each device holds some rows of them"
NOTHING_TO_OFFLOAD = "the memory of a CPU process is the host's, so that nothing moves"
WHOLE_LAYERS = "weights stream from the host as the layers of a whole model"
# of architectures that Bloomery's decoder lacks: Pythia, Falcon ...
TRANSFORMERS_LAYERS = "layers of transformers"
# as in Gemma 4's small models
SHARED_BY_LAYERS = "keys of another layer, inputs of each layer"
ALL_PARAMETERS = "PEFT ranks and replaces whole matrices, and each device holds some rows of them"
OTHER_ROWS = "each step exchanges other numbers of rows, and blocks would be compiled again"
ALL_LAYERS = "PEFT needs a whole model, and each stage has some of its layers"


def _has_objective(recipe: Recipe, *, kinds: tuple[str, ...]) -> bool:
    return recipe.objective.kind in kinds


def _has_optimizer(recipe: Recipe, *, kind: str) -> bool:
    return recipe.optimizer.kind == kind


def _has_optimizer_setting(recipe: Recipe, *, kind: str, key: str) -> bool:
    is_set: bool = getattr(recipe.optimizer, key) != PLAIN_SETTINGS[key]
    return is_set and _has_optimizer(recipe, kind=kind)


def _objective_features() -> Iterator[Feature]:
    """A row for objectives that read the same rows and count their loss alike."""
    alike: dict[object, list[ObjectiveSpec]] = {}
    for spec in OBJECTIVES.values():
        likeness = (
            spec.data_kind,
            spec.loss_unit,
            spec.values,
            spec.extra_forwards > 0,
            spec.source,
        )
        alike.setdefault(likeness, []).append(spec)
    for specs in alike.values():
        kinds = tuple(spec.kind for spec in specs)
        yield Feature(f"objective {', '.join(kinds)}", partial(_has_objective, kinds=kinds))


def _optimizer_features() -> Iterator[Feature]:
    """A row for each optimizer."""
    for kind, spec in OPTIMIZERS.items():
        is_used_by = partial(_has_optimizer, kind=kind)
        yield Feature(f"optimizer {kind}", is_used_by, shard=spec.over_shards)


def _optimizer_setting_features() -> Iterator[Feature]:
    """A row for each setting of one optimizer that does not train over shards."""
    for kind, spec in OPTIMIZERS.items():
        for key, reason in spec.settings_over_shards.items():
            yield Feature(
                f"optimizer.{key}, {kind}",
                partial(_has_optimizer_setting, kind=kind, key=key),
                shard=reason,
                fix="optimizer.kind=adamw optimizer.state_dtype=int8",
            )


FEATURES: tuple[Feature, ...] = (
    *_objective_features(),
    Feature(
        "objective.teacher, grpo, rloo",
        lambda r: isinstance(r.objective, GroupRollouts) and r.objective.teacher is not None,
    ),
    Feature("adapter lora", lambda r: _lora(r) is not None),
    Feature(
        "adapter dora",
        lambda r: (lora := _lora(r)) is not None and lora.kind == "dora",
        shard=WHOLE_WEIGHT,
    ),
    Feature(
        "adapter pissa",
        lambda r: (lora := _lora(r)) is not None and lora.init == "pissa",
        shard=WHOLE_WEIGHT,
    ),
    Feature(
        "PEFT methods",
        lambda r: isinstance(r.adapter, Peft),
        shard=ALL_PARAMETERS,
        pipeline=ALL_LAYERS,
    ),
    Feature("quantize nf4, int8", lambda r: r.quantize.kind != "none"),
    Feature("train.precision bfloat16", lambda r: r.train.precision in ("bfloat16", "auto")),
    Feature("train.precision bfloat16-pure", lambda r: r.train.precision == "bfloat16-pure"),
    Feature("train.precision float16", lambda r: r.train.precision == "float16"),
    Feature(
        "train.activation_checkpointing",
        lambda r: r.train.activation_checkpointing not in ("none", "auto"),
    ),
    Feature("train.compile", lambda r: r.train.compile is True),
    *_optimizer_features(),
    Feature("optimizer.state_dtype int8, bfloat16", lambda r: r.optimizer.state_dtype != "float32"),
    Feature("optimizer.stochastic_rounding, adamw", lambda r: r.optimizer.stochastic_rounding),
    *_optimizer_setting_features(),
    Feature(
        "optimizer.paged, offload",
        lambda r: r.optimizer.paged or r.optimizer.offload,
        untested=NOTHING_TO_OFFLOAD,
    ),
    Feature(
        "parallel.stream",
        lambda r: r.parallel.stream in ("layers", "experts"),
        shard=WHOLE_LAYERS,
        pipeline=WHOLE_LAYERS,
        context=WHOLE_LAYERS,
        fix="parallel.stream=off",
    ),
    Feature(
        "parallel.scoring_devices",
        lambda r: r.parallel.scoring_devices > 0,
        pipeline="each rank that asks has the head, and stages before the last have none",
        context="they score whole sequences, and each device has a part of them",
        fix="parallel.scoring_devices=0",
    ),
    Feature(
        "optimizer.fused_backward",
        lambda r: r.optimizer.fused_backward,
        replicate=ONE_GRADIENT,
        shard=ONE_GRADIENT,
        pipeline="its updates run inside backward, before the other micro-batches are back",
        context=ONE_GRADIENT,
        fix="optimizer.fused_backward=false",
    ),
    Feature(
        "train.offload_activations",
        lambda r: r.train.offload_activations,
        shard="it moves gathered weights to the host like activations",
        untested=NOTHING_TO_OFFLOAD,
    ),
    Feature(
        "train.ema_decay",
        lambda r: r.train.ema_decay is not None,
    ),
    Feature(
        SHARED_BY_LAYERS,
        lambda _: False,
        pipeline="a stage would lack the keys of another, or the embedded tokens that its layers read",
        in_model=lambda config: any(
            layer.keys_of is not None or layer.per_layer_input_size > 0 for layer in layers(config)
        ),
    ),
    Feature(
        TRANSFORMERS_LAYERS,
        lambda r: r.model.implementation == "transformers",
        pipeline="only Bloomery's decoder is cut into stages",
        context="only Bloomery's decoder exchanges heads",
        in_model=lambda config: config.transformers_backend is not None,
    ),
)


def refusals(recipe: Recipe, axis: Axis, config: ModelConfig | None = None) -> list[str]:
    """Why the recipe does not train over this axis: "feature: reason" for each. `config`: of its model, once read."""
    return [
        f"{feature.name}: {feature.reason(axis)}"
        for feature in _refused_features(recipe, axis, config)
    ]


def _refused_features(recipe: Recipe, axis: Axis, config: ModelConfig | None) -> list[Feature]:
    return [
        feature for feature in FEATURES if feature.reason(axis) and feature.applies(recipe, config)
    ]


def refuse_unsupported(
    recipe: Recipe,
    config: ModelConfig | None = None,
    *,
    replicate: int = 1,
    shard: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> None:
    """Raises UserError where a feature of the recipe, or of its model, does not train over these sizes."""
    sizes: dict[Axis, int] = {
        "replicate": replicate,
        "shard": shard,
        "pipeline": pipeline,
        "context": context,
    }
    for axis, size in sizes.items():
        reasons = refusals(recipe, axis, config) if size > 1 else []
        if reasons:
            raise UserError(
                f"not supported over {size} devices with parallel.{axis}: {'; '.join(reasons)}",
                where=f"parallel.{axis}",
                fix=_fix_over_devices(recipe, axis, size, config),
                code=2,
            )


def _fix_over_devices(recipe: Recipe, axis: Axis, size: int, config: ModelConfig | None) -> str:
    """The settings with which the recipe trains over as many devices, on this axis or on another."""
    if axis == "context":
        return "set parallel.context=1"
    refused = {candidate: _refused_features(recipe, candidate, config) for candidate in AXES}
    # First an axis that refuses nothing, and of several shards, which save most memory.
    preferred_axes: tuple[Axis, ...] = ("shard", "replicate", "pipeline")
    by_preference = sorted(
        preferred_axes,
        key=lambda candidate: (len(refused[candidate]) > 0, preferred_axes.index(candidate)),
    )
    for candidate in by_preference:
        if not all(feature.fix for feature in refused[candidate]):
            continue
        edits = [feature.fix for feature in refused[candidate]]
        if candidate != axis:
            edits += [f"parallel.{axis}=1", f"parallel.{candidate}={size}"]
        return f"set {' '.join(edits)}"
    return "train on one device"
