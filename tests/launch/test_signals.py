"""One request saves first, a second Ctrl+C ends at once."""

import os
import signal
import threading

import pytest

from bloomery.launch.signals import stop_requests


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_one_signal_asks_and_tells_the_listener_once(number: int) -> None:
    heard: list[int] = []
    before = signal.getsignal(number)
    with stop_requests() as requests:
        assert not requests.asked
        with requests.heard_by(lambda: heard.append(1)):
            send(number)
            send(signal.SIGTERM)
        assert requests.asked
    assert heard == [1]
    assert signal.getsignal(number) == before


def test_ctrl_c_after_any_request_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests():
        send(signal.SIGTERM)
        send(signal.SIGINT)


def test_who_listens_late_hears_of_it_all_the_same() -> None:
    heard: list[int] = []
    with stop_requests() as requests:
        send(signal.SIGINT)
        with requests.heard_by(lambda: heard.append(1)):
            pass
    assert heard == [1]


def test_in_another_thread_signals_stay_with_the_main_one() -> None:
    seen: list[bool] = []

    def body() -> None:
        with stop_requests() as requests:
            seen.append(requests.asked)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) == before
