"""The product with a quantised weight as one torch operator: its floats exist only while that runs, forward and back.

Legend: I inputs, O outputs of the layer. One operator, so that compiled blocks and checkpointing keep what it gives,
and never the weight that it made.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bloomery.errors import UserError
from bloomery.model.quantize_facts import BLOCK, CPU_PIECE, GPU_PIECE
from bloomery.model.quantize_formats import dequantise_int8, dequantise_nf4, dequantise_scales, nf4_levels


class Stored(NamedTuple):
    """The buffers of a quantised weight [O, I]; `outer` is empty where the scales are float32."""

    codes: Tensor
    scales: Tensor
    outer: Tensor
    outputs: int
    inputs: int
    reader: str  # torch, compiled, bitsandbytes


_READ: dict[torch.dtype, Callable[[Tensor, Tensor, Tensor], None]] = {
    torch.uint8: dequantise_nf4,
    torch.int8: dequantise_int8,
}


def dequantised(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The weight as floats, [O, I]."""
    codes, shape = stored.codes, (stored.outputs, stored.inputs)
    if stored.outer.numel():
        scales = dequantise_scales(stored.scales, stored.outer.view(torch.float32))
    else:
        scales = stored.scales.view(torch.float32)
    if stored.reader == "bitsandbytes":
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", shape, dtype)
        return weight
    if stored.reader == "compiled" and scales.numel() * BLOCK == stored.outputs * stored.inputs:
        values: Tensor = _one_kernel(codes.dtype)(codes, scales, nf4_levels(codes.device), dtype)
        return values.view(shape)
    read, in_a_byte = _READ[codes.dtype], 2 if codes.dtype == torch.uint8 else 1
    flat = torch.empty(stored.outputs * stored.inputs, dtype=dtype, device=codes.device)
    piece = CPU_PIECE if codes.device.type == "cpu" else GPU_PIECE
    for first in range(0, len(flat), piece):
        part = flat[first : first + piece]
        some = codes[first // in_a_byte : -(-(first + len(part)) // in_a_byte)]
        read(some, scales[first // BLOCK : -(-(first + len(part)) // BLOCK)], part)
    return flat.view(shape)


@cache
def _one_kernel(codes: torch.dtype) -> Callable[..., Tensor]:
    """Of weights of whole blocks: (codes, scales, levels of nf4, dtype) to floats, without anything between."""
    return torch.compile(_nf4_at_once if codes == torch.uint8 else _int8_at_once, dynamic=True)


def _nf4_at_once(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    values = levels.index_select(0, torch.stack([codes >> 4, codes & 15], dim=1).view(-1).int())
    return (values.view(-1, BLOCK) * scales[:, None]).to(dtype)


def _int8_at_once(codes: Tensor, scales: Tensor, _levels: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float().view(-1, BLOCK) * scales[:, None]).to(dtype)


def ready(reader: str) -> str:
    """The same, its operators known to torch. Raises UserError when bitsandbytes is gone since the plan was made."""
    if reader == "bitsandbytes":
        try:
            import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # its operators
        except ImportError as error:
            raise UserError(
                "the plan reads the 4-bit weights with bitsandbytes, which is not here any more",
                remedy="pip install --no-deps 'bitsandbytes>=0.50.0'",
            ) from error
    return reader


def quantised_product(x: Tensor, stored: Stored) -> Tensor:
    """x [..., I] times the weight, [..., O], in the dtype of x. The gradient goes to x alone."""
    result: Tensor = _ahead(x, *stored)
    return result


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    sizes: tuple[int, int, str]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@torch.library.custom_op("bloomery::quantised_product", mutates_args=())
def _ahead(x: Tensor, codes: Tensor, scales: Tensor, outer: Tensor, outputs: int, inputs: int, reader: str) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        weight_OI = dequantised(Stored(codes, scales, outer, outputs, inputs, reader), x.dtype)
        return torch.nn.functional.linear(x, weight_OI)


@torch.library.custom_op("bloomery::quantised_product_backward", mutates_args=())
def _back(grad: Tensor, codes: Tensor, scales: Tensor, outer: Tensor, outputs: int, inputs: int, reader: str) -> Tensor:
    with torch.autocast(grad.device.type, enabled=False):
        return grad @ dequantised(Stored(codes, scales, outer, outputs, inputs, reader), grad.dtype)


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:4])
    ctx.sizes = inputs[4:]


def _differentiate(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _back(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 6


@_ahead.register_fake
def _ahead_fake(x: Tensor, _codes: Tensor, _scales: Tensor, _outer: Tensor, outputs: int, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@_back.register_fake
def _back_fake(
    grad: Tensor, _codes: Tensor, _scales: Tensor, _outer: Tensor, _outputs: int, inputs: int, *_: Any
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], inputs)


_ahead.register_autograd(_differentiate, setup_context=_save)
