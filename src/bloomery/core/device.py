"""The one door to devices: what a kind of device can do, and PyTorch's calls for any kind.

A device is a name ("cuda", "xpu:1") or a torch.device; without a number it is the current one of its kind. A CPU
answers every call: it has nothing to wait for, and its memory is the host's. torch is imported inside functions.

PyTorch has these calls twice: in a module of each kind (torch.cuda, torch.xpu, torch.mps), and in torch.accelerator for
whatever kind is here. The module comes first, as it has more; torch.accelerator serves kinds from outside PyTorch. Its
functions for memory came with torch 2.9, that for free memory (`get_memory_info`) with 2.10.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

from bloomery.core.errors import UserError

if TYPE_CHECKING:
    import torch

AnyDevice: TypeAlias = "str | torch.device"
# streams: copies out of pinned memory run beside the work. memory counts: the allocator knows what tensors hold, and
# held at most. triton, varlen, flex: kernels of Triton, of varlen_attn and of FlexAttention, forward and backward.
# float64: in general; `computes_float64` asks the device, too. cpu: kernels that only a CPU has, and C++ of ours.
Capability = Literal["streams", "memory counts", "triton", "varlen", "flex", "float64", "cpu"]


@final
@dataclass(frozen=True)
class DeviceKind:
    """What PyTorch can do on every device of a kind. The facts of single GPUs stand in `hardware/gpus.toml`."""

    type: str  # PyTorch's name
    capabilities: frozenset[Capability]
    prefixes: tuple[str, ...] = ()  # what users write before the number of a device: hip:0


CPU = DeviceKind("cpu", frozenset[Capability]({"float64", "cpu"}))
META = DeviceKind("meta", frozenset[Capability]())  # shapes without memory
KINDS = (
    CPU,
    META,
    # Also AMD's GPUs, to which PyTorch for ROCm gives this name.
    DeviceKind(
        "cuda",
        frozenset[Capability]({"streams", "memory counts", "triton", "varlen", "flex", "float64"}),
        prefixes=("cuda", "hip", "rocm"),
    ),
    DeviceKind(
        "xpu",
        frozenset[Capability]({"streams", "memory counts", "float64"}),
        prefixes=("xpu",),
    ),
    # One queue of work, and memory that is the host's.
    DeviceKind("mps", frozenset[Capability](), prefixes=("mps",)),
)


@final
@dataclass(frozen=True)
class DeviceProperties:
    """A device as its driver describes it; "" and 0 where PyTorch does not tell."""

    name: str
    arch: str = ""  # gfx1030, sm_90
    total_bytes: int = 0
    unit_id: str = ""  # of this very card
    pci_address: str = ""  # 0000:03:00.0


def device_kind(device: AnyDevice) -> DeviceKind:
    """A kind that is not listed has what torch.accelerator asks of any: streams, and an allocator that counts."""
    device_type = _type_of(device)
    capabilities = frozenset[Capability]({"streams", "memory counts", "float64"})
    unlisted = DeviceKind(device_type, capabilities)
    return next((kind for kind in KINDS if kind.type == device_type), unlisted)


def can(device: AnyDevice, capability: Capability) -> bool:
    return capability in device_kind(device).capabilities


def is_accelerator(device: AnyDevice) -> bool:
    """Whether it computes, and is no CPU: its work runs behind the host's."""
    return _type_of(device) not in (CPU.type, META.type)


# Which devices are here.


def accelerator_type() -> str | None:
    """The kind of accelerator that this PyTorch can use on this machine, such as "cuda"; None: it has the CPU alone."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def num_devices(device: AnyDevice) -> int:
    """How many devices of its kind this process sees; a CPU is one."""
    return int(_function(device, "device_count")()) if is_accelerator(device) else 1


def current_index(device: AnyDevice) -> int:
    """The number of the device of its kind that this thread uses."""
    if not is_accelerator(device):
        return 0
    return int(_function(device, "current_device", "current_device_index")())


def number_of(device: AnyDevice) -> int:
    """The number in the name of a device; of a name without one, that of the device that this thread uses."""
    import torch

    number = torch.device(device).index
    return current_index(device) if number is None else number


def select_device(device: AnyDevice, index: int) -> None:
    """Make this thread use the device of its kind with this number."""
    if is_accelerator(device):
        _function(device, "set_device", "set_device_index")(index)


def accelerators_in_use() -> tuple[str, ...]:
    """The kinds of accelerator that this process has begun to use; a fork of it could not. Imports no torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    modules = [(kind.type, getattr(torch, kind.type, None)) for kind in KINDS]
    return tuple(
        device_type
        for device_type, module in modules
        if is_accelerator(device_type) and getattr(module, "is_initialized", lambda: False)()
    )


def properties_of(device: AnyDevice) -> DeviceProperties:
    if not is_accelerator(device):
        return DeviceProperties("CPU")
    get_properties = getattr(_module(device), "get_device_properties", None)
    if get_properties is None:  # torch.mps: one device without a description
        recommended_bytes = getattr(_module(device), "recommended_max_memory", lambda: 0)
        return DeviceProperties(_type_of(device), total_bytes=recommended_bytes())
    properties = get_properties(device)
    bus = getattr(properties, "pci_bus_id", None)
    pci_address = ""
    if isinstance(bus, int):
        domain = getattr(properties, "pci_domain_id", 0)
        number = getattr(properties, "pci_device_id", 0)
        pci_address = f"{domain:04x}:{bus:02x}:{number:02x}.0"
    arch = getattr(properties, "gcnArchName", "").split(":")[0]
    if not arch and hasattr(properties, "major"):
        arch = f"sm_{properties.major}{properties.minor}"
    return DeviceProperties(
        name=properties.name,
        arch=arch,
        total_bytes=properties.total_memory,
        unit_id=str(getattr(properties, "uuid", "")),
        pci_address=pci_address,
    )


def runtime_version() -> str:
    """Of the runtime that torch was built for: HIP, CUDA or SYCL; "" for a build for CPUs."""
    import torch

    versions = (getattr(torch.version, name, None) for name in ("hip", "cuda", "xpu"))
    return next((version for version in versions if version), "")


def multiplies_bfloat16(device: AnyDevice) -> bool:
    """Whether PyTorch says that this device computes in bfloat16 without emulation. Of AMD's it always does."""
    is_supported = getattr(_module(device), "is_bf16_supported", None)
    return is_supported is not None and bool(is_supported(including_emulation=False))


def multiplies_groups(device: AnyDevice) -> bool:
    """Whether PyTorch multiplies groups of rows, each by a matrix of its own, without the host knowing where they end
    (`torch.nn.functional.grouped_mm`): on NVIDIA's GPUs from compute capability 8.0 on.

    Nobody has tried AMD's builds, where a wrong kernel may end the process.
    """
    import torch

    if (
        _type_of(device) != "cuda"
        or torch.version.hip
        or not hasattr(torch.nn.functional, "grouped_mm")
    ):
        return False
    return bool(torch.cuda.get_device_capability(device) >= (8, 0))


def computes_float64(device: AnyDevice) -> bool:
    """Whether PyTorch computes in float64 on it: not on Apple's GPUs, and of Intel's not on Arc A."""
    if not can(device, "float64"):
        return False
    get_properties = (
        getattr(_module(device), "get_device_properties", None) if is_accelerator(device) else None
    )
    return get_properties is None or bool(getattr(get_properties(device), "has_fp64", True))


def products_take_tf32() -> bool:
    """Whether float32 products may be rounded to TF32's 10 bits, as the process is set."""
    import torch

    return bool(torch.backends.cuda.matmul.allow_tf32)


def collective_backends(device: AnyDevice) -> str:
    """What torch.distributed needs to send tensors of this device, and of the host: gloo for these in every run."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{_type_of(device)}:{device_backend(device)}"


def device_backend(device: AnyDevice) -> str:
    """The backend of torch.distributed between devices of this kind: nccl, xccl, gloo.

    Raises UserError where PyTorch names none.
    """
    import torch.distributed as dist

    device_type = _type_of(device)
    backend = dist.Backend.default_device_backend_map.get(device_type)
    if backend is None:
        raise UserError(
            f"torch.distributed has no backend for devices of the type {device_type}",
            where="--devices",
            fix="train on one device",
        )
    return str(backend)


def copies_directly(device: AnyDevice, index: int, peer: int) -> bool | None:
    """Whether devices with these numbers reach each other's memory; None where PyTorch does not tell."""
    can_access = getattr(_module(device), "can_device_access_peer", None)
    return None if can_access is None else bool(can_access(index, peer))


# Time: the work of an accelerator runs behind the host's.


def synchronize(device: AnyDevice) -> None:
    """Wait until everything that was queued on the device is over."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def synchronize_stream(device: AnyDevice) -> None:
    """Wait until everything that was queued on this thread's stream is over."""
    if can(device, "streams"):
        current_stream(device).synchronize()
    else:
        synchronize(device)


def current_stream(device: AnyDevice) -> Any:
    """The stream that this thread queues work on: a torch.Stream, or the kind's own. For devices with streams."""
    return _function(device, "current_stream")(device)


def new_stream(device: AnyDevice) -> Any:
    """A queue of work beside the others."""
    import torch

    stream_class = getattr(_module(device), "Stream", None)
    return torch.Stream(device) if stream_class is None else stream_class(device)


def on_stream(device: AnyDevice, stream: Any) -> AbstractContextManager[object]:
    """Work of the block is queued on `stream`."""
    enter = getattr(_module(device), "stream", None)
    return cast(AbstractContextManager[object], stream if enter is None else enter(stream))


def new_event(device: AnyDevice, *, timed: bool = False) -> Any:
    """A moment in the work of a device: a torch.Event, or the kind's own. `timed`: for `elapsed_time`."""
    import torch

    event_class = getattr(_module(device), "Event", None)
    if event_class is None:
        return torch.Event(_type_of(device), enable_timing=timed)
    return event_class(enable_timing=timed)


def recorded_event(device: AnyDevice) -> Any:
    """A timed event at the current end of the device's work."""
    event = new_event(device, timed=True)
    event.record()
    return event


def warn_of_waits(device: AnyDevice, *, is_on: bool) -> bool:
    """Make PyTorch warn wherever the host waits for the device. False where it cannot."""
    set_mode = getattr(_module(device), "set_sync_debug_mode", None)
    if set_mode is not None:
        set_mode("warn" if is_on else "default")
    return set_mode is not None


@contextmanager
def races_raise(device: AnyDevice) -> Generator[bool]:
    """Inside, an access that no event orders after an earlier one raises an error. Yields whether PyTorch looks for it.

    Operators take several times as long.
    """
    try:
        sanitizer = import_module(f"torch.{_type_of(device)}._sanitizer")
    except ModuleNotFoundError:
        yield False
        return
    with sanitizer.CUDASanitizerDispatchMode():
        yield True


def sent(tensor: "torch.Tensor", device: AnyDevice) -> "torch.Tensor":
    """A few numbers of the host, on the device. The host goes on at once where streams copy out of pinned memory."""
    if not can(device, "streams"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pin_host_memory(device: AnyDevice, address: int, num_bytes: int) -> Callable[[], object] | None:
    """Pins memory that PyTorch has not allocated, so that copies of it run beside the host. Returns what ends that.

    None where the device's runtime does not do it: copies then wait, and are right all the same.
    """
    open_runtime = getattr(_module(device), "cudart", None)
    runtime: Any = None if open_runtime is None else open_runtime()
    register = getattr(runtime, "cudaHostRegister", None)
    if register is None or int(register(address, num_bytes, 0)) != 0:
        return None
    return partial(runtime.cudaHostUnregister, address)


# Memory. Bytes; a CPU's is the process's, which the allocator does not count.


def memory_stats(device: AnyDevice) -> dict[str, int]:
    """What the allocator counts, by torch's names: `allocated_bytes.all.current`; nothing where it does not count."""
    if not can(device, "memory counts"):
        return {}
    return dict(_function(device, "memory_stats")(device))


def free_and_total_bytes(device: AnyDevice) -> tuple[int, int] | None:
    """Of this device, whoever uses it; None for a CPU, whose memory `hardware.detect` reads."""
    if not is_accelerator(device):
        return None
    if can(device, "memory counts"):
        free_bytes, total_bytes = _function(device, "mem_get_info", "get_memory_info")(device)
        return free_bytes, total_bytes
    total_bytes = properties_of(device).total_bytes
    used_bytes = getattr(_module(device), "driver_allocated_memory", lambda: 0)()
    return max(0, total_bytes - used_bytes), total_bytes


def reset_peak_memory(device: AnyDevice) -> None:
    """Begin again to note what tensors hold at most."""
    if can(device, "memory counts"):
        _function(device, "reset_peak_memory_stats")(device)


def release_cached_memory() -> None:
    """Give the driver back what the allocator of the accelerator, if one is here, holds for later tensors."""
    device_type = accelerator_type()
    if device_type is not None:
        _function(device_type, "empty_cache")()


def cap_memory(device: AnyDevice, limit_bytes: float) -> None:
    """Make allocations beyond this raise an error of PyTorch. Without this call of its module a kind has no cap."""
    set_share = getattr(_module(device), "set_per_process_memory_fraction", None)
    total_bytes = properties_of(device).total_bytes
    if set_share is not None and total_bytes:
        # The share is of this very device: the next may have another size. torch.mps has one, and takes no number; the
        # others take no name without one.
        which = (number_of(device),) if hasattr(_module(device), "get_device_properties") else ()
        set_share(min(1.0, limit_bytes / total_bytes), *which)


def record_memory_history(device: AnyDevice, *, is_on: bool) -> None:
    """Note who allocates what, for `memory_blocks`, where the kind can."""
    record = getattr(getattr(_module(device), "memory", None), "_record_memory_history", None)
    if record is not None and is_on:
        record(context="alloc", stacks="python", max_entries=100_000)
    elif record is not None:
        record(enabled=None)


def memory_blocks(device: AnyDevice) -> object | None:
    """The allocator's blocks, as values of JSON; None where the kind does not list them."""
    snapshot = getattr(getattr(_module(device), "memory", None), "_snapshot", None)
    return None if snapshot is None else snapshot()


# Random numbers, and profiles.


def seed_generators(device: AnyDevice, seed: int) -> None:
    """Of the CPU, and of the devices of this kind. `seed`: below 2**63."""
    import torch

    # Not torch.manual_seed, which formats a traceback for each kind of GPU that is absent.
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module = _module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


@contextmanager
def generators_restored(device: AnyDevice) -> Generator[None]:
    """After the block the generators of the CPU and of this device are as before."""
    import torch

    numbers = [number_of(device)] if is_accelerator(device) else []
    with torch.random.fork_rng(devices=numbers, device_type=_type_of(device)):
        yield


def profiled_activities(device: AnyDevice) -> list[Any]:
    """What torch.profiler records: the CPU, and the device where it can."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    own_activity = getattr(ProfilerActivity, _type_of(device).upper(), None)
    if is_accelerator(device) and own_activity is not None:
        activities.append(own_activity)
    return activities


def _type_of(device: AnyDevice) -> str:
    return device.partition(":")[0] if isinstance(device, str) else device.type


def _module(device: AnyDevice) -> Any:
    import torch

    return torch.get_device_module(_type_of(device))


def _function(device: AnyDevice, name: str, accelerator_name: str = "") -> Any:
    """A function of the module of its kind, else of torch.accelerator, where it may have another name."""
    import torch

    function = getattr(_module(device), name, None)
    return function or getattr(torch.accelerator, accelerator_name or name)
