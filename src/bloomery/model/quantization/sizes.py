"""Quantized bases without torch: the sizes of their blocks, the bytes that they take, whose kernels read them."""

import math
import re
from collections.abc import Sequence
from typing import Literal

from bloomery.core import Choice
from bloomery.hardware.machine import Machine

BLOCK = 64  # weights that share a scale (arXiv:2305.14314, section 3; bitsandbytes' default)
SCALES_BLOCK = 256  # scales that share a scale of their own under double quantization (the same section)
Dequantizer = Literal["torch", "compiled", "bitsandbytes"]  # of quantized weights; the first two are our own
SCALE_BYTES = 4  # float32
# Weights dequantized at once, and the scratch bytes of each in addition to its float. On a CPU they stay in its caches.
DEQUANTIZED_ON_CPU, DEQUANTIZED_ON_GPU, PIECE_BYTES = 2**17, 2**23, 6
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
    return codes, blocks, (-(-blocks // SCALES_BLOCK) + 1) * SCALE_BYTES  # one more: what is subtracted from them all


def backend(machine: Machine, base: str, *, device: str, compiled: bool) -> Choice[Dequantizer]:
    """The implementation of dequantization: "bitsandbytes", or Bloomery's "torch" or "compiled".

    `compiled`: whether blocks are; compiled, our code is one kernel, which only a GPU has use for.
    """
    if device == "cpu":
        return Choice("torch", "native dequantization on a CPU")
    ours: Dequantizer = "compiled" if compiled else "torch"
    missing = "no other has a scale for each 64 of 8 bits" if base == "int8" else _without_bitsandbytes(machine)
    if missing is None:
        return Choice("bitsandbytes", "bitsandbytes reads them: its probe came out right on this GPU")
    return Choice(ours, f"Bloomery's own code{', compiled,' if compiled else ''} reads them: {missing}")


def _without_bitsandbytes(machine: Machine) -> str | None:
    """Why its kernels are not taken; None: they are there and were right."""
    installed = next((package for package in machine.software.packages if package.name == "bitsandbytes"), None)
    if installed is None:
        return "bitsandbytes is not installed"
    numbers = [int(number) for number in re.findall(r"\d+", installed.version)[:2]]
    if len(numbers) < 2 or tuple(numbers) < OLDEST:
        return f"bitsandbytes {installed.version} is older than 0.50"
    probe = next((probe for probe in machine.probes if probe.name == "bitsandbytes"), None)
    if probe is None:
        return "`bloomery doctor --probe` has not tried bitsandbytes"
    return None if probe.outcome == "ok" else f"the probe of bitsandbytes came out {probe.outcome}"
