"""Commands that pages start: each a process of its own, which lives on when studio ends. Does not import torch."""

import os
import shlex
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import IO, final

from bloomery.core.child import python_module
from bloomery.core.errors import UserError, of_the_system
from bloomery.core.text import harmless, redact_secrets

TOKEN = "BLOOMERY_STUDIO_TOKEN"
_OUTPUT_BYTES = 20_000  # that a page shows


@final
@dataclass
class Command:
    """Mutable: `bloomery` with these arguments. `subject`: the run or file that it is about."""

    arguments: tuple[str, ...]
    subject: str
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]

    @property
    def line(self) -> str:
        """As it would be typed."""
        return shlex.join(("bloomery", *self.arguments))

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """As Ctrl+C in a terminal: what it trains is saved first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    @property
    def printed_bytes(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    def text(self) -> str:
        """The end of what it has printed."""
        start = max(0, self.printed_bytes - _OUTPUT_BYTES)
        content = os.pread(self.output.fileno(), _OUTPUT_BYTES, start)
        return redact_secrets(harmless(content.decode("utf-8", errors="replace"))).strip()


@final
@dataclass
class Commands:
    """Mutable: the commands of this studio, the newest last."""

    started: list[Command] = field(default_factory=list)

    def start(self, *arguments: str, subject: str) -> Command:
        """Raises UserError where the same command still runs, for two pages or two clicks, and where the system refuses
        another process or its file.
        """
        for command in self.started:
            if command.arguments == arguments and command.code is None:
                problem = f"`{command.line}` still runs"
                raise UserError(problem, where=subject, fix="wait until it ends")
        try:
            # A file without a name: a pipe would end the command when studio ends.
            output = tempfile.TemporaryFile()  # noqa: SIM115
            process = subprocess.Popen(
                python_module("bloomery", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C in the terminal of studio does not reach it
                env={name: value for name, value in os.environ.items() if name != TOKEN},
            )
        except OSError as error:
            worded = of_the_system(error)
            raise UserError(
                f"cannot start `bloomery {shlex.join(arguments)}`: {error.strerror}",
                where=worded.where if worded else "",
                fix=worded.fix if worded else "end other programs, then try again",
            ) from error
        command = Command(arguments, subject, process, output)
        self.started = [*self.started, command][-200:]
        return command

    def of(self, subject: str) -> Command | None:
        """The newest command about it."""
        about_it = (command for command in reversed(self.started) if command.subject == subject)
        return next(about_it, None)
