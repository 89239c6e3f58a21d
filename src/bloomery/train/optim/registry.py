"""The code of each optimizer, in the module that its entry of `OPTIMIZERS` names: `build`, and `exact` beside it.

A module of an optimizer has these functions:

- `build` makes the torch optimizers that update the named parameters, all of which it takes;
- `exact` makes the same update in float64, written from the paper and sharing no code with `build`: what a device's is
  compared with. Without it the updates are not compared, and the check of a device says so;
- `products` says what its matrix products are computed in, where it has some.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor, nn

from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.common import Rounding
from bloomery.train.optim.placement import StatePlacement


class Builder(Protocol):
    """Builds the torch optimizers of one kind for the named parameters."""

    def __call__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        *,
        plan: OptimizerPlan,
        rounding: Rounding,
        placement: StatePlacement,
    ) -> list[torch.optim.Optimizer]: ...


class ExactOptimizer(Protocol):
    """Updates one weight, float64 on the CPU."""

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the update."""


@dataclass(frozen=True)
class UpdateProducts:
    """Matrix products of an update, one after the other: their dtype, and by how much they enlarge rounding errors."""

    count: int
    dtype: torch.dtype
    growth: float


@dataclass(frozen=True)
class OptimizerCode:
    """`exact`: of the plan and the parameter's weight decay; None where updates are not compared. `products`: of an
    update on a device; None where it has no matrix products.
    """

    build: Builder
    exact: Callable[[OptimizerPlan, float], ExactOptimizer] | None
    products: Callable[[torch.device], UpdateProducts] | None


def code_of(kind: str) -> OptimizerCode:
    """The code of an optimizer, imported now."""
    module = import_module(OPTIMIZERS[kind].module or f"bloomery.train.optim.{kind}")
    return OptimizerCode(
        module.build, getattr(module, "exact", None), getattr(module, "products", None)
    )
