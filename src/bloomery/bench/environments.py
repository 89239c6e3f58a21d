"""Throw-away Python environments: another PyTorch each, and every other package of this environment. No torch.

    folder/
        packages/       symbolic links to the packages of this environment that do not depend on its PyTorch
        2.12.1/         an environment: its PyTorch, Triton and their libraries, then `packages`
        caches/2.12.1/  the kernels that it compiles

`packages` is outside of the environments, because pip removes what is inside when it installs another version.
"""

import json
import mmap
import os
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, final

from bloomery.core.child import kill_group, last_words, python_module
from bloomery.core.errors import UserError
from bloomery.core.units import GIB, format_bytes

PREFIX = "bloomery-torch-"
OTHER_VERSIONS = "name other versions: bloomery bench RECIPE --torch 2.12.1,2.13.0"
IMPORT_SECONDS = 300.0  # of PyTorch, on a slow disk
SIZE_SECONDS = 10.0  # for an index to answer how large a file is
# Bytes of disk per downloaded byte, the file and its content, and some more. Measured: PyTorch 2.12.1 with CUDA's
# libraries unpacks to 1.7 times its size, 2.13.0 for CPUs, which is small, to 3.6 times.
DISK_PER_DOWNLOAD = 3.0
SPARE_BYTES = 0.5 * GIB
# Packages that the wheels of PyTorch bring with them, by the start of their names.
OWN_PACKAGES = ("torch", "triton", "pytorch-triton", "rocm", "amd-torch")
OWN_MODULES = ("torch", "torchgen", "functorch", "triton")
# Kernels that one PyTorch compiled are no kernels of another.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
FACTS = (
    "import json, torch; from importlib.util import find_spec; v = torch.version; "
    "triton = find_spec('triton') and __import__('triton').__version__; "
    "print(json.dumps([torch.__version__, v.hip or '', v.cuda or '', triton, torch.__file__]))"
)
OFFLINE = re.compile(
    r"NameResolutionError|NewConnectionError|ConnectTimeout|ReadTimeout|Max retries exceeded|ProxyError"
    r"|Temporary failure in name resolution|Network is unreachable|SSLError"
)

OnLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file that an installation fetches; `bytes` is None where the index does not answer its size."""

    name: str  # torch 2.12.1
    bytes: int | None


class Installer(Protocol):
    """How packages get into an environment. Both methods raise UserError."""

    def downloads(self, python: Path, arguments: Sequence[str]) -> list[Download]:
        """What `install` would download; installs nothing."""

    def install(self, python: Path, arguments: Sequence[str], on_line: OnLine) -> None:
        """Installs `arguments` into the environment of `python`; `on_line` gets what is printed meanwhile."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The PyTorch that an interpreter imports. `hip`, `cuda`: what it was built for, empty: nothing."""

    version: str
    hip: str
    cuda: str
    triton: str | None
    file: str


@contextmanager
def throwaway_folder() -> Iterator[Path]:
    """A folder below TMPDIR that is removed at the end, also after Ctrl+C, SIGTERM, SIGHUP and errors.

    Folders of processes that were killed are removed first. Raises UserError where none can be made.
    """
    remove_orphans(Path(tempfile.gettempdir()))
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    except OSError as error:
        fix = "set TMPDIR to a folder that you can write to"
        raise UserError(
            f"no temporary folder: {error.strerror}", where=tempfile.gettempdir(), fix=fix
        ) from error

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    old_handlers = {
        number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield folder
    finally:
        # A second Ctrl+C would leave gigabytes behind.
        interrupt_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            for number, handler in (*old_handlers.items(), (signal.SIGINT, interrupt_handler)):
                signal.signal(number, handler)


def remove_orphans(parent: Path) -> None:
    """Removes this user's throw-away folders in `parent` whose process does not run."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        number = folder.name.removeprefix(PREFIX).partition("-")[0]
        try:
            is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        except FileNotFoundError:  # its process has just removed it
            continue
        if not number.isdecimal() or not is_own:
            continue
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            continue  # another user's process has the number now


def share_packages(folder: Path) -> list[str]:
    """Fills `folder` with links to the packages of this environment, without PyTorch and what was compiled with it.

    Returns the packages that are left out although PyTorch does not bring them. Raises UserError where this PyTorch is
    on PYTHONPATH, which comes before the packages of every environment.
    """
    for path in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if (Path(path) / "torch").is_dir():
            raise UserError(
                "PYTHONPATH has a PyTorch, which no environment can replace",
                where=path,
                fix="unset PYTHONPATH",
            )

    folder.mkdir()
    hidden_entries = {"__pycache__", *OWN_MODULES}
    left_out = []
    for package in metadata.distributions():
        name = package.metadata["Name"]
        is_own = re.sub("[-_.]+", "-", name.lower()).startswith(OWN_PACKAGES)
        is_torchs_own = is_own and not _requires_torch(package)
        if is_torchs_own or _is_compiled_with_torch(package):
            hidden_entries |= _entries_of(package)
            if not is_torchs_own:
                left_out.append(f"{name} {package.version}")
    for packages_folder in site_folders():
        for entry in packages_folder.iterdir():
            link = folder / entry.name
            if entry.name not in hidden_entries and not link.is_symlink():
                link.symlink_to(entry)
    return sorted(left_out)


def site_folders() -> list[Path]:
    """The folders of installed packages of this interpreter, in the order of imports."""
    candidates = [*sys.path, *site.getsitepackages()]
    names = ("site-packages", "dist-packages")
    folders = [Path(path) for path in candidates if Path(path).name in names]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _requires_torch(package: metadata.Distribution) -> bool:
    return any(re.match(r"torch\b(?![-_.])", text) for text in package.requires or ())


def _is_compiled_with_torch(package: metadata.Distribution) -> bool:
    """Whether a library of the package is linked with PyTorch's: it can be loaded with the same release alone."""
    if not _requires_torch(package):
        return False
    return any(
        _names_torch(Path(str(file.locate())))
        for file in package.files or ()
        if file.name.endswith(".so")
    )


def _names_torch(library: Path) -> bool:
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            return any(text.find(name) >= 0 for name in (b"libtorch", b"libc10"))
    except (OSError, ValueError):  # it is missing or empty
        return False


def _entries_of(package: metadata.Distribution) -> set[str]:
    """The files and folders of a package in its folder of packages, without those that several may share."""
    entries = {file.parts[0] for file in package.files or ()}
    return entries - {"..", "__pycache__", "nvidia", "bin"}


def make_environment(folder: Path, packages: Path) -> Path:
    """A Python environment with this interpreter, whose packages are its own and then `packages`: its interpreter."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    pth = folder / "lib" / version / "site-packages" / "shared-packages.pth"
    # Not the path alone: `packages` has such files, too, of packages that are installed as editable.
    pth.write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return folder / "bin" / "python"


def cache_variables(folder: Path) -> dict[str, str]:
    """Variables with caches of compiled kernels in `folder`."""
    return {name: str(folder / name.partition("_")[0].lower()) for name in CACHES}


def torch_of(python: str | Path) -> TorchFacts:
    """The PyTorch that `python` imports. Raises UserError where it imports none."""
    try:
        answer = subprocess.run(
            [str(python), "-P", "-c", FACTS],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"importing PyTorch took more than {IMPORT_SECONDS:.0f} s"
        raise UserError(problem, where=str(python), fix=OTHER_VERSIONS) from error
    if answer.returncode:
        reason = last_words(answer.stderr.splitlines()) or f"exit code {answer.returncode}"
        problem = f"PyTorch cannot be imported: {reason}"
        raise UserError(problem, where=str(python), fix=OTHER_VERSIONS)
    version, hip, cuda, triton, file = json.loads(answer.stdout.splitlines()[-1])
    return TorchFacts(version=version, hip=hip, cuda=cuda, triton=triton, file=file)


def disk_needed(downloads: Iterable[Download]) -> float:
    """Bytes of disk that an installation takes, as far as the sizes are known."""
    return SPARE_BYTES + DISK_PER_DOWNLOAD * sum(download.bytes or 0 for download in downloads)


def refuse_full_disk(folder: Path, needed: float) -> None:
    """Raises UserError where `folder` has less than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"not enough disk: about {format_bytes(needed)} are needed, {format_bytes(free)} are free",
            where=str(folder.parent),
            fix="free disk space, or set TMPDIR to a folder on another disk",
        )


@final
class Pip:
    """The pip of this environment, run by the interpreter of another one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises UserError where pip is not installed."""
        # Not importlib.util.find_spec: asked for pip, setuptools' finder gives up distutils, and torch.compile fails in
        # this process from then on (Python 3.11).
        if PathFinder.find_spec("pip") is None:
            fix = f"{shlex.quote(sys.executable)} -m ensurepip"
            raise UserError("pip is not installed in this environment", where=sys.prefix, fix=fix)
        # A user's choice of another folder would defeat the environment.
        own_folder = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": ""}
        self._environment = {**environment, **own_folder, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def downloads(self, python: Path, arguments: Sequence[str]) -> list[Download]:
        with tempfile.TemporaryDirectory(dir=python.parents[2]) as folder:
            report = Path(folder) / "report.json"
            options = ["--dry-run", "--retries", "2", "--report", str(report)]
            code, lines = self._run(python, [*options, *arguments])
            if code:
                raise refusal(lines, arguments)
            files = json.loads(report.read_text())["install"]
        urls = [file["download_info"]["url"] for file in files]
        with ThreadPoolExecutor(8) as pool:
            sizes = list(pool.map(_size_of, urls))
        return [
            Download(name=f"{file['metadata']['name']} {file['metadata']['version']}", bytes=size)
            for file, size in zip(files, sizes, strict=True)
        ]

    def install(self, python: Path, arguments: Sequence[str], on_line: OnLine) -> None:
        options = ["--no-compile", "--progress-bar", "off", "--no-warn-script-location"]
        code, lines = self._run(python, [*options, *arguments], on_line)
        if code:
            raise refusal(lines, arguments)

    def _run(
        self, python: Path, words: Sequence[str], on_line: OnLine | None = None
    ) -> tuple[int, list[str]]:
        """Exit code and output of `pip install`. Ctrl+C ends pip with the block that called it."""
        process = subprocess.Popen(
            python_module("pip", "install", "--no-input", *words, python=str(python)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment,
            start_new_session=True,
        )
        lines = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if on_line is not None:
                    on_line(line.strip())
            return process.wait(), lines
        finally:
            if process.poll() is None:
                kill_group(process.pid)
                process.wait()


def refusal(lines: Sequence[str], arguments: Sequence[str]) -> UserError:
    """The sentence for pip's output after it failed to install `arguments`."""
    text = "\n".join(lines)
    where = "pip install " + shlex.join(arguments)
    listed = re.search(r"from versions: ([^)]*)\)", text)
    versions = [] if listed is None else listed[1].split(", ")
    if "(constraint)" in text:
        constraint = re.search(r"\(constraint\) (\S+)", text)
        name = f" {constraint[1]}" if constraint else ""
        fix = "PIP_CONSTRAINT=/dev/null in front of the command, or edit your constraints file"
        return UserError(f"a constraint of pip{name} excludes it", where=where, fix=fix)
    if versions and versions != ["none"]:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        newest = ", ".join(versions[-6:])  # pip lists the oldest first
        return UserError(
            f"there is no such wheel for Python {python}: {arguments[-1]}",
            where=where,
            fix=f"use one of {newest}",
        )
    if OFFLINE.search(text):
        return UserError(
            "the package index does not answer",
            where=where,
            fix="connect to the network, or name an index with PIP_INDEX_URL",
        )
    if "No space left on device" in text:
        fix = "free disk space, or set TMPDIR to a folder on another disk"
        return UserError("the disk is full", where=where, fix=fix)
    if listed is not None:
        fix = "check PIP_INDEX_URL and `pip config list`"
        return UserError("the package index has no PyTorch", where=where, fix=fix)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors[:1] or [last_words(lines)])[0] or "it printed nothing"
    return UserError(f"pip failed: {reason}", where=where, fix=OTHER_VERSIONS)


def _size_of(url: str) -> int | None:
    """Bytes of a file by its header; None where the server does not answer."""
    import urllib.error
    import urllib.request

    try:
        if url.startswith("file:"):
            return Path(urllib.request.url2pathname(url.removeprefix("file:"))).stat().st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SIZE_SECONDS) as reply:
            return int(reply.headers["Content-Length"])
    except (urllib.error.URLError, OSError, ValueError, TypeError):
        return None
