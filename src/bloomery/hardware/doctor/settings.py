"""What the environment variables that a user has set do on this machine: for `plan` and the doctor."""

from dataclasses import dataclass
from typing import Literal

from bloomery.hardware.doctor.software import override
from bloomery.hardware.machine import Machine, visible_devices
from bloomery.hardware.profile import (
    Profile,
    family_name,
)
from bloomery.hardware.vendors import ALLOCATORS, VENDORS
from bloomery.hardware.wheels import series

EffectKind = Literal["nothing", "works", "slows", "harms"]


HIP_SEGMENTS_SINCE = (2, 12)  # the first torch whose HIP allocator supports expandable segments


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A variable that is set, and its effect on this machine."""

    name: str
    value: str
    kind: EffectKind
    reason: str

    def __str__(self) -> str:
        if self.reason.startswith(self.name):
            return self.reason
        effect = {
            "nothing": "has no effect",
            "works": "works",
            "slows": "slows training",
            "harms": "harms",
        }[self.kind]
        return f"{self.name}={self.value} {effect}: {self.reason}"


def idle_settings(machine: Machine, profile: Profile) -> tuple[Effect, ...]:
    """The effect of each supported environment variable that is set, in the order of their names."""
    effects = []
    for name, value in sorted(machine.software.environment.items()):
        effect_of = _allocator if name in ALLOCATORS else _effect
        if (effect := effect_of(name, value, machine, profile)) is not None:
            effects.append(Effect(name=name, value=value, kind=effect[0], reason=effect[1]))
    return tuple(effects)


def _allocator(
    name: str, value: str, machine: Machine, profile: Profile
) -> tuple[EffectKind, str] | None:
    vendor = profile.accelerator.vendor if profile.accelerator else None
    torch = machine.software.torch
    if vendor is None:
        return "nothing", "training runs on the CPU, which uses another allocator"
    facts = VENDORS[vendor]
    if name not in facts.allocators:
        return "nothing", f"PyTorch for GPUs of {facts.name} does not read it"
    if vendor != "amd" or "expandable_segments:true" not in value.lower():
        return "works", "it replaces the allocator settings of Bloomery"
    if torch is not None and series(torch) < HIP_SEGMENTS_SINCE:
        return (
            "nothing",
            f"PyTorch {torch} does not support expandable segments on HIP: it warns and ignores them",
        )
    if "max_split_size_mb" in value:
        return "harms", "expandable segments and max_split_size_mb cannot be combined"
    return "harms", "expandable segments are new on HIP and can hang while memory is mapped"


def _effect(
    name: str, value: str, machine: Machine, profile: Profile
) -> tuple[EffectKind, str] | None:
    """For any other variable; None: not supported here, or it works as documented."""
    environment = machine.software.environment
    spec = profile.arch
    vendor, arch = (
        (profile.accelerator.vendor, profile.accelerator.arch) if profile.accelerator else ("", "")
    )
    nodes = machine.host.around.slurm.get("SLURM_JOB_NUM_NODES", "1")
    # One device in one process does not communicate.
    alone = len(visible_devices(machine)) <= 1 and nodes == "1"
    amd = any(device.vendor == "amd" for device in machine.accelerators)
    on = value not in ("", "0")
    match name:
        case "AMD_LOG_LEVEL":
            return ("slows", "the runtime logs every call") if on and vendor == "amd" else None
        case (
            "AMD_SERIALIZE_COPY"
            | "AMD_SERIALIZE_KERNEL"
            | "CUDA_LAUNCH_BLOCKING"
            | "HIP_LAUNCH_BLOCKING"
        ) if on:
            debugging: tuple[EffectKind, str] = (
                "slows",
                "for debugging: the CPU waits for every kernel",
            )
            return debugging if vendor else ("nothing", "no GPU is used")
        case "CUDA_VISIBLE_DEVICES":
            if not machine.accelerators:
                return "nothing", "this machine has no GPU"
            if (
                all(each.vendor == "amd" for each in machine.accelerators)
                and "HIP_VISIBLE_DEVICES" in environment
            ):
                return "nothing", "HIP_VISIBLE_DEVICES is set and takes precedence"
            if not any(name in VENDORS[each.vendor].masks for each in machine.accelerators):
                return "nothing", "this machine has no GPU of AMD or NVIDIA"
        case "ZE_AFFINITY_MASK":
            if not any(device.vendor == "intel" for device in machine.accelerators):
                return "nothing", "this machine has no GPU of Intel"
        case "FLASH_ATTENTION_TRITON_AMD_ENABLE":
            return "nothing", "it applies to the package flash-attn, which Bloomery does not use"
        case "HIP_VISIBLE_DEVICES" | "ROCR_VISIBLE_DEVICES":
            if not amd:
                return "nothing", "this machine has no AMD GPU"
            if "HIP_VISIBLE_DEVICES" in environment and "ROCR_VISIBLE_DEVICES" in environment:
                first = f"ROCR_VISIBLE_DEVICES={environment['ROCR_VISIBLE_DEVICES']} applies first"
                return (
                    "works",
                    f"{first}, HIP_VISIBLE_DEVICES numbers the remaining GPUs; set only one of them",
                )
        case "HSA_ENABLE_DXG_DETECTION":
            return None if machine.host.around.wsl else ("nothing", "this is not WSL")
        case "HSA_FORCE_FINE_GRAIN_PCIE":
            if vendor != "amd":
                return "nothing", "it applies to AMD GPUs"
            return ("nothing", "it applies to memory shared by several GPUs") if alone else None
        case "HSA_OVERRIDE_GFX_VERSION":
            if not amd:
                return "nothing", "this machine has no AMD GPU"
            if (finding := next(override(machine), None)) is not None:
                kinds: dict[str, EffectKind] = {
                    "override-needless": "nothing",
                    "override-helps": "works",
                }
                return kinds.get(finding.id, "harms"), finding.what
        case "HSA_XNACK" if on and vendor == "amd":
            if not arch.startswith("gfx9"):
                return "nothing", f"{arch} does not support page migration"
            return "slows", "memory pages can migrate between CPU and GPU while kernels run"
        case "MIOPEN_CUSTOM_CACHE_DIR" | "MIOPEN_USER_DB_PATH":
            return "nothing", "MIOpen computes convolutions, and language models have none"
        case "PYTORCH_NO_HIP_MEMORY_CACHING":
            if vendor != "amd":
                return "nothing", "it applies to PyTorch's allocator on AMD GPUs"
            return "slows", "for debugging: the driver allocates every tensor"
        case "ROCBLAS_INTERNAL_FP16_ALT_IMPL":
            return None if arch == "gfx90a" else ("nothing", "it applies to float16 on MI200 only")
        case "TORCHDYNAMO_DISABLE" | "TORCH_COMPILE_DISABLE":
            return ("works", "it disables torch.compile") if value == "1" else None
        case "TORCH_BLAS_PREFER_HIPBLASLT":
            return _hipblaslt(value != "0", vendor, arch, spec.hipblaslt if spec else "unknown")
        case "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL":
            if vendor != "amd" or spec is None:
                return "nothing", "it applies to fused attention on AMD GPUs"
            kernels = spec.attention_in(machine.software.torch)
            if kernels == "none":
                return "nothing", f"PyTorch has no fused attention kernels for {family_name(arch)}"
            if kernels == "yes":
                return "nothing", f"fused attention is enabled on {arch} by default"
            return "works", f"it enables fused attention on {arch}"
        case "TRITON_INTERPRET" if value == "1":
            return "slows", "Triton kernels run as Python code on the CPU"
        # TORCH_NCCL_ASYNC_ERROR_HANDLING is set by torchrun.
        case _ if (
            name.startswith(("NCCL_", "RCCL_", "TORCH_NCCL_"))
            and alone
            and not name.endswith("_HANDLING")
        ):
            return "nothing", "one device in one process does not communicate"
    return None


def _hipblaslt(
    requested: bool, vendor: str, arch: str, support: str
) -> tuple[EffectKind, str] | None:
    if vendor != "amd":
        return "nothing", "it applies to AMD GPUs, and training does not run on one"
    if support == "none":
        return "nothing", f"hipBLASLt does not support {family_name(arch)}: PyTorch uses rocBLAS"
    if support == "default" and requested:
        return "nothing", f"PyTorch uses hipBLASLt on {arch} by default"
    if support == "supported" and not requested:
        return "nothing", f"PyTorch uses rocBLAS on {arch} by default"
    if support == "unknown":
        return None
    return "works", f"matmuls on {arch} use {'hipBLASLt' if requested else 'rocBLAS'}"
