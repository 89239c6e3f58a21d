"""Optimizers and dequantization by their formulas, in float64 on the CPU: what a device's are compared with.

Written from the papers, number by number, and sharing no code with those that train.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, final

import torch
from torch import Tensor

from bloomery.facts.limits import SCALES_BLOCK, WEIGHTS_BLOCK
from bloomery.model.io.quantized import NF4_LEVELS, Buffers, dynamic_levels
from bloomery.plan.types import OptimizerPlan


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


class ExactOptimizer(Protocol):
    """Updates one weight, float64 on the CPU."""

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the update."""


def has_formula(plan: OptimizerPlan) -> bool:
    """Whether the updates of this optimizer can be compared: one without a formula here cannot."""
    return plan.kind in FORMULAS


def exact_optimizer(plan: OptimizerPlan, name: str, num_dims: int) -> ExactOptimizer:
    """That of the parameter of this name, for an optimizer with a formula."""
    decay = plan.weight_decay if num_dims >= 2 else 0.0
    return FORMULAS[plan.kind](plan, decay, num_dims == 2 and ".layers." in name)


@final
class ExactAdamW:
    """Algorithm 2 of arXiv:1711.05101, with decay as in PyTorch: relative to the learning rate."""

    def __init__(self, plan: OptimizerPlan, decay: float) -> None:
        self._plan = plan
        self._decay = decay
        self._steps = 0
        self._mean: Tensor | float = 0.0
        self._square: Tensor | float = 0.0

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        self._steps += 1
        beta1, beta2 = self._plan.betas
        rate = self._plan.learning_rate
        self._mean = beta1 * self._mean + (1 - beta1) * gradient
        self._square = beta2 * self._square + (1 - beta2) * gradient.square()
        mean = self._mean / (1 - beta1**self._steps)
        square = self._square / (1 - beta2**self._steps)
        decayed = weight * (1 - rate * self._decay)
        updated: Tensor = decayed - rate * mean / (square.sqrt() + self._plan.eps)
        return updated


@final
class ExactAdafactor:
    """Algorithm 4 of arXiv:1804.04235 with the constants of PyTorch's: epsilons 1e-30 and 1e-3, threshold 1."""

    def __init__(self, rate: float, decay: float) -> None:
        self._rate = rate
        self._decay = decay
        self._steps = 0
        self._variances: list[Tensor] = []

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        self._steps += 1
        squares = gradient.square()
        sums = [squares] if gradient.ndim < 2 else [squares.mean(-1, True), squares.mean(-2, True)]
        before = self._variances or [torch.zeros_like(each) for each in sums]
        share: float = self._steps**-0.8
        self._variances = [old + share * (new - old) for old, new in zip(before, sums, strict=True)]

        variance = self._variances[0]
        if gradient.ndim >= 2:
            rows, columns = self._variances
            variance = rows * columns / rows.mean(-2, True).clamp(min=1e-30)
        update = gradient / variance.clamp(min=1e-60).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        size = max(1e-3, float(weight.square().mean().sqrt()))
        rate: float = min(self._rate, self._steps**-0.5)
        return weight * (1 - self._rate * self._decay) - rate * size * update


@final
class ExactMuon:
    """Nesterov momentum, five quintic Newton-Schulz iterations, and the size of AdamW's updates (arXiv:2502.16982)."""

    def __init__(self, plan: OptimizerPlan) -> None:
        self._plan = plan
        self._momentum: Tensor | float = 0.0

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        plan = self._plan
        momentum = plan.momentum * self._momentum + (1 - plan.momentum) * gradient
        self._momentum = momentum
        direction = (1 - plan.momentum) * gradient + plan.momentum * momentum
        is_tall = direction.shape[0] > direction.shape[1]
        x = direction.mT if is_tall else direction
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        size = 0.2 * math.sqrt(max(weight.shape))
        decayed = weight * (1 - plan.muon_learning_rate * plan.weight_decay)
        update: Tensor = size * (x.mT if is_tall else x)
        return decayed - plan.muon_learning_rate * update


# By kind: of the plan, the decay of the parameter, and whether it is a matrix inside a layer. Muon takes those, AdamW
# what Muon leaves. Another optimizer's updates are not compared.
FORMULAS: Mapping[str, Callable[[OptimizerPlan, float, bool], ExactOptimizer]] = {
    "adamw": lambda plan, decay, _: ExactAdamW(plan, decay),
    "muon": lambda plan, decay, in_layer: ExactMuon(plan) if in_layer else ExactAdamW(plan, decay),
    "adafactor": lambda plan, decay, _: ExactAdafactor(plan.learning_rate, decay),
}
