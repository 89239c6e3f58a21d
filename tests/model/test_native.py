"""Where compiled code is kept, and what a compiler that fails misses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.core.files import cache_folder
from bloomery.model import native
from bloomery.model.native import Library, Uncompiled

SOURCE = Library("bloomery.model", "three.cpp")


@pytest.fixture(autouse=True)
def _three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that gives 3, and folders for caches and temporary files that the tests may spoil."""
    (tmp_path / "three.cpp").write_text('extern "C" int three() { return 3; }\n')
    monkeypatch.setattr(native, "files", lambda package: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(native.tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def three() -> int:
    native.library.cache_clear()
    return int(native.library(SOURCE).three())


def test_code_is_compiled_once() -> None:
    assert three() == 3
    (file,) = cache_folder().glob("three-*.so")
    inode = file.stat().st_ino
    assert three() == 3 and file.stat().st_ino == inode


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    """Each time in a process of its own: one that has loaded a library does not look at its file again."""
    code = "import sys, pathlib; from bloomery.model import native\n"
    code += f"native.files = lambda package: pathlib.Path({str(tmp_path)!r})\n"
    code += "sys.exit(native.library(native.Library('bloomery.model', 'three.cpp')).three())"
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command).returncode == 3
    (file,) = cache_folder().glob("three-*.so")
    file.write_bytes(file.read_bytes()[:100])
    assert subprocess.run(command).returncode == 3
    assert file.stat().st_size > 100


def test_where_the_home_folder_cannot_be_written_code_is_kept_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HOME on a disk mounted read-only, or HOME=/proc."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    assert three() == 3
    (file,) = (tmp_path / "tmp" / f"bloomery-{os.getuid()}").glob("three-*.so")
    inode = file.stat().st_ino
    assert three() == 3 and file.stat().st_ino == inode


def test_no_code_of_a_folder_that_others_can_write_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    folder = tmp_path / "tmp" / f"bloomery-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Uncompiled, match="others can write") as refused:
        three()
    assert "XDG_CACHE_HOME" in refused.value.fix and "g++" not in refused.value.fix


def test_without_a_compiler_the_fix_is_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(Uncompiled, match="no C\\+\\+ compiler") as refused:
        three()
    assert "install g++" in refused.value.fix


def test_without_a_linker_the_fix_is_to_install_binutils(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    compiler = os.environ.get("BLOOMERY_TESTS_COMPILER") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "bin/g++").symlink_to(compiler)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(Uncompiled, match="failed") as refused:
        three()
    assert "binutils" in refused.value.fix


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("collect2: fatal error: cannot find 'ld'", "binutils"),
        ('clang: error: unable to execute command: Executable "ld" doesn\'t exist!', "binutils"),
        ("fatal error: omp.h: No such file or directory", "OpenMP"),
        ("/usr/bin/ld: cannot find -lgomp: No such file or directory", "OpenMP"),
        ("g++: fatal error: cannot execute 'cc1plus': execvp: No such file", "install g++"),
        ("fatal error: vector: No such file or directory", "install g++"),
        ("/tmp/ccX.s: fatal error: error closing: No space left on device", "TMPDIR"),
        ("error: bad value 'native' for '-march=' switch", "CXX"),
    ],
)
def test_the_fix_is_for_what_the_compiler_says(message: str, fix: str) -> None:
    assert fix in native._fix_of(message)
