"""Random cases of Triton's attention kernels in its interpreter, a line of JSON each: test_attention_triton.py runs it.

    TRITON_INTERPRET=1 python triton_cases.py NUMBER ... [tiles]

With `tiles`: each case once for every tile of the table.

Oracle: plain attention in float64. Beside it stands the error of PyTorch's math attention in the same precision.
"""

import json
import random
import sys
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import interpreter

from bloomery.model.attention import tiles, triton_attention
from bloomery.model.attention.attend import document_starts
from bloomery.model.attention.blockwise import Options, QueryDocuments
from bloomery.model.attention.tiles import TileShape

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (64, 80, 96, 128, 256)


def as_floats(array: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The interpreter keeps bfloat16 as its 16 bits: those of a float32 without its lower half."""
    if dtype != tl.bfloat16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def dot(self, a, b, d, _precision, _imprecise):
    """The interpreter multiplies the bits of bfloat16 as if they were integers (triton 3.8): here they are numbers."""
    product = np.matmul(
        as_floats(a.data, a.dtype.scalar), as_floats(b.data, b.dtype.scalar), dtype=d.data.dtype
    )
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def rounded(self, source, target_type):
    """The interpreter cuts the lower half of a float32 off (triton 3.8): GPUs round to the nearest bfloat16."""
    if target_type.scalar != tl.bfloat16:
        return self.cast_impl(source, target_type)
    nearest = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
    return interpreter.TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)


interpreter.InterpreterBuilder.create_dot = dot
interpreter.InterpreterBuilder.create_fp_trunc = rounded


def visible(first_BT: Tensor | None, length: int, window: int | None) -> Tensor:
    """[B or 1, 1, T, T], True where the query sees the key."""
    position = torch.arange(length)
    distance = position[:, None] - position
    is_seen = (distance >= 0)[None, None]
    if window is not None:
        is_seen = is_seen & (distance < window)
    if first_BT is not None:
        is_seen = is_seen & (position >= first_BT[:, None, :, None])
    return is_seen


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_seen: Tensor,
    options: Options,
    is_kept: Tensor | None = None,
) -> Tensor:
    """Attention by its formula, in the precision of the inputs. `is_kept`: of dropout, True where a share stays."""
    heads_per_key = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(heads_per_key, 1).mT * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    shares = torch.softmax(scores.masked_fill(~is_seen, float("-inf")), -1)
    if is_kept is not None:
        shares = shares * is_kept / (1 - round(options.dropout * 65536) / 65536)
    return shares.to(v.dtype) @ v.repeat_interleave(heads_per_key, 1)


def math_attention(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, options: Options) -> Tensor:
    """PyTorch's math backend; a soft-cap, which it lacks, by the formula."""
    if options.softcap is not None:
        return plain(q, k, v, is_seen, options)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_seen, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def results(attention: Callable[..., Tensor], inputs: list[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attention(*leaves)
    output.backward(d_out.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def kept_by(seed: Tensor, options: Options, shape: tuple[int, int, int, int]) -> Tensor:
    """Which shares dropout keeps, [B, H, T, T]: of equal scores and values that name their key, in parts of a width."""
    batch, heads, length, width = shape
    zeros = torch.zeros(batch, heads, length, width)
    kept_parts = []
    for start in range(0, length, width):
        names = torch.zeros(length, width)
        span = range(start, min(start + width, length))
        names[list(span), [key - start for key in span]] = 1.0
        values = names.expand(batch, heads, length, width).contiguous()
        plain_options = options._replace(window=None, softcap=None)
        output = triton_attention.triton(
            zeros, zeros, values, QueryDocuments(None, None, seed), plain_options
        )
        kept_parts.append(output[..., : len(span)] > 0)
    return torch.cat(kept_parts, -1)


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def table_tiles() -> list[TileShape]:
    """All candidates of all GPUs; the interpreter has no warps."""
    rows = [row[kernel] for row in tiles._table() for kernel in tiles.KERNELS]
    return [
        TileShape(*size, 4) for size in sorted({tuple(tile[:2]) for row in rows for tile in row})
    ]


def case(number: int, tile: TileShape | None = None) -> dict:
    generator = random.Random(number)
    torch.manual_seed(number)
    dtype = PRECISIONS[number % 3]
    batch = generator.choice([1, 1, 2])
    key_heads = generator.choice([1, 2])
    heads = key_heads * generator.choice([1, 1, 2, 3])
    length = generator.choice([1, 2, generator.randint(3, 70), generator.randint(70, 300)])
    width = generator.choice(WIDTHS)
    window = generator.choice([None, None, generator.randint(1, length + 5)])
    options = Options(
        None if window is None or window >= length else window,
        generator.choice([None, None, 4.0]),
        width**-0.5,
        generator.choice([0.0, 0.0, 0.1, 0.5]) if length <= 70 else 0.0,
    )
    first_BT = None
    if generator.random() < 0.6:
        documents = [sorted(generator.choices(range(5), k=length)) for _ in range(batch)]
        first_BT = document_starts(torch.tensor(documents))

    def projection(num_heads: int) -> Tensor:
        return torch.randn(batch, length, num_heads, width).to(dtype).transpose(1, 2)

    # Any tile gives the right numbers; those of GPUs have more queries than keys, or the reverse.
    rows, keys = generator.choice([(64, 64), (64, 16), (16, 32), (32, 32)])
    tile = tile or TileShape(rows, keys, 4)
    triton_attention.tile_shape = lambda *_args, **_settings: tile
    # GPUs with vector products read the columns of a wide head in parts: every other case does it here.
    part = 32 if number % 2 else tiles.MAX_WIDTH
    triton_attention.columns_at_once = lambda _arch, width: min(part, tiles.padded_width(width))

    inputs = [projection(heads), projection(key_heads), projection(key_heads)]
    d_out = torch.randn(batch, heads, length, width).to(dtype)
    seed = torch.tensor(generator.randrange(2**62)) if options.dropout else None
    is_seen = visible(first_BT, length, options.window)

    def kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return triton_attention.triton(q, k, v, QueryDocuments(first_BT, None, seed), options)

    kernel_results = results(kernels, inputs, d_out)
    repeated_results = results(kernels, inputs, d_out)
    is_kept = None if seed is None else kept_by(seed, options, (batch, heads, length, width))
    exact_results = results(
        lambda q, k, v: plain(q, k, v, is_seen, options, is_kept),
        [x.double() for x in inputs],
        d_out,
    )
    if is_kept is None:
        math_results = results(
            lambda q, k, v: math_attention(q, k, v, is_seen, options), inputs, d_out
        )
    else:
        math_results = results(
            lambda q, k, v: plain(q, k, v, is_seen, options, is_kept), inputs, d_out
        )
    causal = visible(None, length, None)
    return {
        "case": number,
        "tile": tile,
        "part": part,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [batch, heads, key_heads, length, width],
        "options": list(options),
        "documents": first_BT is not None,
        "repeats": all(map(torch.equal, kernel_results, repeated_results)),
        "kept": None if is_kept is None else int((is_kept & causal).sum()),
        "seen": int(causal.sum()) * batch * heads,
        "error": [rms(a - b) for a, b in zip(kernel_results, exact_results, strict=True)],
        "math": [rms(a - b) for a, b in zip(math_results, exact_results, strict=True)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in sys.argv[1:]:
        for tile in table_tiles() if "tiles" in sys.argv else [None]:
            if number != "tiles":
                print(json.dumps(case(int(number), tile)), flush=True)
