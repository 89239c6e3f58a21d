"""A command that prints where it listens: a process that ends with this one, however this one ends. No torch."""

import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, final

from bloomery.core.child import DYING_SECONDS, kill_group, python_module
from bloomery.core.text import harmless, redact_secrets

State = Literal["starting", "ready", "ended"]


@final
class ListeningProcess:
    """Mutable: `bloomery` with these arguments, of which one makes it end with this process.

    `address`: a pattern of the line with the address, its first group. `environment`: all of its variables.
    """

    def __init__(
        self, *arguments: str, address: str, environment: Mapping[str, str], folder: Path
    ) -> None:
        self.url: str | None = None
        self._address = re.compile(address)
        self._lines: deque[str] = deque(maxlen=40)
        self._process = subprocess.Popen(
            python_module("bloomery", *arguments),
            stdin=subprocess.PIPE,  # closes when this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=folder,
            env=dict(environment),
        )
        self._reader = threading.Thread(target=self._read, name="listening process", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode("utf-8", errors="replace").rstrip()
            if match := self._address.match(text):
                self.url = match[1]
            self._lines.append(redact_secrets(harmless(text.rpartition("\r")[2])))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> State:
        if self._process.poll() is not None:
            return "ended"
        return "starting" if self.url is None else "ready"

    def text(self) -> str:
        """The end of what it has printed; all of that once it has ended."""
        if self.state == "ended":
            self._reader.join(2.0)
        return "\n".join(self._lines.copy())

    def close(self) -> None:
        """Kills it. One that is stuck in a driver ends later."""
        kill_group(self.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_SECONDS)


def parent_option() -> str:
    """The option with which a command ends when this process does."""
    return f"--parent={os.getpid()}"
