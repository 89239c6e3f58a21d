"""A part of a layer that keeps its inputs alone, and is computed again in backward.

Unlike a checkpoint of torch it can be called inside one, of any kind: it is one node of the graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

_is_inside = ContextVar("is_inside", default=False)


def is_inside_recomputed() -> bool:
    """Whether the operator that runs now belongs to a part that keeps none of its results."""
    return _is_inside.get()


# As `torch.compiler.disable`, which imports the compiler at once: two seconds of every command that has a decoder.
@_disable_dynamo
def recomputed(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """What the function makes of its inputs, which must not depend on anything else that is trained.

    Autocast is off inside. Gradients are those of autograd, of the same operators on the same numbers.
    """
    result: Tensor = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]  # torch's `apply`
    return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with _inside(inputs):
            return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_gradient = ctx.needs_input_grad[1:]
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, needs_gradient, strict=True)
        ]
        with torch.enable_grad(), _inside(inputs):
            result = ctx.function(*inputs)
        trained = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        with _inside(inputs):
            gradients = iter(torch.autograd.grad(result, trained, grad))
        return None, *(next(gradients) if needed else None for needed in needs_gradient)


@contextmanager
def _inside(inputs: Sequence[Tensor | None]) -> Iterator[None]:
    """Nobody keeps what these operators make, and autocast does not round it."""
    device = next(tensor.device.type for tensor in inputs if tensor is not None)
    token = _is_inside.set(True)
    try:
        # PyTorch has no autocast of meta tensors.
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            yield
    finally:
        _is_inside.reset(token)
