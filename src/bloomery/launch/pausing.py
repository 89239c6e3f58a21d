"""A training process waits between two steps while a pause is asked. No torch."""

import time
from collections.abc import Callable
from typing import final

from bloomery.monitor.events import Emit, Event, Phase, StepDone
from bloomery.train.requests import Request


@final
class StepPauses:
    """In the training process: waits between two steps while a pause is asked, or until a stop is.

    `now`: what is asked of any rank: all of them wait, and none inside a collective.
    """

    def __init__(self, emit: Emit, now: Callable[[], Request]) -> None:
        self._emit = emit
        self._step = 0
        self._now = now

    def emit(self, event: Event) -> None:
        self._step = event.step if isinstance(event, StepDone) else self._step
        self._emit(event)

    def wait(self, progress: Callable[[], None] = lambda: None, poll_seconds: float = 0.5) -> bool:
        """Waits until the pause ends; returns whether a stop was requested. `progress` is called at each look."""
        progress()
        request = self._now()
        if request.pause and not request.stop:
            self._emit(Phase(step=self._step, name="paused"))
        while request.pause and not request.stop:
            time.sleep(poll_seconds)
            progress()
            request = self._now()
        return request.stop
