"""What signals ask of a training process: to stop, or to save. No torch."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.signals import SAVE_SIGNAL, STOP_SIGNALS
from bloomery.launch.exit_codes import STOPPED
from bloomery.monitor.events import Emit, Event, Phase, StepDone


@final
@dataclass
class StopFlag:
    """Set by signals. Before the first step of this process there is nothing to save: a stop request exits at once."""

    stop_requested: bool = False
    step: int = 0  # the last step that this process finished
    save_asked: bool = False
    stop_at: int | None = None  # after this step the process stops as if it were asked to
    emit: Emit | None = None

    def install(self) -> None:
        for number in (*STOP_SIGNALS, SAVE_SIGNAL):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE_SIGNAL})  # an earlier request arrives now

    def take_step(self, step: int) -> None:
        """From here on a stop saves.

        Of several ranks each takes the step before rank 0 reports it. A later rank that took it when it has emitted
        the event could still end without a save, at a stop by whoever has seen that event.
        """
        self.step = step
        if self.stop_at is not None and step >= self.stop_at:
            self.stop_requested = True

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        if not self.save_asked:
            return False
        # Reset only what was seen: a signal between a test and a reset in any case would be lost.
        self.save_asked = False
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            self.save_asked = True
            return
        is_first = not self.stop_requested
        self.stop_requested = True
        if not self.step:
            os._exit(STOPPED)
        if is_first and self.emit is not None:
            with suppress(UserError):  # the training loop reports a full disk
                self.emit(Phase(step=self.step, name="stopping"))

    def watching(self, emit: Emit) -> Emit:
        """`emit`, storing each step. A stop request emits an event at once, since a step may take a minute."""
        self.emit = emit

        def emit_event(event: Event) -> None:
            if isinstance(event, StepDone):
                self.take_step(event.step)
            emit(event)

        return emit_event
