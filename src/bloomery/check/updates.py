"""Updates of an optimizer on a device, compared with its formula in float64 on the CPU.

The formula stands beside the code that trains (`train/optim/NAME.py`: `exact`) and shares none with it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from bloomery.check.comparison import SEED, Deviation, PartResult, drawn
from bloomery.check.rounding import SAFETY, UNIT_ROUNDOFF, bound_of, tile_error, typical_size
from bloomery.check.small_model import ModelPair, Side
from bloomery.facts.counting import (
    Shape,
    fused_matrices,
    is_decayed,
    is_in_layer,
    is_of_experts,
)
from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER, updating_kind
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.registry import ExactOptimizer, UpdateProducts, code_of

OPTIMIZER_STEPS = 3
OPTIMIZER_ROWS = 256  # of a matrix that is updated in float64
OPTIMIZER_COLUMNS = 1024
OPTIMIZER_EXPERTS = 2  # of a stack
# Of AdamW in float32: the roundings of one update.
ROUNDINGS_OF_UPDATE = 16
# Of an optimizer's states between two steps. bfloat16 is rounded stochastically, to either neighbor. Level k of 127 is
# (k / 127)^4 of a block's largest: next to a typical value, a third of the largest, levels are 4 / (127 x 0.76) apart.
STATE_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 2.0 / (127 * 0.76)}


def has_formula(plan: OptimizerPlan) -> bool:
    """Whether the updates of this optimizer can be compared: one without a formula cannot."""
    return code_of(plan.kind).exact is not None


def exact_optimizer(plan: OptimizerPlan, name: str, shape: Shape) -> ExactOptimizer:
    """That of the parameter of this name, for an optimizer with a formula."""
    code = code_of(updating_kind(plan.kind, name, shape))
    assert code.exact is not None, f"{plan.kind} has no formula"
    optimizer = code.exact(plan, plan.weight_decay if is_decayed(name, shape) else 0.0)
    fused = fused_matrices(name, shape)
    # Products are those of single matrices.
    return optimizer if code.products is None or fused == 1 else _OfFused(optimizer, fused)


@final
@dataclass(frozen=True)
class _OfFused:
    """Updates a stack whose entries are several matrices, below each other, as a stack of these."""

    optimizer: ExactOptimizer
    fused: int

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        matrices, gradients = (
            stack.unflatten(1, (self.fused, -1)).flatten(0, 1) for stack in (weight, gradient)
        )
        return self.optimizer.step(matrices, gradients).view_as(weight)


def products_of(
    plan: OptimizerPlan, name: str, shape: Shape, device: torch.device
) -> UpdateProducts | None:
    """The matrix products of that parameter's update; None where it has none."""
    products = code_of(updating_kind(plan.kind, name, shape)).products
    return None if products is None else products(device)


# By itself, with large rates


def examine_optimizer(pair: ModelPair) -> PartResult:
    """Three updates of each kind of trainable parameter against the formula in float64, with rates at which the update,
    the decay and the corrections of the first steps are as large as the weights.

    Of an optimizer without a formula, only whether the device repeats its updates bit by bit.
    """
    side = pair.tested
    plan = side.plan.optimizer
    spec = OPTIMIZERS[plan.kind]
    # An optimizer with a rate of its own leaves some parameters to the usual one.
    usual_rate = OPTIMIZERS[USUAL_OPTIMIZER].loud_rate
    rates = (
        {"learning_rate": spec.loud_rate}
        if spec.own_rate is None
        else {"learning_rate": usual_rate, spec.own_rate.key: spec.loud_rate}
    )
    # The decay of one update is a tenth of the weight, where the recipe has any.
    decay = 0.1 / spec.loud_rate if plan.weight_decay else 0.0
    loud_plan = plan.model_copy(update={**rates, "weight_decay": decay})
    loud_side = Side(
        side.plan.model_copy(update={"optimizer": loud_plan}), side.model_and_optimizer
    )

    runs = [_updated(loud_side) for _ in range(2)]
    different_bits = any(not torch.equal(runs[0][name][0], runs[1][name][0]) for name in runs[0])
    wrong_quantities = []
    for name, (weight, before, exact) in runs[0].items():
        if exact is None:
            continue
        products = products_of(plan, name, tuple(before.shape), side.device)
        for run in runs:
            weight = run[name][0]
            error, bound = update_error(
                loud_side, weight, before, exact, products, steps=OPTIMIZER_STEPS
            )
            if not error <= bound:
                wrong_quantities.append(Deviation(f"update of {name}", error, bound))
    return PartResult(tuple(wrong_quantities), different_bits)


def _updated(side: Side) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Of a slice of one parameter of each name in a layer and each other one: the weight after the updates on the
    device, before them, and after them by the formula; None where the optimizer has none.
    """
    parameters = _sample(side.model_and_optimizer.optimizer.named_parameters)
    holder = nn.Module()
    weights: dict[str, nn.Parameter] = {}
    before: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        most: tuple[int, ...] = (OPTIMIZER_ROWS, OPTIMIZER_COLUMNS)
        if is_of_experts(name):
            most = (OPTIMIZER_EXPERTS, *most)
        shape = tuple(min(size, limit) for size, limit in zip(parameter.shape, most, strict=False))
        values = 0.02 * drawn(f"{name}, weight", shape, parameter.dtype)
        weight = nn.Parameter(values.to(parameter.dtype).to(side.device))
        weights[name] = weight
        before[name] = weight.detach().double().cpu()
        _hold(holder, name, weight)

    optimizer = build_optimizer(holder, side.plan.optimizer, seed=SEED)
    compared = weights if has_formula(side.plan.optimizer) else {}
    exact = {name: before[name] for name in compared}
    exact_optimizers = {
        name: exact_optimizer(side.plan.optimizer, name, tuple(weight.shape))
        for name, weight in compared.items()
    }
    for step in range(OPTIMIZER_STEPS):
        for name, weight in weights.items():
            gradient = 1e-3 * drawn(f"{name}, gradient {step}", tuple(weight.shape), torch.float32)
            weight.grad = gradient.to(weight.dtype).to(side.device)
            if name in compared:
                exact[name] = exact_optimizers[name].step(exact[name], weight.grad.double().cpu())
        optimizer.step(1.0)
    return {
        name: (weight.detach(), before[name], exact.get(name)) for name, weight in weights.items()
    }


def _sample(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """One parameter of each shape, dtype and place: inside layers or not."""
    sample: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        key = (tuple(parameter.shape), parameter.dtype, is_in_layer(name))
        sample.setdefault(key, (name, parameter))
    return dict(sample.values())


def _hold(holder: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives the module the parameter under its full name, which an optimizer's groups depend on."""
    *folders, leaf = name.split(".")
    for folder in folders:
        if folder not in dict(holder.named_children()):
            holder.add_module(folder, nn.Module())
        holder = holder.get_submodule(folder)
    holder.register_parameter(leaf, parameter)


# In a step


def update_differences(
    side: Side,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    weights_before: Mapping[str, Tensor],
) -> list[Deviation]:
    """The update of each weight against the optimizer's formula in float64, applied to the device's own gradients.

    So wrong gradients and a wrong optimizer are told apart, and the signs that a first step of AdamW takes of small
    gradients cannot differ. Nothing for an optimizer without a formula.
    """
    plan = side.plan.optimizer
    if not has_formula(plan):
        return []
    update_errors = []
    checked_shapes = set[tuple[int, ...]]()
    for name, gradient in gradients.items():
        # Many products in float64, as Muon's, take long: one matrix of each shape is enough.
        shape = tuple(gradient.shape)
        products = products_of(plan, name, shape, side.device)
        if products is not None and (shape in checked_shapes or min(shape) > 1024):
            continue
        checked_shapes.add(shape)
        before = weights_before[name].double().cpu()
        optimizer = exact_optimizer(plan, name, shape)
        exact = optimizer.step(before, gradient.double().cpu())
        error, bound = update_error(side, weights[name], before, exact, products)
        update_errors.append(Deviation(f"update of {name}", error, bound))
    return update_errors


def update_error(
    side: Side,
    weight: Tensor,
    before: Tensor,
    exact: Tensor,
    products: UpdateProducts | None,
    *,
    steps: int = 1,
) -> tuple[float, float]:
    """The error of an update relative to its size, and what rounding explains.

    The weight is rounded to its dtype each step, which is large next to a small update; the update itself is computed
    in float32, in the dtype of the weights by PyTorch's optimizers, and its matrix products in their own.
    """
    plan = side.plan.optimizer
    size = max(typical_size(exact - before), 1e-30)
    error = tile_error(
        (weight.double().cpu() - before) / size, (exact - before) / size, least_size=1.0
    )
    weight_roundoff = UNIT_ROUNDOFF[weight.dtype] * (2.0 if plan.stochastic_rounding else 1.0)
    rounded_weight = SAFETY * weight_roundoff * math.sqrt(steps) * typical_size(before) / size
    return error, rounded_weight + update_bound(side, weight, products, steps=steps)


def update_bound(
    side: Side, weight: Tensor, products: UpdateProducts | None, *, steps: int
) -> float:
    """Of the update by itself, relative to its size."""
    plan = side.plan.optimizer
    float32 = UNIT_ROUNDOFF[torch.float32]
    if products is not None:
        product_roundoff = UNIT_ROUNDOFF[products.dtype]
        return products.growth * bound_of(product_roundoff, roundings=products.count, terms=4096)
    # 1 - beta^t is computed in float32 at worst, and its error grows as it shrinks.
    unit_roundoff = float32 / (1 - max(plan.betas))
    if weight.dtype == torch.bfloat16:
        unit_roundoff = max(unit_roundoff, UNIT_ROUNDOFF[torch.bfloat16])
    if steps > 1 and not OPTIMIZERS[plan.kind].float32_states:
        unit_roundoff = max(unit_roundoff, STATE_ROUNDOFF[plan.state_dtype])
    return bound_of(unit_roundoff, roundings=ROUNDINGS_OF_UPDATE)
