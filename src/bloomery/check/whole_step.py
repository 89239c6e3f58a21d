"""One training step of the small model on the device, compared with float32 on the CPU: its loss, the gradient of each
parameter and its norm, and the weights after the update.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from bloomery.check.exact_numbers import exact_optimizer, has_formula, products_of
from bloomery.check.rounding import (
    SAFETY,
    UNIT_ROUNDOFF,
    bound_of,
    root_mean_square,
    tile_error,
)
from bloomery.check.small_model import Pair, Side
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.model.io.weights import LOGIT_DEVIATION
from bloomery.train.optim.registry import UpdateProducts
from bloomery.train.step import (
    StepPasses,
    clip_factor,
    global_norm,
    run_micro_batches,
    train_step,
)

# Roundings to the dtype of matmuls along the longest way through a layer and back: seven matmuls, two norms, the
# rotation, attention (scores and their shares) and the MLP's two products ahead; twice the matmuls and the same again
# on the way back.
ROUNDINGS_OF_LAYER = 45
ROUNDINGS_OF_HEAD = 10
OVERFLOWS = (
    40  # float16 lowers its loss scale until gradients fit: the halvings from 2^16 to below 2^-24
)
# Of AdamW in float32: the roundings of one update.
ROUNDINGS_OF_UPDATE = 16


@final
@dataclass(frozen=True)
class Difference:
    """What differs by more than rounding, by how much, and how much rounding explains; relative errors."""

    quantity: str  # such as "loss", "gradient of lm_head.weight"
    error: float
    bound: float


@final
@dataclass(frozen=True)
class StepNumbers:
    """The results of one step, by parameter. `gradients`: clipped, as the optimizer had them."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    def has_bits_of(self, other: "StepNumbers") -> bool:
        return (
            self.loss == other.loss
            and all(
                torch.equal(self.gradients[name], other.gradients[name]) for name in self.gradients
            )
            and all(torch.equal(self.weights[name], other.weights[name]) for name in self.weights)
        )


def step_on_device(pair: Pair) -> StepNumbers:
    """One step with the code of the run; afterwards the weights and the optimizer are as before.

    A step that is not finite has the loss and the norm alone.
    """
    side = pair.tested
    model_and_optimizer = side.model_and_optimizer
    optimizer = model_and_optimizer.optimizer
    parameters = optimizer.named_parameters
    weights_before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        gradients.update(
            {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}
        )

    hooks = [member.register_step_pre_hook(keep_gradients) for member in optimizer.members]
    loss_scale = model_and_optimizer.loss_scale
    if loss_scale is not None:
        model_and_optimizer.loss_scale = replace(loss_scale)
    try:
        for _ in range(OVERFLOWS):
            result = train_step(
                model_and_optimizer,
                [pair.batch],
                side.objective,
                plan=side.plan.train,
                lr_scale=1.0,
            )
            if not result.overflowed:
                break
        weights = {name: p.detach().clone() for name, p in parameters.items()}
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights_before[name])
        optimizer.load({}, {})
        model_and_optimizer.loss_scale = loss_scale
        model_and_optimizer.updating = False
    return StepNumbers(result.loss, result.grad_norm, gradients, weights)


def exact_step(pair: Pair) -> StepNumbers:
    """Loss and clipped gradients in float32 on the CPU, without an update: `weights` are those before it."""
    side = pair.exact
    model_and_optimizer = side.model_and_optimizer
    optimizer = model_and_optimizer.optimizer
    num_targets = side.objective.count(pair.batch)
    passes = StepPasses(
        model_and_optimizer,
        side.objective,
        side.plan.train,
        position=0,
        lr_scale=1.0,
        scale_factor=1.0,
        num_targets=num_targets,
        num_micro_batches=1,
    )
    total, _ = run_micro_batches([pair.batch], passes)
    parameters = optimizer.named_parameters
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norm = float(global_norm(gradients))
    clip = clip_factor(norm, side.plan.train.max_grad_norm)
    optimizer.zero_grad()
    return StepNumbers(
        float(total) / num_targets,
        norm,
        {name: gradient * clip for name, gradient in gradients.items()},
        {name: p.detach() for name, p in parameters.items()},
    )


def differences(pair: Pair, numbers: StepNumbers, exact: StepNumbers) -> list[Difference]:
    """What differs by more than rounding, in the order in which a step computes it."""
    bound = step_bound(pair.tested)

    # The loss: logits of a fresh model have a deviation of `LOGIT_DEVIATION`, and so much of them is rounded off.
    loss_error = abs(numbers.loss - exact.loss)
    loss_bound = bound * max(LOGIT_DEVIATION, 1e-3) + 1e-6 * abs(exact.loss)
    all_differences = [Difference("loss", loss_error, loss_bound)]
    if not numbers.gradients:
        all_differences.append(Difference("norm of the gradients", math.inf, bound))
    else:
        relative = abs(numbers.grad_norm / exact.grad_norm - 1.0)
        norm_bound = max(
            step_bound(pair.tested, gradient.dtype) for gradient in numbers.gradients.values()
        )
        all_differences.append(Difference("norm of the gradients", relative, norm_bound))
        all_differences += gradient_differences(numbers.gradients, exact.gradients, pair.tested)
        all_differences += update_differences(pair.tested, numbers, exact.weights)
    return [each for each in all_differences if not each.error <= each.bound]


def step_bound(side: Side, dtype: torch.dtype = torch.float32) -> float:
    """Of gradients in `dtype`: everything that is rounded on the way through all layers and back."""
    config = side.plan.model.config
    precision = side.plan.train.precision
    per_layer = ROUNDINGS_OF_LAYER
    if precision == "bfloat16-pure":
        per_layer += 8  # the residual stream and its gradient are rounded, too
    longest_sum = max(config.intermediate_size, config.vocab_size, side.plan.train.tokens_per_step)
    return bound_of(
        max(side.roundoff(in_attention=True), UNIT_ROUNDOFF[dtype]),
        roundings=config.num_layers * per_layer + ROUNDINGS_OF_HEAD,
        terms=longest_sum * (config.num_layers + 1),
    )


def gradient_differences(
    gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], side: Side
) -> list[Difference]:
    """Of each parameter, the last layer first: backward computes in that order."""
    return [
        Difference(
            f"gradient of {name}",
            tile_error(gradients[name], exact[name], least_size=natural_size(name, exact))
            if name in gradients
            else math.inf,
            step_bound(side, gradients[name].dtype if name in gradients else torch.float32),
        )
        for name in reversed(list(exact))
    ]


def natural_size(name: str, gradients: Mapping[str, Tensor]) -> float:
    """The size that the gradient of a bias has before sums cancel: that of its matrix, whose inputs are about 1.

    A softmax does not depend on the bias of keys, so that its gradient is 0 but for rounding.
    """
    matrix = gradients.get(name.removesuffix(".bias") + ".weight")
    return root_mean_square(matrix) if name.endswith(".bias") and matrix is not None else 0.0


def update_differences(
    side: Side, numbers: StepNumbers, weights_before: Mapping[str, Tensor]
) -> list[Difference]:
    """The update of each weight against the optimizer's formula in float64, applied to the device's own gradients.

    So wrong gradients and a wrong optimizer are told apart, and the signs that a first step of AdamW takes of small
    gradients cannot differ. Nothing for an optimizer without a formula.
    """
    plan = side.plan.optimizer
    if not has_formula(plan):
        return []
    update_errors = []
    checked_shapes = set[tuple[int, ...]]()
    for name, gradient in numbers.gradients.items():
        # Many products in float64, as Muon's, take long: one matrix of each shape is enough.
        shape = tuple(gradient.shape)
        products = products_of(plan, name, shape, side.device)
        if products is not None and (shape in checked_shapes or min(shape) > 1024):
            continue
        checked_shapes.add(shape)
        before = weights_before[name].double().cpu()
        optimizer = exact_optimizer(plan, name, shape)
        exact = optimizer.step(before, gradient.double().cpu())
        error, bound = update_error(side, numbers.weights[name], before, exact, products)
        update_errors.append(Difference(f"update of {name}", error, bound))
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
    size = max(root_mean_square(exact - before), 1e-30)
    error = tile_error(
        (weight.double().cpu() - before) / size, (exact - before) / size, least_size=1.0
    )
    weight_roundoff = UNIT_ROUNDOFF[weight.dtype] * (2.0 if plan.stochastic_rounding else 1.0)
    rounded_weight = SAFETY * weight_roundoff * math.sqrt(steps) * root_mean_square(before) / size
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


# Of an optimizer's states between two steps. bfloat16 is rounded stochastically, to either neighbor. Level k of 127 is
# (k / 127)^4 of a block's largest: next to a typical value, a third of the largest, levels are 4 / (127 x 0.76) apart.
STATE_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 2.0 / (127 * 0.76)}
