"""Bytes of weights, gradients and states where they are smaller than usual: adapters, quantised bases, 8-bit states.

What this version cannot train yet is counted all the same: `plan` says what it would save; published runs check it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bloomery.model.config import ModelConfig
from bloomery.model.counting import matrices, parameter_shapes
from bloomery.recipe.schema import Lora, Recipe

STATE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1.0 + 4 / 256,
}  # a number of the state; int8: a float32 scale each 256
BASE_BYTES = {
    "nf4": 0.5 + 1 / 64 + 4 / 64 / 256,
    "int8": 1.0 + 4 / 64,
}  # a weight; nf4: scales of 64, themselves in 8 bits
PAGE_SHARE = 0.0  # paged states live in the processor's memory and visit


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the parameters are held and trained. `weight`: bytes of a trained weight and of its gradient."""

    weight: int
    numbers: float = 2.0  # states of each trained parameter
    states: str = "float32"
    paged: bool = False
    in_backward: bool = False
    base: str = "none"
    rank: int = 0
    targets: tuple[str, ...] = ()
    adapter_bytes: int = 4


def way_of(recipe: Recipe, *, weight: int) -> Way:
    adapter = recipe.adapter
    lora = adapter if isinstance(adapter, Lora) else None
    return Way(
        weight=weight,
        states="bfloat16" if weight == 2 and recipe.optimizer.states == "float32" else recipe.optimizer.states,
        paged=recipe.optimizer.paged,
        in_backward=recipe.optimizer.in_backward,
        base=recipe.quantize.base,
        rank=lora.rank if lora else 0,
        targets=tuple(lora.targets) if lora else (),
        adapter_bytes=2 if lora is not None and lora.dtype == "bfloat16" else 4,
    )


def adapter_count(config: ModelConfig, rank: int, targets: Iterable[str]) -> int:
    """Numbers of low-rank pairs on the named matrices of every layer."""
    wanted = set(targets)
    each = sum(
        rank * (rows + columns) for name, rows, columns, _ in matrices(config) if name.rpartition(".")[2] in wanted
    )
    return each * config.num_layers


def state_parts(config: ModelConfig, way: Way) -> dict[str, float]:
    """Weights, gradients, optimizer and adapter, in bytes."""
    shapes = parameter_shapes(config)
    count = sum(math.prod(shape) for shape in shapes.values())
    matrix = sum(math.prod(s) for name, s in shapes.items() if ".layers." in name and len(s) == 2)
    held = float(count * way.weight)
    if way.base != "none":
        held = (count - matrix) * way.weight + matrix * BASE_BYTES[way.base]
    if way.rank:
        trained = adapter_count(config, way.rank, way.targets)
        each = 2 * way.adapter_bytes + way.numbers * (
            way.adapter_bytes if way.states == "bfloat16" else STATE_BYTES[way.states]
        )
        return {"weights": held, "adapter": trained * each}
    largest = max(math.prod(shape) for shape in shapes.values())
    gradients = (largest if way.in_backward else count) * way.weight  # freed as soon as each is used
    states = PAGE_SHARE if way.paged else STATE_BYTES[way.states]
    return {"weights": held, "gradients": float(gradients), "optimizer": count * way.numbers * states}
