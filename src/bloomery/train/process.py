"""Settings of the whole process that training depends on, and what it has used."""

import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from bloomery.core.units import GIB
from bloomery.hardware.machine import read_machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.events import DeviceStats
from bloomery.plan.types import RunPlan


def set_up_process(plan: RunPlan) -> None:
    """Threads and determinism as planned, which both decide about the last bit of a sum, and an end to GPU memory."""
    torch.set_num_threads(plan.train.threads)
    torch.use_deterministic_algorithms(plan.train.deterministic)
    # Filling fresh memory with NaN finds reads of uninitialised values at the price of one pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not annotated
    if plan.train.device == "cuda":
        # A driver that runs out of memory can hang the machine (ROCm); PyTorch's own limit raises an error instead.
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.memory.limit / whole))


# The last is how oneDNN says on a CPU that it found no memory for a kernel.
FULL = re.compile(
    r"out of memory|ErrorOutOfMemory|ALLOC_FAILED|bad_alloc|not enough memory|(can't|cannot) allocate memory"
    r"|could not create a (primitive|memory)",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: of PyTorch's allocators, of a GPU library beside them, or of Python itself."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(FULL.search(str(error)))


def training_device(machine: Path) -> tuple[int, str]:
    """Number and name, among the accelerators of the run's recorded machine, of the one that training uses."""
    used = build_profile(read_machine(machine)).accelerator if machine.is_file() else None
    return (0, "") if used is None else (used.index, used.name)


def allocator_sample(stats: Mapping[str, int], *, step: int, device: tuple[int, str]) -> DeviceStats:
    """What PyTorch's allocator holds. `stats`: those of `torch.cuda.memory_stats()`."""
    reserved = stats.get("reserved_bytes.all.current", 0)
    between = stats.get("inactive_split_bytes.all.current", 0)  # a segment with a tensor in it cannot go back
    return DeviceStats(
        step=step,
        device=device[0],
        name=device[1],
        allocated_gib=round(stats.get("allocated_bytes.all.current", 0) / GIB, 3),
        reserved_gib=round(reserved / GIB, 3),
        fragmentation=round(between / reserved, 3) if reserved else 0.0,
        alloc_retries=stats.get("num_alloc_retries", 0),
    )


def resident_gib() -> float:
    """What this process holds in memory now; elsewhere than on Linux, the most that it ever held."""
    pages = Path("/proc/self/statm")
    if not pages.is_file():
        return peak_memory_gib("cpu")
    return int(pages.read_text().split()[1]) * resource.getpagesize() / GIB


def peak_memory_gib(device: str) -> float:
    """The most that was allocated on the GPU, or resident on the CPU, since the process began."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    status = Path("/proc/self/status")
    if status.is_file():  # not ru_maxrss: on Linux it begins with what the process held that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
