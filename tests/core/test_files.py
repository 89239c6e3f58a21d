"""The cache folder of a user, wherever it can be written."""

import tempfile
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest

from bloomery.core.files import (
    LARGEST,
    cache_folder,
    read_at_most,
    read_input,
    read_whole,
    temporary_cache,
)


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


def test_a_small_file_takes_little_memory_whatever_may_be_read(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(b"{}" * 100)
    tracemalloc.start()
    assert read_whole(path) == read_input(path) == b"{}" * 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LARGEST / 16


def test_no_more_is_read_than_was_asked(tmp_path):
    stream = BytesIO(bytes(range(256)) * 8_192)
    assert read_at_most(stream, 300) == (bytes(range(256)) * 2)[:300]
    assert len(read_at_most(stream, 2**20 + 5)) == 2**20 + 5 and stream.tell() == 2**20 + 305
    assert len(read_at_most(stream, 2**30)) == 2**20 - 305 and not read_at_most(stream, 1)
