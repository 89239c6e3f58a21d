"""The PyTorch build that fits a machine. Standard library only: used before anything is installed.

Sources: PyTorch's release matrix and .ci/docker/manywheel/build.sh (the indexes), TheRock's RELEASES.md and
SUPPORTED_GPUS.md (AMD's own wheels), pytorch/pytorch#190385 (CUDA 12.6 ends with 2.14, CUDA 13 begins at Turing),
ROCm/legacy-rocm-build#4625 (no gfx906 matrix library from ROCm 6.4 on), OLCF's pytorch_frontier.rst of 2026-07-22,
LUMI's container images in /appl/local.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TORCH = "2.13.0"
OLDEST_TORCH = (2, 9)
PYTORCH_INDEX = "https://download.pytorch.org/whl/"
AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next/"

_ROCM_6 = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1101 gfx1102 gfx1200 gfx1201"
_ROCM_71 = _ROCM_6 + " gfx950"
_ROCM_72 = _ROCM_71 + " gfx1150 gfx1151"
_ROCM_714 = (
    "gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1200 gfx1201"  # no gfx906
)
# torch -> (index at download.pytorch.org, GPUs with kernels in its wheels)
PYTORCH_ROCM: dict[tuple[int, int], tuple[str, str]] = {
    (2, 9): ("rocm6.4", _ROCM_6),
    (2, 10): ("rocm7.1", _ROCM_71),
    (2, 11): ("rocm7.2", _ROCM_72),
    (2, 12): ("rocm7.2", _ROCM_72),
    (2, 13): ("rocm7.2", _ROCM_72),
    (2, 14): ("rocm7.14", _ROCM_714),
    (2, 15): ("rocm7.14", _ROCM_714),
}
# torch -> local version of AMD's wheels, which have one kernel package per GPU
AMD_WHEELS = {
    "2.11.0": "rocm10.0.0",
    "2.12.0": "rocm10.0.0",
    "2.13.0": "rocm10.0.0",
    "2.14.0": "rocm10.1.0",
}
AMD_DEVICES = (
    "gfx950 gfx942 gfx90a gfx908 gfx906 gfx900 gfx1201 gfx1200 gfx1153 gfx1152 gfx1151 gfx1150 gfx1103 gfx1102 gfx1101 "
    "gfx1100 gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036 gfx1010 gfx1011 gfx1012"
)
# Listed by PyTorch but not usable: the wheels lack rocBLAS kernels, or crash.
NOT_FROM_PYTORCH = {
    "gfx900": "PyTorch's ROCm wheels have no rocBLAS kernels for it",
    "gfx906": "ROCm 6.4 and later have no rocBLAS kernels for gfx906, 7.14 and later no kernels at all",
    "gfx1150": "PyTorch's ROCm 7 wheels crash on it; AMD's ROCm 10 wheels do not",
    "gfx1151": "PyTorch's ROCm 7 wheels crash on it; AMD's ROCm 10 wheels do not",
}
_AMD_FIRST = ("gfx1150", "gfx1151")  # from PyTorch's index only with ROCm 7.14
_OVERRIDE = "set HSA_OVERRIDE_GFX_VERSION"
_NO_RDNA2 = "use torch.compile after PyTorch 2.14: Triton 3.9 does not support {arch}"


@dataclass(frozen=True)
class TorchBuild:
    """The arguments of `pip install`, the reason, and what to avoid on this machine."""

    requirement: str
    index: str | None
    reason: str
    never: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # variables that this build requires
    before: tuple[str, ...] = ()  # commands to run first, in this shell and in every job

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU build."""
        return self.index == PYTORCH_INDEX + "cpu"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `pip install`."""
        return [*(["--index-url", self.index] if self.index else []), self.requirement]

    @property
    def command(self) -> str:
        return "pip install " + shlex.join(self.arguments)


SITES = ("frontier", "lumi", "setonix")
_SITE_VARIABLES = ("SLURM_CLUSTER_NAME", "LMOD_SYSTEM_NAME", "PAWSEY_CLUSTER")
_PYPI = "pip install torch without --index-url: the wheel on PyPI is for NVIDIA and replaces this one"
_BUILDS_OF_SITES = {
    "frontier": TorchBuild(
        "torch==2.10.0+rocm7.1",
        PYTORCH_INDEX + "rocm7.1",
        "OLCF's documentation: this wheel with the ROCm 7.1.1 module",
        (
            _PYPI,
            "load a ROCm module of another major version than the wheel",
            "start ranks with torchrun, which takes minutes: srun starts one per GCD",
        ),
        before=(
            "module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 craype-accel-amd-gfx90a",
            "export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH",
        ),
    ),
    "lumi": TorchBuild(
        "torch==2.10.0+rocm7.1",
        PYTORCH_INDEX + "rocm7.1",
        "the wheel for Frontier, which has the same nodes; LUMI's own container, listed first, supports its network",
        (_PYPI, "pip install torch in LUMI's container: its own PyTorch is built for that ROCm and network"),
        before=("ls /appl/local/containers/sif-images/lumi-pytorch-rocm-*.sif",),
    ),
}


def detect_site(root: Path = Path("/")) -> str:
    """frontier, lumi or setonix, also on their login nodes without GPU; empty elsewhere."""
    values = {os.environ.get(name, "").lower() for name in _SITE_VARIABLES}
    site = next((site for site in SITES if site in values), "")
    return site or ("lumi" if (root / "appl/lumi").is_dir() else "")


def torch_builds(
    arch: str | None,
    *,
    python: tuple[int, int],
    system: str = "Linux",
    cpu_arch: str = "x86_64",
    torch: str = DEFAULT_TORCH,
    driver: int | None = None,
    site: str = "",
) -> list[TorchBuild]:
    """The builds that fit, the best first; never empty. `arch`: gfx1031, sm_86, None; `driver`: NVIDIA's major version.

    `site`: a cluster that documents its own build, also for its login nodes without GPU (`arch` None).

    >>> torch_builds("gfx1031", python=(3, 12))[0].requirement
    'torch[device-gfx1031]==2.13.0+rocm10.0.0'
    """
    if site in _BUILDS_OF_SITES and arch in (None, "gfx90a") and torch == DEFAULT_TORCH:
        return [_BUILDS_OF_SITES[site]]
    if arch is None or system == "Darwin":
        return [_cpu(torch, system, "no GPU found" if arch is None else "no macOS wheels for this GPU")]
    if arch.startswith("sm_"):
        return [_cuda(arch, torch, driver)]
    if not (3, 10) <= python <= (3, 14):
        return [_cpu(torch, system, f"no ROCm wheels for Python {python[0]}.{python[1]}")]
    builds = list(_rocm(arch, torch, system, cpu_arch))
    return builds or [_cpu(torch, system, f"no PyTorch {torch} wheel has kernels for {arch} on {system} {cpu_arch}")]


def _rocm(arch: str, torch: str, system: str, cpu_arch: str) -> list[TorchBuild]:
    linux = system == "Linux" and cpu_arch == "x86_64"
    pytorch = _from_pytorch(arch, torch) if linux else []
    amd = _from_amd(arch, torch) if cpu_arch in ("x86_64", "AMD64") else []
    override = _with_override(arch, torch) if linux else []
    return [*amd, *pytorch] if arch in _AMD_FIRST else [*pytorch, *amd, *override]


def _from_pytorch(arch: str, torch: str) -> list[TorchBuild]:
    if arch == "gfx906":
        reason = "the last index with kernels and rocBLAS for gfx906; its last version is torch 2.9.1"
        newer = "install torch from rocm6.4 or newer: " + NOT_FROM_PYTORCH[arch]
        pinned = torch if series(torch) == (2, 9) else "2.9.1"
        return [TorchBuild(f"torch=={pinned}+rocm6.3", PYTORCH_INDEX + "rocm6.3", reason, (newer,))]
    index, archs = PYTORCH_ROCM.get(series(torch), ("", ""))
    crashes = arch in NOT_FROM_PYTORCH and not (arch in _AMD_FIRST and index == "rocm7.14")
    if crashes or arch not in archs.split():
        return []
    never = (f"{_OVERRIDE}: this wheel has kernels for {arch}", *_triton(arch, torch))
    return [TorchBuild(f"torch=={torch}+{index}", PYTORCH_INDEX + index, f"it has kernels for {arch}", never)]


def _from_amd(arch: str, torch: str) -> list[TorchBuild]:
    if torch not in AMD_WHEELS or arch not in AMD_DEVICES.split() or arch == "gfx900":
        return []
    reason = f"AMD's wheels have kernels for {arch}"
    if arch in ("gfx906", "gfx908", "gfx90a", "gfx950"):
        reason += "; built but not tested by AMD for this GPU"
    never = [f"{_OVERRIDE}: this wheel does not include the kernels of the other architecture"]
    if arch in _AMD_FIRST:
        never.append(f"install torch from rocm7.2 or older: {NOT_FROM_PYTORCH[arch]}")
    return [
        TorchBuild(
            f"torch[device-{arch}]=={torch}+{AMD_WHEELS[torch]}", AMD_INDEX, reason, (*never, *_triton(arch, torch))
        )
    ]


def _triton(arch: str, torch: str) -> tuple[str, ...]:
    return (_NO_RDNA2.format(arch=arch),) if arch.startswith("gfx10") and series(torch) <= (2, 14) else ()


def _with_override(arch: str, torch: str) -> list[TorchBuild]:
    """gfx1031 to gfx1036 can run the kernels of gfx1030 with the override; no other family can safely."""
    index, _ = PYTORCH_ROCM.get(series(torch), ("", ""))
    if not re.fullmatch("gfx103[1-6]", arch) or not index:
        return []
    return [
        TorchBuild(
            f"torch=={torch}+{index}",
            PYTORCH_INDEX + index,
            f"{arch} can run the kernels of gfx1030 with HSA_OVERRIDE_GFX_VERSION",
            ("set the override with AMD's own wheels, or with a second GPU of another family",),
            (("HSA_OVERRIDE_GFX_VERSION", "10.3.0"),),
        )
    ]


def _cuda(arch: str, torch: str, driver: int | None) -> TorchBuild:
    capability = int(arch.removeprefix("sm_"))
    old_driver = driver is not None and driver < 580
    if capability >= 100:  # requires CUDA 12.8: an older driver must be updated
        return TorchBuild(f"torch=={torch}", None, f"the wheel on PyPI is a CUDA build that supports {arch}")
    if (capability < 75 or old_driver) and series(torch) <= (2, 14):
        reason = (
            f"CUDA 13 requires sm_75, the GPU is {arch}" if capability < 75 else f"driver {driver} is older than 580"
        )
        return TorchBuild(f"torch=={torch}+cu126", PYTORCH_INDEX + "cu126", reason)
    return TorchBuild(f"torch=={torch}", None, f"the wheel on PyPI is a CUDA build that supports {arch}")


def _cpu(torch: str, system: str, reason: str) -> TorchBuild:
    """On Linux the wheel on PyPI includes gigabytes of CUDA; PyTorch's own index has a small one."""
    return TorchBuild(f"torch=={torch}", PYTORCH_INDEX + "cpu" if system != "Darwin" else None, reason)


def series(version: str) -> tuple[int, int]:
    """(2, 13) from "2.13.0+rocm7.2"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def fits(arch: str | None, *, torch: str, hip: str | None, cuda: str | None, kernels: list[str]) -> str | None:
    """None if an installed PyTorch supports this GPU (`kernels`: its `get_arch_list`), otherwise the reason."""
    if series(torch) < OLDEST_TORCH:
        return f"PyTorch {torch} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    if arch is None:
        return None
    if arch.startswith("sm_"):
        return None if cuda else f"PyTorch {torch} is not a CUDA build"
    if not hip:
        return f"PyTorch {torch} is not a ROCm build, the GPU is from AMD"
    archs = [kernel.split(":")[0] for kernel in kernels]
    return None if arch in archs else f"PyTorch {torch} has no kernels for {arch}"
