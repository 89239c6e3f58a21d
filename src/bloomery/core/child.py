"""Child processes that may crash or hang: each tells what it finds as lines, none outlives its parent. No torch."""

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, final

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TAIL_LINES = 200
LONGEST = 300  # letters of a sentence that a child's output is cut to

RAISED = ("Error", "Exception", "Interrupt", "Exit", "Iteration")  # how the names of exceptions end

Silence = Literal["ended", "silent"]


@final
class Child:
    """`python -m MODULE` in a session of its own; when the block ends, it and all that it started are gone.

    The child reads `job` as JSON from its standard input and tells lines of JSON through the descriptor that the job
    names. What it or a library prints is kept as its last lines.
    """

    def __init__(self, module: str, job: Mapping[str, Any], *, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-X", "faulthandler", "-m", module]
        self._job, self._environment = dict(job), dict(environment)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._unread = b""

    def __enter__(self) -> "Child":
        self._told, child_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(child_end,),
                start_new_session=True,  # Ctrl+C reaches it through us alone, and its group can be killed as a whole
            )
        except BaseException:
            os.close(self._told)
            raise
        finally:
            os.close(child_end)
        self._pump = threading.Thread(target=self._keep_tail, name="output of a child", daemon=True)
        self._pump.start()
        assert self._process.stdin is not None
        job = json.dumps(self._job | {"tell": child_end, "parent": os.getpid()})
        try:
            self._process.stdin.write(job.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self  # it died at once: `next` says so
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_group(self._process.pid)
        self._process.wait()
        self._pump.join(2.0)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # what was never read needs no flushing
        os.close(self._told)

    def next(self, seconds: float) -> dict[str, Any] | Silence:
        """What it tells next; "ended" when it has ended without another word, "silent" when `seconds` have passed."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._told], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return "silent"
            piece = os.read(self._told, 2**16)
            if not piece:
                return "ended"
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ending(self) -> str:
        """How it ended, in words. Call it after `next` said "ended"."""
        code = self._process.wait()
        self._pump.join(2.0)
        if code < 0:
            return f"{signal_name(-code)}{self._said(': ')}"
        return f"exit code {code}{self._said(': ')}"

    @property
    def code(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        return self._process.wait()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that it or a library printed."""
        return tuple(self._tail)

    def _said(self, before: str) -> str:
        last = last_words(self._tail)
        return before + last if last else ""

    def _keep_tail(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.decode(errors="replace").rstrip("\n"))


def kill_group(leader: int) -> None:
    """The process and all that it started in its session; harmless when they are gone."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def last_words(lines: Sequence[str]) -> str:
    """The exception's line of a traceback, else the last line; without the stack that faulthandler prints."""
    told = [line.strip() for line in lines if line.strip()]
    raised = [line for line in told if line.partition(":")[0].split(".")[-1].endswith(RAISED)]
    fatal = [line for line in told if line.startswith("Fatal Python error")]
    return (raised[-1:] or fatal[-1:] or told[-1:] or [""])[0][:LONGEST]


# In the child


def accept() -> dict[str, Any]:
    """The job of this process, which from now on ends when the process that gave the job does."""
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    die_with_parent(job["parent"])
    return job


def die_with_parent(parent: int) -> None:
    """From now on this process ends, whatever it does, when `parent` does; its standard input is a pipe from there."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
    threading.Thread(target=_watch_pipe, name="parent", daemon=True).start()


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports of a child: a million objects come and none is garbage, so nothing walks over them, ever.

    Torch and its compiler load in a fifth less time that way.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _watch_pipe() -> None:
    os.read(0, 1)  # returns when the other end is closed: the parent is gone
    os._exit(1)


def tell(job: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """A line for the process that gave the job."""
    os.write(job["tell"], json.dumps(found).encode() + b"\n")


def ask(command: Sequence[str], *, seconds: float) -> str | None:
    """Standard output of `command`; "" when it cannot be started or fails, None when it took longer than `seconds`."""
    answer: list[str] = []
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError:
        return ""
    # A child in uninterruptible sleep outlives SIGKILL: whoever waits for it hangs too, so a daemon thread does.
    reader = threading.Thread(target=lambda: answer.append(child.communicate()[0]), daemon=True)
    reader.start()
    reader.join(seconds)
    if reader.is_alive():
        child.kill()
        return None
    return answer[0] if answer and child.returncode == 0 else ""
