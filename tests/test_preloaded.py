"""A forked process of Bloomery is what one that was started from nothing is (`preloaded`)."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from bloomery.core.signals import held_back
from bloomery.monitor.events import StepDone, read_events

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
VERSION = [sys.executable, "-m", "bloomery", "--version"]


def ended(popen, words, folder, **variables):
    with popen(
        words,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        start_new_session=True,
    ) as process:
        out, err = process.communicate(timeout=120)
        return process, process.returncode, out, err


def test_an_interrupted_wait_is_asked_again_and_spoils_no_later_process(monkeypatch):
    process = preloaded.Popen(
        [sys.executable, "-c", "import sys; sys.exit(3)"], stdin=subprocess.DEVNULL
    )
    assert process._ending is not None, "it was not forked"
    note = preloaded.Popen._handle_exitstatus

    def interrupted(self, *arguments):
        monkeypatch.setattr(preloaded.Popen, "_handle_exitstatus", note)
        raise KeyboardInterrupt

    monkeypatch.setattr(preloaded.Popen, "_handle_exitstatus", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.wait()
    assert process.wait() == 3


CODE = "import sys; print(__name__, sys.argv); sys.exit(f'{sys.stdin.read()!r}')"


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["-m", "bloomery", *words]
            for words in (
                ["--version"],
                ["plan", "absent.yaml"],
                ["no-such-command"],
                ["runs", "--json"],
            )
        ),
        ["-c", CODE, "a b", "-m"],
        ["-c", "1 / 0"],
    ],
)
def test_exit_code_and_streams(tmp_path, words):
    told = [
        ended(popen, [sys.executable, *words], tmp_path)
        for popen in (subprocess.Popen, preloaded.Popen)
    ]
    assert told[0][1:] == told[1][1:]
    assert told[1][0]._ending is not None, "it was not forked"


def test_a_variable_that_a_library_reads_when_it_starts_is_a_start_from_nothing(tmp_path):
    process, code, *_ = ended(preloaded.Popen, VERSION, tmp_path, OMP_PROC_BIND="true")
    assert (process._ending, code) == (None, 0)


THREADS = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(300, 300)
layer(torch.randn(200, 300)).square().mean().backward()
print(torch.get_num_threads(), layer.weight.grad.sum().item().hex())
"""


def test_a_forked_process_computes_with_the_threads_of_its_variables(tmp_path):
    told = [
        ended(popen, [sys.executable, "-c", THREADS], tmp_path, OMP_NUM_THREADS="2")
        for popen in (subprocess.Popen, preloaded.Popen)
    ]
    assert told[0][1:] == told[1][1:] and told[0][2].split()[0] == "2"
    assert told[1][0]._ending is not None, "it was not forked"


@pytest.mark.soak
def test_a_forked_run_takes_the_steps_of_one_from_nothing(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "extends: demo\ndata: {path: text, glob: '*.txt'}\nmodel: {hidden_size: 16, num_layers: 1}\n"
        "tokenizer: {train: {kind: bpe, vocab_size: 300}}\nsample: {prompts: []}\n"
        "train: {max_steps: 2}\n"
    )
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(
            f"the cat number {number} sat on the mat " * 40
        )
    losses = []
    for popen in (subprocess.Popen, preloaded.Popen):
        words = [*VERSION[:3], "train", "tiny.yaml", "--run-dir", popen.__module__]
        process, code, out, err = ended(
            popen, words, tmp_path, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536"
        )
        assert code == 0, out + err
        assert (getattr(process, "_ending", None) is None) == (popen is subprocess.Popen)
        events = read_events(tmp_path / popen.__module__ / "events.jsonl")
        losses.append([event.loss for event in events if isinstance(event, StepDone)])
    assert losses[0] == losses[1] != []


def test_its_session_folder_and_words_are_its_own_and_its_ending_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe.log")
    with preloaded.Popen(
        [*VERSION[:3], "doctor", "--explain", "pipe.log"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"MARK": "here"},
    ) as process:
        assert process.poll() is None and process._ending is not None
        about = Path(f"/proc/{process.pid}")
        # it reads there by now, as that process and as no other
        with (tmp_path / "pipe.log").open("wb"):
            words = [word for word in (about / "cmdline").read_bytes().split(b"\0") if word]
            assert words == [os.fsencode(word) for word in process.args]
            assert b"MARK=here" in (about / "environ").read_bytes().split(b"\0")
            assert os.getsid(process.pid) == process.pid
            assert (about / "cwd").readlink() == tmp_path
            assert not [
                path for path in (about / "fd").iterdir() if "socket" in str(path.readlink())
            ]
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL


def test_a_state_is_made_up_only_where_nobody_waits_and_the_process_that_forks_has_ended(tmp_path):
    with preloaded.Popen([sys.executable, "-c", ""], cwd=tmp_path, env=dict(os.environ)) as process:
        told = process._ending
        process._ending, theirs = socket.socketpair()
        theirs.close()
        with pytest.raises(ChildProcessError):
            process.poll()
        assert process._internal_poll(_deadstate=sys.maxsize) == sys.maxsize  # as `__del__` asks
        process._ending.close()
        process._ending, process.returncode = told, None
        assert process.wait(60) == 0


# Its child gets a signal before it has done anything, while it still has the handlers of its parent.
SIGNALLED = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
words = [sys.executable, "-m", "bloomery.launch.worker", "train", "absent"]
words += ["--parent", str(os.getpid()), "--report", "2"]
with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
    sys.exit(-child.wait())
"""


def test_a_signal_right_after_the_fork_does_not_reach_a_handler_of_the_parent(tmp_path):
    _, code, _, err = ended(preloaded.Popen, [sys.executable, "-c", SIGNALLED], tmp_path)
    assert code == signal.SIGTERM, err


@pytest.mark.parametrize("blocked", [{signal.SIGUSR2}, pytest.param(set(), marks=pytest.mark.soak)])
def test_signals_are_blocked_as_where_the_process_was_asked_for(tmp_path, monkeypatch, blocked):
    """Not as where the first process of all was: that one may have been started with a signal held back."""
    code = "import signal; print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"
    with held_back(signal.SIGUSR2):
        server = preloaded.Server()
    own = preloaded.Client(server.address, server.process.pid, server.early)
    monkeypatch.setattr(preloaded, "_client", own)
    previous_mask = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        words = [sys.executable, "-c", code]
        told = [ended(popen, words, tmp_path) for popen in (subprocess.Popen, preloaded.Popen)]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        server.end()
    assert told[0][2] == told[1][2] == f"{sorted(map(int, blocked))}\n"
