"""Asks a child process for readings, and gives up what hangs or crashes in it.

Nothing here waits for longer than its deadline, not even for the child's death: who is stuck in a driver does not die.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from bloomery.core.child import Child
from bloomery.hardware.telemetry.sysfs import Device, Reading

DEADLINE_SECONDS = 8.0  # for one look: a tool has four, and its process must be started
DYING_SECONDS = 0.5
MODULE = "bloomery.hardware.telemetry.worker"


@final
class Reader:
    """`look` asks once. A source that does not answer in time, or takes its process down, is not asked again.

    `said` hears of each source that is given up, once.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        said: Callable[[str], None],
        processor: str = "",
        root: Path = Path("/"),
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        told = [asdict(device) for device in devices]
        self._job: dict[str, Any] = {"devices": told, "root": str(root), "processor": processor}
        self._without: list[str] = []
        self._said, self._deadline = said, deadline
        self._child: Child | None = None
        self._trying = ""
        self._hopeless = False

    def look(self) -> list[Reading]:
        """Empty when nothing answered in time."""
        if self._hopeless:
            return []
        until = time.monotonic() + self._deadline
        try:
            if self._child is None:
                job = self._job | {"without": self._without}
                self._child = Child(MODULE, job, environment=os.environ, dying_seconds=DYING_SECONDS).start()
            told = self._child.ask({}, seconds=self._deadline)
            while isinstance(told, dict) and "readings" not in told:
                self._trying = told["trying"]
                told = self._child.next(until - time.monotonic())
            if isinstance(told, dict):
                return [Reading(**facts) for facts in told["readings"]]
            ended = "failed (its process ended)"
            self._give_up(ended if told == "ended" else f"did not answer within {self._deadline:.0f} s")
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._give_up(f"failed ({error})")
        return []

    def _give_up(self, problem: str) -> None:
        """The source that was being asked is left alone from now on; the next look starts another process."""
        self.close()
        name, self._trying = self._trying, ""
        if not name:
            self._hopeless = True
            self._said(f"the sensors of this machine cannot be read: their reader {problem}; training goes on without")
            return
        self._without.append(name)
        self._said(f"reading sensors through {name} {problem}: it is not asked again, training goes on")

    def close(self) -> None:
        """Ends the process. One that is stuck in a driver is left behind; it ends when the driver lets it."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
