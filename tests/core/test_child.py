"""The protocol of child processes: messages whole and in order, time limits, deaths, and nothing left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.core.child import JOB_SIGNALS, Child, kill_group, output_of

HERE = Path(__file__).parent


def child(**job) -> Child:
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    return Child("child_for_tests", job, environment={**os.environ, "PYTHONPATH": paths})


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_messages_of_any_size_arrive_whole_and_in_order():
    """Larger than any buffer both ways, with letters that no encoding has; nobody waits for the other to read."""
    with child(job="x" * 300_000) as worker:
        content, name = os.urandom(3_000_000), "a\ud800é\n" * 100_000
        assert worker.ask({"do": "double", "name": name}, content, seconds=60) == {
            "name": name,
            "content": content + content,
        }
        assert worker.send({"do": "flood", "count": 2000}, seconds=60)
        # it floods first, and would wait for a reader
        assert worker.send({"do": "ignore"}, content, seconds=60)
        assert worker.ask({"do": "double", "name": ""}, seconds=60)["number"] == 0
        assert [worker.next(60)["number"] for _ in range(1999)] == list(range(1, 2000))
        assert worker.next(60) == {"name": ""}


def test_a_time_limit_is_kept_and_what_was_said_last_is_kept():
    with child() as worker:
        assert worker.next(0.05) == "silent"
        assert worker.ask({"do": "leave"}, seconds=60) == {"last": "words"}
        assert worker.next(60) == "ended"
        assert worker.send({"do": "ignore"}, bytes(3_000_000), seconds=60)
        assert worker.next(60) == "ended"
        assert worker.code == 7
        assert worker.ending() == "exit code 7: ValueError: no such driver"
    with child() as worker:
        begun = time.monotonic()
        assert worker.ask({"do": "sleep"}, seconds=0.3) == "silent"
        assert not worker.send({"do": "ignore"}, bytes(3_000_000), seconds=0.1)  # nobody reads it
        assert time.monotonic() - begun < 60  # it sleeps for 600


def test_the_end_of_the_block_ends_all_that_the_child_started():
    with child(pids=True) as worker:
        pids = worker.next(60)["pids"]
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells nobody else")
def test_a_child_dies_with_its_parent():
    code = (
        "import os, sys, signal; sys.path.insert(0, sys.argv[1]); from test_child import child\n"
        "print(child(pids=True).start().next(60)['pids'][0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, check=False
    )
    assert gone(int(parent.stdout))
    kill_group(int(parent.stdout))  # what the child had started


@pytest.mark.parametrize("number", JOB_SIGNALS)
def test_a_signal_to_all_processes_of_a_job_does_not_end_a_child(number):
    """The worker that gives rewards is needed until the last step is saved."""
    with child(pids=True) as worker:
        own, started = worker.next(60)["pids"]
        os.kill(own, number)
        assert worker.ask({"do": "double", "name": "still here"}, seconds=60) == {
            "name": "still here"
        }
        os.kill(started, number)  # what it starts has the defaults
        assert gone(started)


def test_the_answer_of_a_command():
    assert output_of([sys.executable, "-c", "print('one')"], seconds=60) == "one\n"
    assert output_of([sys.executable, "-c", "raise SystemExit(3)"], seconds=60) == ""
    assert output_of(["/nowhere/at/all"], seconds=60) == ""
    assert output_of(["sleep", "60"], seconds=0.05) is None
