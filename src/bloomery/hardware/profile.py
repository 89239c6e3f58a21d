"""What a machine wants, and the PyTorch that fits it: the only place where knowledge of vendors turns into choices."""

import os
import re
import stat
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bloomery.core.choice import Choice
from bloomery.hardware.machine import (
    CUDA_ORDER,
    MASKS,
    Accelerator,
    Access,
    Machine,
    Probe,
    Software,
    hidden,
    mask_of,
    number_of,
    visible_devices,
)
from bloomery.hardware.specs.specs import ArchSpec, CpuSpec, GpuSpec, arch_spec, cpu_spec, gpu_spec
from bloomery.hardware.specs.wheels import TorchBuild, series, torch_builds

MEMORY_SHARE = 0.92  # of a card: above it a ROCm driver can hang before PyTorch raises
SHARED_MEMORY_SHARE = 0.85  # of processor graphics: what they take, the rest of the machine lacks
HIP_ALLOCATOR = "garbage_collection_threshold:0.8,max_split_size_mb:512"
CUDA_ALLOCATOR = "expandable_segments:True"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NODE_LOCAL = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # not MIOpen's: a language model has no convolutions


class Overridden(NamedTuple):
    """A variable that the user has set otherwise than this machine wants. The user's value stays."""

    theirs: str
    ours: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Choices for the device that training will use, with the table's rows behind them (None: not in the table)."""

    device: Choice[str]  # cpu, cuda (also ROCm's name in PyTorch)
    accelerator: Accelerator | None
    arch: ArchSpec | None
    gpu: GpuSpec | None
    cpu: CpuSpec | None
    dtype: Choice[str]  # float32, bfloat16, float16
    attention: Choice[str]  # fused, plain: whether the device has fused attention kernels
    compile: Choice[bool]
    fused_optimizer: Choice[bool]
    memory_share: Choice[float]  # of the device, above which PyTorch's allocator raises
    workers: Choice[int]
    pin_memory: Choice[bool]
    prefetch: Choice[int]  # batches read ahead
    environment: Choice[dict[str, str]]  # set before torch is imported, never over the user's own
    overridden: dict[str, Overridden]  # what the user's own settings keep from being set


def build_profile(machine: Machine) -> Profile:
    """Choices for the accelerator that training would use here, or for the processor when there is none to use."""
    accelerator, device = choose_device(machine)
    arch = arch_spec(accelerator.arch) if accelerator else None
    cpu = cpu_spec(machine.host)
    wanted = _wanted(machine, accelerator, arch)
    unset = [each for each in wanted if not _set(machine, each.name)]
    return Profile(
        device=device,
        accelerator=accelerator,
        arch=arch,
        gpu=gpu_spec(accelerator) if accelerator else None,
        cpu=cpu,
        dtype=_gpu_dtype(machine, accelerator, arch) if accelerator else _cpu_dtype(cpu),
        attention=_attention(machine, accelerator, arch),
        compile=_compile(machine, accelerator, arch),
        fused_optimizer=Choice(True, "one kernel over all parameters; the same mathematics"),
        memory_share=_memory_share(accelerator),
        workers=Choice(1, "shards are memory-mapped: one thread reads far faster than any device trains"),
        pin_memory=_pinned(accelerator, arch),
        prefetch=Choice(4 if accelerator else 2, "batches kept ready, a few kilobytes each"),
        environment=Choice(
            {each.name: each.value for each in unset},
            "; ".join(dict.fromkeys(each.reason for each in unset)) or "nothing needs to be set",
        ),
        overridden=_overridden(machine, wanted),
    )


def choose_device(machine: Machine) -> tuple[Accelerator | None, Choice[str]]:
    """The visible accelerator with the most memory that is no processor graphics and that torch was built for.

    Where the user has chosen with a mask it is the first that the mask shows, as PyTorch will take that one.
    """
    build = machine.software.build
    if not machine.accelerators:
        return None, Choice("cpu", "no GPU was found")
    seen = visible_devices(machine)
    if not seen:
        return None, Choice("cpu", f"{hidden(machine)} hides every GPU")
    usable = [device for device in seen if build in (None, _build_for(device))]
    firsts = {device.vendor: device for device in reversed(usable) if mask_of(machine, device.vendor)}
    best = _best([device for device in usable or seen if firsts.get(device.vendor, device) is device])
    if not usable:
        reason = f"{best.name} is here, but the installed PyTorch is a {build} build: it needs a {_build_for(best)} one"
        return None, Choice("cpu", reason)
    barred = _barred(machine, best)
    if barred:
        return None, Choice("cpu", f"{best.name} is here, but {barred}")
    return best, Choice("cuda", f"{best.name} ({best.arch}){_among(machine, best, usable)}")


def _best(devices: Sequence[Accelerator]) -> Accelerator:
    return max(devices, key=lambda device: (not device.integrated, device.usable_bytes, -device.index))


def _among(machine: Machine, device: Accelerator, usable: Sequence[Accelerator]) -> str:
    """Which of several, and why that one."""
    if len(usable) == 1:
        return ""
    mask = mask_of(machine, device.vendor)
    if mask:
        said = f", the first that {mask}={machine.software.environment[mask]} shows"
        counted = device.vendor == "amd" or CUDA_ORDER in machine.software.environment or _alike(usable)
        return said if counted else f"{said} if {CUDA_ORDER} is PCI_BUS_ID, which is not set"
    if _alike(usable):
        return f", the first of {len(usable)} alike"
    best = max(usable, key=lambda each: each.usable_bytes)
    why = "the most memory of" if best.usable_bytes == device.usable_bytes else "no processor graphics, of"
    return f", device {device.index}: {why} {len(usable)}"


def _alike(devices: Sequence[Accelerator]) -> bool:
    return len({(device.name, device.arch, device.memory_bytes) for device in devices}) == 1


def _build_for(device: Accelerator) -> str:
    return "rocm" if device.vendor == "amd" else "cuda"


def _barred(machine: Machine, device: Accelerator) -> str:
    """Why this process may not use a device that is there; empty when nothing says so."""
    around = machine.host.around
    words = {
        "denied": "may not be opened by you",
        "hung": "does not answer: the driver has hung",
        "absent": f"is not in this {around.container} container" if around.container else "is not there",
    }
    kfd = machine.host.access.kfd if device.vendor == "amd" and not around.wsl else None  # WSL has /dev/dxg instead
    refused = [(name, words[said]) for name, said in (("/dev/kfd", kfd), (device.node, device.access)) if said in words]
    return " ".join(refused[0]) if refused else ""


def _probe(machine: Machine, name: str) -> Probe | None:
    return next((probe for probe in machine.probes if probe.name == name), None)


def _failed(machine: Machine, *names: str) -> str:
    """What the probes of this machine said, when every one of `names` was run and none came out well; else empty."""
    found = [probe for name in names if (probe := _probe(machine, name)) is not None]
    if len(found) < len(names) or any(probe.outcome == "ok" or "experimental" in probe.said for probe in found):
        return ""  # "experimental": the switch was missing that our environment sets
    return f"probed here: {found[0].name} {found[0].outcome}" + (f" ({found[0].said})" if found[0].said else "")


def _gpu_dtype(machine: Machine, device: Accelerator, arch: ArchSpec | None) -> Choice[str]:
    """The table's, unless a probe of this very device says that it does not work."""
    chosen = _table_dtype(device, arch)
    failed = _failed(machine, f"matmul-{chosen.value}")
    if not failed:
        return chosen
    other = "float16" if chosen.value == "bfloat16" else "float32"
    return Choice("float32" if _failed(machine, f"matmul-{other}") else other, failed)


def _table_dtype(device: Accelerator, arch: ArchSpec | None) -> Choice[str]:
    if arch is None:
        return Choice("float32", f"{device.arch} is not in the table: what it multiplies in hardware is unknown")
    if arch.bf16 == "full":
        return Choice("bfloat16", f"{device.arch} multiplies bf16 in hardware")
    if arch.bf16 == "half":
        return Choice("bfloat16", f"{device.arch} multiplies bf16 at half the rate of fp16, without loss scaling")
    if arch.float16_rate:
        return Choice("float32", f"{device.arch} computes float16 at {arch.float16_rate} of float32's rate")
    if arch.cautious:
        return Choice(
            "float32", f"the safe choice for {device.arch}; float16 is twice as fast on paper and untried here"
        )
    return Choice("float16", f"{device.arch} has no bf16 matrix instructions")


def _cpu_dtype(cpu: CpuSpec | None) -> Choice[str]:
    if cpu is not None and cpu.bf16:
        return Choice("bfloat16", f"this CPU multiplies it in hardware ({cpu.name})")
    return Choice("float32", "this CPU has no bf16 instructions, and fp16 is five to nine times slower on any CPU")


def _attention(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> Choice[str]:
    if device is None:
        return Choice("fused", "PyTorch's CPU kernel needs no quadratic memory")
    if arch is None:
        return Choice("plain", f"nothing is known of fused kernels for {device.arch}")
    failed = _failed(machine, "attention-flash", "attention-efficient")
    if failed:
        return Choice("plain", failed)
    kernels = arch.attention_in(machine.software.torch)
    if kernels == "none":
        return Choice("plain", f"no fused kernel for {family_name(device.arch)}")
    if kernels == "wrong":
        return Choice("plain", f"the fused kernels of PyTorch {machine.software.torch} give NaN on {device.arch}")
    reason = f"PyTorch has fused kernels for {device.arch}"
    if kernels == "experimental":
        reason += ", switched on by TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    return Choice("fused", reason)


def _pinned(device: Accelerator | None, arch: ArchSpec | None) -> Choice[bool]:
    if device is None:
        return Choice(False, "nothing is copied to a device")
    if device.integrated:
        return Choice(False, "processor graphics read the same memory")
    if arch is not None and arch.cautious:
        return Choice(False, f"the safe choice for {device.arch}; a batch is a few kilobytes")
    return Choice(True, "copies to the device overlap with work")


def family_name(arch: str) -> str:
    """gfx1031 -> gfx103x: how people name chips that share an instruction set; others as they are."""
    return arch[:-1] + "x" if arch.startswith(("gfx10", "gfx11")) else arch


def _compile(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> Choice[bool]:
    said = machine.software.environment
    off = next((name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if said.get(name) == "1"), None)
    if off is not None:
        return Choice(False, f"{off}=1 is set")
    failed = _failed(machine, "compile")
    if failed:
        return Choice(False, failed)
    return _gpu_compile(machine, device, arch) if device else _cpu_compile(machine)


def _gpu_compile(machine: Machine, device: Accelerator, arch: ArchSpec | None) -> Choice[bool]:
    if arch is None:
        return Choice(False, f"{device.arch} is not in the table: Triton is untried on it")
    here = bool(machine.software.torch_folder)  # not a machine that was only named
    if arch.compile and here and machine.software.triton is None:
        return Choice(False, "torch.compile needs Triton, and none is installed")
    if arch.compile and here and machine.host.compiler is None:
        return Choice(False, "Triton needs a C compiler, and there is none on PATH")
    return Choice(arch.compile, arch.compile_reason)


def _cpu_compile(machine: Machine) -> Choice[bool]:
    compiler = machine.host.compiler
    if compiler is None:
        return Choice(False, "torch.compile needs a C++ compiler, and there is none on PATH")
    return Choice(True, f"{compiler} builds fused loops: 10 to 35% faster once compiled")


def _memory_share(device: Accelerator | None) -> Choice[float]:
    if device is None:
        return Choice(1.0, "of the memory that is free")
    if device.integrated:
        return Choice(SHARED_MEMORY_SHARE, "the processor needs the rest, or all swaps")
    if device.vendor == "amd":
        return Choice(MEMORY_SHARE, "so that PyTorch fails before the driver hangs")
    return Choice(MEMORY_SHARE, "the rest is the driver's and the libraries'")


class _Wanted(NamedTuple):
    name: str
    value: str
    reason: str


def _wanted(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> list[_Wanted]:
    """Variables that should be set in the parent, before torch is imported."""
    if device is None:
        compiler = machine.host.compiler
        looked_for = compiler is None or compiler.endswith("/g++")
        reason = "torch.compile looks for g++ unless CXX names another"
        return [] if looked_for else [_Wanted("CXX", compiler or "", reason)]
    return [*_allocator(machine, device), *_vendor_settings(machine, device, arch), *_node_local(machine)]


def _allocator(machine: Machine, device: Accelerator) -> list[_Wanted]:
    torch = machine.software.torch
    old = torch is not None and series(torch) < (2, 10)  # which knew the variable by its vendors' names alone
    if device.vendor == "amd":
        name = "PYTORCH_HIP_ALLOC_CONF" if old else "PYTORCH_ALLOC_CONF"
        return [_Wanted(name, HIP_ALLOCATOR, "less fragmentation; expandable segments stay off on HIP")]
    if machine.host.around.wsl:
        return []
    name = "PYTORCH_CUDA_ALLOC_CONF" if old else "PYTORCH_ALLOC_CONF"
    return [_Wanted(name, CUDA_ALLOCATOR, "less fragmentation")]


def _vendor_settings(machine: Machine, device: Accelerator, arch: ArchSpec | None) -> list[_Wanted]:
    wanted = []
    if arch is not None and arch.attention_in(machine.software.torch) == "experimental":
        reason = "fused attention is switched off by default on this chip"
        wanted.append(_Wanted("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", reason))
    if device.arch == "gfx942":
        reason = "AMD's guide to training on MI300X"
        wanted += [_Wanted(name, "1", reason) for name in ("HIP_FORCE_DEV_KERNARG", "HSA_NO_SCRATCH_RECLAIM")]
    return [*wanted, *_mask(machine, device)]


def _mask(machine: Machine, device: Accelerator) -> list[_Wanted]:
    """PyTorch takes the device that its runtime counts first: the others are hidden where that could be another.

    Of a mask of the user's own only what it should be, where it shows a better device later.
    """
    peers = [each for each in visible_devices(machine) if each.vendor == device.vendor]
    best, theirs = _best(peers), mask_of(machine, device.vendor)
    if best is device if theirs else device.number is None and _alike(peers):
        return []
    reason = f"{best.name} is the GPU to train on, and PyTorch takes the first that it sees"
    name = "HIP_VISIBLE_DEVICES" if device.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    mask = _Wanted(name, str(number_of(machine, best)), reason)
    if device.vendor == "amd" or theirs:
        return [mask]
    order = _Wanted(CUDA_ORDER, "PCI_BUS_ID", "GPUs are counted as nvidia-smi counts them")
    return [order, mask] if machine.software.environment.get(CUDA_ORDER, order.value) == order.value else [order]


def _node_local(machine: Machine) -> list[_Wanted]:
    """Caches of a cluster's job: on a shared file system they corrupt under many ranks."""
    job = machine.host.around.slurm.get("SLURM_JOB_ID")
    if job is None:
        return []
    reason = "compiled kernels in a folder of the node: shared ones corrupt under many ranks"
    return [_Wanted(name, f"/tmp/bloomery-{job}/{name.split('_')[0].lower()}", reason) for name in NODE_LOCAL]


def _set(machine: Machine, name: str) -> tuple[str, ...]:
    """The user's own variables that decide what `name` would."""
    said = machine.software.environment
    masks = MASKS if name == "HIP_VISIBLE_DEVICES" else (name,)  # a mask of AMD's alone does not bind CUDA
    same = ALLOCATORS if name in ALLOCATORS else masks
    return tuple(other for other in same if other in said)


def _overridden(machine: Machine, wanted: list[_Wanted]) -> dict[str, Overridden]:
    said = machine.software.environment
    return {
        name: Overridden(said[name], each.value, each.reason)
        for each in wanted
        for name in _set(machine, each.name)
        if said[name] != each.value
    }


def best_device(machine: Machine) -> Accelerator | None:
    """The card that training is meant for: no processor graphics where there is a card, of cards those that the
    installed PyTorch was built for, of those the most memory."""
    maker = {"rocm": "amd", "cuda": "nvidia"}.get(machine.software.build or "")
    return max(
        machine.accelerators,
        key=lambda one: (not one.integrated, one.vendor == maker, one.usable_bytes, -one.index),
        default=None,
    )


def fitting_builds(machine: Machine, device: Accelerator | None) -> list[TorchBuild]:
    """The builds of PyTorch that fit `device` in this machine, the best first; never empty."""
    major, minor = (int(part) for part in machine.software.python.split(".")[:2])
    driver = machine.host.driver.nvidia.partition(".")[0]
    return torch_builds(
        device.arch if device else None,
        python=(major, minor),
        system=machine.host.system,
        processor=machine.host.processor,
        driver=int(driver) if driver.isdigit() else None,
        site=machine.host.around.site,
    )


def install(machine: Machine, *, anew: bool = True) -> str:
    """The command that installs the fitting build; `anew`: over another build of that version, which pip would keep."""
    command = fitting_builds(machine, best_device(machine))[0].command
    if anew:
        command = command.replace("pip install ", "pip install --force-reinstall ", 1)
    return "PIP_CONSTRAINT=/dev/null " + command if machine.software.pinned else command  # the pin names the old build


def with_gpu(machine: Machine, device: Accelerator) -> Machine:
    """This machine with `device` as its only accelerator and the PyTorch that fits it; masks of its own cards go."""
    wanted = fitting_builds(machine, device)[0].requirement
    version = re.search(r"==(.+)", wanted)
    said = machine.software.environment.items()
    software = Software(
        python=machine.software.python,
        torch=version[1] if version else None,
        build="rocm" if device.vendor == "amd" else "cuda",
        environment={name: value for name, value in said if name not in (*MASKS, CUDA_ORDER)},
    )
    host = machine.host.model_copy(update={"access": Access()})  # what may be opened here says nothing of that GPU
    return machine.model_copy(update={"accelerators": (device,), "host": host, "software": software, "probes": ()})


def private_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with its NODE_LOCAL folders' own parent made for this user alone.

    Where somebody else has made that folder first another takes its place; where none can be made none is named.
    """
    named = {name: Path(environment[name]) for name in NODE_LOCAL if name in environment}
    kept = {name: value for name, value in environment.items() if name not in named}
    roots = {path.parent for path in named.values()}
    try:
        ours = {root: root if _made(root) else Path(tempfile.mkdtemp(prefix="bloomery-")) for root in roots}
    except OSError:
        return kept
    return kept | {name: str(ours[path.parent] / path.name) for name, path in named.items()}


def _made(folder: Path) -> bool:
    """Whether it is there and this user's alone. Raises OSError when it can be neither made nor seen."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link of somebody else's is not followed
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def apply_environment(machine: Machine, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets in `environment` what `machine` wants and the user has not, as for a run's child."""
    wanted = private_caches(build_profile(machine).environment.value)
    for name, value in wanted.items():
        environment.setdefault(name, value)
