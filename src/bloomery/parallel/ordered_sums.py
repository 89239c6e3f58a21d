"""Several micro-batches in one backward. Autograd would add the gradients of all of them first, and their sum to those
of micro-batches before: rounding would be another. So each adds its own, in their order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Decoder
from bloomery.model.forward_input import ForwardInput
from bloomery.parallel.host_memory import HostLayer, Place


def with_own_leaves(model: Decoder, inputs: Sequence[ForwardInput]) -> list[ForwardInput]:
    """Inputs that compute with leaves of their own: of the same memory, and of the same memory of gradients."""
    places = [
        Place(module._parameters, name, 0, parameter.shape, parameter.dtype)
        for path, module in model.named_modules()
        if not path.startswith("model.layers.")
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    outer = HostLayer(places, 0)
    changed = []
    for forward_input in inputs:
        leaves = dict[Tensor, nn.Parameter]()  # a tied matrix is one
        for place in places:
            parameter = place.tensor
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter not in leaves:
                leaves[parameter] = nn.Parameter(parameter.detach())
                leaves[parameter].grad = parameter.grad
        own = [leaves[place.tensor] for place in places]
        changed.append(replace(forward_input, around=partial(outer.replaced, own)))
    return changed


def with_ordered_sums(block: nn.Module) -> AbstractContextManager[None]:
    """Inside, the trained tensors of a layer that are on the device add each micro-batch's gradients by itself."""
    places = [
        Place(module._parameters, name, 0, parameter.shape, parameter.dtype)
        for module in block.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    parameters = [place.tensor for place in places]
    if not parameters:
        return nullcontext()
    arrived = Arrived.apply(  # type: ignore[no-untyped-call]  # torch's `apply`
        partial(_add_gradients, parameters),
        [parameter.detach() for parameter in parameters],
        *parameters,
    )
    return HostLayer(places, 0).replaced(arrived)


def _add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """To the `grad` of each, as autograd does for a leaf."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad += gradient


@final
class Arrived(torch.autograd.Function):
    """Weights on the device that stand for the host's parameters. Backward hands their gradients to `send`."""

    @staticmethod
    def forward(
        ctx: Any,
        send: Callable[[Sequence[Tensor | None]], None],
        on_device: Sequence[Tensor],
        *_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.send = send
        ctx.set_materialize_grads(False)
        return tuple(on_device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.send(gradients)
        return (None, None, *(None for _ in gradients))
