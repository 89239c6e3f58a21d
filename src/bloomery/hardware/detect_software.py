"""Python, the installed PyTorch and related packages, and their environment variables. Imports none of the packages."""

import configparser
import os
import platform
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import util
from pathlib import Path
from urllib.parse import unquote, urlparse

from bloomery.hardware.kfd import file_text
from bloomery.hardware.machine import (
    MASKS,
    Package,
    ShellSetting,
    Software,
)
from bloomery.hardware.vendors import ORDERS, TRITONS, VENDORS, Build

ENVIRONMENT = (
    "HSA_OVERRIDE_GFX_VERSION",
    *MASKS,
    *ORDERS,
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
    "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "TORCH_ROCM_FA_PREFER_CK",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "HIPBLAS_WORKSPACE_CONFIG",
    "CUBLAS_WORKSPACE_CONFIG",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "CXX",
    "HSA_ENABLE_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    "HSA_NO_SCRATCH_RECLAIM",
    "HSA_XNACK",
    "HSA_ENABLE_DXG_DETECTION",
    "AMD_SERIALIZE_KERNEL",
    "AMD_SERIALIZE_COPY",
    "HIP_LAUNCH_BLOCKING",
    "CUDA_LAUNCH_BLOCKING",
    "AMD_LOG_LEVEL",
    "GPU_MAX_HW_QUEUES",
    "HIP_FORCE_DEV_KERNARG",
    "BNB_ROCM_VERSION",
    "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "MIOPEN_USER_DB_PATH",
    "MIOPEN_CUSTOM_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_INTERPRET",
    "LD_LIBRARY_PATH",
    "ROCM_PATH",
    "PIP_CONSTRAINT",
)
ENVIRONMENT_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
# Related distributions by name; others that require torch are found by their metadata.
COMPANIONS = re.compile(
    r"(?:torch(?:vision|audio|ao|tune)?|triton(?:-rocm|-xpu)?|pytorch-triton(?:-rocm|-xpu)?|flash-attn|bitsandbytes|xformers"
    r"|liger-kernel|amdsmi|nvidia-ml-py|rocm|rocm-sdk-.+|amd-torch-device-.+)"
)
REQUIRES_TORCH = re.compile(
    r"^Requires-Dist: *(torch(?![\w.-])[^;\r\n]*?) *(?:;([^\r\n]*))?\r?$", re.MULTILINE
)
SHELL_FILES = (
    "~/.bashrc",
    "~/.bash_profile",
    "~/.profile",
    "~/.zshrc",
    "~/.zshenv",
    "~/.zprofile",
    "~/.config/fish/config.fish",
    "/etc/environment",
    "/etc/bash.bashrc",
    "/etc/profile",
)
SHELL_FOLDERS = (("/etc/profile.d", "*.sh"), ("~/.config/environment.d", "*.conf"))
_NAME = r"([A-Z][A-Z0-9_]*)"
_VALUE = r"""("[^"]*"|'[^']*'|[^\s;#&]*)"""
SETS = (
    re.compile(rf"(?:^|[\s;&])(?:export\s+)?{_NAME}={_VALUE}"),  # sh, environment.d
    re.compile(rf"^\s*(?:setenv|set\s+-\S*x\S*)\s+{_NAME}\s+{_VALUE}"),  # csh, fish
    re.compile(rf'"{_NAME}":\s*{_VALUE}'),  # conda env config vars
)
LARGEST_SHELL_FILE = 1 << 20


def read_software(root: Path) -> Software:
    """The packages that this interpreter imports; shell files and pip configuration below `root`."""
    packages = tuple(sorted(_packages(), key=lambda package: package.name))
    versions = {package.name: package.version for package in packages}
    spec = util.find_spec("torch")  # finds the package without importing it
    table = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    values = assignments(file_text(table)) if table else {}
    home = str(Path.home()) + "/"
    environment = {name: value for name, value in sorted(os.environ.items()) if matters(name)}
    if home != "//":  # no user name in a bug report
        environment = {name: value.replace(home, "~/") for name, value in environment.items()}
    torch = values.get("__version__") or versions.get("torch") or ""
    return Software(
        python=platform.python_version(),
        # A folder named torch is not PyTorch.
        torch=torch if re.match(r"\d{1,9}\.\d{1,9}", torch) else None,
        build=build_of(values) if values else None,
        triton=next((versions[name] for name in TRITONS if name in versions), None),
        environment=environment,
        hip=values.get("hip", ""),
        cuda=values.get("cuda", ""),
        xpu=values.get("xpu", ""),
        prefix=_short(Path(sys.prefix)),
        torch_folder=_short(table.parent) if table else "",
        packages=packages,
        settings=tuple(_settings(root)),
        pinned=_pinned(root),
    )


def matters(name: str) -> bool:
    """Whether a variable of this name affects PyTorch, the driver or the libraries between them."""
    return name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)


def assignments(text: str) -> dict[str, str]:
    """The strings of torch/version.py, whose lines are `name: Optional[str] = 'value'`."""
    return dict(re.findall(r"^(\w+)\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))


def build_of(values: dict[str, str]) -> Build:
    builds = (vendor.build for vendor in VENDORS.values() if values.get(vendor.version))
    return next(builds, "cpu")


def _short(path: Path) -> str:
    """With the home folder as ~, so that a bug report does not contain the user name."""
    home = Path.home()
    if home != Path("/") and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)


def _packages() -> Iterator[Package]:
    """Installed distributions related to torch, the first of each name on the import path."""
    packages: dict[str, Package | None] = {}
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".")
        try:
            state = folder.stat()
        except OSError:  # not there
            continue
        packages = _installed_in(folder, (state.st_dev, state.st_ino, state.st_mtime_ns)) | packages
    yield from filter(None, packages.values())


# A run detects its machine several times, and reading all metadata takes longest.
@lru_cache(maxsize=64)
def _installed_in(path: Path, _state: tuple[int, int, int]) -> dict[str, Package | None]:
    """All distributions of a folder by name, None for those unrelated to torch. An installation changes its state."""
    packages: dict[str, Package | None] = {}
    for folder in sorted(path.glob("*.dist-info")):
        # Such as flash_attn-2.8.3.dist-info.
        stem, _, version = folder.name.removesuffix(".dist-info").partition("-")
        name = re.sub(r"[-_.]+", "-", stem).lower()
        if name in packages:
            continue
        metadata = file_text(folder / "METADATA")
        # Pairs of a requirement, "torch>=2.8", and its marker, which names an extra.
        requirements = REQUIRES_TORCH.findall(metadata) if "torch" in metadata else ()
        torch_requirement = next(
            (requirement for requirement, marker in requirements if "extra" not in marker), ""
        )
        requirement = re.sub(r"[()\s]", "", torch_requirement)
        # The installer writes RECORD; other files can keep the time of a cache.
        record = folder / "RECORD"
        packages[name] = None
        if requirement or COMPANIONS.fullmatch(name):
            packages[name] = Package(
                name=name,
                version=version,
                installed=(record if record.exists() else folder).stat().st_mtime,
                requested=(folder / "REQUESTED").exists(),
                requires_torch=requirement,
            )
    return packages


def _settings(root: Path) -> Iterator[ShellSetting]:
    """Lines of shell files and activation scripts that set a relevant variable."""
    for name, file in _shell_files(root):
        try:
            text = (
                file.read_text(errors="replace")
                if file.stat().st_size <= LARGEST_SHELL_FILE
                else ""
            )
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            code = "" if line.lstrip().startswith("#") else line
            for variable, value in (match for pattern in SETS for match in pattern.findall(code)):
                if matters(variable):
                    yield ShellSetting(
                        name=variable, value=value.strip("\"'"), file=name, line=number
                    )


def _shell_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(the path with ~, the path below `root`)."""
    for name in SHELL_FILES:
        yield name, below(root, name)
    for folder, pattern in SHELL_FOLDERS:
        yield from (
            (f"{folder}/{file.name}", file) for file in sorted(below(root, folder).glob(pattern))
        )
    activation = Path(sys.prefix) / "bin/activate"
    yield _short(activation), below(root, str(activation))
    conda = Path(os.environ.get("CONDA_PREFIX") or sys.prefix)
    yield _short(conda / "conda-meta/state"), below(root, str(conda / "conda-meta/state"))
    scripts = conda / "etc/conda/activate.d"
    yield from (
        (_short(scripts / file.name), file)
        for file in sorted(below(root, str(scripts)).glob("*.sh"))
    )


def below(root: Path, path: str | Path) -> Path:
    """An absolute path, or one in the home folder, below `root`."""
    return root / str(Path(path).expanduser()).lstrip("/")


def _pinned(root: Path) -> str:
    """The line of pip's constraints that pins torch; empty if the next `pip install` can replace it.

    pip uses only the most specific setting: the variable, then the file of the environment, the user, the system.
    """
    config_files = (
        f"{sys.prefix}/pip.conf",
        "~/.config/pip/pip.conf",
        "~/.pip/pip.conf",
        "/etc/pip.conf",
    )
    values = (
        os.environ.get("PIP_CONSTRAINT"),
        *(_constraint(below(root, name)) for name in config_files),
    )
    for name in next((value for value in values if value), "").split():
        path = unquote(urlparse(name).path) if name.startswith("file:") else name
        for line in file_text(below(root, path)).splitlines():
            if re.match(r"\s*torch\s*(==|@)", line):
                return line.strip()
    return ""


def _constraint(file: Path) -> str:
    """The value of `constraint` in a pip.conf."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # pip reports this itself
        return ""
    sections = (
        section for section in ("install", "global") if parser.has_option(section, "constraint")
    )
    return next((parser.get(section, "constraint") for section in sections), "")
