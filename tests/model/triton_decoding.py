"""Triton's kernel for decoding in Triton's interpreter, a line of JSON for each case: test_decoding_triton.py runs it.

    TRITON_INTERPRET=1 python triton_decoding.py NUMBER ...

Oracle: attention in float64, text by text. Beside it stands the error of math attention in the same precision.
"""

import json
import random
import sys

import torch
from torch import Tensor
from triton_cases import PRECISIONS, WIDTHS, plain, rms

from bloomery.model.attention.blockwise import Options
from bloomery.model.attention.triton_attention import decode


def by_text(q: Tensor, k: Tensor, v: Tensor, counts: list[int], options: Options) -> Tensor:
    """Each text's token to its first keys."""
    rows = []
    for row, count in enumerate(counts):
        keys = k[row : row + 1, :, :count]
        values = v[row : row + 1, :, :count]
        is_seen = torch.ones(1, 1, 1, count, dtype=torch.bool)
        rows.append(plain(q[row : row + 1], keys, values, is_seen, options))
    return torch.cat(rows)


def case(number: int) -> dict:
    generator = random.Random(number)
    torch.manual_seed(number)
    dtype = PRECISIONS[number % 3]
    slots = generator.randint(1, 9)
    key_heads = generator.choice([1, 2])
    heads = key_heads * generator.choice([1, 2, 4, 7, 20])
    width = generator.choice(WIDTHS)
    capacity = generator.choice([1, generator.randint(2, 300), generator.randint(257, 600)])
    max_count = generator.choice([generator.randint(1, min(300, capacity)), min(300, capacity)])
    is_ragged = generator.random() < 0.7
    counts = [generator.randint(1, max_count) if is_ragged else max_count for _ in range(slots)]
    options = Options(None, generator.choice([None, 4.0]), width**-0.5, 0.0)

    # A view of the slots' memory, as the cache returns it; what no text sees must not matter.
    q = torch.randn(slots, 1, heads, width).to(dtype).transpose(1, 2)
    memory = torch.full((2, slots + 1, key_heads, capacity, width), float("nan"), dtype=dtype)
    for row, count in enumerate(counts):
        memory[:, row, :, :count] = torch.randn(2, key_heads, count, width).to(dtype)
    k, v = memory[:, :slots, :, : max(counts)]
    num_keys = torch.tensor(counts, dtype=torch.int32) if is_ragged else None

    kernel_output = decode(q, k, v, num_keys, options.softcap, options.scale)
    exact_output = by_text(q.double(), k.double(), v.double(), counts, options)
    math_output = by_text(q, k, v, counts, options)
    return {
        "case": number,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [slots, heads, key_heads, capacity, width],
        "counts": counts,
        "softcap": options.softcap,
        "same_shape": kernel_output.shape == q.shape and kernel_output.dtype == dtype,
        "repeats": torch.equal(
            kernel_output, decode(q, k, v, num_keys, options.softcap, options.scale)
        ),
        "error": rms(kernel_output - exact_output),
        "math": rms(math_output - exact_output),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in sys.argv[1:]:
        print(json.dumps(case(int(number))), flush=True)
