"""Requests to a run: SIGTERM, SIGUSR1, SIGHUP, Ctrl+C save and stop, a second Ctrl+C exits, SIGUSR2 saves. No torch."""

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
    """Whether a stop was requested. Calls `listener` at the first stop request, and `saver` at each save request.

    A save request without a saver is stored for the next one.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self.over = False  # everything is saved: another Ctrl+C has no effect
        self.listener: Callable[[], None] | None = None
        self.saver: Callable[[], None] | None = None
        self.save_asked = False

    def ask(self, number: int) -> None:
        """Raises KeyboardInterrupt for a Ctrl+C after an earlier request, unless the run is over."""
        if self.stop_requested and not self.over and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first = not self.stop_requested
        self.stop_requested = True
        if is_first and self.listener is not None:
            self.listener()

    def ask_save(self) -> None:
        if self.saver is not None:
            self.saver()
        else:
            self.save_asked = True

    @contextmanager
    def handled_by(
        self, listener: Callable[[], None], saver: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Inside the block `listener` gets the first stop request, also an earlier one; `saver` likewise."""
        self.listener = listener
        self.saver = saver
        try:
            if self.stop_requested:
                listener()
            if self.save_asked and saver is not None:
                self.save_asked = False
                saver()
            yield
        finally:
            self.listener = self.saver = None


def receives_signals() -> bool:
    """Whether this thread receives signals: only Python's main thread does."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held_back(number: int) -> Iterator[None]:
    """Blocks the signal for children started inside the block, until they install a handler."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Inside the block these signals become requests, except outside the main thread."""
    requests = StopRequests()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            requests.ask_save()
        else:
            requests.ask(number)

    if not receives_signals():
        yield requests
        return
    previous_handlers = {
        number: signal.signal(number, handle) for number in (*STOP_SIGNALS, SAVE_SIGNAL)
    }
    try:
        yield requests
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
