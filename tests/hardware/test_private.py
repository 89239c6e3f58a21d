"""Folders that hold code which will be run belong to this user alone, whoever was there first."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from bloomery.hardware.profile import NODE_LOCAL, local_caches

OTHER = {"OMP_NUM_THREADS": "4"}


def named(root: Path) -> dict[str, str]:
    return {**OTHER, **{name: str(root / name.split("_")[0].lower()) for name in NODE_LOCAL}}


def parent(environment: dict[str, str]) -> Path:
    (found,) = {Path(environment[name]).parent for name in NODE_LOCAL}
    return found


def test_the_folder_is_made_for_this_user_alone_and_used_again(tmp_path: Path) -> None:
    wanted = named(tmp_path / "bloomery-7")
    assert local_caches(wanted) == local_caches(wanted) == wanted
    assert stat.S_IMODE((tmp_path / "bloomery-7").stat().st_mode) == 0o700
    assert local_caches(OTHER) == OTHER


@pytest.mark.parametrize("trap", ["open", "link", "file", "owner"])
def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch, trap: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs, root = tmp_path / "theirs", tmp_path / "bloomery-7"
    theirs.mkdir(mode=0o700)
    if trap == "open":
        root.mkdir()
        root.chmod(0o777)
    elif trap == "link":
        root.symlink_to(theirs)
    elif trap == "file":
        root.touch(mode=0o600)
    else:
        root.mkdir(mode=0o700)
        monkeypatch.setattr("os.getuid", lambda: root.stat().st_uid + 1)
    found = parent(local_caches(named(root)))
    assert found != root
    assert found.parent == tmp_path
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert list(theirs.iterdir()) == []


def test_without_any_folder_the_libraries_keep_their_own_defaults(tmp_path: Path) -> None:
    assert local_caches(named(tmp_path / "missing" / "bloomery-7")) == OTHER


def test_kernels_are_kept_in_the_temporary_folder_where_the_home_folder_cannot_be_written(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_caches(OTHER) == OTHER
    for home in ("/dev/null", str(tmp_path / "missing")):
        monkeypatch.setenv("HOME", home)
        folder = tmp_path / f"bloomery-{os.getuid()}"
        assert local_caches(OTHER) == OTHER | {"TRITON_CACHE_DIR": str(folder / "triton")}
        assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert local_caches(OTHER) == OTHER
