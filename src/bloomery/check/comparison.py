"""What a device computes of drawn numbers, with gradients, and by how much it differs from the same on the CPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from bloomery.check.rounding import tile_error, typical_size
from bloomery.infer.forward import precision_context
from bloomery.model.io.parameters import stream

SEED = 0
Numbers = dict[str, Tensor]  # by quantity
RESULT = "results"


@final
@dataclass(frozen=True)
class Deviation:
    """What differs by more than rounding, by how much, and how much rounding explains; relative errors."""

    quantity: str  # such as "loss", "gradient of lm_head.weight"
    error: float
    bound: float


@final
@dataclass(frozen=True)
class PartResult:
    """`different_bits`: the device gave other bits when it computed the same once more."""

    differences: tuple[Deviation, ...]
    different_bits: bool


def wrong_quantities(
    runs: Sequence[Mapping[str, Tensor]],
    exact: Mapping[str, Tensor],
    bound_of_numbers: Callable[[Tensor], float],
) -> tuple[Deviation, ...]:
    """What differs from `exact` by more than the bound in any run of the same computation.

    Wrong in one run counts: memory that is read before it is written may hold the right numbers once. A gradient that
    does not exist is wrong, too.
    """
    wrong = []
    for quantity, exact_numbers in exact.items():
        least_size = natural_size(quantity, exact)
        bound = bound_of_numbers(runs[0].get(quantity, exact_numbers))
        error = max(
            tile_error(numbers[quantity], exact_numbers, least_size=least_size)
            if quantity in numbers
            else math.inf
            for numbers in runs
        )
        if not error <= bound:
            wrong.append(Deviation(quantity, error, bound))
    return tuple(wrong)


def natural_size(name: str, gradients: Mapping[str, Tensor]) -> float:
    """The size that the gradient of a bias has before sums cancel: that of its matrix, whose inputs are about 1.

    A softmax does not depend on the bias of keys, so that its gradient is 0 but for rounding.
    """
    matrix = gradients.get(name.removesuffix(".bias") + ".weight")
    return typical_size(matrix) if name.endswith(".bias") and matrix is not None else 0.0


# Inputs, and what is computed of them


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers that `dtype` holds exactly, float32 on the CPU."""
    numbers = torch.empty(shape).normal_(generator=stream(SEED, name))
    return numbers.to(dtype).float()


def backward_numbers(
    name: str,
    compute: Callable[..., Tensor],
    inputs: Mapping[str, tuple[Tensor, torch.dtype]],
    modules: Mapping[str, nn.Module],
    *,
    device: torch.device,
    precision: str,
    gradient: Tensor | None = None,
) -> Numbers:
    """The result of `compute` of the inputs, and the gradients of these and of the modules' trainable parameters.

    `inputs`: drawn numbers, and the dtype that they have unless everything is float32. Backward begins with `gradient`,
    or with drawn numbers, and runs outside of autocast, as in a step.
    """
    is_float32 = precision == "float32"
    leaves = {
        leaf: tensor.to(device, torch.float32 if is_float32 else dtype).detach().requires_grad_()
        for leaf, (tensor, dtype) in inputs.items()
    }
    parameters = {
        f"{prefix}{parameter_name}": parameter
        for prefix, module in modules.items()
        for parameter_name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for parameter in parameters.values():
        parameter.grad = None
    with precision_context(precision, device.type):
        result = compute(*leaves.values())
    if result.requires_grad:
        if gradient is None:
            gradient = drawn(f"{name}, gradient", tuple(result.shape), torch.bfloat16)
        torch.autograd.backward(result, gradient.to(device, result.dtype))
    numbers = {RESULT: result.detach().clone()}
    for leaf, tensor in (*leaves.items(), *parameters.items()):
        if tensor.grad is not None:
            numbers[f"gradient of {leaf}"] = tensor.grad
    for parameter in parameters.values():
        parameter.grad = None
    return numbers
