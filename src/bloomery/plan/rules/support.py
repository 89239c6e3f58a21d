"""The support matrix: every feature by every axis of the mesh, tested or refused with a reason."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.model.limits import INT8_BLOCK, INT8_SMALLEST
from bloomery.recipe.schema import Lora, Peft, Recipe

Axis = Literal["replicate", "shard"]
AXES: tuple[Axis, ...] = ("replicate", "shard")


@dataclass(frozen=True)
class Feature:
    """A row of the matrix. `used`: whether a recipe uses it. `replicate`, `shard`: why not; "" where it is tested.

    `fix`: what to set instead.
    """

    name: str
    used: Callable[[Recipe], bool]
    replicate: str = ""
    shard: str = ""
    fix: str = ""

    def reason(self, axis: Axis) -> str:
        return self.replicate if axis == "replicate" else self.shard


def _lora(recipe: Recipe) -> Lora | None:
    return recipe.adapter if isinstance(recipe.adapter, Lora) else None


ONE_GRADIENT = "its updates run inside backward, before gradients are summed over devices"
WHOLE_WEIGHT = "it reads whole weight matrices, and each device holds some rows of them"
ALL_PARAMETERS = "PEFT ranks and replaces whole matrices, and each device holds some rows of them"
FEATURES: tuple[Feature, ...] = (
    Feature("objective pretrain", lambda r: r.objective.kind == "pretrain"),
    Feature("objective sft", lambda r: r.objective.kind == "sft"),
    Feature("objective dpo, ipo, simpo, orpo", lambda r: r.objective.kind in ("dpo", "ipo", "simpo", "orpo")),
    Feature("objective kto", lambda r: r.objective.kind == "kto"),
    Feature("objective reward", lambda r: r.objective.kind == "reward"),
    Feature("objective distill", lambda r: r.objective.kind == "distill"),
    Feature("adapter lora", lambda r: _lora(r) is not None),
    Feature("adapter dora", lambda r: (one := _lora(r)) is not None and one.kind == "dora", shard=WHOLE_WEIGHT),
    Feature("adapter pissa", lambda r: (one := _lora(r)) is not None and one.init == "pissa", shard=WHOLE_WEIGHT),
    Feature("PEFT methods", lambda r: isinstance(r.adapter, Peft), shard=ALL_PARAMETERS),
    Feature("quantize nf4, int8", lambda r: r.quantize.kind != "none"),
    Feature("train.precision bfloat16", lambda r: r.train.precision in ("bfloat16", "auto")),
    Feature("train.precision bfloat16-pure", lambda r: r.train.precision == "bfloat16-pure"),
    Feature("train.precision float16", lambda r: r.train.precision == "float16"),
    Feature("train.activation_checkpointing", lambda r: r.train.activation_checkpointing not in ("none", "auto")),
    Feature("train.compile", lambda r: r.train.compile is True),
    Feature("optimizer adamw", lambda r: r.optimizer.kind == "adamw"),
    Feature("optimizer muon", lambda r: r.optimizer.kind == "muon"),
    Feature("optimizer adafactor", lambda r: r.optimizer.kind == "adafactor"),
    Feature("optimizer.state_dtype int8, bfloat16", lambda r: r.optimizer.state_dtype != "float32"),
    Feature("optimizer.stochastic_rounding, adamw", lambda r: r.optimizer.stochastic_rounding),
    Feature(
        "optimizer.stochastic_rounding, adafactor",
        lambda r: r.optimizer.stochastic_rounding and r.optimizer.kind == "adafactor",
        shard="its random bits follow slices of the rows of one device",
        fix="optimizer.kind=adamw optimizer.state_dtype=int8",
    ),
    Feature("optimizer.paged, offload", lambda r: r.optimizer.paged or r.optimizer.offload),
    Feature(
        "optimizer.fused_backward", lambda r: r.optimizer.fused_backward, replicate=ONE_GRADIENT, shard=ONE_GRADIENT,
        fix="optimizer.fused_backward=false",
    ),
    Feature(
        "train.offload_activations", lambda r: r.train.offload_activations,
        shard="it moves gathered weights to the host like activations",
    ),
    Feature(
        "model.load_with=transformers", lambda r: r.model.load_with == "transformers",
        shard="only Bloomery's decoder is sharded",
    ),
)  # fmt: skip


def refusals(recipe: Recipe, axis: Axis) -> list[str]:
    """Why the recipe does not train over this axis: "feature: reason" for each."""
    return [f"{one.name}: {one.reason(axis)}" for one in FEATURES if one.reason(axis) and one.used(recipe)]


def refuse_unsupported(recipe: Recipe, *, replicate: int, shard: int) -> None:
    """Raises UserError where a feature of the recipe does not train over these sizes."""
    sizes: tuple[tuple[Axis, Axis, int], ...] = (("replicate", "shard", replicate), ("shard", "replicate", shard))
    for axis, other, size in sizes:
        found = refusals(recipe, axis) if size > 1 else []
        if found:
            ways = {way: [one for one in FEATURES if one.reason(way) and one.used(recipe)] for way in AXES}
            fix = "train on one device"
            for way in sorted(AXES, key=lambda each: (len(ways[each]) > 0, each == "replicate")):  # shards save memory
                if all(one.fix for one in ways[way]):
                    words = [one.fix for one in ways[way]]
                    words += [f"parallel.{axis}=1", f"parallel.{other}={size}"] if way != axis else []
                    fix = f"set {' '.join(words)}"
                    break
            problem = f"not supported over {size} devices with parallel.{axis}: {'; '.join(found)}"
            raise UserError(problem, where=f"parallel.{axis}", fix=fix, code=2)


def refuse_split_blocks(shapes: Mapping[str, Sequence[int]], shard: int) -> None:
    """Raises UserError where a block of an int8 state, whose numbers share a scale, would belong to two devices."""
    for name, shape in shapes.items():
        rows = -(-shape[0] // shard)
        if math.prod(shape) >= INT8_SMALLEST and rows * math.prod(shape[1:]) % INT8_BLOCK:
            problem = f"int8 states need {INT8_BLOCK} numbers of a parameter together; {shard} devices divide "
            fix = "set optimizer.state_dtype=bfloat16, or another parallel.shard"
            raise UserError(f"{problem}{name} {list(shape)} elsewhere", where="optimizer.state_dtype", fix=fix, code=2)
