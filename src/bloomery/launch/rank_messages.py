"""Messages between the processes of one launch, over one connection per host instead of files. No torch.

Rank 0's process listens (`MessageServer`): where, and a token, is in a file of the run that this user alone can read.
On each host one other process connects to it, and the others of that host connect to that one (`MessageClient`).
Down goes the whole `State` of the launch at every change; up go who a process is, how its rank ended, who is gone.
Who connects again gets the whole state and repeats its own entries. Without a connection the files are read, seldom.
A message is a line of JSON. Beyond 127.0.0.1 rank 0 listens only where the launch has several hosts.
"""

import asyncio
import fcntl
import hashlib
import hmac
import ipaddress
import json
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import open_regular, private_folder, read_whole, replace_atomically
from bloomery.core.sockets import short_path

CONNECT_SECONDS = 1.0  # between two looks for rank 0's server
AGAIN_SECONDS = 0.1  # until the next connection to a process of this host that has said nothing
FILES_SECONDS = 5.0  # between two looks at the files of the board, without a connection
ANSWER_SECONDS = 10.0  # for the first line of a new connection
GONE_SECONDS = 2.0  # without a connection to a rank 0 that was reached before
CLOSE_SECONDS = 2.0  # for the other end to read what was sent last
# Without an answer for so long a connection is closed: idle seconds, seconds between probes, probes.
PROBES = (3, 2, 2)
# After that its processes are taken for lost, unless they connect again. With what the last words of the other ranks
# take (`supervisor.PEER_WORDS_SECONDS`), all have ended 15 seconds after a host is gone.
LOST_SECONDS = 2.0
LINE_BYTES = 2**22

Entry = dict[str, Any]


@final
@dataclass(frozen=True)
class Member:
    """A process of a launch. `launch`: the same text for all of them. `identity`: of this process alone."""

    rank: int
    world: int
    pid: int
    host: str
    launch: str
    identity: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@final
@dataclass(frozen=True)
class State:
    """What a later rank knows of rank 0. `message`: its last one.

    `version`: of the file of that message, "" for one that came over a connection. `works`: rank 0 is at work.
    `mistake`: of the launch, as the arguments of a UserError. `looked`: False before anything is known. `gone`: its
    server was reached and is not any more, whatever its files say: of a lost host they look alive for two minutes.
    """

    message: Entry | None = None
    version: str = ""
    works: bool = False
    mistake: Entry | None = None
    looked: bool = True
    gone: bool = False

    def error(self) -> UserError | None:
        return None if self.mistake is None else UserError(**self.mistake)


def mistake_of(first: Member, other: Member, variables: tuple[str, str]) -> Entry | None:
    """What two processes of a launch show to be wrong with it. `variables`: the names of those of rank and world."""
    lower, higher = sorted((first, other), key=lambda member: (member.rank, member.host))
    rank_variable, world_variable = variables
    if lower.rank == higher.rank:
        return {
            "problem": f"two processes have rank {lower.rank}: {lower} and {higher}",
            "where": f"{rank_variable}={lower.rank}",
            "fix": f"give each process another {rank_variable}, from 0 to {first.world - 1}",
            "code": 2,
        }
    if lower.world != higher.world:
        return {
            "problem": f"rank {lower.rank} was started as one of {lower.world} ranks, and rank {higher.rank} as one of"
            f" {higher.world}",
            "where": world_variable,
            "fix": f"set the same {world_variable} for all processes",
            "code": 2,
        }
    return None


@final
class MessageServer:
    """As rank 0: tells the other processes the state of the launch, and hears how their ranks end."""

    def __init__(self, own: Member, variables: tuple[str, str]) -> None:
        self._own = own
        self._variables = variables
        self._token = secrets.token_hex(16)
        self._state = State(works=True)
        self._present = {own.identity: own}
        # By identity: the connection on which a process has come last. It may come again before the kernel has found
        # out that its earlier connection is broken.
        self._connection_of = dict[str, StreamWriter]()
        self._ends = dict[int, Entry]()
        # By rank: since when a process is lost, and its host.
        self._lost = dict[int, tuple[float, str]]()
        self._attempt = -1
        self._has_met = False
        self._connections = set[StreamWriter]()
        self._file: Path | None = None
        self._loop = _LoopThread("messages of rank 0")

    def start(self, file: Path, address: str | None) -> None:
        """Listens on `address`, None for 127.0.0.1, and writes `file`. Raises UserError."""
        try:
            listener = _listener(address)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot listen for the other ranks: {error.strerror}",
                where=address or "127.0.0.1",
                fix="set MASTER_ADDR to an address of rank 0's host",
            ) from error
        entry = {
            "address": address or "127.0.0.1",
            "port": listener.getsockname()[1],
            "launch": self._own.launch,
            "token": self._token,
        }
        self._loop.start(self._serve_all(listener))
        with suppress(OSError):  # a full disk: training reports that
            file.parent.mkdir(exist_ok=True)
            with replace_atomically(file) as draft:
                os.fchmod(draft.fileno(), 0o600)
                draft.write(json.dumps(entry).encode())
            self._file = file

    def close(self) -> None:
        """Ends the connections, once everything that was published is sent."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
        self._loop.close()

    def publish(self, message: Entry, attempt: int) -> None:
        """To all, and to those who come later. Ends of ranks in earlier attempts no longer count."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._ends = {}
            self._lost = {}
        self._set(replace(self._state, message=message))

    def met(self) -> None:
        """All ranks have met: from here on there is no mistake to be found."""
        self._has_met = True

    def mistake(self) -> UserError | None:
        return self._state.error()

    def present_ranks(self) -> set[int]:
        return {member.rank for member in list(self._present.values())}

    def end_of(self, rank: int) -> Entry | None:
        """How a rank ended in this attempt: as its process said, or killed, where that is gone without a word."""
        if rank in self._ends:
            return self._ends[rank]
        if (lost := self._lost.get(rank)) is None:
            return None
        lost_since, host = lost
        if time.monotonic() - lost_since < LOST_SECONDS:
            return None
        return {"code": -signal.SIGKILL, "report": None, "tail": [], "host": host, "lost": True}

    def _set(self, state: State) -> None:
        self._state = state
        self._loop.soon(self._tell_all)

    def _tell_all(self) -> None:
        for writer in self._connections:
            _send(writer, asdict(self._state))

    async def _serve_all(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(
            self._serve, sock=listener, limit=LINE_BYTES, start_serving=False
        )
        try:
            await server.start_serving()  # here, so that it is closed whenever this ends
            await asyncio.Event().wait()
        finally:
            server.close()
            await _drained(self._connections)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One connection: the process that talks for its host."""
        members = dict[str, Member]()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                hello = json.loads(await reader.readline())
            if not hmac.compare_digest(str(hello["token"]), self._token):
                return
            _probe(writer)
            self._connections.add(writer)
            _send(writer, asdict(self._state))
            while line := await reader.readline():
                self._receive(json.loads(line), writer, members)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a broken connection, or a program that is none of ours: the connection ends
        except asyncio.CancelledError:
            pass  # this process ends; for a task that ends cancelled asyncio would print a traceback
        finally:
            self._connections.discard(writer)
            for member in members.values():
                self._lose(member, writer, time.monotonic())
            writer.close()

    def _receive(self, entry: Entry, writer: StreamWriter, members: dict[str, Member]) -> None:
        """`members`: those that have come on this connection."""
        if entry["kind"] == "member":
            member = Member(**entry["member"])
            members[member.identity] = member
            self._present[member.identity] = member
            self._connection_of[member.identity] = writer
            self._lost.pop(member.rank, None)
            self._judge(member)
        elif entry["kind"] == "gone" and entry["identity"] in members:
            # Its connection on its own host has closed: the process has ended, and does not connect again.
            member = members.pop(entry["identity"])
            self._lose(member, writer, time.monotonic() - LOST_SECONDS)
        elif entry["kind"] == "end" and entry["attempt"] in (None, self._attempt):
            self._ends[int(entry["rank"])] = dict(entry["ending"])

    def _lose(self, member: Member, writer: StreamWriter, since: float) -> None:
        """Its process is gone, unless it has come again on another connection than this one."""
        if self._connection_of.get(member.identity) is not writer:
            return
        del self._connection_of[member.identity]
        del self._present[member.identity]
        if member.rank not in self.present_ranks():
            self._lost[member.rank] = (since, member.host)

    def _judge(self, member: Member) -> None:
        if self._has_met or self._state.mistake is not None:
            return
        others = [other for other in self._present.values() if other.identity != member.identity]
        for other in others:
            mistake = mistake_of(other, member, self._variables)
            if mistake is not None:
                self._set(replace(self._state, mistake=mistake))
                return


@final
class MessageClient:
    """As a later rank: knows the state of the launch, and says how its rank ended."""

    def __init__(self, own: Member, server_file: Path, look: Callable[[], State]) -> None:
        """`server_file`: of the server, once it listens. `look`: reads the state from the files of the board."""
        self._own = own
        self._server_file = server_file
        self._look = look
        self._entries: dict[str, Entry] = {"member": {"kind": "member", "member": asdict(own)}}
        # Of the other processes of this host, while this one talks for them: their entries by kind.
        self._entries_of = dict[StreamWriter, dict[str, Entry]]()
        self._up: StreamWriter | None = None
        self._loop = _LoopThread("messages of a later rank")
        self.state = State(looked=False)

    def start(self) -> None:
        """May be called again."""
        if not self._loop.is_running:
            self._loop.start(self._run())

    def close(self) -> None:
        """Ends the connections, once everything is sent."""
        self._loop.close()

    def end(self, attempt: int | None, ending: Entry) -> None:
        """How the rank of this process ended. `attempt`: None where it was none that rank 0 had begun."""
        entry = {"kind": "end", "rank": self._own.rank, "attempt": attempt, "ending": ending}
        self._entries["end"] = entry
        self._loop.soon(self._send_up, entry)

    def _send_up(self, entry: Entry) -> None:
        if self._up is not None:
            _send(self._up, entry)

    def _set(self, state: State) -> None:
        # Rank 0 ends after a mistake, and the files do not have it: who has heard of it keeps it.
        state = replace(state, mistake=state.mistake or self.state.mistake)
        # The others first: this process may end when it has read the state.
        for writer in self._entries_of:
            _send(writer, asdict(state))
        self.state = state

    async def _run(self) -> None:
        while True:
            path: Path | None = None
            other: socket.socket | None = None
            listener: socket.socket | None = None
            # A full disk, or one that cannot be written: this process connects to rank 0 by itself.
            with suppress(OSError, UserError):
                path = self._socket_path()
                if path is not None:
                    other, listener = _joined_host(path)
            if other is not None:
                reader, writer = await asyncio.open_unix_connection(sock=other, limit=LINE_BYTES)
                if not await self._hear(reader, writer):
                    await asyncio.sleep(AGAIN_SECONDS)
            else:
                await self._talk_for_host(path, listener)

    def _socket_path(self) -> Path | None:
        """Where the processes of this launch on this host meet; None where no folder is this user's alone."""
        key = f"{self._server_file}\n{self._own.launch}"
        folder = Path(tempfile.gettempdir()) / f"bloomery-launches-{os.getuid()}"
        path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"
        return path if private_folder(folder) else None

    async def _hear(
        self, reader: StreamReader, writer: StreamWriter, first_seconds: float | None = None
    ) -> bool:
        """States, until the connection ends. Whether there was one. `first_seconds`: for the first one."""
        heard = False
        try:
            for entries in (self._entries, *self._entries_of.values()):
                for entry in list(entries.values()):  # `end` adds one from another thread
                    _send(writer, entry)
            self._up = writer
            async with asyncio.timeout(first_seconds) as patience:
                while line := await reader.readline():
                    self._set(State(**json.loads(line)))
                    heard = True
                    patience.reschedule(None)
        except (OSError, ValueError, TypeError, RecursionError):
            pass  # a broken connection, or a program that is none of ours: it is looked for again
        finally:
            self._up = None
            await _drained({writer})
        return heard

    async def _talk_for_host(self, path: Path | None, listener: socket.socket | None) -> None:
        server = None
        if listener is not None:
            server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=LINE_BYTES, start_serving=False
            )
        look_at = time.monotonic()
        lost_at = math.inf
        try:
            # Here, so that a process that ends as it begins to listen leaves no socket that nobody answers.
            if server is not None:
                await server.start_serving()
            while True:
                server_entry = self._server_entry()
                answer_seconds = ANSWER_SECONDS if lost_at == math.inf else GONE_SECONDS
                if server_entry is not None and await self._reach(server_entry, answer_seconds):
                    lost_at = time.monotonic()
                    # The lock of a rank 0 that was killed is free a moment later.
                    look_at = lost_at + CONNECT_SECONDS / 2
                is_gone = time.monotonic() - lost_at > GONE_SECONDS
                if time.monotonic() >= look_at or (is_gone and not self.state.gone):
                    look_at = time.monotonic() + FILES_SECONDS
                    self._set(replace(self._look(), gone=is_gone))
                await asyncio.sleep(CONNECT_SECONDS)
        finally:
            if server is not None and path is not None:
                path.unlink(missing_ok=True)  # while it listens no other process takes the path
                server.close()
                await _drained(self._entries_of)

    def _server_entry(self) -> Entry | None:
        """Where rank 0 of this launch listens."""
        with suppress(OSError, ValueError, UserError):
            entry = json.loads(read_whole(self._server_file, most=10_000))
            if isinstance(entry, dict) and entry.get("launch") == self._own.launch:
                return entry
        return None

    async def _reach(self, server_entry: Mapping[str, Any], answer_seconds: float) -> bool:
        """Hears rank 0's server until the connection ends. Whether there was one."""
        try:
            async with asyncio.timeout(answer_seconds):
                reader, writer = await asyncio.open_connection(
                    server_entry["address"], server_entry["port"], limit=LINE_BYTES
                )
        except (OSError, KeyError, TypeError):
            return False  # an earlier server that was killed, or one that this host does not reach
        _probe(writer)
        _send(writer, {"token": str(server_entry.get("token", ""))})
        return await self._hear(reader, writer, answer_seconds)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Another process of this host."""
        entries = dict[str, Entry]()
        self._entries_of[writer] = entries
        try:
            if self.state.looked:
                _send(writer, asdict(self.state))
            while line := await reader.readline():
                entry = json.loads(line)
                entries[str(entry["kind"])] = entry
                self._send_up(entry)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a broken connection: the process is gone
        except asyncio.CancelledError:
            pass  # as in the server
        finally:
            del self._entries_of[writer]
            if "member" in entries:
                identity = entries["member"]["member"]["identity"]
                self._send_up({"kind": "gone", "identity": identity})
            writer.close()


def _joined_host(path: Path) -> tuple[socket.socket | None, socket.socket | None]:
    """A connection to the process that talks for this host, or the socket on which this one listens as that process.

    Raises OSError where the folder of `path` cannot be written.
    """
    lock = open_regular(path.parent / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(path) as address:
                other.connect(address)
            return other, None
        except OSError:
            other.close()
        path.unlink(missing_ok=True)  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(path) as address:
                listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
        return None, listener
    finally:
        os.close(lock)


def _listener(address: str | None) -> socket.socket:
    """A listening socket on a free port of that address; of all addresses where the other hosts know this one by
    a name that means 127.0.0.1 here. None: of 127.0.0.1.
    """
    host = address or "127.0.0.1"
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if address is not None and ipaddress.ip_address(place[0]).is_loopback:
        return socket.create_server(("", 0), family=socket.AF_INET)
    try:
        return socket.create_server((str(place[0]), 0), family=family)
    except OSError:
        if address is None:
            raise
        return socket.create_server(("", 0), family=socket.AF_INET)  # a translated address


def _probe(writer: StreamWriter) -> None:
    """Lets the kernel find out that the other host is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), PROBES, strict=True):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        idle, interval, count = PROBES
        milliseconds = 1000 * (idle + interval * count)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _send(writer: StreamWriter, entry: Entry) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(entry).encode() + b"\n")


async def _drained(connections: Iterable[StreamWriter]) -> None:
    """Closes connections; waits until what was written is sent, for CLOSE_SECONDS at most."""
    writers = list(connections)  # their tasks remove them
    for writer in writers:
        writer.close()  # after what is written
    with suppress(OSError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for writer in writers:
                with suppress(OSError):
                    await writer.wait_closed()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@final
class _LoopThread:
    """A thread that runs one coroutine; it never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._task = loop.create_task(work)

        def run() -> None:
            assert self._task is not None
            try:
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(self._task)
                loop.run_until_complete(_cancelled(asyncio.all_tasks(loop)))
            finally:
                loop.close()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Runs the call in the thread; nothing where it has not begun, or has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        if self._thread is not None and self._task is not None:
            self.soon(self._task.cancel)
            self._thread.join(2 * CLOSE_SECONDS)
