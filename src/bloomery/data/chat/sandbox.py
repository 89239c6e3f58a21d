"""The parent's side of a process that renders chat templates: it outlives whatever a template does."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

from bloomery.core.errors import UserError
from bloomery.data.chat.templates import ChatTemplate

CPU_SECONDS = 2.0  # for one conversation
WALL_SECONDS = 30.0  # beside the time that every conversation of a batch may take
_PATIENCE = 3  # conversations that may kill the process, and one more for every thousand
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
_REMEDY = "mend the template, or set data.chat.template to another: chatml, llama2, llama3, qwen, mistral, gemma"
_SOURCES = Path(__file__).parents[3]  # where the child finds this package
Json = dict[str, Any]


def read_frame(stream: IO[bytes]) -> Any:
    """Raises EOFError where the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    content = stream.read(*struct.unpack("<I", head))
    return json.loads(content)


def write_frame(stream: IO[bytes], value: Any) -> None:
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    stream.write(struct.pack("<I", len(content)) + content)
    stream.flush()


@final
class TemplateProcess:
    """Renders batches of conversations with one template. Starts with the first batch; a `close` ends it."""

    def __init__(self, template: ChatTemplate, names: Mapping[str, str], enders: Sequence[str]) -> None:
        self._template, self._names, self._enders = template, dict(names), list(enders)
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = self._answered = 0

    def read(self, jobs: Sequence[Json]) -> list[Json]:
        """An answer a job: {"text", "spans"} or {"error"}. Raises UserError for a template that cannot be used."""
        if not jobs:
            return []
        answers = self._ask(jobs)
        if isinstance(answers, list):
            self._answered += len(answers)
            return answers
        if len(jobs) > 1:  # one of them killed it: one by one
            return [answer for job in jobs for answer in self.read([job])]
        self._deaths += 1
        if self._deaths >= _PATIENCE + self._answered // 1000:
            raise self.error(answers)
        return [{"error": answers}]

    def error(self, problem: str) -> UserError:
        return UserError(f"the chat template cannot be used: {problem}", where=self._template.origin, remedy=_REMEDY)

    def _ask(self, jobs: Sequence[Json]) -> list[Json] | str:
        """The answers, or what ended the process."""
        process = self._process or self._start()
        assert process.stdin and process.stdout
        timer = threading.Timer(WALL_SECONDS + CPU_SECONDS * len(jobs), process.kill)
        timer.start()
        try:
            write_frame(process.stdin, jobs)
            answers: list[Json] = read_frame(process.stdout)
            return answers
        except (EOFError, BrokenPipeError):
            return self._buried()
        finally:
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        """Nothing of this process's environment but what Python needs: no token, no key."""
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        paths = (str(_SOURCES), os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bloomery.data.chat.sandbox_worker"], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=2**20,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        said = {"text": self._template.text, "names": self._names, "enders": self._enders, "seconds": CPU_SECONDS}
        try:
            write_frame(self._process.stdin, said)
            ready = read_frame(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise self.error(self._buried()) from error
        if "error" in ready:
            self.close()
            raise self.error(ready["error"])
        return self._process

    def _buried(self) -> str:
        process = self._process
        assert process is not None
        code = process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return f"it took more than {CPU_SECONDS:g} seconds for one conversation"
        if code == -signal.SIGKILL:
            return "its process was killed: it took too long, or the machine ran out of memory"
        return f"its process ended with code {code}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        process.kill()
        process.wait()
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:  # what was not yet sent goes nowhere
            return
