"""Puts the simulated GPU of simulated_device.cpp behind torch.cuda or torch.xpu: code for a GPU runs unchanged.

A process has it whose environment names this folder's `startup` in PYTHONPATH and a device in BLOOMERY_SIMULATED:
"amd", "nvidia" or "intel", then the number of devices and the GiB of each, as in "amd,2,4" (`environment` makes both).
Its children inherit it. The library is loaded just before torch, whose CPU build asks once, early in its import,
whether there is one for CUDA or XPU; everything above `torch._C` is PyTorch's own Python code, with its own checks of
arguments.
"""

import ctypes
import fcntl
import hashlib
import importlib.abc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from simulated_cards import cards, described, machine_file, vendor_of

HERE = Path(__file__).parent
SOURCE = HERE / "simulated_device.cpp"
LIBRARY = HERE / "library"
STARTUP = HERE / "startup"
CACHE = Path(
    os.environ.get("BLOOMERY_SIMULATED_CACHE", Path.home() / ".cache/bloomery/simulated-device")
)
SOURCES = "/src/bloomery/"
TORCH_LIBRARIES = ("c10", "torch_cpu")
_lib = None
_waits = Counter()
_has_float64 = True
_places = {}  # their text, which the library reads after the call
_xpu_library = None  # of operators; they go with it
_cpu_library = None


def environment(device="amd", devices=2, gib=4.0):
    """Variables with which a process has the simulated device: a vendor with a number of devices and the GiB of each,
    or whatever else `simulated_cards` reads."""
    description = device if "," in device or machine_file(device) else f"{device},{devices},{gib}"
    paths = [str(STARTUP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "BLOOMERY_SIMULATED": description,
    }


def torch_folder():
    return Path(importlib.util.find_spec("torch").origin).parent


def why_not():
    """Why there can be no simulated device here; "" where there can."""
    version = (torch_folder() / "version.py").read_text()
    if re.search(r"^(cuda|hip|xpu)\b[^=]*= *['\"]", version, re.MULTILINE):
        return "this PyTorch is built for GPUs; the simulated one needs a build for CPUs"
    if shutil.which("g++") is None:
        return "no g++"
    if not (torch_folder() / "include/ATen/ATen.h").is_file():
        return "this PyTorch has no headers"
    return ""


def flags_of(vendor):
    return ["-DSIM_XPU"] if vendor == "intel" else []


def place(vendor="amd"):
    """Where the library is, once it is compiled: one per source and torch."""
    version = (torch_folder() / "version.py").read_bytes()
    sources = b"".join(path.read_bytes() for path in [SOURCE, *sorted(LIBRARY.glob("*.h"))])
    key = hashlib.sha256(sources + version + repr(flags_of(vendor)).encode()).hexdigest()[:16]
    return CACHE / f"simulated-device-{key}.so"


def build(vendor="amd"):
    """The library, compiled if it is not there. Without importing torch."""
    out = place(vendor)
    if out.is_file():
        return out
    CACHE.mkdir(parents=True, exist_ok=True)
    # One process compiles; those that come meanwhile wait for it.
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if out.is_file():
            return out
        print("compiling the simulated device, half a minute, once", file=sys.stderr, flush=True)
        base = torch_folder()
        include = base / "include"
        partial = out.with_suffix(f".{os.getpid()}.tmp")
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++20",
            "-Wall",
            "-Wextra",
            *flags_of(vendor),
            "-isystem",  # no warnings of PyTorch's own
            str(include),
            "-isystem",
            str(include / "torch/csrc/api/include"),
            str(SOURCE),
            "-o",
            str(partial),
            f"-L{base}/lib",
            *(f"-l{name}" for name in TORCH_LIBRARIES),
        ]
        subprocess.run(command, check=True)
        partial.rename(out)
    return out


class _WithTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the library before torch, and hands torch its functions after."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self not in sys.meta_path:
            return None
        # Whoever only asks whether there is a torch does not load it: the next one finds this again.
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            library = build(vendor_of(described()))
            spec = importlib.util.find_spec("torch")
        finally:
            sys.meta_path.insert(place, self)
        plain = spec.loader.exec_module

        def exec_module(module):
            load(library)
            plain(module)
            patch()

        spec.loader.exec_module = exec_module
        return spec


def install_with_torch():
    """From now on `import torch` brings the device that BLOOMERY_SIMULATED names."""
    sys.meta_path.insert(0, _WithTorch())


def load(library):
    global _lib
    # By their paths first: the same library serves every environment with this version of torch.
    folder = torch_folder() / "lib"
    for name in TORCH_LIBRARIES:
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    _lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "allocated peak reserved reserved_peak count total ooms capacity pinned pinned_peak retries "
            "copied_in copied_out"
        ).split()
    ]


def stats(device=0):
    found = Stats()
    _lib.sim_stats(device, ctypes.byref(found))
    return found


def report():
    """What happened since `clear`: calls and waits by operator, operators without a kernel, problems."""
    found = {"call": {}, "sync": {}, "missing": {}, "problem": {}}
    for line in _lib.sim_report().decode().splitlines():
        kind, name, count = line.split("\t")
        found[kind][name] = int(count)
    return found


def clear():
    _lib.sim_clear()
    _waits.clear()


def waits():
    """Waits of the host since `clear`: (operator, place) -> count.

    The place is the innermost function of Bloomery, such as "train/step.py train_step"; "outside" where there is none,
    as in autograd's own thread.
    """
    return dict(_waits)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _hear_wait(operator):
    frame = sys._getframe()
    while frame is not None and SOURCES not in frame.f_code.co_filename:
        frame = frame.f_back
    place = "outside"
    if frame is not None:
        place = f"{frame.f_code.co_filename.partition(SOURCES)[2]} {frame.f_code.co_qualname}"
    _waits[operator.decode(), place] += 1


def faulty(operator, factor):
    """From now on that operator's results are multiplied; "" ends it."""
    _lib.sim_faulty(operator.encode(), ctypes.c_double(factor))


def empty_pinned_cache():
    """Give back the pinned blocks that the allocator keeps for the next request."""
    _lib.sim_empty_pinned_cache()


def reset_pinned_peak():
    """Begin again to note how much is pinned at most. Returns what is pinned now."""
    _lib.sim_reset_pinned_peak()
    return stats().pinned


def capacity(gib, device=0):
    _lib.sim_set_capacity(device, ctypes.c_uint64(int(gib * 2**30)))


def break_kernel(operator, after=0, kills=False):
    """The kernel of the next call but `after` of that operator touches memory that is not its own.

    Its call returns; the next wait for the device raises the vendor's error, and from then on every call does. With
    `kills` the runtime ends the process at once, as AMD's does for most such faults. "" ends it.
    """
    _lib.sim_breaking(operator.encode(), ctypes.c_int64(after), int(kills))


def mend():
    """The devices work again, as in a new process."""
    break_kernel("")
    _lib.sim_mend()


def launch(name, *, reads=(), writes=()):
    """A kernel that takes addresses, such as Triton's: on the current device and its current stream.

    It breaks if a tensor is another device's. Contiguous tensors.
    """
    tensors = [*reads, *writes]
    count = len(tensors)
    _checked(
        _lib.sim_launch(
            name.encode(),
            count,
            (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_uint64 * count)(*(tensor.nbytes for tensor in tensors)),
            (ctypes.c_int * count)(*(number >= len(reads) for number in range(count))),
        )
    )


def _checked(error):
    """Raise what the library says, as PyTorch does for an error of the runtime."""
    if error:
        import torch

        raise torch.AcceleratorError(error.decode())


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
def _hear_launch(operator):
    frame = sys._getframe(1)
    while frame is not None and SOURCES not in frame.f_code.co_filename:
        frame = frame.f_back
    place = "backward"
    if frame is not None:
        file = frame.f_code.co_filename.partition(SOURCES)[2]
        place = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
    return ctypes.addressof(_places.setdefault(place, ctypes.create_string_buffer(place.encode())))


def trace(on):
    """Races name the places of Bloomery's code, not only the operators. Slow."""
    _lib.sim_hear_launches(_hear_launch if on else None)


def record():
    """From now on all work of the devices is noted, up to the first `replay`."""
    _lib.sim_record()


def replay(seed):
    """The recorded work in another order, in which the streams get ahead of each other by chance.

    Returns the first piece of work that read other bytes than it had in the recording, "" if there is none.
    """
    return _lib.sim_replay(ctypes.c_uint64(seed)).decode()


def recorded():
    """How many pieces of work there are in the recording."""
    return _lib.sim_recorded()


def blocks(device=0):
    """The allocated blocks: (offset, bytes)."""
    return [
        tuple(map(int, line.split("\t"))) for line in _lib.sim_blocks(device).decode().splitlines()
    ]


def sync_is_error(on):
    _lib.sim_sync_is_error(int(on))


def has_float64(on):
    """Whether tensors of the device may be in float64, as the properties of torch.xpu tell."""
    global _has_float64
    _has_float64 = on
    _lib.sim_has_float64(int(on))


def problem_is_error(on):
    _lib.sim_problem_is_error(int(on))


def patch():
    """Give torch.cuda or torch.xpu the functions that a build for it would have brought."""
    import torch

    gpus = cards(described())
    vendor = gpus[0].vendor
    # Launchers may show each rank a device of its own alone.
    mask = "HIP_VISIBLE_DEVICES" if vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    shown = [int(number) for number in os.environ.get(mask, "").split(",") if number.isdecimal()]
    numbers = [number for number in shown if number < len(gpus)] or list(range(len(gpus)))
    gpus = [gpus[number] for number in numbers]
    devices = len(gpus)
    hip = "7.2.53211" if vendor == "amd" else None
    C, cuda = torch._C, torch.xpu if vendor == "intel" else torch.cuda
    type_name = "xpu" if vendor == "intel" else "cuda"
    _lib.sim_report.restype = ctypes.c_char_p
    _lib.sim_replay.restype = ctypes.c_char_p
    _lib.sim_recorded.restype = ctypes.c_uint64
    _lib.sim_current_stream.restype = ctypes.c_int64
    _lib.sim_set_fraction.argtypes = [ctypes.c_int, ctypes.c_double]
    _lib.sim_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    for name in ("blocks", "empty_cache", "launch", "synchronize"):
        getattr(_lib, f"sim_{name}").restype = ctypes.c_char_p
    _lib.sim_set_runtime({"amd": b"HIP", "nvidia": b"CUDA", "intel": b"XPU"}[vendor])
    _lib.sim_hear_waits(_hear_wait)
    # A problem is raised where it is noticed; also in children, whose reports a run of tests collects.
    problem_is_error(True)
    _lib.sim_set_problem_file(os.environ.get("BLOOMERY_SIMULATED_REPORTS", "").encode())
    _lib.sim_set_devices(devices)
    for device, gpu in enumerate(gpus):
        _lib.sim_set_capacity(device, ctypes.c_uint64(gpu.num_bytes))
    _lib.sim_set_fused_attention(int(gpus[0].has_fused_attention))
    kind = 12 if vendor == "intel" else 1  # c10::DeviceType
    # Of a whole process and its children: operator,factor.
    if fault := os.environ.get("BLOOMERY_SIMULATED_FAULT"):
        operator, factor = fault.split(",")
        faulty(operator, float(factor))

    if vendor == "intel":
        C._has_xpu = True
        torch.version.xpu = "20250302"
    else:
        C._has_cuda = True
        torch.version.hip = hip
        torch.version.cuda = None if hip else "13.0"

    def exchange(device):
        before = _lib.sim_device()
        if device >= 0:
            _lib.sim_set_device(device)
        return before

    def maybe_exchange(device):  # not the same function: Dynamo knows each by its identity
        return exchange(device)

    def nested(device):
        s = stats(device)
        zero = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}

        def both(current, peak):
            return {
                "all": {**zero, "current": current, "peak": peak},
                "small_pool": dict(zero),
                "large_pool": dict(zero),
            }

        return {
            "allocation": both(s.count, s.count),
            "allocated_bytes": both(s.allocated, s.peak),
            "active_bytes": both(s.allocated, s.peak),
            "reserved_bytes": both(s.reserved, s.reserved_peak),
            "requested_bytes": both(s.allocated, s.peak),
            "inactive_split_bytes": both(0, 0),
            **{name: both(s.count, s.count) for name in ("active", "segment")},
            "inactive_split": both(0, 0),
            **{f"oversize_{name}": dict(zero) for name in ("allocations", "segments")},
            "num_alloc_retries": s.retries,
            "num_ooms": s.ooms,
        }

    def segment(device, offset, size):
        """A block as a segment of its own."""
        block = {"size": size, "requested_size": size, "address": offset, "frames": []}
        return {
            "device": device,
            "address": offset,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [{**block, "state": "active_allocated"}],
        }

    def stream_data(device, stream):
        return (stream, device, kind)

    started_in = []

    def init():
        started_in.append(os.getpid())
        _lib.sim_hand_out_defaults(1)
        cuda.default_generators = tuple(torch.Generator(f"{type_name}:{d}") for d in range(devices))
        _lib.sim_hand_out_defaults(0)

    def is_in_bad_fork():
        return bool(started_in) and started_in[-1] != os.getpid()

    functions = {
        "getDeviceCount": lambda: _lib.sim_devices(),
        "init": init,
        "setDevice": lambda d: exchange(d),
        "getDevice": lambda: _lib.sim_device(),
        "exchangeDevice": exchange,
        "maybeExchangeDevice": maybe_exchange,
        "isInBadFork": is_in_bad_fork,
        "memoryStats": nested,
        "resetPeakMemoryStats": lambda d: _lib.sim_reset_peak(d),
        "resetAccumulatedMemoryStats": lambda d: None,
        "emptyCache": lambda *a: _checked(_lib.sim_empty_cache()),
        "setMemoryFraction": lambda f, d: _lib.sim_set_fraction(d, f),
        "synchronize": lambda *d: _checked(_lib.sim_synchronize(*d or [_lib.sim_device()])),
        "getCurrentStream": lambda d: stream_data(d, _lib.sim_current_stream(d)),
        "getCurrentRawStream": lambda d: _lib.sim_current_stream(d),
        "getDefaultStream": lambda d: stream_data(d, 0),
        "setStream": lambda stream_id, device_index, device_type: (
            exchange(device_index),
            _lib.sim_set_stream(device_index, stream_id),
        ),
        "canDeviceAccessPeer": lambda a, b: True,
        "getArchFlags": lambda: " ".join({gpu.arch for gpu in gpus}),
        "memorySnapshot": lambda *a: {
            "segments": [segment(d, *block) for d in range(devices) for block in blocks(d)],
            "device_traces": [[] for _ in range(devices)],
            "allocator_settings": {},
        },
        "record_memory_history": lambda *a, **k: None,
        "record_memory_history_legacy": lambda *a, **k: None,
        "isCurrentStreamCapturing": lambda: False,
        "hostMemoryStats": lambda: {
            "allocated_bytes": {"current": stats().pinned, "peak": stats().pinned_peak}
        },
        "hostEmptyCache": lambda: _lib.sim_empty_pinned_cache(),
        "getAllocatorBackend": lambda: "native",
        "set_sync_debug_mode": lambda mode: _lib.sim_set_sync_debug_mode(mode),
        "get_sync_debug_mode": lambda: _lib.sim_sync_debug_mode(),
        "ipc_collect": lambda: None,
        # Of torch.xpu alone.
        "getMemoryInfo": lambda d: (
            int(stats(d).capacity - stats(d).reserved),
            int(stats(d).capacity),
        ),
        "recordMemoryHistory": lambda *a: None,
    }
    for function, body in functions.items():
        setattr(C, f"_{type_name}_{function}", body)
    cuda._exchange_device, cuda._maybe_exchange_device = exchange, maybe_exchange
    cuda._is_in_bad_fork = is_in_bad_fork

    def properties_of_xpu(device):
        return SimpleNamespace(
            name=gpus[device].name,
            platform_name="Intel(R) oneAPI Unified Runtime over Level-Zero",
            total_memory=int(stats(device).capacity),
            max_compute_units=gpus[device].units,
            has_fp16=True,
            has_fp64=_has_float64,
            has_bfloat16_conversions=True,
            has_subgroup_matrix_multiply_accumulate=True,
            is_integrated_gpu=False,
            driver_version="1.6.33578",
            uuid=f"sim-{device}",
        )

    def gcn_name(
        arch,
    ):  # those with ECC, and with page faults that can be retried, have them in their name
        return f"{arch}:sramecc+:xnack-" if arch in ("gfx90a", "gfx942", "gfx950") else arch

    def properties(device):
        return SimpleNamespace(
            name=gpus[device].name,
            major=gpus[device].capability[0],
            minor=gpus[device].capability[1],
            total_memory=int(stats(device).capacity),
            multi_processor_count=gpus[device].units,
            gcnArchName=gcn_name(gpus[device].arch) if hip else "",
            warp_size=64 if hip else 32,
            is_integrated=0,
            uuid=f"sim-{numbers[device]}",
            pci_bus_id=numbers[device] + 1,
            pci_device_id=0,
            pci_domain_id=0,
            L2_cache_size=2**22,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=65536,
        )

    cuda._get_device_properties = properties_of_xpu if vendor == "intel" else properties
    C._cuda_getDeviceProperties = properties

    class _Error:
        success = 0

    cuda._cudart = SimpleNamespace(
        cudaError=_Error,
        cudaMemGetInfo=lambda d: (
            int(stats(d).capacity - stats(d).reserved),
            int(stats(d).capacity),
        ),
        cudaGetErrorString=lambda code: str(code),
    )

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **kwargs):
            if "stream_id" in kwargs:
                return torch.Stream.__new__(cls, **kwargs)
            index = cuda._utils._get_device_index(device, optional=True)
            return torch.Stream.__new__(cls, torch.device(type_name, index), priority=priority)

        @property
        def cuda_stream(self):
            return self.stream_id

        sycl_queue = cuda_stream

        def record_event(self, event=None):
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            # One of torch's own class, whose `elapsed_time` takes no other.
            return torch.Event(
                torch.device(type_name), enable_timing=enable_timing, blocking=blocking
            )

    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event

    if vendor == "intel":
        _compute_attention_of_xpu(torch)
    else:
        _compute_products_of_another_dtype(torch)

    resize_on_host = torch.UntypedStorage.resize_

    def resize(storage, size):
        if storage.device.type != type_name:
            return resize_on_host(storage, size)
        torch.ops.simulated.resize_storage(storage, size)
        return storage

    torch.UntypedStorage.resize_ = resize

    C._cuda_getDefaultGenerator = None
    # Imported with CUDA graphs, as `torch._dynamo.reset` does; nothing here captures one.
    C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    _patch_ranks()


def _compute_products_of_another_dtype(torch):
    """bfloat16 times bfloat16 in float32, as losses on chunks ask for: PyTorch has it on cuda alone."""

    def addmm(addend, one, other, out_dtype, *, beta=1, alpha=1, out):
        wide = (each.to(out_dtype) for each in (addend, one, other))
        return out.copy_(torch.addmm(*wide, beta=beta, alpha=alpha))

    def mm(one, other, out_dtype, *, out):
        return out.copy_(torch.mm(one.to(out_dtype), other.to(out_dtype)))

    from torch import library

    global _cpu_library
    _cpu_library = library.Library("aten", "IMPL")
    _cpu_library.impl("addmm.dtype_out", addmm, "CPU")
    _cpu_library.impl("mm.dtype_out", mm, "CPU")


def _compute_attention_of_xpu(torch):
    """scaled_dot_product_attention on xpu by its formula.

    PyTorch looks for the kernel in a table that has no row for xpu in a build for CPUs.
    """

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **how):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            shut = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, torch.zeros_like(shut), shut)
        by_formula = torch.ops.aten._scaled_dot_product_attention_math.default
        return by_formula(query, key, value, attn_mask, dropout_p, is_causal, **how)[0]

    from torch import library

    global _xpu_library
    _xpu_library = library.Library("aten", "IMPL")
    for key in ("XPU", "AutogradXPU"):
        _xpu_library.impl("scaled_dot_product_attention", attention, key)


def _patch_ranks():
    """Give torch.distributed the backend nccl: library/ranks.h."""
    import torch
    from torch.distributed import distributed_c10d

    class ProcessGroupNCCL(distributed_c10d.ProcessGroupGloo):
        """What carries the copies on the host."""

        class Options:
            pass

        def __init__(self, store, rank, size, options):
            super().__init__(store, rank, size, options._timeout)

    make_group = distributed_c10d._new_process_group_helper

    def make_group_of_devices(*arguments, **settings):
        group, store = make_group(*arguments, **settings)
        if "nccl" in str(distributed_c10d._world.pg_map.get(group, ("",))[0]):
            torch.ops.simulated.use_device_ranks(group.boxed())
        return group, store

    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout
    distributed_c10d._new_process_group_helper = make_group_of_devices
