"""Connections that cost nothing: a silent one is closed, too many are closed, and none of them is a request.

uvicorn has no time limit for the head of a request, and counts idle connections as requests.
"""

import asyncio
import errno
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for a client to send a whole head
STALLED_SECONDS = 60.0  # for a client to read what was sent
ACCEPTED_AT_ONCE = 16  # connections that asyncio accepts before it looks at any of them
RESERVED_FILES = 6 * ACCEPTED_AT_ONCE  # those, until they are closed, and files of the program
QUIET_SECONDS = 60.0  # between two lines about files that ran out


def most_connections(connections: int) -> int:
    """As many as wanted, or as the limit of open files leaves; that limit is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    open_files = len(list(folder.iterdir())) if folder.is_dir() else 64
    files_needed = connections + open_files + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < files_needed:
        soft = files_needed if hard == resource.RLIM_INFINITY else min(files_needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(8, min(connections, soft - open_files - RESERVED_FILES))


class Waiting:
    """Connections that have sent no whole head yet, the longest silent first. `most`: connections in all."""

    def __init__(self, most_connections: int) -> None:
        self.most = most_connections
        self.silent: dict[BoundedProtocol, None] = {}  # that never sent a whole head
        self.idle: dict[BoundedProtocol, None] = {}  # kept alive after an answer

    def remove(self, connection: "BoundedProtocol") -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)

    def oldest(self) -> "BoundedProtocol | None":
        return next(iter(self.silent), None) or next(iter(self.idle), None)


class BoundedProtocol(H11Protocol):
    """An HTTP connection with a time limit for each head, and for a client that does not read its answer.

    uvicorn makes protocols from a class: `protocol_of` binds the connections that are counted together.
    """

    waiting: Waiting
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A new connection takes the place of the one that has been silent for longest: strangers that say nothing keep
        # nobody out.
        if len(self.connections) > self.waiting.most:
            (self.waiting.oldest() or self).drop()
        if not transport.is_closing():
            self._await_head(self.waiting.silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.remove(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        previous_cycle = self.cycle
        super().data_received(data)
        if self.cycle is not previous_cycle:
            self._head_arrived()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._head_arrived()  # the websocket takes over the connection, and may stay silent
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        previous_cycle = self.cycle
        super().on_response_complete()
        if self.cycle is previous_cycle and not self.transport.is_closing():
            self._await_head(self.waiting.idle)  # else a pipelined request has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(STALLED_SECONDS, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def drop(self) -> None:
        """Close it now. It counts no longer, although its file closes a moment later."""
        self.waiting.remove(self)
        self.connections.discard(self)
        self.transport.abort()

    def _await_head(self, group: "dict[BoundedProtocol, None]") -> None:
        self._head_arrived()
        group[self] = None
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.drop)

    def _head_arrived(self) -> None:
        self.waiting.remove(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_of(waiting: Waiting) -> type[BoundedProtocol]:
    return type("CountedProtocol", (BoundedProtocol,), {"waiting": waiting})


def quiet_accept() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler of a loop that reports files that ran out in a line per minute, not in a page per client."""
    reported = -QUIET_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        error = context.get("exception")
        exhausted = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        if not (isinstance(error, OSError) and error.errno in exhausted):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - reported >= QUIET_SECONDS:
            reported = time.monotonic()
            print(f"warning: connections are refused for now: {error.strerror}", file=sys.stderr)

    return handle
