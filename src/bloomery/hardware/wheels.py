"""The PyTorch build that fits a machine (table: wheels.toml). Standard library only: used before anything is installed.

Sources: pytorch/pytorch#190385 (CUDA 12.6 ends with 2.14, CUDA 13 begins at Turing), ROCm/legacy-rocm-build#4625 (no
gfx906 matrix library from ROCm 6.4 on); those of the builds are in the table.
"""

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT_TORCH = "2.13.0"
OLDEST_TORCH = (2, 9)
PYTORCH_INDEX = "https://download.pytorch.org/whl/"
AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next/"

_AMD_FIRST = ("gfx1150", "gfx1151")  # from PyTorch's index only with ROCm 7.14
_OVERRIDE = "set HSA_OVERRIDE_GFX_VERSION"
_NO_RDNA2 = "use torch.compile after PyTorch 2.14: Triton 3.9 does not support {arch}"


@dataclass(frozen=True)
class WheelTable:
    """wheels.toml, whose comments describe the fields."""

    pytorch_rocm: dict[str, str]
    pytorch_xpu: dict[str, str]
    triton: dict[str, str]
    pytorch_kernels: dict[str, str]
    not_from_pytorch: dict[str, str]
    amd_wheels: dict[str, str]
    amd_devices: list[str]
    sites: dict[str, dict[str, Any]]
    rocm: dict[str, dict[str, Any]]


@cache
def wheel_table() -> WheelTable:
    return WheelTable(
        **tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    )


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
    if (
        (documented := wheel_table().sites.get(site))
        and arch in (None, "gfx90a")
        and torch == DEFAULT_TORCH
    ):
        lists = {key: tuple(documented[key]) for key in ("never", "before")}
        return [TorchBuild(**documented | lists)]
    if arch is not None and arch.startswith("apple"):
        return [TorchBuild(f"torch=={torch}", None, "PyTorch's wheel for macOS computes on Metal")]
    if arch is None or system == "Darwin":
        return [
            _cpu(torch, system, "no GPU found" if arch is None else "no macOS wheels for this GPU")
        ]
    if arch.startswith("sm_"):
        return [_cuda(arch, torch, driver)]
    if arch in wheel_table().pytorch_xpu:
        return [_xpu(arch, torch, python, system, cpu_arch)]
    if not (3, 10) <= python <= (3, 14):
        return [_cpu(torch, system, f"no ROCm wheels for Python {python[0]}.{python[1]}")]
    linux = system == "Linux" and cpu_arch == "x86_64"
    pytorch = _from_pytorch(arch, torch) if linux else []
    amd = _from_amd(arch, torch) if cpu_arch in ("x86_64", "AMD64") else []
    builds = (
        [*amd, *pytorch]
        if arch in _AMD_FIRST
        else [*pytorch, *amd, *(_with_override(arch, torch) if linux else [])]
    )
    return builds or [
        _cpu(
            torch, system, f"no PyTorch {torch} wheel has kernels for {arch} on {system} {cpu_arch}"
        )
    ]


def triton_of(torch: str) -> str | None:
    """The Triton, 3.7, of a PyTorch release such as 2.13.0+rocm7.2; None for one that is not listed."""
    return wheel_table().triton.get("{}.{}".format(*series(torch)))


def torch_with_triton(*, since: str, before: str) -> str:
    """The first PyTorch, 2.14, whose Triton is at least `since`; with `before` the last whose Triton is older."""
    releases = wheel_table().triton.items()
    if before:
        return next(
            torch for torch, triton in reversed(releases) if series(triton) < series(before)
        )
    return next(torch for torch, triton in releases if series(triton) >= series(since))


def _index_of(torch: str) -> str:
    """PyTorch's ROCm index of a release, rocm7.2; empty without one."""
    return wheel_table().pytorch_rocm.get("{}.{}".format(*series(torch)), "")


def _from_pytorch(arch: str, torch: str) -> list[TorchBuild]:
    unusable = wheel_table().not_from_pytorch
    if arch == "gfx906":
        reason = (
            "the last index with kernels and rocBLAS for gfx906; its last version is torch 2.9.1"
        )
        newer = "install torch from rocm6.4 or newer: " + unusable[arch]
        pinned = torch if series(torch) == (2, 9) else "2.9.1"
        return [TorchBuild(f"torch=={pinned}+rocm6.3", PYTORCH_INDEX + "rocm6.3", reason, (newer,))]
    index = _index_of(torch)
    crashes = arch in unusable and not (arch in _AMD_FIRST and index == "rocm7.14")
    if crashes or arch not in wheel_table().pytorch_kernels.get(index, "").split():
        return []
    refused = (f"{_OVERRIDE}: this wheel has kernels for {arch}", *_triton(arch, torch))
    return [
        TorchBuild(
            f"torch=={torch}+{index}", PYTORCH_INDEX + index, f"it has kernels for {arch}", refused
        )
    ]


def _from_amd(arch: str, torch: str) -> list[TorchBuild]:
    table = wheel_table()
    if torch not in table.amd_wheels or arch not in table.amd_devices:
        return []
    reason = f"AMD's wheels have kernels for {arch}"
    if arch in ("gfx906", "gfx908", "gfx90a", "gfx950"):
        reason += "; built but not tested by AMD for this GPU"
    refused = [f"{_OVERRIDE}: this wheel does not include the kernels of the other architecture"]
    if arch in _AMD_FIRST:
        refused.append(f"install torch from rocm7.2 or older: {table.not_from_pytorch[arch]}")
    requirement = f"torch[device-{arch}]=={torch}+{table.amd_wheels[torch]}"
    return [TorchBuild(requirement, AMD_INDEX, reason, (*refused, *_triton(arch, torch)))]


def _triton(arch: str, torch: str) -> tuple[str, ...]:
    return (
        (_NO_RDNA2.format(arch=arch),)
        if arch.startswith("gfx10") and series(torch) <= (2, 14)
        else ()
    )


def _with_override(arch: str, torch: str) -> list[TorchBuild]:
    """gfx1031 to gfx1036 can run the kernels of gfx1030 with the override; no other family can safely."""
    index = _index_of(torch)
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
    reason = f"CUDA 13 requires sm_75, the GPU is {arch}" if capability < 75 else ""
    if (
        75 <= capability < 100 and driver is not None and driver < 580
    ):  # Blackwell requires CUDA 12.8 and a newer driver
        reason = f"driver {driver} is older than 580"
    if reason and series(torch) <= (2, 14):
        return TorchBuild(f"torch=={torch}+cu126", PYTORCH_INDEX + "cu126", reason)
    return TorchBuild(
        f"torch=={torch}", None, f"the wheel on PyPI is a CUDA build that supports {arch}"
    )


def _xpu(arch: str, torch: str, python: tuple[int, int], system: str, cpu_arch: str) -> TorchBuild:
    """PyTorch's wheel with SYCL's runtime, which needs the GPU's driver for Level Zero beside it."""
    if not (3, 10) <= python <= (3, 14):
        return _cpu(torch, system, f"no XPU wheels for Python {python[0]}.{python[1]}")
    if cpu_arch not in ("x86_64", "AMD64"):
        return _cpu(torch, system, f"no XPU wheels for {cpu_arch}")
    since = wheel_table().pytorch_xpu[arch]
    reason = f"PyTorch's XPU wheels serve {arch} from {since} on; not run on this hardware"
    return TorchBuild(f"torch=={torch}+xpu", PYTORCH_INDEX + "xpu", reason)


def _cpu(torch: str, system: str, reason: str) -> TorchBuild:
    """On Linux the wheel on PyPI includes gigabytes of CUDA; PyTorch's own index has a small one."""
    return TorchBuild(
        f"torch=={torch}", PYTORCH_INDEX + "cpu" if system != "Darwin" else None, reason
    )


def index_answers(index: str) -> bool:
    """Whether a package index can be reached within three seconds."""
    # Slow to import, and commands that install nothing do not need them.
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(index + "/torch/", timeout=3) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def series(version: str) -> tuple[int, int]:
    """(2, 13) from "2.13.0+rocm7.2"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def fits(
    arch: str | None,
    *,
    torch: str,
    hip: str | None,
    cuda: str | None,
    kernels: list[str],
    xpu: str | None = None,
) -> str | None:
    """None if an installed PyTorch supports this GPU (`kernels`: its `get_arch_list`), otherwise the reason."""
    if series(torch) < OLDEST_TORCH:
        return f"PyTorch {torch} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    if arch is None:
        return None
    if arch.startswith("sm_"):
        return None if cuda else f"PyTorch {torch} is not a CUDA build"
    if arch in wheel_table().pytorch_xpu:
        return None if xpu else f"PyTorch {torch} is not an XPU build, the GPU is from Intel"
    if not hip:
        return f"PyTorch {torch} is not a ROCm build, the GPU is from AMD"
    archs = [kernel.split(":")[0] for kernel in kernels]
    return None if arch in archs else f"PyTorch {torch} has no kernels for {arch}"
