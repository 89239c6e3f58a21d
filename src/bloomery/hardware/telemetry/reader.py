"""Asks a child process for readings, and gives up what hangs or crashes in it.

Nothing here waits for longer than its deadline, not even for the child's death: who is stuck in a driver does not die.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

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
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._trying = ""
        self._hopeless = False

    def look(self) -> list[Reading]:
        """Empty when nothing answered in time."""
        if self._hopeless:
            return []
        try:
            if self._process is None:
                self._process = self._started()
            self._ask(b"\n")
            return self._answer(time.monotonic() + self._deadline)
        except TimeoutError:
            self._give_up(f"did not answer within {self._deadline:.0f} s")
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._give_up(f"failed ({error})")
        return []

    def _started(self) -> "subprocess.Popen[bytes]":
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],  # -P: what lies in the working folder is no library
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl+C is not for it
        )
        self._ask(json.dumps(self._job | {"without": self._without}).encode() + b"\n")
        return self._process

    def _ask(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)

    def _answer(self, until: float) -> list[Reading]:
        """Raises TimeoutError, and BrokenPipeError when the process has ended."""
        while True:
            told = json.loads(self._line(until))
            if "readings" in told:
                return [Reading(**facts) for facts in told["readings"]]
            self._trying = told["trying"]

    def _line(self, until: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(descriptor, 2**16)
            if not piece:
                raise BrokenPipeError("its process ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

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
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DYING_SECONDS)
