"""What a long operation does now, in words, for whoever waits for it: the command line shows it, other callers do not.

with told_to(print):
    export(...)  # which calls progress("writing tensor 3 of 272")
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def progress(text: str) -> None:
    """Tells the listener of this thread, if there is one. Cheap: call it for each tensor, response or file."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def is_heard() -> bool:
    """Whether this thread has a listener: for progress that costs more than a call."""
    return _listener.get() is not None


@contextmanager
def told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside the block `listener` gets every text."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
