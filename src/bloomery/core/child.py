"""Child processes that may crash or hang, none outliving its parent: the one protocol for all of them. No torch.

The parent:

    with Child("bloomery.some.worker", {"folder": str(folder)}, environment=os.environ) as child:
        answer = child.ask({"texts": texts}, seconds=30.0)
        if answer == "silent":
            ...  # it took longer: the end of the block kills it and all that it started
        elif answer == "ended":
            raise UserError(f"the worker died: {child.ending()}")
        else:
            ids = np.frombuffer(answer["content"], np.uint16)

`start` and `close` do what the block does where a child lives longer than one function; `next` waits for what it tells
unasked. The thread that starts a child must outlive it: the kernel takes that thread for its parent. The child,
`python -m bloomery.some.worker`:

    job = accept()  # from here on it dies with its parent
    with loading():
        import torch
    for asked in requests(job):  # until the parent closes; one that only reports has no such loop
        tell(job, {"lengths": lengths}, content=ids.tobytes())

A message is a JSON object and, where there is any, raw bytes, which arrive as its entry "content". Nothing is pickled.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, final

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TAIL_LINES = 200
LONGEST = 300  # letters of a sentence that a child's output is cut to
DYING_SECONDS = 30.0  # a killed process with much memory takes its time; one that is stuck in a driver never ends

RAISED = ("Error", "Exception", "Interrupt", "Exit", "Iteration")  # how the names of exceptions end

Message = dict[str, Any]
Silence = Literal["ended", "silent"]

_HEAD = struct.Struct("<IQ")  # bytes of JSON, bytes of content
_PIECE = 2**20


def _packed(message: Mapping[str, Any], content: bytes | memoryview) -> bytes:
    told = json.dumps(message).encode()
    return b"".join((_HEAD.pack(len(told), len(content)), told, content))


def _unpacked(told: bytes | bytearray, content: bytes) -> Message:
    message: Message = json.loads(told)
    return message | {"content": content} if content else message


@final
class Child:
    """`python -m MODULE` in a session of its own; when the block ends, it and all that it started are gone.

    It gets `job` and answers through a socket, and never sees another variable than those of `environment`. What it or
    a library prints is kept as its last lines. `dying_seconds`: how long the end of the block waits for its death.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        dying_seconds: float = DYING_SECONDS,
    ) -> None:
        # -P: what lies in the working folder is no library
        self._command = [sys.executable, "-P", "-X", "faulthandler", "-m", module]
        self._environment, self._dying_seconds = dict(environment), dying_seconds
        self._unsent, self._unread = memoryview(_packed(job, b"")), bytearray()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def start(self) -> "Child":
        """Raises OSError when no process can be started."""
        self._talk, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,  # nothing is written: that it closes tells the child that we are gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl+C reaches it through us alone, and its group can be killed as a whole
            )
        except BaseException:
            self._talk.close()
            raise
        finally:
            theirs.close()
        self._talk.setblocking(False)
        self._pump = threading.Thread(target=self._keep_tail, name="output of a child", daemon=True)
        self._pump.start()
        self._send_some()
        return self

    __enter__ = start

    def close(self) -> None:
        """Ends it and all that it started. One that is stuck in a driver is left behind, and ends when that lets it."""
        kill_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._dying_seconds)
        self._pump.join(0.0 if self._process.poll() is None else 2.0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if not self._pump.is_alive():
            self._process.stdout.close()
        self._talk.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float) -> bool:
        """Tells it something that asks for no answer; False when it did not take all of it within `seconds`.

        One that has ended takes anything: `next` says so. What it tells meanwhile is kept for `next`.
        """
        self._unsent = memoryview(b"".join((self._unsent, _packed(message, content))))
        return self._converse(time.monotonic() + seconds, lambda: not self._unsent) != "silent"

    def ask(
        self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float
    ) -> Message | Silence:
        """What it tells next once it has this message: as `next`, with the sending within `seconds`, too."""
        until = time.monotonic() + seconds
        return self.next(until - time.monotonic()) if self.send(message, content, seconds=seconds) else "silent"

    def next(self, seconds: float) -> Message | Silence:
        """What it tells next; "ended" when it has ended without another word, "silent" when `seconds` have passed."""
        silence = self._converse(time.monotonic() + seconds, self._has_message)
        if silence is not None:
            return silence
        told, content = _HEAD.unpack_from(self._unread)
        begin, end = _HEAD.size + told, _HEAD.size + told + content
        message = _unpacked(self._unread[_HEAD.size : begin], bytes(memoryview(self._unread)[begin:end]))
        del self._unread[:end]
        return message

    def _has_message(self) -> bool:
        return len(self._unread) >= _HEAD.size and len(self._unread) >= _HEAD.size + sum(
            _HEAD.unpack_from(self._unread)
        )

    def _converse(self, until: float, done: Callable[[], bool]) -> Silence | None:
        """Sends and reads until it is `done`: neither side ever waits for the other to read."""
        while not done():
            poll = select.poll()
            poll.register(self._talk, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if not (ready := poll.poll(max(0.0, until - time.monotonic()) * 1000)):
                return "silent"
            if ready[0][1] & select.POLLOUT:
                self._send_some()
            if ready[0][1] & ~select.POLLOUT:
                try:
                    piece = self._talk.recv(_PIECE)
                except BlockingIOError:
                    continue
                except ConnectionResetError:  # it ended without reading all that it was sent
                    piece = b""
                if not piece:
                    return "ended"
                self._unread += piece
        return None

    def _send_some(self) -> None:
        try:
            self._unsent = self._unsent[self._talk.send(self._unsent) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # it has ended: what it told before is still there to be read
            self._unsent = memoryview(b"")

    def ending(self) -> str:
        """How it ended, in words. Call it after `next` said "ended"."""
        code = self._process.wait()
        self._pump.join(2.0)
        last = last_words(self._tail)
        return (signal_name(-code) if code < 0 else f"exit code {code}") + (last and f": {last}")

    @property
    def code(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        return self._process.wait()

    @property
    def tail(self) -> list[str]:
        """The last lines that it or a library printed so far."""
        return list(self._tail.copy())

    def _keep_tail(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(2**16):
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


def accept() -> Message:
    """The job of this process, which from now on ends when the process that gave the job does."""
    die_with_parent(int(sys.argv[2]))
    socket = int(sys.argv[1])
    job = _received(socket)
    if job is None:
        os._exit(1)
    return job | {"tell": socket}


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


def tell(job: Mapping[str, Any], found: Mapping[str, Any], content: bytes | memoryview = b"") -> None:
    """A message for the process that gave the job."""
    unsent = memoryview(_packed(found, content))
    while unsent:
        unsent = unsent[os.write(job["tell"], unsent) :]


def requests(job: Mapping[str, Any]) -> Iterator[Message]:
    """What the process that gave the job tells after it, until it has nothing more to tell."""
    while (message := _received(job["tell"])) is not None:
        yield message


def _received(socket: int) -> Message | None:
    """None when the other side is gone."""
    head = _exactly(socket, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    told, content = _HEAD.unpack(head)
    rest = _exactly(socket, told + content)
    return _unpacked(rest[:told], bytes(rest[told:])) if len(rest) == told + content else None


def _exactly(socket: int, count: int) -> bytearray:
    """So many bytes, or fewer when the other side is gone."""
    found = bytearray()
    while len(found) < count:
        try:
            piece = os.read(socket, min(_PIECE, count - len(found)))
        except ConnectionResetError:
            break
        if not piece:
            break
        found += piece
    return found


def output_of(command: Sequence[str], *, seconds: float) -> str | None:
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
