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
    # The machine and its CPU are part of the name: a home folder may be shared by several.
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    facts = [code.decode(), compiler, version, " ".join(FLAGS), _cpu()]
    stem = source.file.partition(".")[0]
    built = (
        cache_folder() / f"{stem}-{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:16]}.so"
    )
    if not built.exists():
        _compile(compiler, code, built)
    return ctypes.CDLL(str(built))


def find_compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compile(compiler: str, code: bytes, into: Path) -> None:
    """Atomically; readable by this user alone, since what is in the file runs."""
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into.parent) as folder:
            made = Path(folder) / into.name
            done = subprocess.run(
                [compiler, *FLAGS, "-x", "c++", "-", "-o", str(made)],
                input=code,
                capture_output=True,
                check=False,
            )
            if done.returncode:
                lines = done.stderr.decode(errors="replace").splitlines() or [""]
                raise Uncompiled(
                    f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}"
                )
            made.chmod(0o700)
            made.replace(into)
    except OSError as error:
        raise Uncompiled(f"cannot write {into}: {error.strerror}") from error


def _cpu() -> str:
    """The features of this CPU, which `-march=native` uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return (
        next((line for line in lines if line.startswith(("flags", "Features"))), "")
        + platform.machine()
    )
