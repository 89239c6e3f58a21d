"""Settings of the whole process that training depends on, and what it has used."""

import resource
import sys

import torch

from bloomery.plan.types import TrainPlan
from bloomery.units import GIB


def set_up_process(plan: TrainPlan) -> None:
    """Threads and determinism as planned: both decide about the last bit of every sum."""
    torch.set_num_threads(plan.threads)
    torch.use_deterministic_algorithms(plan.deterministic)
    # Filling fresh memory with NaN finds reads of uninitialised values at the price of one pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def peak_memory_gib(device: str) -> float:
    """The most that was allocated on the GPU, or resident on the CPU, since the process began."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
