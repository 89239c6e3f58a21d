"""One request saves first, a second Ctrl+C ends at once."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from bloomery.core.signals import stop_requests


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_one_signal_asks_and_tells_the_listener_once(number: int) -> None:
    heard: list[int] = []
    before = signal.getsignal(number)
    with stop_requests() as requests:
        assert not requests.stop_requested
        with requests.handled_by(lambda: heard.append(1)):
            send(number)
            send(signal.SIGTERM)
        assert requests.stop_requested
    assert heard == [1]
    assert signal.getsignal(number) == before


def test_ctrl_c_after_any_request_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests():
        send(signal.SIGTERM)
        send(signal.SIGINT)


def test_ctrl_c_after_all_is_kept_interrupts_nothing() -> None:
    with stop_requests() as requests:
        send(signal.SIGINT)
        requests.over = True
        send(signal.SIGINT)


IMPORTING = """
import os, signal, sys
class Typing:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Typing())
"""
LEAVING = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(("moment", "code"), [(IMPORTING, -signal.SIGINT), (LEAVING, 0)])
def test_ctrl_c_at_the_door_is_no_traceback(moment: str, code: int) -> None:
    door = "\nimport runpy, sys; sys.argv[1:] = ['--version']\nrunpy.run_module('bloomery', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", moment + door], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, "")


def test_who_listens_late_hears_of_it_all_the_same() -> None:
    heard: list[int] = []
    with stop_requests() as requests:
        send(signal.SIGINT)
        with requests.handled_by(lambda: heard.append(1)):
            pass
    assert heard == [1]


def test_in_another_thread_signals_stay_with_the_main_one() -> None:
    seen: list[bool] = []

    def body() -> None:
        with stop_requests() as requests:
            seen.append(requests.stop_requested)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) == before
