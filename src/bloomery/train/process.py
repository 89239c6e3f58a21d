"""Settings of the process that trains, out-of-memory detection and memory use."""

import re
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from bloomery.core.allocator import keep_freed_memory
from bloomery.core.device import cap_memory, is_accelerator, memory_stats
from bloomery.core.units import GIB, MIB
from bloomery.hardware.machine import read_machine
from bloomery.hardware.profile import build_profile
from bloomery.model.compiled_memory import fill_freed_memory
from bloomery.model.native import Uncompiled
from bloomery.monitor.events import DeviceStats
from bloomery.plan.types import TrainPlan

# The files of Python and PyTorch that a training process on a CPU maps; a part of the plan's runtime.
LIBRARIES = 120 * MIB


def set_up_process(train: TrainPlan, *, memory_limit: float) -> None:
    """Set threads and determinism, which affect rounding, what becomes of freed memory, and the limit of a GPU's."""
    torch.set_num_threads(train.threads)
    if train.device == "cpu" and train.ranks == 1 and keep_freed_memory():
        with suppress(Uncompiled):  # more memory, the same numbers
            fill_freed_memory()
    torch.use_deterministic_algorithms(train.deterministic)
    # Debug fill of fresh memory with NaN costs one pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not annotated
    # Out of memory in a ROCm driver can hang the machine; PyTorch's limit raises an error instead.
    cap_memory(train.device, memory_limit)


# The last alternative: oneDNN's message when a CPU kernel gets no memory.
FULL = re.compile(
    r"out of memory|ErrorOutOfMemory|ALLOC_FAILED|bad_alloc|not enough memory|(can't|cannot) allocate memory"
    r"|could not create a (primitive|memory)",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in PyTorch, a GPU library or Python."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(FULL.search(str(error)))


def training_device(machine: Path) -> tuple[int, str]:
    """Index and name of the accelerator that training uses, from the run's machine.json."""
    accelerator = build_profile(read_machine(machine)).accelerator if machine.is_file() else None
    return (0, "") if accelerator is None else (accelerator.index, accelerator.name)


def allocator_sample(
    stats: Mapping[str, int], *, step: int, device: tuple[int, str]
) -> DeviceStats:
    """The state of PyTorch's allocator. `stats`: of `core.device.memory_stats`."""
    reserved = stats.get("reserved_bytes.all.current", 0)
    # Free blocks next to a live tensor cannot be returned: their segment is in use.
    unusable = stats.get("inactive_split_bytes.all.current", 0)
    return DeviceStats(
        step=step,
        device=device[0],
        name=device[1],
        allocated_gib=round(stats.get("allocated_bytes.all.current", 0) / GIB, 3),
        reserved_gib=round(reserved / GIB, 3),
        fragmentation=round(unusable / reserved, 3) if reserved else 0.0,
        alloc_retries=stats.get("num_alloc_retries", 0),
    )


def resident_gib() -> float:
    """Resident memory of this process; its peak on systems other than Linux."""
    pages = Path("/proc/self/statm")
    if not pages.is_file():
        return peak_memory_gib("cpu")
    return int(pages.read_text().split()[1]) * resource.getpagesize() / GIB


def peak_memory_gib(device: str) -> float:
    """Peak memory of this process: allocated on the GPU, or resident on the CPU.

    On Linux pages of files count up to `LIBRARIES`: the kernel drops them when memory is short, and how many it maps of
    the same libraries depends on how it read them.
    """
    if is_accelerator(device):
        return memory_stats(device).get("allocated_bytes.all.peak", 0) / GIB
    status = Path("/proc/self/status")
    if status.is_file():  # not ru_maxrss, which on Linux starts at the parent's memory
        text = status.read_text()
        peak_bytes, file_bytes = (
            int(text.split(f"{key}:")[1].split()[0]) * 1024 for key in ("VmHWM", "RssFile")
        )
        return (peak_bytes - max(0, file_bytes - LIBRARIES)) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
