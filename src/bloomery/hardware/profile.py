"""Settings for a machine, and the PyTorch build that fits it: the only module with choices that depend on vendors."""

import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from bloomery.core import Choice
from bloomery.core.device import can
from bloomery.core.files import private_folder, temporary_cache
from bloomery.core.units import GIB
from bloomery.hardware.machine import (
    MASKS,
    Accelerator,
    Access,
    Machine,
    Software,
    hidden,
    mask_of,
    runtime_number,
    visible_devices,
    with_devices,
)
from bloomery.hardware.specs import ArchSpec, CpuSpec, GpuSpec, arch_spec, cpu_spec, gpu_spec
from bloomery.hardware.vendors import ALLOCATORS, ORDERS, VENDORS, Build
from bloomery.hardware.wheels import DEFAULT_TORCH, TorchBuild, series, torch_builds, triton_of

T = TypeVar("T")

MEMORY_SHARE = 0.92  # of GPU memory: above it a ROCm driver can hang before PyTorch raises
# Share of the memory of an integrated GPU: the rest of the machine uses the same memory.
SHARED_MEMORY_SHARE = 0.85
HIP_ALLOCATOR = "garbage_collection_threshold:0.8,max_split_size_mb:512"
CUDA_ALLOCATOR = "expandable_segments:True"
# Not MIOpen's folders: language models have no convolutions.
TRITON_CACHE = "TRITON_CACHE_DIR"
NODE_LOCAL = (TRITON_CACHE, "TORCHINDUCTOR_CACHE_DIR")


class Override(NamedTuple):
    """A variable that the user has set to another value than Bloomery would. The user's value stays."""

    user_value: str
    profile_value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Settings for the device that training uses, with its entries in gpus.toml (None: not listed)."""

    device: Choice[str]  # the type of `core.device.KINDS`
    accelerator: Accelerator | None
    arch: ArchSpec | None
    gpu: GpuSpec | None
    cpu: CpuSpec | None
    dtype: Choice[str]  # float32, bfloat16, float16
    attention: Choice[str]  # fused, plain: whether the device has fused attention kernels
    compile: Choice[bool]
    # The installed version; of a GPU that is only planned for, that of its PyTorch.
    triton: str | None
    # Whether it compiles kernels for the device: yes; another would (on a GPU that is only planned for); no.
    triton_compiles: Choice[str]
    # Whether this package's C++ for training is compiled and quicker than PyTorch here.
    native: Choice[bool]
    fused_optimizer: Choice[bool]
    memory_share: Choice[float]  # of the device, above which PyTorch's allocator raises
    workers: Choice[int]
    pin_memory: Choice[bool]
    prefetch: Choice[int]  # batches read ahead
    # Set before torch is imported; never replaces the user's variables.
    environment: Choice[dict[str, str]]
    overridden: dict[str, Override]  # the user's variables that differ from `environment`
    # Of each of unequal GPUs that train together, in the order of ranks; none: all are alike. The other fields are then
    # settings that suit all of them, and the device with the least memory.
    peers: tuple["Profile", ...] = ()


def build_profile(machine: Machine) -> Profile:
    """Settings for the accelerator that training would use, or for the CPU if none is usable; for unequal GPUs that
    train together those that suit all.
    """
    profile = _profile(machine)
    if not machine.together or profile.accelerator is None:
        return profile
    devices = training_peers(machine, profile.accelerator)
    alone = (
        with_devices(machine, {device.index}).model_copy(update={"together": False})
        for device in devices
    )
    return _joined(profile, tuple(_profile(machine_of_one) for machine_of_one in alone))


def _joined(profile: Profile, peers: tuple[Profile, ...]) -> Profile:
    """The settings that suit all of `peers`. `profile`: of the whole machine."""
    # Stages hand activations to each other, and every rank scales its loss alike: they compute in one dtype. Every GPU
    # multiplies float16 where another one does not bfloat16.
    dtypes = [peer.dtype for peer in peers]
    dtype = next((choice for choice in dtypes if choice.value == "float32"), dtypes[0])
    if dtype.value != "float32":
        dtype = next((choice for choice in dtypes if choice.value == "float16"), dtype)

    def first(choices: Sequence[Choice[T]], value: T) -> Choice[T]:
        """The first choice of this value, which holds for all, else one of the others."""
        return next((choice for choice in choices if choice.value == value), choices[0])

    smallest = min(peers, key=lambda peer: peer.accelerator.usable_bytes if peer.accelerator else 0)
    kernel_environment = {
        name: value
        for peer in peers
        for name, value in peer.environment.value.items()
        if name not in (*MASKS, *ORDERS)
    }
    triton = [peer.triton_compiles for peer in peers]
    names = " + ".join(
        f"{peer.accelerator.name} ({peer.accelerator.arch})" for peer in peers if peer.accelerator
    )
    return replace(
        profile,
        device=Choice(profile.device.value, f"{names}, named together"),
        accelerator=smallest.accelerator,
        arch=smallest.arch,
        gpu=smallest.gpu,
        dtype=dtype,
        attention=first([peer.attention for peer in peers], "plain"),
        compile=first([peer.compile for peer in peers], False),
        triton_compiles=next((choice for choice in triton if choice.value != "yes"), triton[0]),
        pin_memory=first([peer.pin_memory for peer in peers], False),
        memory_share=min((peer.memory_share for peer in peers), key=lambda share: share.value),
        environment=Choice(
            kernel_environment | profile.environment.value, profile.environment.reason
        ),
        peers=peers,
    )


def _profile(machine: Machine) -> Profile:
    """For one device, or several that are alike."""
    accelerator, device = choose_device(machine)
    arch = arch_spec(accelerator.arch) if accelerator else None
    cpu = cpu_spec(machine.host)
    settings = _environment(machine, accelerator, arch)
    user = machine.software.environment

    def set_by_user(name: str) -> tuple[str, ...]:
        """The user's variables that have the same effect as `name`."""
        masks = next((facts.masks for facts in VENDORS.values() if facts.mask == name), (name,))
        return tuple(
            variable
            for variable in (ALLOCATORS if name in ALLOCATORS else masks)
            if variable in user
        )

    unset = [setting for setting in settings if not set_by_user(setting.name)]
    pin_memory = Choice(True, "copies to the device overlap with computation")
    if accelerator is None:
        memory_share = Choice(1.0, "of the free memory")
        pin_memory = Choice(False, "no copies to a device")
    elif accelerator.integrated:
        memory_share = Choice(SHARED_MEMORY_SHARE, "the CPU needs the rest, or the machine swaps")
        pin_memory = Choice(False, "an integrated GPU uses the same memory")
    else:
        so_that = "so that PyTorch raises before the driver hangs"
        memory_share = Choice(
            MEMORY_SHARE,
            so_that if accelerator.vendor == "amd" else "driver and libraries use the rest",
        )
        if not can(device.value, "streams"):
            pin_memory = Choice(False, "no copy overlaps with the computation of such a device")
        elif arch is not None and arch.cautious:
            pin_memory = Choice(False, f"safe choice for {accelerator.arch}; a batch has a few kB")
    return Profile(
        device=device,
        accelerator=accelerator,
        arch=arch,
        gpu=gpu_spec(accelerator) if accelerator else None,
        cpu=cpu,
        dtype=_dtype(machine, accelerator, arch, cpu),
        attention=_attention(machine, accelerator, arch),
        compile=_compile(machine, accelerator, arch),
        triton=machine.software.triton,
        triton_compiles=_triton_compiles(machine, accelerator, arch),
        native=_native(machine, accelerator),
        fused_optimizer=Choice(True, "one kernel for all parameters; same results"),
        memory_share=memory_share,
        workers=Choice(
            1, "shards are memory-mapped: one thread reads much faster than any device trains"
        ),
        pin_memory=pin_memory,
        prefetch=Choice(4 if accelerator else 2, "batches kept ready, a few kB each"),
        environment=Choice(
            {setting.name: setting.value for setting in unset},
            "; ".join(dict.fromkeys(setting.reason for setting in unset))
            or "no variables need to be set",
        ),
        overridden={
            name: Override(user[name], setting.value, setting.reason)
            for setting in settings
            for name in set_by_user(setting.name)
            if user[name] != setting.value
        },
    )


def choose_device(machine: Machine) -> tuple[Accelerator | None, Choice[str]]:
    """The visible GPU that the installed PyTorch supports: a discrete one first, then the one with the most memory.

    If the user has set a mask, the first GPU that the mask shows, which is the one PyTorch uses.
    """
    build = machine.software.build
    if not machine.accelerators:
        return None, Choice("cpu", "no GPU found")
    visible = visible_devices(machine)
    if not visible:
        return None, Choice("cpu", f"{hidden(machine)} hides every GPU")
    usable = [device for device in visible if build in (None, _build_for(device))]
    firsts = {
        device.vendor: device for device in reversed(usable) if mask_of(machine, device.vendor)
    }
    best = _best(
        [device for device in usable or visible if firsts.get(device.vendor, device) is device]
    )
    if not usable:
        return None, Choice(
            "cpu", f"{best.name} requires a {_build_for(best)} build of PyTorch, installed: {build}"
        )
    if problem := _inaccessible(machine, best):
        return None, Choice("cpu", f"{best.name} is not accessible: {problem}")
    hidden_gpus = hidden_integrated(machine, best)
    usable = [device for device in usable if device not in hidden_gpus]
    reason = ""
    if len(usable) > 1 and (mask := mask_of(machine, best.vendor)):
        reason = f", the first GPU of {mask}={machine.software.environment[mask]}"
        order = VENDORS[best.vendor].order
        if order and order[0] not in machine.software.environment and not _same_model(usable):
            reason += f" with {order[0]}={order[1]}, which is not set"
    elif len(usable) > 1 and _same_model(usable):
        reason = f", the first of {len(usable)} GPUs of the same model"
    elif len(usable) > 1:
        largest = max(candidate.usable_bytes for candidate in usable)
        quality = "most memory" if best.usable_bytes == largest else "discrete GPU"
        reason = f", device {best.index}: {quality} of {len(usable)} GPUs"
    elif hidden_gpus:
        reason = f", device {best.index}"
    if hidden_gpus:
        names = " and ".join(
            f"GPU {device.index} ({device.name}, {device.arch})" for device in hidden_gpus
        )
        verb = "is integrated and hidden" if len(hidden_gpus) == 1 else "are integrated and hidden"
        reason += f"; {names} {verb}: -d {hidden_gpus[0].index} trains on it"
    return best, Choice(VENDORS[best.vendor].device_type, f"{best.name} ({best.arch}){reason}")


def hidden_integrated(machine: Machine, device: Accelerator) -> tuple[Accelerator, ...]:
    """The integrated GPUs that training on `device`, a discrete GPU, hides from PyTorch.

    None if the user has set a mask: it stays. None of another vendor: PyTorch does not show these. None if the user
    lets CUDA count GPUs in another order than nvidia-smi: a mask would name other ones.
    """
    if device.integrated or mask_of(machine, device.vendor):
        return ()
    if not _counts_by_bus(machine, device):
        return ()
    shown = (*machine.hidden_integrated, *machine.accelerators)
    return tuple(peer for peer in shown if peer.vendor == device.vendor and peer.integrated)


def _counts_by_bus(machine: Machine, device: Accelerator) -> bool:
    """Whether the runtime of its vendor counts GPUs as they were found, or can be made to."""
    order = VENDORS[device.vendor].order
    return order is None or machine.software.environment.get(*order) == order[1]


def training_peers(machine: Machine, device: Accelerator) -> list[Accelerator]:
    """The visible GPUs of the vendor of `device`, without those that `hidden_integrated` hides."""
    hidden_gpus = hidden_integrated(machine, device)
    return [
        peer
        for peer in visible_devices(machine)
        if peer.vendor == device.vendor and peer not in hidden_gpus
    ]


def mask_without_integrated(machine: Machine, device: Accelerator) -> dict[str, str]:
    """The variables that show PyTorch every GPU of `training_peers`; empty if none is hidden."""
    if not hidden_integrated(machine, device):
        return {}
    numbers = ",".join(
        str(runtime_number(machine, peer)) for peer in training_peers(machine, device)
    )
    facts = VENDORS[device.vendor]
    return dict([facts.order] if facts.order else []) | {facts.mask: numbers}


def _best(devices: Sequence[Accelerator]) -> Accelerator:
    return max(
        devices, key=lambda device: (not device.integrated, device.usable_bytes, -device.index)
    )


def _same_model(devices: Sequence[Accelerator]) -> bool:
    return len({(device.name, device.arch, device.memory_bytes) for device in devices}) == 1


def _build_for(device: Accelerator) -> Build:
    return VENDORS[device.vendor].build


def _inaccessible(machine: Machine, device: Accelerator) -> str:
    """Why this process cannot use a device that is present; empty if nothing prevents it."""
    around = machine.host.around
    problems = {
        "denied": "permission denied for",
        "hung": "the driver does not respond at",
        "absent": f"this {around.container} container was started without"
        if around.container
        else "missing:",
    }
    # WSL has /dev/dxg instead
    kfd = machine.host.access.kfd if device.vendor == "amd" and not around.wsl else None
    nodes = (("/dev/kfd", kfd), (device.node, device.access))
    return next((f"{problems[access]} {node}" for node, access in nodes if access in problems), "")


def _failed(machine: Machine, *names: str) -> str:
    """The result of the first probe of `names` if all of them ran and failed; otherwise empty."""
    results = {probe.name: probe for probe in machine.probes}
    probes = [results[name] for name in names if name in results]
    if len(probes) < len(names) or any(
        probe.outcome == "ok" or "experimental" in probe.message for probe in probes
    ):
        return ""  # "experimental": the probe ran without the variable that the environment sets
    return f"probe {probes[0].name} {probes[0].outcome}" + (
        f" ({probes[0].message})" if probes[0].message else ""
    )


def _dtype(
    machine: Machine, device: Accelerator | None, arch: ArchSpec | None, cpu: CpuSpec | None
) -> Choice[str]:
    """The dtype of the matmuls: by gpus.toml, unless its probe failed on this machine."""
    if device is None:
        if cpu is not None and cpu.bf16:
            return Choice("bfloat16", f"this CPU has bf16 instructions: {cpu.name}")
        return Choice(
            "float32",
            "this CPU has no bf16 instructions, and fp16 is 5 to 9 times slower on any CPU",
        )
    if arch is None:
        choice = Choice(
            "float32", f"{device.arch} is not in gpus.toml: its supported dtypes are unknown"
        )
    elif arch.bf16 == "full":
        choice = Choice("bfloat16", f"{device.arch} supports bf16 matmuls in hardware")
    elif arch.bf16 == "half":
        choice = Choice(
            "bfloat16",
            f"{device.arch} computes bf16 at half the rate of fp16, without loss scaling",
        )
    elif arch.float16_rate:
        choice = Choice(
            "float32",
            f"{device.arch} computes float16 at {arch.float16_rate} of the rate of float32",
        )
    elif arch.cautious:
        choice = Choice(
            "float32",
            f"safe choice for {device.arch}; float16 is nominally twice as fast, not tested",
        )
    else:
        choice = Choice("float16", f"{device.arch} has no bf16 matrix instructions")
    failure = _failed(machine, f"matmul-{choice.value}")
    if not failure:
        return _right_dtype(machine, choice)
    alternative = "float16" if choice.value == "bfloat16" else "float32"
    return Choice("float32" if _failed(machine, f"matmul-{alternative}") else alternative, failure)


def _right_dtype(machine: Machine, choice: Choice[str]) -> Choice[str]:
    """The choice, unless a training step in it is wrong on this machine, and right in another dtype."""
    probe = next((probe for probe in machine.probes if probe.name == f"step-{choice.value}"), None)
    if probe is None or probe.outcome != "wrong":
        return choice
    key, _, value = probe.facts.get("fix", "").partition("=")
    return (
        Choice(value, f"probe {probe.name}: {probe.message}")
        if key == "train.precision"
        else choice
    )


def _attention(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> Choice[str]:
    if device is None:
        return Choice("fused", "PyTorch's CPU kernel needs no quadratic memory")
    if arch is None:
        return Choice("plain", f"{device.arch} is not in gpus.toml: fused kernels are unknown")
    failure = _failed(machine, "attention-flash", "attention-efficient")
    if failure:
        return Choice("plain", failure)
    kernels = arch.attention_in(machine.software.torch)
    if kernels == "none":
        return Choice("plain", f"no flash attention for {family_name(device.arch)}")
    if kernels == "wrong":
        return Choice(
            "plain",
            f"flash attention of PyTorch {machine.software.torch} returns NaN on {device.arch}",
        )
    reason = f"PyTorch has fused kernels for {device.arch}"
    if kernels == "experimental":
        reason += ", enabled by TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    return Choice("fused", reason)


def family_name(arch: str) -> str:
    """gfx1031 -> gfx103x: the usual name of architectures that share an instruction set; others unchanged."""
    return arch[:-1] + "x" if arch.startswith(("gfx10", "gfx11")) else arch


def _compile(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> Choice[bool]:
    user = machine.software.environment
    compiler = machine.host.compiler
    disabling = next(
        (
            name
            for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
            if user.get(name) == "1"
        ),
        None,
    )
    if disabling is not None:
        return Choice(False, f"{disabling}=1 is set")
    failure = _failed(machine, "compile")
    if failure:
        return Choice(False, failure)
    if device is None:
        if compiler is None:
            return Choice(False, "torch.compile requires a C++ compiler, and none is on PATH")
        return Choice(True, f"{compiler} compiles fused loops: 3 to 35% faster")
    if arch is None:
        return Choice(False, f"{device.arch} is not in gpus.toml: not tested with Triton")
    installed = bool(machine.software.torch_folder)  # not a machine given by --gpu
    if arch.compile and installed and machine.software.triton is None:
        return Choice(False, "torch.compile requires Triton, which is not installed")
    if arch.compile and installed and compiler is None:
        return Choice(False, "Triton requires a C compiler, and none is on PATH")
    return Choice(arch.compile, arch.compile_reason)


def _triton_compiles(
    machine: Machine, device: Accelerator | None, arch: ArchSpec | None
) -> Choice[str]:
    triton = machine.software.triton
    installed = bool(machine.software.torch_folder)  # not a machine given by --gpu
    if device is None:
        return Choice("no", "Triton compiles for GPUs")
    if arch is None:
        return Choice("no", f"{device.arch} is not in gpus.toml: not tested with Triton")
    if triton is None:
        return Choice("no", "Triton is not installed")
    if installed and machine.host.compiler is None:
        return Choice("no", "Triton requires a C compiler, and none is on PATH")
    failure = _failed(machine, "backend-triton")
    if failure:
        return Choice("no", failure)
    refusal = arch.triton_refusal(triton)
    if refusal:
        is_open = not installed and arch.triton_from != "never"
        return Choice("another" if is_open else "no", refusal)
    return Choice("yes", f"Triton {triton} compiles for {device.arch}")


def _native(machine: Machine, device: Accelerator | None) -> Choice[bool]:
    """Vectors of 256 or 512 bits: those of AVX2 and AVX-512, whose registers hold the sums of a product."""
    compiler = machine.host.compiler
    flags = machine.host.cpu_flags
    if device is not None:
        return Choice(False, "training runs on a GPU")
    if compiler is None or not Path(compiler).name.endswith("g++"):
        return Choice(False, "no g++ on PATH")
    if not {"avx2", "avx512f"} & set(flags):
        return Choice(False, "the CPU has no AVX2")
    return Choice(True, f"{compiler} compiles them for this CPU")


class _Setting(NamedTuple):
    name: str
    value: str
    reason: str


def _environment(
    machine: Machine, device: Accelerator | None, arch: ArchSpec | None
) -> list[_Setting]:
    """Variables to set in the parent process, before torch is imported."""
    compiler = machine.host.compiler
    torch = machine.software.torch
    if device is None:
        if compiler is None or compiler.endswith("/g++"):
            return []
        return [_Setting("CXX", compiler, "torch.compile uses g++ unless CXX is set")]
    settings = []
    # PyTorch before 2.10 knows the vendors' own names of the variable alone.
    is_old = torch is not None and series(torch) < (2, 10)
    if device.vendor == "amd":
        name = "PYTORCH_HIP_ALLOC_CONF" if is_old else "PYTORCH_ALLOC_CONF"
        settings.append(
            _Setting(name, HIP_ALLOCATOR, "less fragmentation; no expandable segments on HIP")
        )
    elif device.vendor == "nvidia" and not machine.host.around.wsl:
        name = "PYTORCH_CUDA_ALLOC_CONF" if is_old else "PYTORCH_ALLOC_CONF"
        settings.append(_Setting(name, CUDA_ALLOCATOR, "less fragmentation"))
    if arch is not None and arch.attention_in(torch) == "experimental":
        reason = "fused attention is disabled by default on this GPU"
        settings.append(_Setting("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", reason))
    if device.arch == "gfx942":
        reason = "AMD's guide to training on MI300X"
        settings += [
            _Setting(name, "1", reason)
            for name in ("HIP_FORCE_DEV_KERNARG", "HSA_NO_SCRATCH_RECLAIM")
        ]
    settings += _mask(machine, device)
    if job := machine.host.around.slurm.get("SLURM_JOB_ID"):
        reason = "compiled kernels in a local folder of the node: many ranks corrupt caches on a network file system"
        caches = {name: f"/tmp/bloomery-{job}/{name.split('_')[0].lower()}" for name in NODE_LOCAL}
        settings += [_Setting(name, folder, reason) for name, folder in caches.items()]
    return settings


def _mask(machine: Machine, device: Accelerator) -> list[_Setting]:
    """PyTorch uses the first visible device, so a mask hides the others if they differ.

    If the user has set a mask: the mask that it should be, where it shows a better device later.
    """
    peers = training_peers(machine, device)
    hidden_gpus = hidden_integrated(machine, device)
    best = _best(peers)
    user_mask = mask_of(machine, device.vendor)
    all_train = device.number is None and _same_model(peers) and not hidden_gpus
    if best is device if user_mask else all_train:
        return []
    are_chosen = _same_model(peers) or machine.together
    reason = f"PyTorch uses the first visible GPU, and the best one is {best.name}"
    # GPUs of one model that were chosen among others: the mask lists them all.
    if several := are_chosen and len(peers) > 1:
        reason = "the chosen GPUs, in their order"
    elif hidden_gpus and len(peers) == 1:
        reason = "the discrete GPU alone: PyTorch uses the first visible one"
    shown_gpus = peers if several else [best]
    facts = VENDORS[device.vendor]
    mask = _Setting(
        facts.mask, ",".join(str(runtime_number(machine, peer)) for peer in shown_gpus), reason
    )
    if facts.order is None or user_mask:
        return [mask]
    order = _Setting(*facts.order, "numbers GPUs as nvidia-smi does")
    return [order, mask] if _counts_by_bus(machine, device) else [order]


def best_device(machine: Machine) -> Accelerator | None:
    """The best GPU for training, accessible or not: discrete before integrated, then the vendor of the installed
    PyTorch, then the most memory.
    """
    return max(
        machine.accelerators,
        key=lambda device: (
            not device.integrated,
            _build_for(device) == machine.software.build,
            device.usable_bytes,
            -device.index,
        ),
        default=None,
    )


def fitting_builds(
    machine: Machine, device: Accelerator | None, *, torch: str = DEFAULT_TORCH
) -> list[TorchBuild]:
    """The builds of a release of PyTorch for `device` in this machine, the best first; never empty."""
    major, minor = (int(part) for part in machine.software.python.split(".")[:2])
    driver = machine.host.driver.nvidia.partition(".")[0]
    return torch_builds(
        device.arch if device else None,
        python=(major, minor),
        system=machine.host.system,
        cpu_arch=machine.host.cpu_arch,
        torch=torch,
        driver=int(driver) if driver.isdigit() else None,
        site=machine.host.around.site,
    )


def install(machine: Machine, *, reinstall: bool = True) -> str:
    """The command that installs the right build; `reinstall`: also over another build of the same version."""
    command = fitting_builds(machine, best_device(machine))[0].command
    if reinstall:
        command = command.replace("pip install ", "pip install --force-reinstall ", 1)
    # A pin names the old build, and pip would refuse the new one.
    return "PIP_CONSTRAINT=/dev/null " + command if machine.software.pinned else command


def with_gpus(machine: Machine, devices: Sequence[Accelerator]) -> Machine:
    """`with_gpu`, with several that train together."""
    return with_gpu(machine, devices[0]).model_copy(
        update={"accelerators": tuple(devices), "together": not _same_model(devices)}
    )


LEAST_HOST = 32 * GIB
HOST_SHARE = 0.9  # of the host's memory, which a plan may use: the system takes the rest


def with_host_memory(machine: Machine, num_bytes: int | None, *, gpus: int = 1) -> Machine:
    """The machine with so much host memory; None: as much as one with such GPUs usually has, twice their memory rounded
    up to a power of two, and LEAST_HOST at least.

    `gpus`: of one model, where the machine has one of them.
    """
    origin = "set"
    if num_bytes is None:
        origin = "assumed"
        count = 1 if len(machine.accelerators) > 1 else gpus
        on_gpus = count * sum(device.usable_bytes for device in machine.accelerators)
        num_bytes = max(LEAST_HOST, 1 << (2 * on_gpus - 1).bit_length())
    host = machine.host.model_copy(
        update={
            "memory_bytes": num_bytes,
            "memory_free_bytes": int(HOST_SHARE * num_bytes),
            "memory_origin": origin,
        }
    )
    return machine.model_copy(update={"host": host})


def with_gpu(machine: Machine, device: Accelerator) -> Machine:
    """This machine with `device` as its only GPU, the right PyTorch, and without masks."""
    requirement = fitting_builds(machine, device)[0].requirement
    version = re.search(r"==(.+)", requirement)
    variables = machine.software.environment.items()
    software = Software(
        python=machine.software.python,
        torch=version[1] if version else None,
        build=_build_for(device),
        triton=triton_of(version[1]) if version else None,
        environment={name: value for name, value in variables if name not in (*MASKS, *ORDERS)},
    )
    # What this process may open is known of other GPUs, not of this one.
    host = machine.host.model_copy(update={"access": Access()})
    return machine.model_copy(
        update={
            "accelerators": (device,),
            "together": False,
            "hidden_integrated": (),
            "host": host,
            "software": software,
            "probes": (),
        }
    )


def local_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the parent of its NODE_LOCAL folders created, readable by this user only.

    If that folder belongs to another user, a temporary folder replaces it; if none can be created, the variables are
    left out. Where the home folder cannot be written, Triton's kernels are kept in TMPDIR.
    """
    caches = {name: Path(environment[name]) for name in NODE_LOCAL if name in environment}
    is_set = any(name in os.environ or name in caches for name in (TRITON_CACHE, "TRITON_HOME"))
    if not is_set and not _writes_home():
        caches[TRITON_CACHE] = temporary_cache() / "triton"
    variables = {name: value for name, value in environment.items() if name not in caches}
    roots = {path.parent for path in caches.values()}
    usable = dict[Path, Path]()
    try:
        for root in roots:
            is_private = private_folder(root)
            usable[root] = root if is_private else Path(tempfile.mkdtemp(prefix="bloomery-"))
    except OSError:
        return variables
    return variables | {name: str(usable[path.parent] / path.name) for name, path in caches.items()}


def _writes_home() -> bool:
    """Whether Triton can keep its kernels where it does by default."""
    try:
        folder = Path.home() / ".triton"
    except RuntimeError:  # a user ID that is not in /etc/passwd
        return False
    return os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK)


def apply_environment(machine: Machine, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables of the profile that the user has not set, as for the child process of a run."""
    for name, value in local_caches(build_profile(machine).environment.value).items():
        environment.setdefault(name, value)
