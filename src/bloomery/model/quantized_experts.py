"""Products of rows with quantized stacks of experts: the matrix of an expert is dequantized, multiplied and dropped.

Never more than one matrix of a stack exists as floats, and none of an expert without rows.

N tokens, S sorted pairs of a token and an expert, O outputs and I inputs of an expert's matrix.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from bloomery.facts.counting import Shape
from bloomery.model.experts import Pairs, gradients_by_expert, products_by_expert, summed
from bloomery.model.io.quantized import Buffers, QuantizedWeight, dequantized_part
from bloomery.model.norms import working_dtype


class QuantizedExperts(nn.Module):
    """A frozen stack [E, O, I] in place of the parameter; `stored`: its numbers."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.stored = weight

    def forward(
        self, x: Tensor, pairs: Pairs, bias_EO: Tensor | None = None, *, is_sorted: bool = True
    ) -> Tensor:
        """As `experts.grouped_linear` by the dequantized stack. The gradient goes to x alone: the bias is frozen."""
        assert bias_EO is None or not bias_EO.requires_grad, (
            "biases of quantized experts are frozen"
        )
        result: Tensor = _ahead(
            x.to(working_dtype(x)),
            *self.stored.part_buffers,
            self.stored.first_part,
            bias_EO,
            pairs.ends_E,
            pairs.order_S,
            pairs.place_S,
            0 if is_sorted else pairs.per_token,
        )
        return result

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[O, I]: that of an expert, as floats."""
        weight = self.stored
        return dequantized_part(weight.part_buffers, expert, dtype, first=weight.first_part)


@torch.library.custom_op("bloomery::quantized_experts", mutates_args=())
def _ahead(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor,
    outputs: int,
    inputs: int,
    reader: str,
    first: int,
    bias_EO: Tensor | None,
    ends_E: Tensor,
    order_S: Tensor,
    place_S: Tensor,
    per_token: int,
) -> Tensor:
    del place_S  # for the gradient of tokens
    buffers = Buffers(codes, scales, outer, outputs, inputs, reader)
    with torch.autocast(x.device.type, enabled=False):
        return products_by_expert(
            x,
            lambda expert: dequantized_part(buffers, expert, x.dtype, first=first),
            outputs,
            bias_EO,
            ends_E,
            order_S,
            per_token,
        )


@torch.library.custom_op("bloomery::quantized_experts_backward", mutates_args=())
def _back(
    grad_SO: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor,
    outputs: int,
    inputs: int,
    reader: str,
    first: int,
    ends_E: Tensor,
    order_S: Tensor,
    place_S: Tensor,
    per_token: int,
) -> Tensor:
    """The gradient of the rows; of tokens the sum over their pairs, in a fixed order."""
    buffers = Buffers(codes, scales, outer, outputs, inputs, reader)
    with torch.autocast(grad_SO.device.type, enabled=False):
        grad_SI = gradients_by_expert(
            grad_SO,
            lambda expert: dequantized_part(buffers, expert, grad_SO.dtype, first=first),
            inputs,
            ends_E,
        )
        pairs = Pairs(order_S, place_S, ends_E, per_token)
        return summed(grad_SI, pairs) if per_token else grad_SI


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    sizes: tuple[int, int, str, int]
    per_token: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, codes, scales, outer, *sizes, _, ends_E, order_S, place_S, per_token = inputs
    ctx.save_for_backward(codes, scales, outer, ends_E, order_S, place_S)
    outputs, columns, reader, first = sizes
    ctx.sizes = (outputs, columns, reader, first)
    ctx.per_token = per_token


def _differentiate(ctx: _Context, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, outer, *pairs = ctx.saved_tensors
    grad_x = _back(grad_SO.contiguous(), codes, scales, outer, *ctx.sizes, *pairs, ctx.per_token)
    return grad_x, *[None] * 12


@_ahead.register_fake
def _ahead_fake(
    x: Tensor,
    _codes: Tensor,
    _scales: Tensor,
    _outer: Tensor,
    outputs: int,
    _inputs: int,
    _reader: str,
    _first: int,
    _bias: Tensor | None,
    _ends: Tensor,
    order_S: Tensor,
    *_: Any,
) -> Tensor:
    return x.new_empty(len(order_S), outputs)


@_back.register_fake
def _back_fake(
    grad_SO: Tensor,
    _codes: Tensor,
    _scales: Tensor,
    _outer: Tensor,
    _outputs: int,
    inputs: int,
    _reader: str,
    _first: int,
    _ends: Tensor,
    _order: Tensor,
    _place: Tensor,
    per_token: int,
) -> Tensor:
    return grad_SO.new_empty(len(grad_SO) // max(1, per_token), inputs)


_ahead.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.bloomery.quantized_experts)
def _flops(
    _x: Shape,
    _codes: Shape,
    _scales: Shape,
    _outer: Shape,
    outputs: int,
    inputs: int,
    _reader: str,
    _first: int,
    _bias: Shape,
    _ends: Shape,
    order: Shape,
    *_: Any,
    **__: Any,
) -> int:
    """Of each row with one matrix, as torch counts products."""
    return 2 * order[0] * outputs * inputs


@register_flop_formula(torch.ops.bloomery.quantized_experts_backward)
def _flops_of_inputs(
    grad: Shape,
    _codes: Shape,
    _scales: Shape,
    _outer: Shape,
    outputs: int,
    inputs: int,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * grad[0] * outputs * inputs
