"""A frozen weight in 4 or 8 bits: its buffers, how it gets in, and what a layer asks of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.norms import working_dtype
from bloomery.model.quantization.formats import (
    Stored,
    dequantised,
    quantise_int8,
    quantise_nf4,
    quantise_scales,
    quantised_product,
    ready,
)
from bloomery.model.quantization.sizes import BLOCK, buffer_bytes
from bloomery.recipe.schema import Quantize

AT_ONCE = 2**20  # weights that are quantised together: some 16 bytes each while that lasts


@final
class QuantisedWeight(nn.Module):
    """A frozen weight [O, I] of a linear layer. All buffers are bytes: `Module.to` leaves scales in float32.

    They are not in `state_dict`: who resumes quantises the same base again, to the same bits.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    def __init__(
        self, shape: Sequence[int], quantize: Quantize, *, reader: str = "torch", device: torch.device | None = None
    ) -> None:
        """`reader`: "torch", on a GPU also "compiled" or, for nf4, "bitsandbytes". Undefined until `fill`."""
        super().__init__()
        self.outputs, self.inputs = shape
        self.base, self.reader = quantize.base, ready(reader)
        sizes = buffer_bytes(self.outputs * self.inputs, quantize.base, quantize.double)
        codes, scales, outer = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        self.register_buffer("codes", codes.view(torch.int8) if self.base == "int8" else codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("outer", outer, persistent=False)

    @property
    def stored(self) -> Stored:
        return Stored(self.codes, self.scales, self.outer, self.outputs, self.inputs, self.reader)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., I] times the weight, plus the bias, in the dtype that autocast gives products."""
        product = quantised_product(x.to(working_dtype(x)), self.stored)
        return product if bias is None else product + bias.to(product.dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight as floats, a copy."""
        return dequantised(self.stored, dtype)

    @property
    def rows_at_once(self) -> int:
        """`fill` takes pieces of a multiple of so many rows: whole blocks."""
        return next(rows for rows in (1, 2, 4, 8, 16, 32, BLOCK) if rows * self.inputs % BLOCK == 0)

    @torch.no_grad()
    def fill(self, pieces: Iterable[Tensor], *, name: str) -> None:
        """Quantises the weight, given as pieces of its rows in order, each on any device and in any dtype of floats.

        Raises UserError when a weight is not finite.
        """
        quantise = quantise_int8 if self.base == "int8" else quantise_nf4
        first, found = 0, []
        for part in self._parts(pieces):
            codes, scales = quantise(part.to(self.codes.device).flatten())
            self.codes[first : first + len(codes)] = codes
            first += len(codes)
            found.append(scales)
        assert first == len(self.codes)
        scales = torch.cat(found)
        if not bool(scales.isfinite().all()):
            raise UserError(
                f"{name} holds weights that are not finite, which no {self.base} can stand for",
                where="model.from", remedy="take a model whose weights are sound, or download it again",
            )  # fmt: skip
        if self.outer.numel():
            codes, outer = quantise_scales(scales)
            self.scales.copy_(codes)
            self.outer.copy_(outer.view(torch.uint8))
        else:
            self.scales.copy_(scales.view(torch.uint8))

    def _parts(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same rows, in parts of whole blocks that take little memory while they are quantised."""
        rows = max(1, AT_ONCE // (self.inputs * self.rows_at_once)) * self.rows_at_once
        for piece in pieces:
            yield from torch.split(piece, rows)
