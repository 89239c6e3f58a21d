"""`python -m bloomery`, in which Ctrl+C is pressed at one exact moment: `PRESSED_AT` names it.

A test that watches from outside may come too late: on a fast machine a tiny run is over in less than a second. The
supervisor and its training child both run this module.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from bloomery.core.child import loading
from bloomery.launch import supervisor, worker
from bloomery.monitor.events import Emit, EvalDone, Event, Phase, StepDone

MOMENT = "PRESSED_AT"
# In the supervisor: at the first two no child has begun to train.
PLANNED = "planned"
CHILD_STARTED = "child started"
# In the training child, while a checkpoint is written.
SAVING = "saving"
# In the training child, at an event.
EVENTS: dict[str, Callable[[Event], bool]] = {
    "stepping": lambda event: isinstance(event, StepDone) and event.step >= 2,
    "evaluating": lambda event: isinstance(event, EvalDone) and event.step >= 10,
    "compiling": lambda event: isinstance(event, Phase) and event.name == "compile",
}
WAIT_SECONDS = 60.0


def before(call: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def wrapper(*args: Any, **options: Any) -> Any:
        action()
        return call(*args, **options)

    return wrapper


def press_in_supervisor(moment: str) -> None:
    """The signal arrives when the plan is on disk, or right after the start of the training child."""
    from bloomery.runs import lifecycle

    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    if moment == PLANNED:
        lifecycle.train_stage = before(lifecycle.train_stage, ctrl_c)
    elif moment == CHILD_STARTED:
        start = supervisor._Process.__init__

        def start_and_press(
            process: supervisor._Process, command: Sequence[str], *rest: Any
        ) -> None:
            start(process, command, *rest)
            if "train" in command:
                # A terminal's Ctrl+C reaches the child, too, as long as it has no session of its own.
                process.child.send_signal(signal.SIGINT)
                ctrl_c()

        supervisor._Process.__init__ = start_and_press


def press_in_worker(moment: str) -> None:
    """The signal goes to the supervisor; the child does nothing more until the request has come back to it."""
    requested = threading.Event()
    handle = worker.StopFlag._handle

    def handle_and_note(flag: worker.StopFlag, *signal_and_frame: Any) -> None:
        requested.set()
        handle(flag, *signal_and_frame)

    def ctrl_c() -> None:
        if not requested.is_set():
            os.kill(os.getppid(), signal.SIGINT)
            assert requested.wait(WAIT_SECONDS), "the stop request never came"

    worker.StopFlag._handle = handle_and_note
    if moment == SAVING:
        with loading():
            from bloomery.train.checkpoint import saver as checkpoint
        checkpoint.put_in_place = before(checkpoint.put_in_place, ctrl_c)
    elif moment in EVENTS:
        watching = worker.StopFlag.watching

        def watching_and_pressing(flag: worker.StopFlag, emit: Emit) -> Emit:
            emit_event = watching(flag, emit)

            def emit_and_press(event: Event) -> None:
                emit_event(event)
                if EVENTS[moment](event):
                    ctrl_c()

            return emit_and_press

        worker.StopFlag.watching = watching_and_pressing


if __name__ == "__main__":
    if "--report" in sys.argv:
        press_in_worker(os.environ[MOMENT])
        ended = worker.main(sys.argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    from bloomery.__main__ import main

    supervisor.WORKER = "pressing"
    press_in_supervisor(os.environ[MOMENT])
    main()
