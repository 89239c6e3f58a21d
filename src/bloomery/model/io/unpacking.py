"""Numbers of packed tensors: codes, scales and zero points to float32, a few rows at a time.

O outputs, I inputs, G groups. Each rule is the one of the program that writes the format; all of them are computed in
float32 and rounded once, to the dtype of whoever asks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.io.packed import Packing
from bloomery.model.io.stored import StoredTensor

# Reads a part of a tensor: (the tensor, its first row, how many rows); rows None are all.
Read = Callable[[StoredTensor, tuple[int, int] | None], Tensor]
Rows = Callable[[int, int], Tensor]
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, then the same with the sign (OCP MX)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight columns of a word lie in it


def open_rows(tensor: StoredTensor, read: Read) -> Rows:
    """A function that gives rows (first, how many) of a packed tensor in float32, on the CPU.

    Scales are held from now on, and codes where they lie in columns. Raises UserError for codes that are no numbers.
    """
    assert tensor.packing is not None
    packing = tensor.packing
    parts = packing.by_role
    rules = {"flat": _flat, "experts": _experts, "gptq": _columns, "awq": _columns}
    rows = rules.get(packing.codes, _in_rows)(tensor, packing, parts, read)

    def checked(first: int, count: int) -> Tensor:
        values = rows(first, count)
        # A sum is finite where all numbers are, and takes a tenth of the time.
        if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
            raise UserError(
                "a packed matrix holds numbers that are not finite: its bytes are of another kind, or damaged",
                where=str(tensor.path),
                fix="download the model again, or take the unquantized one",
            )
        return values

    return checked


def _in_rows(
    tensor: StoredTensor, packing: Packing, parts: dict[str, StoredTensor], read: Read
) -> Rows:
    """value = (code - less - zero) * scale (+ bias), with a grid of scales over blocks of rows and columns."""
    outputs, inputs = tensor.shape
    high, wide = packing.block
    scales = _numbers(read(parts["scales"], None)) * packing.factor
    if "divisor" in parts:
        scales = scales / _numbers(read(parts["divisor"], None)).reshape(())
    if "multiplier" in parts:
        scales = scales * _numbers(read(parts["multiplier"], None)).reshape(())
    grid_RG = scales.reshape(-(-outputs // high), -1)
    zeros_RG = None
    if "zeros" in parts:
        zeros_RG = read(parts["zeros"], None).float().reshape(grid_RG.shape)
    elif "packed zeros" in parts:
        # Zero points are packed along the outputs, with the offset of the codes.
        words_WG = read(parts["packed zeros"], None)
        unpack = bits_of_words if packing.codes == "bits" else unpacked_bits
        zeros_RG = unpack(words_WG.t(), packing.bits).t()[:outputs] - packing.less
    biases_RG = _numbers(read(parts["biases"], None)) if "biases" in parts else None
    groups = _Groups(_order(parts, read), inputs, wide, grid_RG.shape[1], tensor)

    def rows(first: int, count: int) -> Tensor:
        codes_NI = _codes(read(parts["codes"], (first, count)), packing)[:, :inputs]
        row_N = torch.arange(first, first + count) // high
        if packing.less:
            codes_NI = codes_NI - packing.less
        values_NI = groups.scaled(
            codes_NI, grid_RG[row_N], None if zeros_RG is None else zeros_RG[row_N]
        )
        return values_NI if biases_RG is None else values_NI + groups.spread(biases_RG[row_N])

    return rows


def _codes(stored: Tensor, packing: Packing) -> Tensor:
    """Codes as float32, one for each weight; a tensor of its own."""
    if packing.codes == "fp4":
        return fp4_pairs(stored)
    if packing.codes == "bits":
        return bits_of_words(stored, packing.bits)
    if packing.codes == "stream":
        return unpacked_bits(stored.view(torch.int32), packing.bits)
    if packing.codes == "float8":  # four times as fast as torch's cast on a CPU
        every_byte = torch.arange(256, dtype=torch.uint8)
        numbers_of_byte = every_byte.view(stored.dtype).float()[:, None]
        return _looked_up(numbers_of_byte, stored.view(torch.uint8))
    return stored.float()


def _order(parts: dict[str, StoredTensor], read: Read) -> Tensor | None:
    """The group of each column, where columns were sorted by their activations; -1 throughout says that none was."""
    if "order" not in parts:
        return None
    order_I = read(parts["order"], None).long()
    return None if bool((order_I == -1).all()) else order_I


class _Groups:
    """Which of the G groups each of the I columns belongs to, and sums and products with a number per group."""

    def __init__(
        self, order_I: Tensor | None, inputs: int, wide: int, groups: int, tensor: StoredTensor
    ) -> None:
        """Raises UserError for a group that the scales do not have."""
        in_order_I = torch.arange(inputs) // wide
        self.group_I = in_order_I if order_I is None else order_I
        # Columns of whole groups in order need no index: a row is a matrix of groups.
        self.is_regular = inputs == wide * groups and torch.equal(self.group_I, in_order_I)
        if not 0 <= int(self.group_I.min()) <= int(self.group_I.max()) < groups:
            raise UserError(
                f"g_idx names a group beyond the {groups} of its scales",
                where=str(tensor.path),
                fix="download the model again",
            )

    def spread(self, numbers_NG: Tensor) -> Tensor:
        """A number per group as one per column, [N, I]."""
        return numbers_NG[:, self.group_I]

    def scaled(self, codes_NI: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None) -> Tensor:
        """(code - zero) * scale; the codes may be overwritten."""
        if not self.is_regular:
            if zeros_NG is not None:
                codes_NI = codes_NI - self.spread(zeros_NG)
            return codes_NI * self.spread(scales_NG)
        codes_NGw = codes_NI.reshape(len(codes_NI), scales_NG.shape[1], -1)
        if zeros_NG is not None:
            codes_NGw = codes_NGw.sub_(zeros_NG[..., None])
        return codes_NGw.mul_(scales_NG[..., None]).view(codes_NI.shape)


def _columns(
    tensor: StoredTensor, packing: Packing, parts: dict[str, StoredTensor], read: Read
) -> Rows:
    """GPTQ and AWQ keep [I, O]: rows of the matrix are columns of the file, so the codes are held in full."""
    outputs, inputs = tensor.shape
    words = read(parts["codes"], None)
    scales_OG = _numbers(read(parts["scales"], None)).t().contiguous()
    words_GW = read(parts["zeros"], None)
    # Version 1 stores zero points less one. Where one was 0, the words of whole fields borrowed over the borders of
    # fields, and adding to words undoes that (GPTQModel's `convert_gptq_v1_to_v2_format`).
    is_whole = 32 % packing.bits == 0
    if packing.plus and is_whole:
        words_GW = words_GW + sum(1 << shift for shift in range(0, 32, packing.bits))
    zeros_GO = unpacked_bits(words_GW, packing.bits)[:, :outputs]
    if packing.plus and not is_whole:
        zeros_GO = zeros_GO + packing.plus
    if packing.codes == "awq":
        zeros_GO = _in_order(zeros_GO)
    zeros_OG = zeros_GO.t().contiguous()
    groups = _Groups(_order(parts, read), inputs, packing.block[1], scales_OG.shape[1], tensor)

    def rows(first: int, count: int) -> Tensor:
        if packing.codes == "awq":
            start = first // 8
            pieces = unpacked_bits(words[:, start : -(-(first + count) // 8)], 4)
            codes_IN = _in_order(pieces)[:, first - 8 * start :][:, :count]
            codes_NI = codes_IN.t().contiguous()
        else:
            codes_NI = unpacked_bits(words[:, first : first + count].t(), packing.bits)
        few = slice(first, first + count)
        return groups.scaled(codes_NI, scales_OG[few], zeros_OG[few])

    return rows


def _in_order(columns: Tensor) -> Tensor:
    """Columns in the order of AWQ's words as columns of the matrix."""
    return columns.view(len(columns), -1, 8)[:, :, list(AWQ_ORDER)].reshape(columns.shape)


def _flat(
    tensor: StoredTensor, packing: Packing, parts: dict[str, StoredTensor], read: Read
) -> Rows:
    """bitsandbytes' 4 bits: two codes in a byte, the first above; a scale for each block of the flat matrix.

    Nested scales are codes of 8 bits themselves: level * scale + offset.
    """
    _, inputs = tensor.shape
    block, nested = packing.block
    levels = read(parts["levels"], None).float()
    pairs_of_byte = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    scales = read(parts["scales"], None)
    if "outer" in parts:
        outer = read(parts["outer"], None).float()
        outer_levels = read(parts["outer levels"], None).float()
        of_block = torch.arange(len(scales)) // nested
        scales = outer_levels[scales.int()] * outer[of_block] + packing.offset
    scales = scales.float()

    def rows(first: int, count: int) -> Tensor:
        start, end = first * inputs, (first + count) * inputs
        first_byte = start // 2
        codes = read(parts["codes"], (first_byte, -(-end // 2) - first_byte))
        values = _looked_up(pairs_of_byte, codes)[start - 2 * first_byte :][: end - start]
        if start % block == 0 and end % block == 0:
            values.view(-1, block).mul_(scales[start // block : end // block, None])
        else:
            values = values * scales[torch.arange(start, end) // block]
        return values.view(count, inputs)

    return rows


def _experts(
    tensor: StoredTensor, packing: Packing, parts: dict[str, StoredTensor], read: Read
) -> Rows:
    """MXFP4 of gpt-oss: [E, O, G, 16] bytes and exponents [E, O, G], as [E, I, O] (transformers' `mxfp4.py`)."""
    del packing, tensor

    def rows(first: int, count: int) -> Tensor:
        levels = fp4_pairs(read(parts["codes"], (first, count)))
        scales = _numbers(read(parts["scales"], (first, count)))
        return (levels * scales[..., None]).flatten(-2).transpose(1, 2)

    return rows


def fp4_pairs(codes: Tensor) -> Tensor:
    """Float32: twice as many numbers along the last axis; the low half of a byte is the first."""
    positive = torch.tensor(FP4_LEVELS)
    levels = torch.cat([positive, -positive])
    return _looked_up(torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1), codes)


def _looked_up(numbers_of_byte: Tensor, codes: Tensor) -> Tensor:
    """The numbers [256, K] that each byte stands for, K times as many along the last axis."""
    count = numbers_of_byte.shape[1]
    shape = (*codes.shape[:-1], codes.shape[-1] * count)
    if count != 2:
        return numbers_of_byte.index_select(0, codes.flatten().int()).view(shape)
    # Two float32 are moved as one word of 8 bytes.
    words = numbers_of_byte.contiguous().view(torch.int64).squeeze(1)
    return words.index_select(0, codes.flatten().int()).view(torch.float32).view(shape)


def bits_of_words(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of `bits` from int32 words along the last axis, from the lowest bit on, in float32.

    A word holds 32 // bits of them, and what is left of its bits is empty.
    """
    if 8 % bits == 0:
        return unpacked_bits(words, bits)
    shift = torch.arange(32 // bits) * bits
    numbers: Tensor = (words[..., None] >> shift) & (2**bits - 1)
    return numbers.flatten(-2).float()


def unpacked_bits(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of `bits` as in `bits_of_words`, but those of 3, 5 or 6 bits run on over the border of words."""
    if 8 % bits == 0:  # a byte holds whole numbers, and the first byte of a word is its lowest
        shift = torch.arange(8 // bits) * bits
        numbers_of_byte = ((torch.arange(256)[:, None] >> shift) & (2**bits - 1)).float()
        return _looked_up(numbers_of_byte, words.contiguous().view(torch.uint8))
    count = words.shape[-1] * 32 // bits
    position = torch.arange(count) * bits
    word, shift = position // 32, position % 32
    numbers = words[..., word] >> shift
    # A number that begins at the end of a word goes on in the next.
    goes_on = shift + bits > 32
    # An arithmetic shift fills with the sign: what is above the word's own bits is cleared first.
    inside = (1 << (32 - shift).clamp(max=bits)) - 1
    following = words[..., (word + 1).clamp(max=words.shape[-1] - 1)]
    rest = torch.where(goes_on, following << (32 - shift).clamp(max=31), 0)
    fields: Tensor = ((numbers & inside.int()) | rest) & (2**bits - 1)
    return fields.float()


def _numbers(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents of two, as MX has them."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127.0)
    return scales.float()
