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
    is a bfloat16 already stays as it is. NaN becomes infinite: its bits could wrap round to zero. It happens in the
    memory of `exact`, whose numbers are lost. The result is a view of the upper halves, to be copied; every machine
    that PyTorch has GPUs on keeps the lower half first.
    """
    infinity = float("inf")
    numbers = torch.nan_to_num_(exact, nan=infinity, posinf=infinity, neginf=-infinity)
    if bits.device.type == "cpu":
        bits = bits.to(torch.int32)  # which the addition would do unseen
    words = numbers.view(torch.int32).add_(bits.view(exact.shape)).add_(_HALF)  # bits: -2^15 to 2^15 - 1
    return words.view(torch.int16)[..., 1::2].view(torch.bfloat16)
