"""Child processes that may crash or hang and never outlive their parent, and their protocol. Does not import torch.

The parent:

    with Child("bloomery.some.worker", {"folder": str(folder)}, environment=os.environ) as child:
        answer = child.ask({"texts": texts}, seconds=30.0)
        if answer == "silent":
            ...  # a timeout: the end of the block kills the child and the processes that it started
        elif answer == "ended":
            raise UserError(f"the worker failed: {child.ending()}")
        else:
            ids = np.frombuffer(answer["content"], np.uint16)

`start` and `close` replace the block if a child lives longer than a function; `next` waits for messages without a
request. The thread that starts a child must outlive it: to the kernel that thread is the parent. The child,
`python -m bloomery.some.worker`:

    job = accept()  # from here on the child ends when its parent does
    with loading():
        import torch
    for request in requests(job):  # until the parent closes; not needed without requests
        reply(job, {"lengths": lengths}, content=ids.tobytes())

A message is a JSON object with optional raw bytes, which become its entry "content". Nothing is pickled.
"""

import ctypes
import gc
import json
import os
import re
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
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"  # no other host reaches it
TAIL_LINES = 200
# Slurm sends these to every process of a job, at its time limit and for `bloomery save`. Only training acts on them.
JOB_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LONGEST_REASON = 300  # characters of an error message from a child
# A killed process with much memory ends slowly; one that is stuck in a driver never does.
DYING_SECONDS = 30.0

FAULTHANDLER = ("-X", "faulthandler")  # options of Python: a crash prints the stack

# How the names of exceptions end.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # of torch, before each line of a traceback
EXCEPTION_SUFFIXES = ("Error", "Exception", "Interrupt", "Exit", "Iteration")

Message = dict[str, Any]
Silence = Literal["ended", "silent"]


def python_module(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs a module in this interpreter, and imports nothing from the working folder.

    `python -m` alone puts that folder first: a file `random.py` there would be executed in place of the library's.
    """
    return [sys.executable, "-P", *options, "-m", module, *arguments]


_HEAD = struct.Struct("<IQ")  # bytes of JSON, bytes of content
_PIECE = 2**20


def _packed(message: Mapping[str, Any], content: bytes | memoryview) -> bytes:
    text = json.dumps(message).encode()
    return b"".join((_HEAD.pack(len(text), len(content)), text, content))


def _unpacked(text: bytes | bytearray, content: bytes) -> Message:
    message: Message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message | {"content": content} if content else message


@final
class Channel:
    """Messages through a connected socket, with a process that may hang or end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._unsent = memoryview(b"")
        self._unread = bytearray()

    def close(self) -> None:
        self._socket.close()

    def send(
        self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float
    ) -> bool:
        """Sends a message without waiting for a reply; False if sending takes longer than `seconds`.

        True also if the other side has ended, which `next` reports. Messages received meanwhile are kept for `next`.
        """
        self._unsent = memoryview(b"".join((self._unsent, _packed(message, content))))
        return self._converse(time.monotonic() + seconds, lambda: not self._unsent) != "silent"

    def ask(
        self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float
    ) -> Message | Silence:
        """Sends a message and returns the next one, like `next`; `seconds` include the sending."""
        deadline = time.monotonic() + seconds
        if not self.send(message, content, seconds=seconds):
            return "silent"
        return self.next(deadline - time.monotonic())

    def next(self, seconds: float) -> Message | Silence:
        """The next message; "ended" if the other side ended without one, "silent" if none arrives within `seconds`.

        Raises ValueError for bytes that are no message: code of the user's wrote them.
        """
        silence = self._converse(time.monotonic() + seconds, self._has_message)
        if silence is not None:
            return silence
        text_size, content_size = _HEAD.unpack_from(self._unread)
        text_end = _HEAD.size + text_size
        content_end = text_end + content_size
        text = self._unread[_HEAD.size : text_end]
        content = bytes(memoryview(self._unread)[text_end:content_end])
        message = _unpacked(text, content)
        del self._unread[:content_end]
        return message

    def _has_message(self) -> bool:
        size = len(self._unread) - _HEAD.size
        return size >= 0 and size >= sum(_HEAD.unpack_from(self._unread))

    def _converse(self, deadline: float, is_done: Callable[[], bool]) -> Silence | None:
        """Sends and receives until `is_done`, so that neither side waits for the other to read."""
        while not is_done():
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            milliseconds_left = max(0.0, deadline - time.monotonic()) * 1000
            if not (ready := poll.poll(milliseconds_left)):
                return "silent"
            _, socket_events = ready[0]
            if socket_events & select.POLLOUT:
                self._send_some()
            if socket_events & ~select.POLLOUT:
                try:
                    piece = self._socket.recv(_PIECE)
                except BlockingIOError:
                    continue
                except ConnectionResetError:  # it ended without reading everything
                    piece = b""
                if not piece:
                    return "ended"
                self._unread += piece
        return None

    def _send_some(self) -> None:
        """Send what the socket takes now; the rest waits for the next call."""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # The other side has ended; its messages can still be read.
            self._unsent = memoryview(b"")


@final
class Child:
    """`python -m MODULE` in its own session; the end of the block kills it and the processes that it started.

    The child receives `job` and replies through a socket; `environment` holds all of its variables. The last lines that
    it prints are kept; `on_line` gets each of them. `dying_seconds`: how long the end of the block waits for it to
    exit. `inherited`: descriptors that it has, too, under the same numbers.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        dying_seconds: float = DYING_SECONDS,
        inherited: Sequence[int] = (),
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._command = python_module(module, options=FAULTHANDLER)
        self._inherited = tuple(inherited)
        self._on_line = on_line
        self._environment = dict(environment)
        self._dying_seconds = dying_seconds
        self._job = dict(job)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def start(self) -> "Child":
        """Raises OSError if the process cannot be started."""
        parent_socket, child_socket = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(child_socket.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,  # nothing is written: it closes when the parent ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(child_socket.fileno(), *self._inherited),
                # Ctrl+C does not reach the child, and its process group can be killed.
                start_new_session=True,
            )
        except BaseException:
            parent_socket.close()
            raise
        finally:
            child_socket.close()
        self._channel = Channel(parent_socket)
        self._pump = threading.Thread(
            target=self._collect_tail, name="output of a child", daemon=True
        )
        self._pump.start()
        self._channel.send(self._job, seconds=0.0)  # what the socket takes now; the rest later
        return self

    __enter__ = start

    def close(self) -> None:
        """Kills the child and the processes that it started. One that is stuck in a driver ends later."""
        kill_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._dying_seconds)
        self._pump.join(0.0 if self._process.poll() is None else 2.0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if not self._pump.is_alive():
            self._process.stdout.close()
        self._channel.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float
    ) -> bool:
        """As `Channel.send`."""
        return self._channel.send(message, content, seconds=seconds)

    def ask(
        self, message: Mapping[str, Any], content: bytes | memoryview = b"", *, seconds: float
    ) -> Message | Silence:
        """As `Channel.ask`."""
        return self._channel.ask(message, content, seconds=seconds)

    def next(self, seconds: float) -> Message | Silence:
        """As `Channel.next`."""
        return self._channel.next(seconds)

    def ending(self) -> str:
        """How the child ended, as text. Call it after `next` returned "ended"."""
        code = self._process.wait()
        self._pump.join(2.0)
        exit_text = signal_name(-code) if code < 0 else f"exit code {code}"
        reason = last_words(self._tail)
        return f"{exit_text}: {reason}" if reason else exit_text

    @property
    def code(self) -> int:
        """The exit code; negative: the signal."""
        return self._process.wait()

    @property
    def tail(self) -> list[str]:
        """The last lines that the child has printed."""
        return list(self._tail.copy())

    def _collect_tail(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(2**16):
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text)
            self._on_line(text)


def kill_group(leader: int) -> None:
    """Kills a process and those that it started in its session, if they still run."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def last_words(lines: Sequence[str]) -> str:
    """The exception of a traceback, otherwise the last line, without the stack of faulthandler."""
    printed_lines = [RANK_PREFIX.sub("", line).strip() for line in lines if line.strip()]
    exceptions = [
        line
        for line in printed_lines
        if line.partition(":")[0].split(".")[-1].endswith(EXCEPTION_SUFFIXES)
    ]
    crashes = [line for line in printed_lines if line.startswith("Fatal Python error")]
    return (exceptions[-1:] or crashes[-1:] or printed_lines[-1:] or [""])[0][:LONGEST_REASON]


# In the child


def accept() -> Message:
    """The job of this process, which from now on ends when its parent ends, and not by a signal to the whole job."""
    # A handler that does nothing: programs that this process starts get the defaults, which SIG_IGN would replace.
    # The child that compiles one grammar works in a thread of its own, where no handler can be set.
    if threading.current_thread() is threading.main_thread():
        for number in JOB_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
    die_with_parent(int(sys.argv[2]))
    socket = int(sys.argv[1])
    job = _received(socket)
    if job is None:
        os._exit(1)
    return job | {"socket": socket}


def die_with_parent(parent: int) -> None:
    """Makes this process end when `parent` ends; its stdin must be a pipe from the parent."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)

    def watch() -> None:
        os.read(0, 1)  # returns when the parent ends, which closes the pipe
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextmanager
def loading() -> Iterator[None]:
    """Disables garbage collection during the imports of a child and freezes their objects.

    Importing torch and its compiler takes 20% less time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def reply(
    job: Mapping[str, Any], message: Mapping[str, Any], content: bytes | memoryview = b""
) -> None:
    """Sends a message to the parent."""
    unsent = memoryview(_packed(message, content))
    while unsent:
        unsent = unsent[os.write(job["socket"], unsent) :]


def requests(job: Mapping[str, Any]) -> Iterator[Message]:
    """The messages of the parent after the job, until the parent closes the connection."""
    while (message := _received(job["socket"])) is not None:
        yield message


def _received(socket: int) -> Message | None:
    """None if the parent has closed the connection."""
    head = _read_exactly(socket, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_size, content_size = _HEAD.unpack(head)
    body = _read_exactly(socket, text_size + content_size)
    if len(body) < text_size + content_size:
        return None
    return _unpacked(body[:text_size], bytes(body[text_size:]))


def _read_exactly(socket: int, count: int) -> bytearray:
    """This many bytes, or fewer if the connection is closed."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while len(received) < count and (
            piece := os.read(socket, min(_PIECE, count - len(received)))
        ):
            received += piece
    return received


def output_of(command: Sequence[str], *, seconds: float) -> str | None:
    """Stdout of `command`; "" if it cannot be started or fails, None after `seconds`."""
    answer: list[str] = []
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError:
        return ""
    # A child in uninterruptible sleep survives SIGKILL, and waiting for it hangs: a daemon thread waits.
    reader = threading.Thread(target=lambda: answer.append(child.communicate()[0]), daemon=True)
    reader.start()
    reader.join(seconds)
    if reader.is_alive():
        child.kill()
        return None
    return answer[0] if answer and child.returncode == 0 else ""
