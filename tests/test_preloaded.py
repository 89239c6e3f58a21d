"""A forked process of Bloomery is what one that was started from nothing is (`preloaded`)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
VERSION = [sys.executable, "-m", "bloomery", "--version"]


def ended(popen, words, folder, **variables):
    with popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
               env=os.environ | variables, start_new_session=True) as process:  # fmt: skip
        out, err = process.communicate(timeout=120)
        return process, process.returncode, out, err


@pytest.mark.parametrize("words", [["--version"], ["plan", "absent.yaml"], ["no-such-command"], ["runs", "--json"]])
def test_exit_code_and_streams(tmp_path, words):
    told = [ended(popen, [*VERSION[:3], *words], tmp_path) for popen in (subprocess.Popen, preloaded.Popen)]
    assert told[0][1:] == told[1][1:]
    assert told[1][0]._ending is not None, "it was not forked"


def test_a_variable_that_a_library_reads_when_it_starts_is_a_start_from_nothing(tmp_path):
    process, code, *_ = ended(preloaded.Popen, VERSION, tmp_path, OMP_NUM_THREADS="3")
    assert (process._ending, code) == (None, 0)


def test_its_session_folder_and_words_are_its_own_and_its_ending_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe.log")
    with preloaded.Popen(
        [*VERSION[:3], "doctor", "--explain", "pipe.log"], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.poll() is None and process._ending is not None
        about = Path(f"/proc/{process.pid}")
        with (tmp_path / "pipe.log").open("wb"):  # it reads there by now, as that process and as no other
            words = [word for word in (about / "cmdline").read_bytes().split(b"\0") if word]
            assert words == [os.fsencode(word) for word in process.args]
            assert os.getsid(process.pid) == process.pid
            assert (about / "cwd").readlink() == tmp_path
            assert not [path for path in (about / "fd").iterdir() if "socket" in str(path.readlink())]
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
