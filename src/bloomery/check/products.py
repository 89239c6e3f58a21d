"""A product of matrices whose result is known: each device computes it before the first step, in milliseconds."""

import torch

from bloomery.core.device import is_accelerator, release_cached_memory, reset_peak_memory
from bloomery.plan.types import TrainPlan

CPU_SIZE = 256
GPU_SIZE = 4096  # multiplies 69 G pairs: every compute unit takes part
TRIES = 3  # a device that is wrong now and then
LARGEST = 2**20  # of the numbers by which products are compared


def product_problem(plan: TrainPlan) -> str:
    """What is wrong with this device's products, in float32 and the precision of the run; "" where nothing is."""
    half_precisions = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    dtypes = {
        torch.float32,
        half_precisions.get(plan.precision.removesuffix("-pure"), torch.float32),
    }
    for dtype in sorted(dtypes, key=str):
        try:
            wrong_rows = wrong_rows_of_product(plan.device, dtype)
        except RuntimeError as error:  # of the driver: a device that is gone, or out of memory
            return f"fails: {str(error).strip().partition(chr(10))[0][:150]}"
        if wrong_rows:
            name = str(dtype).removeprefix("torch.")
            return (
                f"computes wrong {name} products: {wrong_rows:,} of {_size_on(plan.device):,} rows"
            )
    release_cached_memory()
    reset_peak_memory(plan.device)
    return ""


def _size_on(device: str) -> int:
    return GPU_SIZE if is_accelerator(device) else CPU_SIZE


def wrong_rows_of_product(device: str, dtype: torch.dtype) -> int:
    """How many rows of one large product are wrong on the device.

    The factors hold -1, 0 and 1. Every entry of their product is a whole number, the largest 233, which every dtype
    holds exactly and sums to in any order: the device must return exactly these. Instead of the product the CPU
    computes A (B v) in float64, for numbers v, and compares it with (A B) v (Freivalds 1977): n^2 operations, not n^3.
    """
    size = _size_on(device)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-1, 2, (size, size), generator=generator, dtype=torch.int8) for _ in range(2)
    )
    vector = torch.randint(-LARGEST, LARGEST, (size,), generator=generator).double()
    # Below 2^53 everywhere: float64 is exact.
    expected = left.double() @ (right.double() @ vector)

    left_on_device = left.to(device, dtype)
    right_on_device = right.to(device, dtype)
    wrong_rows = torch.zeros(size, dtype=torch.bool)
    for _ in range(TRIES):
        product = (left_on_device @ right_on_device).cpu().double()
        wrong_rows |= product @ vector != expected
    return int(wrong_rows.sum())
