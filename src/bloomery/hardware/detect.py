"""What this machine is, read from the system's own files: no torch, no driver library, nothing that can hang."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from bloomery.hardware.kfd import KfdNode, read_kfd
from bloomery.hardware.machine import Accelerator, Host, Machine, Software

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16", "sve")
ENVIRONMENT = (
    "HSA_OVERRIDE_GFX_VERSION", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "TORCH_BLAS_PREFER_HIPBLASLT",
    "TORCH_COMPILE_DISABLE", "CXX",
)  # fmt: skip
NVIDIA_QUERY = "index,name,memory.total,memory.used,compute_cap"
MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size where there is no limit


def detect(*, root: Path = Path("/"), folder: Path | None = None) -> Machine:
    """The machine below `root` (tests give a constructed tree); `folder` is where runs will be written."""
    return Machine(
        accelerators=(*_amd(root), *_nvidia(start=len(read_kfd(root / "sys")))),
        host=_host(root, folder or Path.cwd()),
        software=_software(),
    )


def _amd(root: Path) -> tuple[Accelerator, ...]:
    names = _amdgpu_ids(root)
    return tuple(_accelerator(index, node, names) for index, node in enumerate(read_kfd(root / "sys")))


def _accelerator(index: int, node: KfdNode, names: dict[tuple[int, int], str]) -> Accelerator:
    name = names.get((node.device_id, node.revision)) or node.arch
    return Accelerator(
        index=index,
        vendor="amd",
        name=name,
        arch=node.arch,
        memory_bytes=node.memory_bytes,
        memory_used_bytes=node.memory_used_bytes,
        integrated=node.integrated,
        node=f"/dev/dri/renderD{node.render_minor}",
    )


def _amdgpu_ids(root: Path) -> dict[tuple[int, int], str]:
    """(PCI device, revision) -> product, from libdrm's table where it is installed."""
    table = root / "usr/share/libdrm/amdgpu.ids"
    if not table.is_file():
        return {}
    line = r"^([0-9A-Fa-f]{4}),\s*([0-9A-Fa-f]{2}),\s*(.+?)\s*$"
    rows = re.findall(line, table.read_text(errors="replace"), re.MULTILINE)
    return {(int(device, 16), int(revision, 16)): name for device, revision, name in rows}


def _nvidia(*, start: int) -> tuple[Accelerator, ...]:
    """What nvidia-smi lists; none when it is absent, fails or takes more than five seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={NVIDIA_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return ()
    return tuple(parse_nvidia_smi(answer.stdout, start=start))


def parse_nvidia_smi(text: str, *, start: int = 0) -> Iterator[Accelerator]:
    """Rows of `nvidia-smi --query-gpu` (csv, no header, no units; memory in MiB) as devices."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5 or not fields[0].isdigit():
            continue
        integrated = not fields[2].isdigit()  # "[N/A]": memory shared with the processor
        yield Accelerator(
            index=start + int(fields[0]),
            vendor="nvidia",
            name=fields[1],
            arch="sm_" + fields[4].replace(".", ""),
            memory_bytes=0 if integrated else int(fields[2]) * 2**20,
            memory_used_bytes=int(fields[3]) * 2**20 if fields[3].isdigit() else 0,
            integrated=integrated,
        )


def _host(root: Path, folder: Path) -> Host:
    name, flags = _cpu(root / "proc/cpuinfo")
    total, free = _memory(root)
    return Host(
        system=platform.system(),
        cpu_name=name,
        cpu_cores=_cores(root),
        cpu_flags=flags,
        memory_bytes=total,
        memory_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(_existing(folder)).free,
        compiler=_compiler(),
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _cpu(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Name of the processor and those of its flags that decide a precision."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    fallback = platform.processor() or platform.machine()
    return (name[1].strip() if name else fallback), tuple(flag for flag in CPU_FLAGS if flag in present)


def _cores(root: Path) -> int:
    """Cores that this process may use: its affinity, and the cgroup's quota rounded down, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    for folder in _cgroups(root, "cpu"):
        v2, quota, period = folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        if v2.is_file():
            words = v2.read_text().split()
            if len(words) == 2 and words[0].isdigit():
                yield int(words[0]) / int(words[1])
        elif quota.is_file() and period.is_file() and int(quota.read_text()) > 0:
            yield int(quota.read_text()) / int(period.read_text())


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's control groups for `controller`, each with its parents, of both versions of the interface."""
    base, table = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    lines = table.read_text().splitlines() if table.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        here = mount / path.lstrip("/")
        # A container without its own cgroup namespace sees the host's path but mounts only its own group.
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _memory(root: Path) -> tuple[int, int]:
    """(total, free) bytes: the machine's, or the smallest control group's around this process."""
    meminfo = root / "proc/meminfo"
    text = meminfo.read_text() if meminfo.is_file() else ""
    kib = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    total, free = kib.get("MemTotal", 0), kib.get("MemAvailable", kib.get("MemFree", 0))
    for limit, used in _memory_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    for folder in _cgroups(root, "memory"):
        for limit_name, used_name in MEMORY_FILES:
            limit, used = _integer(folder / limit_name), _integer(folder / used_name)
            if limit is not None and limit < UNLIMITED:
                yield limit, max(0, (used or 0) - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel drops when memory is asked for: counted as used, but free."""
    stat = folder / "memory.stat"
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", stat.read_text(), re.MULTILINE) if stat.is_file() else None
    return int(found[1]) if found else 0


def _integer(path: Path) -> int | None:
    """None where the file is missing or says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def _compiler() -> str | None:
    """torch.compile takes $CXX, else g++; any other compiler works once CXX names it."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _software() -> Software:
    version, build = _torch()
    names = ("triton", "triton-rocm", "pytorch-triton-rocm")
    return Software(
        python=platform.python_version(),
        torch=version,
        build=build,
        triton=next((found for name in names if (found := _version(name))), None),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str | None, Literal["cpu", "cuda", "rocm"] | None]:
    spec = util.find_spec("torch")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return None, None
    table = Path(spec.origin).parent / "version.py"
    text = table.read_text() if table.is_file() else ""
    return parse_torch_version(text) if text else (_version("torch"), None)


def parse_torch_version(text: str) -> tuple[str | None, Literal["cpu", "cuda", "rocm"]]:
    """(version, build) from the text of torch/version.py, whose lines are `name: Optional[str] = 'value'`."""
    values = dict(re.findall(r"^(\w+)\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    build: Literal["cpu", "cuda", "rocm"] = "rocm" if values.get("hip") else "cuda" if values.get("cuda") else "cpu"
    return values.get("__version__"), build
