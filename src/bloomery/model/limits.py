"""How much the runtime works on at once, and the bytes of quantized bases: code obeys it and a plan counts with it.

No torch. Those of optimizers are here too, because a plan is made below training. Of quantized bases: the sizes of
their blocks, the bytes that they take, and whose kernels read them.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from bloomery.core import Choice
from bloomery.hardware.machine import Machine

# Entries of the vocabulary whose logits exist at once on a CPU: a thousand rows of them stay in the caches, so that the
# passes between the matmuls cost little, and computing them twice is quicker than reading all 50,000 from memory.
CPU_TILE = 4096
ATTENTION_BLOCK = 256  # queries and keys of a tile of blockwise attention
# of such tiles that exist at once: a cache's worth, or enough to fill a GPU
CPU_SCORES = 2**20
GPU_SCORES = 2**23
# Numbers that an optimizer of our own works on at once: 16 million (64 MiB of float32) keep a device busy, 128 thousand
# stay in a core's cache.
GPU_PIECE = 2**24
CPU_PIECE = 2**17
# numbers of a state that share a scale: arXiv:2110.02861 takes 2048, bitsandbytes 256 today
INT8_BLOCK = 256
# tensors of fewer numbers keep float32 moments, as in bitsandbytes: they decide much
INT8_SMALLEST = 4096
# numbers of matrices orthogonalized at once: enough to fill a device, 100 MiB of scratch at most
MUON_STACK = 2**24


BLOCK = 64  # weights that share a scale (arXiv:2305.14314, section 3; bitsandbytes' default)
# scales that share a scale of their own under double quantization (the same section)
SCALES_BLOCK = 256
# of quantized weights; the first two are our own
Dequantizer = Literal["torch", "compiled", "bitsandbytes"]
SCALE_BYTES = 4  # float32
# Weights dequantized at once, and the scratch bytes of each in addition to its float. On a CPU they stay in its caches.
DEQUANTIZED_ON_CPU = 2**17
DEQUANTIZED_ON_GPU = 2**23
PIECE_BYTES = 6
OLDEST = (0, 50)  # of bitsandbytes: before 0.50 its 4-bit kernels were wrong on AMD GPUs


def storage_bytes(shape: Sequence[int], base: str, double: bool) -> int:
    """Bytes of a quantized weight of `shape`: exactly the buffers of `QuantizedWeight`."""
    return sum(buffer_bytes(math.prod(shape), base, double))


def buffer_bytes(count: int, base: str, double: bool) -> tuple[int, int, int]:
    """Bytes of `count` weights' codes, of their scales, and of what those are scaled by (empty unless `double`)."""
    blocks = -(-count // BLOCK)
    if base == "int8":
        return count, blocks * SCALE_BYTES, 0
    assert base == "nf4"
    codes = -(-count // 2)
    if not double:
        return codes, blocks * SCALE_BYTES, 0
    # one more: what is subtracted from them all
    return codes, blocks, (-(-blocks // SCALES_BLOCK) + 1) * SCALE_BYTES


def dequantizer(machine: Machine, base: str, *, device: str, compiled: bool) -> Choice[Dequantizer]:
    """The implementation of dequantization: "bitsandbytes", or Bloomery's "torch" or "compiled".

    `compiled`: whether blocks are; compiled, our code is one kernel, which only a GPU has use for.
    """
    if device == "cpu":
        return Choice("torch", "native dequantization on a CPU")
    ours: Dequantizer = "compiled" if compiled else "torch"
    missing = (
        "no other has a scale for each 64 of 8 bits"
        if base == "int8"
        else _without_bitsandbytes(machine)
    )
    if missing is None:
        return Choice(
            "bitsandbytes", "bitsandbytes reads them: its probe came out right on this GPU"
        )
    return Choice(
        ours, f"Bloomery's own code{', compiled,' if compiled else ''} reads them: {missing}"
    )


def _without_bitsandbytes(machine: Machine) -> str | None:
    """Why its kernels are not taken; None: they are there and were right."""
    installed = next(
        (package for package in machine.software.packages if package.name == "bitsandbytes"), None
    )
    if installed is None:
        return "bitsandbytes is not installed"
    numbers = [int(number) for number in re.findall(r"\d+", installed.version)[:2]]
    if len(numbers) < 2 or tuple(numbers) < OLDEST:
        return f"bitsandbytes {installed.version} is older than 0.50"
    probe = next((probe for probe in machine.probes if probe.name == "bitsandbytes"), None)
    if probe is None:
        return "`bloomery doctor --probe` has not tried bitsandbytes"
    return None if probe.outcome == "ok" else f"the probe of bitsandbytes came out {probe.outcome}"
