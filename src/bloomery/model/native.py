"""C++ of this package, compiled once per machine by its C++ compiler and kept in the cache folder."""

import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bloomery.core.files import cache_folder, private_folder, temporary_cache

VECTORS = ("tiles.h", "vectors.h")  # of this package
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")


class Uncompiled(Exception):
    """Why PyTorch computes what compiled code would, and what makes the code compile."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem)
        self.fix = fix


class Library(NamedTuple):
    """A file of C++ in a package."""

    package: str
    file: str
    headers: tuple[str, ...] = ()  # files of `bloomery.model` that stand before it, in their order
    flags: tuple[str, ...] = ()  # beside those of every file


@functools.cache
def library(source: Library) -> ctypes.CDLL:
    """The compiled file; compiling takes a few seconds, once per version, compiler and CPU. Raises Uncompiled."""
    headers = [files("bloomery.model").joinpath(header) for header in source.headers]
    sources = [*headers, files(source.package).joinpath(source.file)]
    code = b"".join(file.read_bytes() for file in sources)
    compiler = find_compiler()
    if compiler is None:
        raise Uncompiled(
            "no C++ compiler is installed: apt install g++", "install g++ (apt install g++)"
        )

    # All that the result depends on is part of its name: several machines may share a home folder.
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    flags = (*FLAGS, *source.flags)
    facts = [code.decode(), compiler, version, " ".join(flags), _cpu()]
    digest = hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]
    name = f"{source.file.partition('.')[0]}-{digest}.so"

    # Where the home folder cannot be written, or nothing there may be executed, the code is kept in TMPDIR.
    problems: list[str] = []
    for folder in dict.fromkeys((cache_folder(), temporary_cache())):
        try:
            return _library_in(
                folder, name, [compiler, *flags], code, is_shared=folder != cache_folder()
            )
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    raise Uncompiled(
        f"its file cannot be kept: {'; '.join(problems)}",
        "set XDG_CACHE_HOME or TMPDIR to a folder that you can write to, and whose files may be executed",
    )


def _library_in(
    folder: Path, name: str, command: list[str], code: bytes, *, is_shared: bool
) -> ctypes.CDLL:
    """The code from this folder, compiled where it is missing or cannot be loaded. Raises OSError and Uncompiled.

    `is_shared`: other users can create the folder, too, and would have this process run their code.
    """
    if is_shared and not private_folder(folder):
        raise PermissionError(errno.EACCES, "others can write to this folder")
    library_file = folder / name
    if library_file.exists():
        with suppress(OSError):  # cut by a full disk, or on a disk whose files may not be executed
            return ctypes.CDLL(str(library_file))
    _compile(command, code, library_file)
    try:
        return ctypes.CDLL(str(library_file))
    except OSError:
        library_file.unlink(missing_ok=True)
        raise


def find_compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compile(command: list[str], code: bytes, library_file: Path) -> None:
    """Writes the file atomically, for this user alone, since its content runs. Raises OSError and Uncompiled."""
    library_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library_file.parent) as folder:
        draft = Path(folder) / library_file.name
        compilation = subprocess.run(
            [*command, "-x", "c++", "-", "-o", str(draft)],
            input=code,
            capture_output=True,
            check=False,
            env=os.environ | {"LC_ALL": "C"},  # its messages are read
        )
        if compilation.returncode:
            lines = compilation.stderr.decode(errors="replace").splitlines() or [""]
            first_error = next((line for line in lines if "error" in line), lines[0])
            raise Uncompiled(f"{command[0]} failed: {first_error}", _fix_of(first_error))
        draft.chmod(0o700)
        draft.replace(library_file)


# Of messages of compilers: what they miss, and the package that has it.
_MISSING = {
    r"cannot find '(ld|as|collect2)'|cannot execute '(as|ld)'|unable to execute command.*\bld\b": "binutils, which has"
    " the assembler and the linker (apt install binutils), or add their folder to PATH",
    r"omp\.h|-lgomp|-fopenmp": "OpenMP (apt install libgomp1 libomp-dev)",
    r"cannot execute '?cc1plus|fatal error: .*(No such file|file not found)|-lstdc\+\+": "g++ with its library"
    " (apt install g++)",
}


def _fix_of(compiler_error: str) -> str:
    """What makes a compiler work that is here and fails."""
    if "No space left" in compiler_error:
        return "free disk space in TMPDIR, or set TMPDIR to a folder on another disk"
    for pattern, package in _MISSING.items():
        if re.search(pattern, compiler_error):
            return f"install {package}"
    return "set CXX to a C++ compiler that works: echo 'int main() {}' | $CXX -x c++ - -o /dev/null"


def _cpu() -> str:
    """The features of this CPU, which `-march=native` uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return features + platform.machine()
