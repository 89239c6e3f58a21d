"""What the variables that a user has set do on this machine: nothing, something, or harm. Asked by `plan`."""

from dataclasses import dataclass
from typing import Literal

from bloomery.hardware.doctor.software import override
from bloomery.hardware.machine import Machine, visible_devices
from bloomery.hardware.profile import ALLOCATORS, Profile, family_name
from bloomery.hardware.specs.wheels import series

Does = Literal["nothing", "works", "slows", "harms"]
HIP_SEGMENTS_SINCE = (2, 12)  # the first torch whose HIP allocator knows expandable segments at all


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A variable as it is set, and what it does here."""

    name: str
    value: str
    does: Does
    reason: str

    def __str__(self) -> str:
        if self.reason.startswith(self.name):
            return self.reason
        verb = {"nothing": "does nothing here", "works": "works", "slows": "slows", "harms": "harms"}[self.does]
        return f"{self.name}={self.value} {verb}: {self.reason}"


def idle_settings(machine: Machine, profile: Profile) -> tuple[Effect, ...]:
    """What each variable of the environment that this knows does here, in the order of their names."""
    found = []
    for name, value in sorted(machine.software.environment.items()):
        said = _allocator(name, value, machine, profile) if name in ALLOCATORS else _said(name, value, machine, profile)
        if said is not None:
            found.append(Effect(name=name, value=value, does=said[0], reason=said[1]))
    return tuple(found)


def _allocator(name: str, value: str, machine: Machine, profile: Profile) -> tuple[Does, str]:
    vendor, torch = profile.accelerator.vendor if profile.accelerator else "", machine.software.torch
    if not vendor:
        return "nothing", "training runs on the processor, whose allocator is another"
    if (name, vendor) == ("PYTORCH_HIP_ALLOC_CONF", "nvidia"):
        return "nothing", "it is ROCm's name, and the GPU is NVIDIA's"
    if vendor == "nvidia" or "expandable_segments:true" not in value.lower():
        return "works", "it replaces the allocator settings that Bloomery would choose"
    if torch is not None and series(torch) < HIP_SEGMENTS_SINCE:
        return "nothing", f"PyTorch {torch} has no expandable segments on HIP: it warns and goes on without"
    if "max_split_size_mb" in value:
        return "harms", "expandable segments and max_split_size_mb exclude each other"
    return "harms", "expandable segments are young on HIP and can hang while memory is mapped"


def _said(name: str, value: str, machine: Machine, profile: Profile) -> tuple[Does, str] | None:
    """Of any other variable; None: it is not known, or does here what it says."""
    said, spec = machine.software.environment, profile.arch
    vendor, arch = (profile.accelerator.vendor, profile.accelerator.arch) if profile.accelerator else ("", "")
    nodes = machine.host.around.slurm.get("SLURM_JOB_NUM_NODES", "1")
    alone = len(visible_devices(machine)) <= 1 and nodes == "1"  # one device in one process: nobody to talk to
    amd = any(device.vendor == "amd" for device in machine.accelerators)
    on = value not in ("", "0")
    match name:
        case "AMD_LOG_LEVEL":
            return ("slows", "the runtime writes a line for every call") if on and vendor == "amd" else None
        case "AMD_SERIALIZE_COPY" | "AMD_SERIALIZE_KERNEL" | "CUDA_LAUNCH_BLOCKING" | "HIP_LAUNCH_BLOCKING" if on:
            waits: tuple[Does, str] = ("slows", "for debugging: the host waits for every kernel")
            return waits if vendor else ("nothing", "no GPU is used")
        case "CUDA_VISIBLE_DEVICES":
            if not machine.accelerators:
                return "nothing", "there is no GPU to choose"
            if all(each.vendor == "amd" for each in machine.accelerators) and "HIP_VISIBLE_DEVICES" in said:
                return "nothing", "HIP_VISIBLE_DEVICES is set, and HIP reads that one"
        case "FLASH_ATTENTION_TRITON_AMD_ENABLE":
            return "nothing", "it concerns the flash-attn package, which Bloomery does not use"
        case "HIP_VISIBLE_DEVICES" | "ROCR_VISIBLE_DEVICES":
            if not amd:
                return "nothing", "there is no AMD GPU to choose"
            if "HIP_VISIBLE_DEVICES" in said and "ROCR_VISIBLE_DEVICES" in said:
                left = f"ROCR_VISIBLE_DEVICES={said['ROCR_VISIBLE_DEVICES']} chooses first"
                return "works", f"{left}, and HIP_VISIBLE_DEVICES counts in what that leaves; set one of them"
        case "HSA_ENABLE_DXG_DETECTION":
            return None if machine.host.around.wsl else ("nothing", "this is not WSL")
        case "HSA_FORCE_FINE_GRAIN_PCIE":
            if vendor != "amd":
                return "nothing", "it concerns AMD GPUs"
            return ("nothing", "it concerns memory that several GPUs share") if alone else None
        case "HSA_OVERRIDE_GFX_VERSION":
            if not amd:
                return "nothing", "there is no AMD GPU to rename"
            if (finding := next(override(machine), None)) is not None:
                does: dict[str, Does] = {"override-needless": "nothing", "override-helps": "works"}
                return does.get(finding.id, "harms"), finding.what
        case "HSA_XNACK" if on and vendor == "amd":
            if not arch.startswith("gfx9"):
                return "nothing", f"{arch} cannot migrate pages"
            return "slows", "pages of memory may move between host and GPU while kernels run"
        case "MIOPEN_CUSTOM_CACHE_DIR" | "MIOPEN_USER_DB_PATH":
            return "nothing", "it concerns MIOpen's convolutions, and a language model has none"
        case "PYTORCH_NO_HIP_MEMORY_CACHING":
            if vendor != "amd":
                return "nothing", "it concerns PyTorch's allocator on AMD GPUs"
            return "slows", "for debugging: every tensor is asked of the driver"
        case "ROCBLAS_INTERNAL_FP16_ALT_IMPL":
            return None if arch == "gfx90a" else ("nothing", "it concerns float16 on MI200 alone")
        case "TORCHDYNAMO_DISABLE" | "TORCH_COMPILE_DISABLE":
            return ("works", "nothing is compiled") if value == "1" else None
        case "TORCH_BLAS_PREFER_HIPBLASLT":
            return _hipblaslt(value != "0", vendor, arch, spec.hipblaslt if spec else "unknown")
        case "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL":
            if vendor != "amd" or spec is None:
                return "nothing", "it concerns fused attention on AMD GPUs"
            kernels = spec.attention_in(machine.software.torch)
            if kernels == "none":
                return "nothing", f"there are no fused kernels for {family_name(arch)} to switch on"
            if kernels == "yes":
                return "nothing", f"the fused kernels of {arch} need no switch"
            return "works", f"it switches on the fused attention of {arch}"
        case "TRITON_INTERPRET" if value == "1":
            return "slows", "Triton's kernels run as Python, on the processor"
        case _ if name.startswith(("NCCL_", "RCCL_", "TORCH_NCCL_")) and alone:
            return "nothing", "one device in one process exchanges nothing"
    return None


def _hipblaslt(asked: bool, vendor: str, arch: str, known: str) -> tuple[Does, str] | None:
    if vendor != "amd":
        return "nothing", "hipBLASLt is AMD's, and training does not run on an AMD GPU"
    if known == "none":
        return "nothing", f"PyTorch has no hipBLASLt for {family_name(arch)} and uses rocBLAS either way"
    if known == "default" and asked:
        return "nothing", f"PyTorch uses hipBLASLt on {arch} anyway"
    if known == "supported" and not asked:
        return "nothing", f"PyTorch uses rocBLAS on {arch} anyway"
    if known == "unknown":
        return None
    return "works", f"matrix products of {arch} go through {'hipBLASLt' if asked else 'rocBLAS'}"
