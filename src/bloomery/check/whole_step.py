"""One training step of the small model on the device, compared with float32 on the CPU: its loss, the gradient of each
parameter and its norm, and the weights after the update.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from bloomery.check.comparison import Deviation, natural_size
from bloomery.check.rounding import bound_in, tile_error
from bloomery.check.small_model import ModelPair, Side
from bloomery.check.updates import update_differences
from bloomery.facts.counting import layers
from bloomery.model.io.weights import LOGIT_DEVIATION
from bloomery.train.balance import step_balance
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


def step_on_device(pair: ModelPair) -> StepNumbers:
    """One step with the code of the run; afterwards the weights and the optimizer are as before.

    A step that is not finite has the loss and the norm alone.
    """
    side = pair.tested
    model_and_optimizer = side.model_and_optimizer
    optimizer = model_and_optimizer.optimizer
    parameters = optimizer.named_parameters
    weights_before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients: dict[str, Tensor] = {}

    def keep_gradients(member: torch.optim.Optimizer, arguments: Any, _keywords: object) -> None:
        # Of `step`, none beside the optimizer itself; of `step_scaled`, what it multiplies gradients by.
        factor = math.prod(arguments[1:])
        own = {parameter for group in member.param_groups for parameter in group["params"]}
        for name, parameter in parameters.items():
            if parameter in own and parameter.grad is not None:
                gradients[name] = parameter.grad.detach() * factor

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


def exact_step(pair: ModelPair) -> StepNumbers:
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
        balance=step_balance(
            side.plan.train.router,
            model_and_optimizer.model,
            model_and_optimizer.mesh,
            num_tokens=float((pair.batch.documents >= 0).sum()),
            num_micro_batches=1,
        ),
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


def step_differences(pair: ModelPair, numbers: StepNumbers, exact: StepNumbers) -> list[Deviation]:
    """What differs by more than rounding, in the order in which a step computes it."""
    bound = step_bound(pair.tested)

    # The loss: logits of a fresh model have a deviation of `LOGIT_DEVIATION`, and so much of them is rounded off.
    loss_error = abs(numbers.loss - exact.loss)
    loss_bound = bound * max(LOGIT_DEVIATION, 1e-3) + 1e-6 * abs(exact.loss)
    all_differences = [Deviation("loss", loss_error, loss_bound)]
    if not numbers.gradients:
        all_differences.append(Deviation("norm of the gradients", math.inf, bound))
    else:
        relative = abs(numbers.grad_norm / exact.grad_norm - 1.0)
        norm_bound = max(
            step_bound(pair.tested, gradient.dtype) for gradient in numbers.gradients.values()
        )
        all_differences.append(Deviation("norm of the gradients", relative, norm_bound))
        all_differences += gradient_differences(numbers.gradients, exact.gradients, pair.tested)
        all_differences += update_differences(
            pair.tested, numbers.gradients, numbers.weights, exact.weights
        )
    return [each for each in all_differences if not each.error <= each.bound]


def step_bound(side: Side, dtype: torch.dtype = torch.float32) -> float:
    """Of gradients in `dtype`: everything that is rounded on the way through all layers and back."""
    config = side.plan.model.config
    precision = side.plan.train.precision
    per_layer = ROUNDINGS_OF_LAYER
    if precision == "bfloat16-pure":
        per_layer += 8  # the residual stream and its gradient are rounded, too
    widest_inner = max(layer.intermediate_size for layer in layers(config))
    longest_sum = max(widest_inner, config.vocab_size, side.plan.train.tokens_per_step)
    return bound_in(
        dtype,
        side.roundoff(in_attention=True),
        roundings=config.num_layers * per_layer + ROUNDINGS_OF_HEAD,
        terms=longest_sum * (config.num_layers + 1),
    )


def gradient_differences(
    gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], side: Side
) -> list[Deviation]:
    """Of each parameter, the last layer first: backward computes in that order."""
    return [
        Deviation(
            f"gradient of {name}",
            tile_error(gradients[name], exact[name], least_size=natural_size(name, exact))
            if name in gradients
            else math.inf,
            step_bound(side, gradients[name].dtype if name in gradients else torch.float32),
        )
        for name in reversed(list(exact))
    ]
