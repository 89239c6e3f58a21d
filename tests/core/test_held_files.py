"""Files that are read while others would delete them: locks, their end, and file systems without them."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bloomery.core.held_files import HeldFiles, claimed

HOLDER = """
import sys, time
from pathlib import Path
from bloomery.core.held_files import HeldFiles
with HeldFiles() as holds:
    assert holds.take(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(600)
"""


def claims(path: Path) -> bool:
    with claimed([path]) as held_file:
        return held_file is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "MANIFEST.json"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def test_a_file_is_claimed_when_its_last_reader_has_let_it_go(file):
    with HeldFiles() as first:
        assert first.take(file)
        with HeldFiles() as second:
            assert second.take(file)
            assert not claims(file)
        assert not claims(file)
    assert claims(file)


def test_an_error_lets_the_file_go(file):
    with pytest.raises(KeyError), HeldFiles() as holds:
        holds.take(file)
        raise KeyError
    assert claims(file)


def test_the_lock_of_a_killed_reader_goes_with_it(file):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "held\n"
        assert not claims(file)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert claims(file)


def test_a_process_that_was_forked_meanwhile_does_not_hold_the_file(file):
    with HeldFiles() as holds:
        assert holds.take(file)
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert claims(file)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_held_file_is_named_and_those_before_it_are_free_again(file):
    free = file.with_name("free.json")
    free.touch()
    with HeldFiles() as holds:
        holds.take(file)
        with claimed([free, file]) as held_file:
            assert held_file == file
        assert claims(free)


def test_whoever_waits_for_a_claimed_file_finds_it_deleted(file):
    """A reader opens the file, and the run renames its folder before the lock is the reader's."""
    answers = []
    with HeldFiles() as holds:
        with claimed([file]):
            reader = threading.Thread(target=lambda: answers.append(holds.take(file)))
            reader.start()
            file.parent.rename(file.parent.with_name("gone"))
        reader.join()
        assert answers == [False]
        assert claims(file.parent.with_name("gone") / file.name)


def test_what_is_missing_is_neither_taken_nor_claimed_by_anybody(tmp_path):
    with HeldFiles() as holds:
        assert not holds.take(tmp_path / "missing.json")
    assert claims(tmp_path / "missing.json")


@pytest.mark.parametrize("what", ["deleted", "replaced", "renamed folder"])
def test_a_held_file_that_is_lost_is_named(file, what):
    with HeldFiles() as holds:
        holds.take(file)
        assert holds.lost() is None
        if what == "renamed folder":
            file.parent.rename(file.parent.with_name("gone"))
        else:
            file.unlink()
        if what == "replaced":
            file.write_text("{}")
        assert holds.lost() == file
        assert not holds.take(file)


def test_a_reader_needs_no_right_to_write(file):
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        with HeldFiles() as holds:
            assert holds.take(file)
            assert not claims(file)
    finally:
        file.parent.chmod(0o755)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_the_file_is_read_and_free_to_be_deleted(file, monkeypatch, number):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with HeldFiles() as holds:
        assert holds.take(file)
        assert claims(file)
        file.unlink()
        assert holds.lost() == file


def test_python_without_fcntl_has_no_locks():
    code = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
import bloomery.infer.held_model
import bloomery.runs.cleaning
from bloomery.core.held_files import HeldFiles, claimed
path = Path(sys.argv[1])
with HeldFiles() as holds, claimed([path]) as held_file:
    assert holds.take(path) and held_file is None
"""
    subprocess.run([sys.executable, "-c", code, __file__], check=True)
