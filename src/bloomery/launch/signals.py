"""Requests to stop: SIGTERM, SIGUSR1, SIGHUP and one Ctrl+C save first, a second Ctrl+C ends at once. No torch."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@final
class StopRequests:
    """Whether somebody asked to stop, and who has to hear of it: `listener` is called at the first request."""

    def __init__(self) -> None:
        self.asked = False
        self.listener: Callable[[], None] | None = None

    def ask(self, number: int) -> None:
        """Raises KeyboardInterrupt when Ctrl+C follows an earlier request."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.asked = not self.asked, True
        if first and self.listener is not None:
            self.listener()

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Inside the block `listener` hears the first request, also one that came just before."""
        self.listener = listener
        try:
            if self.asked:
                listener()
            yield
        finally:
            self.listener = None


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Inside the block the stop signals become requests. Outside the main thread no signal can be caught: none is."""
    requests = StopRequests()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        requests.ask(number)

    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
