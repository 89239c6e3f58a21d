"""Requests to a run: SIGTERM, SIGUSR1, SIGHUP, Ctrl+C save and stop, a second Ctrl+C ends, SIGUSR2 saves. No torch."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR2


@final
class StopRequests:
    """Whether somebody asked to stop, and who has to hear of it: `listener` is called at the first request.

    `saver` hears each request for a checkpoint; one that comes while nobody could save is kept for who can.
    """

    def __init__(self) -> None:
        self.asked = False
        self.over = False  # all is kept: another Ctrl+C ends nothing
        self.listener: Callable[[], None] | None = None
        self.saver: Callable[[], None] | None = None
        self.save_asked = False

    def ask(self, number: int) -> None:
        """Raises KeyboardInterrupt when Ctrl+C follows an earlier request, unless all is over by then."""
        if self.asked and not self.over and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.asked = not self.asked, True
        if first and self.listener is not None:
            self.listener()

    def ask_save(self) -> None:
        if self.saver is not None:
            self.saver()
        else:
            self.save_asked = True

    @contextmanager
    def heard_by(self, listener: Callable[[], None], saver: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside the block `listener` hears the first request, also one that came just before; `saver` likewise."""
        self.listener, self.saver = listener, saver
        try:
            if self.asked:
                listener()
            if self.save_asked and saver is not None:
                self.save_asked = False
                saver()
            yield
        finally:
            self.listener = self.saver = None


def can_hear() -> bool:
    """Whether signals reach this thread: Python hands them to the main one alone."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held_back(number: int) -> Iterator[None]:
    """Children started inside the block inherit the signal blocked: it waits until they have a handler for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Inside the block these signals become requests. Outside the main thread no signal can be caught: none is."""
    requests = StopRequests()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            requests.ask_save()
        else:
            requests.ask(number)

    if not can_hear():
        yield requests
        return
    before = {number: signal.signal(number, handle) for number in (*STOP_SIGNALS, SAVE_SIGNAL)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
