"""NF4 and int8 in blocks of 64 weights, and scales in 8 bits: numbers there and back, in plain torch.

NF4 is bitwise identical to bitsandbytes, so that its kernels can read it. N numbers, flat; blocks
follow each other without regard to rows, and the last one may be short.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.device import computes_float64
from bloomery.core.errors import UserError
from bloomery.core.extras import install_packages
from bloomery.facts.limits import (
    DEQUANTIZED_ON_CPU,
    DEQUANTIZED_ON_GPU,
    SCALE_BYTES,
    SCALES_BLOCK,
    WEIGHTS_BLOCK,
    buffer_bytes,
)
from bloomery.model.io.parameters import first_row, local
from bloomery.model.norms import working_dtype
from bloomery.recipe.schema import Quantize

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
LEAST = 1e-38  # a block of zeros is divided by this


def quantize_nf4(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte with the first one above (uint8 [N / 2]), and the largest size in each block (float32)."""
    blocks, scales = _blocks(values_N, WEIGHTS_BLOCK)
    values = _normed(blocks, scales)
    levels = nf4_levels(values_N.device)
    # The number of bounds below each value, half way between the levels: torch.bucketize takes three times as long on
    # a CPU.
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    is_larger = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    for bound in (levels[:-1] + levels[1:]) / 2:
        torch.gt(values, bound, out=is_larger)
        codes += is_larger.view(torch.uint8)
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1])[: -(-len(values_N) // 2)], scales


def dequantize_nf4(codes: Tensor, scales: Tensor, into_N: Tensor) -> None:
    """Undoes `quantize_nf4`: level times scale in float32, rounded once to the dtype of `into_N`."""
    values = nf4_pairs(codes.device).index_select(0, codes.int()).view(torch.float32)
    _scaled(values[: len(into_N)], scales, into_N)


def quantize_int8(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from -127 to 127 (int8 [N]), and what a step of one is worth in each block (float32)."""
    blocks, largest = _blocks(values_N, WEIGHTS_BLOCK)
    codes = (_normed(blocks, largest) * 127.0).round_().to(torch.int8)
    return codes.view(-1)[: len(values_N)], largest / 127.0


def dequantize_int8(codes: Tensor, scales: Tensor, into_N: Tensor) -> None:
    """Undoes `quantize_int8`, in float32, rounded once to the dtype of `into_N`."""
    _scaled(codes.float(), scales, into_N)


def quantize_scales(scales_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits (uint8 [N]) and what they are of: the largest of each 256, then the mean (float32).

    The mean is summed in float64: a base that is quantized again, with other threads, is the same to the bit.
    """
    summed_N = scales_N if computes_float64(scales_N.device) else scales_N.cpu()
    mean = summed_N.double().mean().float().to(scales_N.device)
    blocks, outer = _blocks(scales_N - mean, SCALES_BLOCK)
    levels = dynamic_levels(scales_N.device)
    bounds = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(_normed(blocks, outer), bounds, out_int32=True).to(torch.uint8)
    return codes.view(-1)[: len(scales_N)], torch.cat([outer, mean[None]])


def dequantize_scales(codes: Tensor, outer: Tensor, first: int = 0) -> Tensor:
    """Float32 [N]: undoes `quantize_scales`; of some codes, the first of which is number `first`.

    `codes`: uint8 [N]; `outer`: float32, a scale per SCALES_BLOCK codes, then the mean.
    """
    scales = dynamic_levels(codes.device).index_select(0, codes.int())
    result = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
    # Codes before the end of the block of the first one have a scale of their own.
    block, offset = divmod(first, SCALES_BLOCK)
    ahead = min(len(codes), -offset % SCALES_BLOCK)
    if ahead:
        torch.mul(scales[:ahead], outer[block], out=result[:ahead])
        block += 1
    if ahead < len(codes):
        end = block - (ahead - len(codes)) // SCALES_BLOCK
        _scaled(scales[ahead:], outer[block:end], result[ahead:], size=SCALES_BLOCK)
    return result.add_(outer[-1])


def _blocks(values_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The values in rows of `size`, float32, zeros after the last; and the largest size in each row."""
    blocks = F.pad(values_N.float(), (0, -len(values_N) % size)).view(-1, size)
    return blocks, blocks.abs().amax(1)


def _normed(blocks: Tensor, scales: Tensor) -> Tensor:
    # A product with the reciprocal, as bitsandbytes' kernels do it: a quotient differs in the last bit.
    return blocks * scales.clamp_min(LEAST).reciprocal()[:, None]


def _scaled(values_N: Tensor, scales: Tensor, into_N: Tensor, *, size: int = WEIGHTS_BLOCK) -> None:
    """into = values times the scale of their block; the values are overwritten."""
    num_in_full_blocks = len(values_N) // size * size
    full_blocks = values_N[:num_in_full_blocks].view(-1, size)
    full_blocks.mul_(scales[: len(full_blocks), None])
    if num_in_full_blocks < len(values_N):
        values_N[num_in_full_blocks:].mul_(scales[-1])
    into_N.copy_(values_N)


@cache
def nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


@cache
def nf4_pairs(device: torch.device) -> Tensor:
    """The two float32 levels of every byte, as one int64 [256]: a look-up for two weights, of words of 8 bytes."""
    levels = nf4_levels(device)
    return (
        torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
        .view(torch.int64)
        .squeeze(1)
    )


@cache
def dynamic_levels(device: torch.device) -> Tensor:
    """256 levels in [-1, 1] whose exponents have ever more fractions: dynamic tree quantization (arXiv:1511.04561).

    For 10^-6 to 10^0 the middles of 1, 2, 4, ... 64 equal parts of [0.1, 1], with both signs; then 0 and 1.
    """
    positive = []
    for exponent in range(7):
        ends = torch.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append(10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2.0))
    magnitudes = torch.cat(positive)
    return torch.cat([-magnitudes, magnitudes, torch.tensor([0.0, 1.0])]).sort().values.to(device)


class Buffers(NamedTuple):
    """The buffers of a quantized weight [O, I]; `outer` is empty where the scales are float32.

    Of a stack of weights `outputs` and `inputs` are those of one (`dequantized_part`), or its rows are all of theirs.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    outputs: int
    inputs: int
    reader: str  # torch, compiled, bitsandbytes


_DEQUANTIZE: dict[torch.dtype, Callable[[Tensor, Tensor, Tensor], None]] = {
    torch.uint8: dequantize_nf4,
    torch.int8: dequantize_int8,
}


def dequantized(buffers: Buffers, dtype: torch.dtype) -> Tensor:
    """The weight as floats, [O, I]."""
    codes = buffers.codes
    shape = (buffers.outputs, buffers.inputs)
    num_values = buffers.outputs * buffers.inputs
    if buffers.outer.numel():
        scales = dequantize_scales(buffers.scales, buffers.outer.view(torch.float32))
    else:
        scales = buffers.scales.view(torch.float32)

    # The kernel of bitsandbytes, or one that torch compiles for weights of full blocks.
    if buffers.reader == "bitsandbytes":
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            codes, scales, WEIGHTS_BLOCK, "nf4", shape, dtype
        )
        return weight
    if buffers.reader == "compiled" and scales.numel() * WEIGHTS_BLOCK == num_values:
        values: Tensor = _one_kernel(codes.dtype)(codes, scales, nf4_levels(codes.device), dtype)
        return values.view(shape)

    # In plain torch piece by piece, so that the temporary float32 values stay few.
    dequantize = _DEQUANTIZE[codes.dtype]
    codes_per_byte = 2 if codes.dtype == torch.uint8 else 1
    weight_N = torch.empty(num_values, dtype=dtype, device=codes.device)
    piece_size = DEQUANTIZED_ON_CPU if codes.device.type == "cpu" else DEQUANTIZED_ON_GPU
    for start in range(0, num_values, piece_size):
        piece = weight_N[start : start + piece_size]
        end = start + len(piece)
        dequantize(
            codes[start // codes_per_byte : -(-end // codes_per_byte)],
            scales[start // WEIGHTS_BLOCK : -(-end // WEIGHTS_BLOCK)],
            piece,
        )
    return weight_N.view(shape)


def dequantized_part(
    buffers: Buffers, number: int, dtype: torch.dtype, *, first: int = 0
) -> Tensor:
    """Weight `number` [O, I] of a stack, whose weights are whole blocks: bitwise its rows of `dequantized`.

    Codes and scales may be those of some weights, from number `first` of all on; `outer` is that of all.
    """
    size = buffers.outputs * buffers.inputs
    code_bytes = size // 2 if buffers.codes.dtype == torch.uint8 else size
    blocks = size // WEIGHTS_BLOCK
    start = number * blocks
    if buffers.outer.numel():
        scale_codes = buffers.scales[start : start + blocks]
        outer = buffers.outer.view(torch.float32)
        scales = dequantize_scales(scale_codes, outer, first * blocks + start).view(torch.uint8)
    else:
        scales = buffers.scales[SCALE_BYTES * start : SCALE_BYTES * (start + blocks)]
    codes = buffers.codes[number * code_bytes : (number + 1) * code_bytes]
    return dequantized(buffers._replace(codes=codes, scales=scales, outer=buffers.outer[:0]), dtype)


@cache
def _one_kernel(codes: torch.dtype) -> Callable[..., Tensor]:
    """Of weights of whole blocks: (codes, scales, levels of nf4, dtype) to floats, without anything between."""
    return torch.compile(_nf4_at_once if codes == torch.uint8 else _int8_at_once, dynamic=True)


def _nf4_at_once(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    values = levels.index_select(0, torch.stack([codes >> 4, codes & 15], dim=1).view(-1).int())
    return (values.view(-1, WEIGHTS_BLOCK) * scales[:, None]).to(dtype)


def _int8_at_once(codes: Tensor, scales: Tensor, _levels: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float().view(-1, WEIGHTS_BLOCK) * scales[:, None]).to(dtype)


def ready_reader(reader: str) -> str:
    """The same, its operators known to torch. Raises UserError when bitsandbytes is gone since the plan was made."""
    if reader == "bitsandbytes":
        try:
            import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # its operators
        except ImportError as error:
            raise UserError(
                "the plan reads the 4-bit weights with bitsandbytes, which is not here any more",
                fix=install_packages("--no-deps", "bitsandbytes>=0.50.0"),
            ) from error
    return reader


def quantized_matmul(x: Tensor, buffers: Buffers) -> Tensor:
    """x [..., I] times the weight, [..., O], in the dtype of x. The gradient goes to x alone."""
    result: Tensor = _ahead(x, *buffers)
    return result


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    sizes: tuple[int, int, str]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@torch.library.custom_op("bloomery::quantized_matmul", mutates_args=())
def _ahead(
    x: Tensor, codes: Tensor, scales: Tensor, outer: Tensor, outputs: int, inputs: int, reader: str
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        weight_OI = dequantized(Buffers(codes, scales, outer, outputs, inputs, reader), x.dtype)
        return torch.nn.functional.linear(x, weight_OI)


@torch.library.custom_op("bloomery::quantized_matmul_backward", mutates_args=())
def _back(
    grad: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor,
    outputs: int,
    inputs: int,
    reader: str,
) -> Tensor:
    with torch.autocast(grad.device.type, enabled=False):
        return grad @ dequantized(
            Buffers(codes, scales, outer, outputs, inputs, reader), grad.dtype
        )


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:4])
    ctx.sizes = inputs[4:]


def _differentiate(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _back(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 6


@_ahead.register_fake
def _ahead_fake(
    x: Tensor, _codes: Tensor, _scales: Tensor, _outer: Tensor, outputs: int, *_: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@_back.register_fake
def _back_fake(
    grad: Tensor,
    _codes: Tensor,
    _scales: Tensor,
    _outer: Tensor,
    _outputs: int,
    inputs: int,
    *_: Any,
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], inputs)


_ahead.register_autograd(_differentiate, setup_context=_save)


AT_ONCE = 2**20  # weights that are quantized together: some 16 bytes each while that lasts


@final
class QuantizedWeight(nn.Module):
    """A frozen weight [O, I] of a linear layer, or a stack of them [E, O, I]. All buffers are bytes: `Module.to` leaves
    scales in float32.

    They are not in `state_dict`: who resumes quantizes the same base again, to the same bits. Under FSDP2 codes and
    scales are parameters, which are gathered as the bytes that they are, and `outer`, a byte of 4,000, stays whole.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        quantize: Quantize,
        *,
        reader: str = "torch",
        device: torch.device | None = None,
    ) -> None:
        """`reader`: "torch", on a GPU also "compiled" or, for nf4, "bitsandbytes". Undefined until `fill`."""
        super().__init__()
        self.shape = tuple(shape)
        *_, self.outputs, self.inputs = shape
        self.rows = math.prod(shape[:-1])
        self.base = quantize.kind
        # What computes the codes, where they are kept somewhere else: a CPU takes minutes for a large model.
        self.quantizes_on: torch.device | None = None
        self.reader = ready_reader(reader)
        sizes = buffer_bytes(self.rows * self.inputs, quantize.kind, quantize.double_quant)
        codes, scales, outer = (
            torch.empty(size, dtype=torch.uint8, device=device) for size in sizes
        )
        self.register_buffer(
            "codes", codes.view(torch.int8) if self.base == "int8" else codes, persistent=False
        )
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("outer", outer, persistent=False)

    def become_parameters(self) -> None:
        """In place: FSDP2 splits parameters alone. Must run before it."""
        for name in ("codes", "scales"):
            buffer = getattr(self, name)
            delattr(self, name)
            self.register_parameter(name, nn.Parameter(buffer, requires_grad=False))

    @property
    def stored(self) -> Buffers:
        """Of a stack with the rows of all weights below each other."""
        return self.part_buffers._replace(outputs=self.rows)

    @property
    def part_buffers(self) -> Buffers:
        """As `dequantized_part` takes them: of the weights that this rank holds."""
        codes, scales = local(self.codes), local(self.scales)
        return Buffers(codes, scales, self.outer, self.outputs, self.inputs, self.reader)

    @property
    def first_part(self) -> int:
        """The number of the first weight of a stack that this rank holds."""
        return first_row(self.codes) * self.shape[0] // len(self.codes)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., I] times the weight, plus the bias, in the dtype that autocast gives products."""
        product = quantized_matmul(x.to(working_dtype(x)), self.stored)
        return product if bias is None else product + bias.to(product.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as floats, a copy."""
        return dequantized(self.stored, dtype).view(self.shape)

    @property
    def device(self) -> torch.device:
        """Where `fill` computes, so that pieces had better be there."""
        if self.quantizes_on is None or self.codes.is_meta:
            return self.codes.device
        return self.quantizes_on

    @property
    def rows_at_once(self) -> int:
        """`fill` takes pieces of a multiple of so many rows: whole blocks."""
        return next(
            rows
            for rows in (1, 2, 4, 8, 16, 32, WEIGHTS_BLOCK)
            if rows * self.inputs % WEIGHTS_BLOCK == 0
        )

    @torch.no_grad()
    def fill(self, pieces: Iterable[Tensor], *, name: str) -> None:
        """Quantizes the weight, given as pieces of its rows in order, each on any device and in any dtype of floats.

        A rank that holds a part of it keeps that part. Raises UserError when a weight is not finite.
        """
        # Quantizing takes several times the memory of its input: pieces are split further, at rows
        # where blocks begin.
        quantize = quantize_int8 if self.base == "int8" else quantize_nf4
        rows_per_part = max(1, AT_ONCE // (self.inputs * self.rows_at_once)) * self.rows_at_once
        code_start = 0
        part_scales = []
        for piece in pieces:
            for part in torch.split(piece, rows_per_part):
                codes, scales = quantize(part.to(self.device).flatten())
                _put_from(code_start, codes, self.codes)
                code_start += len(codes)
                part_scales.append(scales)
        assert code_start == len(self.codes)

        # A block with a number that is not finite has such a scale.
        scales = torch.cat(part_scales)
        if not bool(scales.isfinite().all()):
            raise UserError(
                f"{name} holds weights that are not finite, which no {self.base} can stand for",
                where="model.from",
                fix="take a model whose weights are sound, or download it again",
            )
        if self.outer.numel():
            codes, outer = quantize_scales(scales)
            _put_from(0, codes, self.scales)
            self.outer.copy_(outer.view(torch.uint8))
        else:
            _put_from(0, scales.view(torch.uint8), self.scales)


def _put_from(start: int, values: Tensor, into: Tensor) -> None:
    """Copies `values` to where they are in `into`, from index `start` on; of a shard, those that this rank holds."""
    first, rows = first_row(into), local(into)
    begin, end = max(start, first), min(start + len(values), first + len(rows))
    if begin < end:
        rows[begin - first : end - first] = values[begin - start : end - start]
