"""Optimizers and dequantization by their formulas, in float64 on the CPU: what a device's are compared with.

Those of optimizers stand beside the code that trains, and share none with it.
"""

import torch
from torch import Tensor

from bloomery.facts.counting import Shape
from bloomery.facts.limits import SCALES_BLOCK, WEIGHTS_BLOCK
from bloomery.facts.optimizers import updating_kind
from bloomery.model.io.quantized import NF4_LEVELS, Buffers, dynamic_levels
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.registry import ExactOptimizer, UpdateProducts, code_of


def exact_weight(stored: Buffers) -> Tensor:
    """Float64 [O, I]: the level of each code times the scale of its block of 64."""
    num_values = stored.outputs * stored.inputs
    codes = stored.codes.cpu()
    if codes.dtype == torch.uint8:
        two_codes = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)[:num_values]
        values = torch.tensor(NF4_LEVELS, dtype=torch.float64)[two_codes.long()]
    else:
        values = codes.double()

    # Scales may be codes themselves: a level times the scale of 256 of them, plus the mean of all.
    if stored.outer.numel():
        outer = stored.outer.cpu().view(torch.float32).double()
        levels = dynamic_levels(torch.device("cpu")).double()[stored.scales.cpu().long()]
        scales = levels * outer[:-1].repeat_interleave(SCALES_BLOCK)[: len(levels)] + outer[-1]
    else:
        scales = stored.scales.cpu().view(torch.float32).double()
    values *= scales.repeat_interleave(WEIGHTS_BLOCK)[:num_values]
    return values.view(stored.outputs, stored.inputs)


def has_formula(plan: OptimizerPlan) -> bool:
    """Whether the updates of this optimizer can be compared: one without a formula cannot."""
    return code_of(plan.kind).exact is not None


def exact_optimizer(plan: OptimizerPlan, name: str, shape: Shape) -> ExactOptimizer:
    """That of the parameter of this name, for an optimizer with a formula."""
    exact = code_of(updating_kind(plan.kind, name, shape)).exact
    assert exact is not None, f"{plan.kind} has no formula"
    return exact(plan, plan.weight_decay if len(shape) >= 2 else 0.0)


def products_of(
    plan: OptimizerPlan, name: str, shape: Shape, device: torch.device
) -> UpdateProducts | None:
    """The matrix products of that parameter's update; None where it has none."""
    products = code_of(updating_kind(plan.kind, name, shape)).products
    return None if products is None else products(device)
