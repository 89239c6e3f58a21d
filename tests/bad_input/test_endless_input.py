"""Pipes that nothing writes into, devices, links to them: refused at once wherever a file is named."""

import os
from pathlib import Path

import pytest
from command_line import assert_clear, here, process

from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input

# A command that waits would be ended by this, one that reads on would have no memory.
BOUNDED = "import resource, signal; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); signal.alarm(20)"


@pytest.fixture(params=["pipe", "device", "link"])
def endless(request, tmp_path) -> Path:
    path = tmp_path / "endless.txt"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "link":
        path.symlink_to("/dev/zero")
    return path if request.param != "device" else Path("/dev/zero")


def test_nothing_waits_for_a_pipe_and_no_device_is_read(endless, tmp_path):
    with pytest.raises(UserError, match=r"is (a pipe|a device), not a file"):
        open_input(endless)
    if endless.is_fifo():
        assert read_input(endless, pipes=True) == b""
        writer = os.open(endless, os.O_RDWR)
        os.write(writer, b"written\n")
        reader = open_input(endless, pipes=True)
        os.close(writer)
        assert reader.read() == b"written\n"


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert read_input(tmp_path / "a", 100) == b"x" * 100
    with pytest.raises(UserError, match="is larger than"):
        read_input(tmp_path / "a", 99)
    for name, problem in (("b", "No such file"), ("a\0b", "invalid file name")):
        with pytest.raises(UserError, match=problem):
            read_input(tmp_path / name)
    with pytest.raises(UserError, match="is a folder"):
        read_input(tmp_path)


def test_no_command_waits_or_reads_without_end(endless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = str(endless)
    for words in (
        ["doctor", "--machine", name],
        ["generate", "nowhere", "--prompts", name],
        ["tokenizer", "inspect", name, "--text", "a"],
        ["plan", name],
        ["train", name],
    ):
        result = here(*words)
        assert result.code in (1, 2) and result.err.startswith("error: "), words
        assert len(result.err.splitlines()) <= 4
    if not endless.is_fifo():
        result = here("doctor", "--explain", name)
        assert result.code == 2 and "not a file" in result.err


@pytest.mark.parametrize(
    "words", [["doctor", "--machine", "/dev/zero"], ["generate", "m", "--prompts", "/dev/zero"]]
)
def test_a_process_of_one_gibibyte_refuses_a_device(tmp_path, words):
    result = process(*words, folder=tmp_path, code=BOUNDED, forked=False)  # for its memory
    assert_clear(result, code=2, mentions=["a device"])
