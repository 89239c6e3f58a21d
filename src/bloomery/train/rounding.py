"""Stochastic rounding to bfloat16: unbiased, and a function of a key, so that a resumed run rounds in the same way."""

import hashlib

import torch
from torch import Tensor

_HALF = 1 << 15


def key_of(*parts: int | str) -> int:
    """A seed of 63 bits for what these words and numbers name."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def random_bits(count: int, *, key: int, device: torch.device) -> Tensor:
    """int16 [count], every pattern equally likely; the key's own stream, so no generator has a state to keep."""
    generator = torch.Generator(device).manual_seed(key)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]


def rounded(exact: Tensor, bits: Tensor) -> Tensor:
    """bfloat16 beside each float32 number, the nearer one the likelier: on average the number itself.

    A bfloat16 is the upper half of a float32: a random lower half is added to the whole, and the sum is cut off. What
    is a bfloat16 already stays as it is. What is not finite becomes NaN, whose bits could else wrap round to zero.
    """
    words = exact.view(torch.int32) + bits.view(exact.shape)  # -2^15 to 2^15 - 1
    upper = words.add_(_HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    del words
    return upper.add_((exact - exact).to(torch.bfloat16))
