"""What the variables that a user has set do on this machine: nothing, something, or harm. Asked by `plan`."""

from collections.abc import Callable
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
    because: str

    def __str__(self) -> str:
        if self.because.startswith(self.name):
            return self.because
        verb = {"nothing": "does nothing here", "works": "works", "slows": "slows", "harms": "harms"}[self.does]
        return f"{self.name}={self.value} {verb}: {self.because}"


@dataclass(frozen=True, kw_only=True)
class _Case:
    value: str
    machine: Machine
    profile: Profile

    @property
    def vendor(self) -> str:
        """Of the device that training would use; empty: the processor."""
        return self.profile.accelerator.vendor if self.profile.accelerator else ""

    @property
    def arch(self) -> str:
        return self.profile.accelerator.arch if self.profile.accelerator else ""

    @property
    def alone(self) -> bool:
        """One device in one process: nobody to talk to."""
        nodes = self.machine.host.around.slurm.get("SLURM_JOB_NUM_NODES", "1")
        return len(visible_devices(self.machine)) <= 1 and nodes == "1"


_Said = tuple[Does, str] | None
_Rule = Callable[[_Case], _Said]


def idle_settings(machine: Machine, profile: Profile) -> tuple[Effect, ...]:
    """What each variable of the environment that this knows does here, in the order of their names."""
    found = []
    for name, value in sorted(machine.software.environment.items()):
        rule = _rule(name)
        said = rule(_Case(value=value, machine=machine, profile=profile)) if rule else None
        if said is not None:
            found.append(Effect(name=name, value=value, does=said[0], because=said[1]))
    return tuple(found)


def _rule(name: str) -> _Rule | None:
    if name in ALLOCATORS:
        return lambda case: _allocator(name, case)
    if name.startswith(("NCCL_", "RCCL_", "TORCH_NCCL_")):
        return _collective
    return _RULES.get(name)


def _allocator(name: str, case: _Case) -> _Said:
    if not case.vendor:
        return "nothing", "training runs on the processor, whose allocator is another"
    if (name, case.vendor) == ("PYTORCH_HIP_ALLOC_CONF", "nvidia"):
        return "nothing", "it is ROCm's name, and the GPU is NVIDIA's"
    if case.vendor == "nvidia" or "expandable_segments:true" not in case.value.lower():
        return "works", "it replaces the allocator settings that Bloomery would choose"
    torch = case.machine.software.torch
    if torch is not None and series(torch) < HIP_SEGMENTS_SINCE:
        return "nothing", f"PyTorch {torch} has no expandable segments on HIP: it warns and goes on without"
    if "max_split_size_mb" in case.value:
        return "harms", "expandable segments and max_split_size_mb exclude each other"
    return "harms", "expandable segments are young on HIP and can hang while memory is mapped"


def _collective(case: _Case) -> _Said:
    return ("nothing", "one device in one process exchanges nothing") if case.alone else None


def _hipblaslt(case: _Case) -> _Said:
    if case.vendor != "amd":
        return "nothing", "hipBLASLt is AMD's, and training does not run on an AMD GPU"
    known = case.profile.arch.hipblaslt if case.profile.arch else "unknown"
    asked = case.value != "0"
    if known == "none":
        return "nothing", f"PyTorch has no hipBLASLt for {family_name(case.arch)} and uses rocBLAS either way"
    if known == "default" and asked:
        return "nothing", f"PyTorch uses hipBLASLt on {case.arch} anyway"
    if known == "supported" and not asked:
        return "nothing", f"PyTorch uses rocBLAS on {case.arch} anyway"
    if known == "unknown":
        return None
    return "works", f"matrix products of {case.arch} go through {'hipBLASLt' if asked else 'rocBLAS'}"


def _override(case: _Case) -> _Said:
    if not any(device.vendor == "amd" for device in case.machine.accelerators):
        return "nothing", "there is no AMD GPU to rename"
    finding = next(override(case.machine), None)
    if finding is None:
        return None
    does: dict[str, Does] = {"override-needless": "nothing", "override-helps": "works"}
    return does.get(finding.id, "harms"), finding.what


def _hip_mask(case: _Case) -> _Said:
    if not any(device.vendor == "amd" for device in case.machine.accelerators):
        return "nothing", "there is no AMD GPU to choose"
    said = case.machine.software.environment
    if "HIP_VISIBLE_DEVICES" in said and "ROCR_VISIBLE_DEVICES" in said:
        left = f"ROCR_VISIBLE_DEVICES={said['ROCR_VISIBLE_DEVICES']} chooses first"
        return "works", f"{left}, and HIP_VISIBLE_DEVICES counts in what that leaves; set one of them"
    return None


def _cuda_mask(case: _Case) -> _Said:
    if not case.machine.accelerators:
        return "nothing", "there is no GPU to choose"
    only_amd = all(device.vendor == "amd" for device in case.machine.accelerators)
    if only_amd and "HIP_VISIBLE_DEVICES" in case.machine.software.environment:
        return "nothing", "HIP_VISIBLE_DEVICES is set, and HIP reads that one"
    return None


def _aotriton(case: _Case) -> _Said:
    if case.vendor != "amd" or case.profile.arch is None:
        return "nothing", "it concerns fused attention on AMD GPUs"
    kernels = case.profile.arch.attention_in(case.machine.software.torch)
    if kernels == "none":
        return "nothing", f"there are no fused kernels for {family_name(case.arch)} to switch on"
    if kernels == "yes":
        return "nothing", f"the fused kernels of {case.arch} need no switch"
    return "works", f"it switches on the fused attention of {case.arch}"


def _debugging(case: _Case) -> _Said:
    if case.value in ("", "0"):
        return None
    return ("slows", "for debugging: the host waits for every kernel") if case.vendor else ("nothing", "no GPU is used")


def _logging(case: _Case) -> _Said:
    if case.value in ("", "0") or case.vendor != "amd":
        return None
    return "slows", "the runtime writes a line for every call"


def _no_caching(case: _Case) -> _Said:
    if case.vendor != "amd":
        return "nothing", "it concerns PyTorch's allocator on AMD GPUs"
    return "slows", "for debugging: every tensor is asked of the driver"


def _xnack(case: _Case) -> _Said:
    if case.vendor != "amd" or case.value in ("", "0"):
        return None
    if not case.arch.startswith("gfx9"):
        return "nothing", f"{case.arch} cannot migrate pages"
    return "slows", "pages of memory may move between host and GPU while kernels run"


def _fine_grain(case: _Case) -> _Said:
    if case.vendor != "amd":
        return "nothing", "it concerns AMD GPUs"
    return ("nothing", "it concerns memory that several GPUs share") if case.alone else None


def _half_precision(case: _Case) -> _Said:
    return None if case.arch == "gfx90a" else ("nothing", "it concerns float16 on MI200 alone")


def _flash_package(_case: _Case) -> _Said:
    return "nothing", "it concerns the flash-attn package, which Bloomery does not use"


def _convolutions(_case: _Case) -> _Said:
    return "nothing", "it concerns MIOpen's convolutions, and a language model has none"


def _no_compile(case: _Case) -> _Said:
    return ("works", "nothing is compiled") if case.value == "1" else None


def _interpreted(case: _Case) -> _Said:
    return ("slows", "Triton's kernels run as Python, on the processor") if case.value == "1" else None


def _dxg(case: _Case) -> _Said:
    return None if case.machine.host.around.wsl else ("nothing", "this is not WSL")


_RULES: dict[str, _Rule] = {
    "AMD_LOG_LEVEL": _logging,
    "AMD_SERIALIZE_COPY": _debugging,
    "AMD_SERIALIZE_KERNEL": _debugging,
    "CUDA_LAUNCH_BLOCKING": _debugging,
    "CUDA_VISIBLE_DEVICES": _cuda_mask,
    "FLASH_ATTENTION_TRITON_AMD_ENABLE": _flash_package,
    "HIP_LAUNCH_BLOCKING": _debugging,
    "HIP_VISIBLE_DEVICES": _hip_mask,
    "HSA_ENABLE_DXG_DETECTION": _dxg,
    "HSA_FORCE_FINE_GRAIN_PCIE": _fine_grain,
    "HSA_OVERRIDE_GFX_VERSION": _override,
    "HSA_XNACK": _xnack,
    "MIOPEN_CUSTOM_CACHE_DIR": _convolutions,
    "MIOPEN_USER_DB_PATH": _convolutions,
    "PYTORCH_NO_HIP_MEMORY_CACHING": _no_caching,
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL": _half_precision,
    "ROCR_VISIBLE_DEVICES": _hip_mask,
    "TORCHDYNAMO_DISABLE": _no_compile,
    "TORCH_BLAS_PREFER_HIPBLASLT": _hipblaslt,
    "TORCH_COMPILE_DISABLE": _no_compile,
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": _aotriton,
    "TRITON_INTERPRET": _interpreted,
}
