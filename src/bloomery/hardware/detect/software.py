"""Python, the installed PyTorch and related packages, and their environment variables. Imports none of them."""

import configparser
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

from bloomery.hardware.detect.kfd import text_of
from bloomery.hardware.machine import Package, Setting, Software

Build = Literal["cpu", "cuda", "rocm"]

ENVIRONMENT = (
    "HSA_OVERRIDE_GFX_VERSION", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "TORCH_ROCM_FA_PREFER_CK",
    "TORCH_BLAS_PREFER_HIPBLASLT", "HIPBLAS_WORKSPACE_CONFIG", "CUBLAS_WORKSPACE_CONFIG",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "CXX", "HSA_ENABLE_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE", "HSA_NO_SCRATCH_RECLAIM", "HSA_XNACK", "HSA_ENABLE_DXG_DETECTION",
    "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_LOG_LEVEL",
    "GPU_MAX_HW_QUEUES", "HIP_FORCE_DEV_KERNARG", "BNB_ROCM_VERSION", "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_INTERPRET", "LD_LIBRARY_PATH", "ROCM_PATH", "PIP_CONSTRAINT",
)  # fmt: skip
ENVIRONMENT_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
# Related distributions by name; others that require torch are found by their metadata.
COMPANIONS = re.compile(
    r"(?:torch(?:vision|audio|ao|tune)?|triton(?:-rocm)?|pytorch-triton(?:-rocm)?|flash-attn|bitsandbytes|xformers"
    r"|liger-kernel|amdsmi|nvidia-ml-py|rocm|rocm-sdk-.+|amd-torch-device-.+)"
)
TRITONS = ("triton", "triton-rocm", "pytorch-triton-rocm")
REQUIRES_TORCH = re.compile(r"^Requires-Dist: *(torch(?![\w.-])[^;\r\n]*?) *(?:;([^\r\n]*))?\r?$", re.MULTILINE)
SHELL_FILES = (
    "~/.bashrc", "~/.bash_profile", "~/.profile", "~/.zshrc", "~/.zshenv", "~/.zprofile", "~/.config/fish/config.fish",
    "/etc/environment", "/etc/bash.bashrc", "/etc/profile",
)  # fmt: skip
SHELL_FOLDERS = (("/etc/profile.d", "*.sh"), ("~/.config/environment.d", "*.conf"))
_NAME, _VALUE = r"([A-Z][A-Z0-9_]*)", r"""("[^"]*"|'[^']*'|[^\s;#&]*)"""
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
    values = assignments(text_of(table)) if table else {}
    home = str(Path.home()) + "/"
    environment = {name: value for name, value in sorted(os.environ.items()) if matters(name)}
    if home != "//":  # no user name in a bug report
        environment = {name: value.replace(home, "~/") for name, value in environment.items()}
    torch = values.get("__version__") or versions.get("torch") or ""
    return Software(
        python=platform.python_version(),
        torch=torch if re.match(r"\d{1,9}\.\d{1,9}", torch) else None,  # a folder named torch is not PyTorch
        build=build_of(values) if values else None,
        triton=next((versions[name] for name in TRITONS if name in versions), None),
        environment=environment,
        hip=values.get("hip", ""),
        cuda=values.get("cuda", ""),
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
    return "rocm" if values.get("hip") else "cuda" if values.get("cuda") else "cpu"


def _short(path: Path) -> str:
    """With the home folder as ~, so that a bug report does not contain the user name."""
    home = Path.home()
    return "~/" + str(path.relative_to(home)) if home != Path("/") and path.is_relative_to(home) else str(path)


def _packages() -> Iterator[Package]:
    """Installed distributions related to torch, the first of each name on the import path."""
    names = set()
    for entry in dict.fromkeys(sys.path):
        for folder in sorted(Path(entry or ".").glob("*.dist-info")):
            stem, _, version = folder.name.removesuffix(".dist-info").partition("-")  # flash_attn-2.8.3.dist-info
            name = re.sub(r"[-_.]+", "-", stem).lower()
            if name in names:
                continue
            names.add(name)
            found = REQUIRES_TORCH.findall(text_of(folder / "METADATA"))  # "torch>=2.8", and the extra that it is of
            wanted = next((requirement for requirement, marker in found if "extra" not in marker), "")
            requirement = re.sub(r"[()\s]", "", wanted)
            record = folder / "RECORD"  # written by the installer; other files can keep the time of a cache
            if requirement or COMPANIONS.fullmatch(name):
                yield Package(
                    name=name,
                    version=version,
                    installed=(record if record.exists() else folder).stat().st_mtime,
                    requested=(folder / "REQUESTED").exists(),
                    requires_torch=requirement,
                )


def _settings(root: Path) -> Iterator[Setting]:
    """Lines of shell files and activation scripts that set a relevant variable."""
    for name, file in _shell_files(root):
        try:
            text = file.read_text(errors="replace") if file.stat().st_size <= LARGEST_SHELL_FILE else ""
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            code = "" if line.lstrip().startswith("#") else line
            for variable, value in (match for pattern in SETS for match in pattern.findall(code)):
                if matters(variable):
                    yield Setting(name=variable, value=value.strip("\"'"), file=name, line=number)


def _shell_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(the path with ~, the path below `root`)."""
    for name in SHELL_FILES:
        yield name, _below(root, name)
    for folder, pattern in SHELL_FOLDERS:
        yield from ((f"{folder}/{file.name}", file) for file in sorted(_below(root, folder).glob(pattern)))
    activation = Path(sys.prefix) / "bin/activate"
    yield _short(activation), _below(root, str(activation))
    conda = Path(os.environ.get("CONDA_PREFIX") or sys.prefix)
    yield _short(conda / "conda-meta/state"), _below(root, str(conda / "conda-meta/state"))
    scripts = conda / "etc/conda/activate.d"
    yield from ((_short(scripts / file.name), file) for file in sorted(_below(root, str(scripts)).glob("*.sh")))


def _below(root: Path, name: str) -> Path:
    return root / str(Path(name).expanduser()).lstrip("/")


def _pinned(root: Path) -> str:
    """The line of pip's constraints that pins torch; empty if the next `pip install` can replace it.

    pip uses only the most specific setting: the variable, then the file of the environment, the user, the system.
    """
    own = (f"{sys.prefix}/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf")
    values = (os.environ.get("PIP_CONSTRAINT"), *(_constraint(_below(root, name)) for name in own))
    for name in next((value for value in values if value), "").split():
        path = unquote(urlparse(name).path) if name.startswith("file:") else name
        for line in text_of(_below(root, path)).splitlines():
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
    sections = (section for section in ("install", "global") if parser.has_option(section, "constraint"))
    return next((parser.get(section, "constraint") for section in sections), "")
