"""Standard output and errors of a program that does not depend on who reads them."""

import os
from typing import Any, TextIO, final


@final
class ClosableStream:
    """A terminal, pipe or file that may close or be full while the program goes on: output from then on is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return self._drop(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop(0)

    def _drop(self, count: int) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
