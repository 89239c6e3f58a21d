"""C++ of this package, compiled once per machine by its C++ compiler and kept in the cache folder."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bloomery.core.files import cache_folder

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")


class Uncompiled(Exception):
    """Why PyTorch computes what compiled code would."""


class Library(NamedTuple):
    """A file of C++ in a package."""

    package: str
    file: str
    header: str | None = None  # a file of `bloomery.model` that stands before it


@functools.cache
def library(source: Library) -> ctypes.CDLL:
    """The compiled file; compiling takes a few seconds, once per version, compiler and CPU. Raises Uncompiled."""
    code = files(source.package).joinpath(source.file).read_bytes()
    if source.header is not None:
        code = files("bloomery.model").joinpath(source.header).read_bytes() + code
    compiler = find_compiler()
    if compiler is None:
        raise Uncompiled("no C++ compiler is installed: apt install g++")

    # All that the result depends on is part of its name: several machines may share a home folder.
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    facts = [code.decode(), compiler, version, " ".join(FLAGS), _cpu()]
    digest = hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]
    stem = source.file.partition(".")[0]
    library_file = cache_folder() / f"{stem}-{digest}.so"
    if not library_file.exists():
        _compile(compiler, code, library_file)
    return ctypes.CDLL(str(library_file))


def find_compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compile(compiler: str, code: bytes, library_file: Path) -> None:
    """Writes the file atomically, for this user alone, since its content runs. Raises Uncompiled."""
    try:
        library_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library_file.parent) as folder:
            draft = Path(folder) / library_file.name
            compilation = subprocess.run(
                [compiler, *FLAGS, "-x", "c++", "-", "-o", str(draft)],
                input=code,
                capture_output=True,
                check=False,
            )
            if compilation.returncode:
                lines = compilation.stderr.decode(errors="replace").splitlines() or [""]
                first_error = next((line for line in lines if "error" in line), lines[0])
                raise Uncompiled(f"{compiler} failed: {first_error}")
            draft.chmod(0o700)
            draft.replace(library_file)
    except OSError as error:
        raise Uncompiled(f"cannot write {library_file}: {error.strerror}") from error


def _cpu() -> str:
    """The features of this CPU, which `-march=native` uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return features + platform.machine()
