"""Who reads quantized weights on this machine: the kernels of bitsandbytes where they proved right, or our own code."""

import re

from bloomery.core import Choice
from bloomery.facts.limits import Dequantizer
from bloomery.hardware.machine import Machine

# Before 0.50 the 4-bit kernels of bitsandbytes were wrong on AMD GPUs.
OLDEST_BITSANDBYTES = (0, 50)


def dequantizer(machine: Machine, kind: str, *, device: str, compiled: bool) -> Choice[Dequantizer]:
    """The implementation that reads weights of this quantization. `compiled`: whether blocks are compiled."""
    if device == "cpu":
        return Choice("torch", "native dequantization on a CPU")
    # Compiled, the native code is one kernel; on a CPU that gains nothing.
    native: Dequantizer = "compiled" if compiled else "torch"
    reason = (
        "no other has a scale for each 64 of 8 bits"
        if kind == "int8"
        else _bitsandbytes_problem(machine)
    )
    if reason is None:
        return Choice(
            "bitsandbytes", "bitsandbytes reads them: its probe came out right on this GPU"
        )
    return Choice(
        native, f"Bloomery's own code{', compiled,' if compiled else ''} reads them: {reason}"
    )


def _bitsandbytes_problem(machine: Machine) -> str | None:
    """Why the kernels of bitsandbytes are not used; None where its probe was right on this GPU."""
    package = next(
        (package for package in machine.software.packages if package.name == "bitsandbytes"), None
    )
    if package is None:
        return "bitsandbytes is not installed"
    version = [int(number) for number in re.findall(r"\d+", package.version)[:2]]
    if len(version) < 2 or tuple(version) < OLDEST_BITSANDBYTES:
        return f"bitsandbytes {package.version} is older than 0.50"
    probe = next((probe for probe in machine.probes if probe.name == "bitsandbytes"), None)
    if probe is None:
        return "`bloomery doctor --probe` has not tried bitsandbytes"
    return None if probe.outcome == "ok" else f"the probe of bitsandbytes came out {probe.outcome}"
