"""The cache folder of a user, wherever it can be written."""

import tempfile
from pathlib import Path

import pytest

from bloomery.core.files import cache_folder, temporary_cache


def test_a_cache_that_cannot_be_written_is_one_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache/bloomery"
    (tmp_path / "file").write_text("")
    for root in ("/proc/nothing", str(tmp_path / "file")):
        monkeypatch.setenv("XDG_CACHE_HOME", root)
        folder = cache_folder()
        assert folder == temporary_cache() and folder.parent == tmp_path
        assert folder.stat().st_mode & 0o077 == 0
    # Of a folder that others can write nothing is read.
    folder.chmod(0o777)
    assert cache_folder() == tmp_path / "file/bloomery"
