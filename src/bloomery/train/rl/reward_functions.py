"""Functions as rewards: those that `bloomery.train(recipe, rewards=[...])` is given. Does not import torch.

A function may be a notebook's, with all that it refers to: no other interpreter can import it. So a copy of the calling
process, made by fork, answers for each function, through a socket in a folder of this user alone. The training process
finds that folder by an environment variable. Where a copy cannot be made, a thread of the calling process answers.
"""

import hashlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bloomery.core.child import Channel, die_with_parent, kill_group, requests
from bloomery.core.device import accelerators_in_use
from bloomery.core.errors import UserError
from bloomery.core.sockets import short_path
from bloomery.recipe.rewards import AnyReward, FunctionReward
from bloomery.train.rl.rewards_worker import Reward, limit_memory, serve_rewards

FOLDER = "BLOOMERY_REWARDS"  # the variable with the folder of the sockets


@contextmanager
def served(functions: Mapping[str, Reward], on_note: Callable[[str], None]) -> Iterator[None]:
    """Answers for these functions, by name, until the end of the block. `on_note`: why they run in this process."""
    if not functions:
        yield
        return
    reason = why_no_copy()
    if reason is not None:
        on_note(f"rewards run in this process, without a limit of memory: {reason}")
    before = os.environ.get(FOLDER)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rewards-"))
        for name, function in functions.items():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with short_path(_address(folder, name)) as address:
                listener.bind(address)
            listener.listen()
            stack.enter_context(listener)
            stack.enter_context(
                _copy(listener, function) if reason is None else _thread(listener, function)
            )
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[FOLDER]
            else:
                os.environ[FOLDER] = before


def why_no_copy() -> str | None:
    """Why a copy of this process would not do."""
    if sys.platform != "linux":
        return "only Linux copies a process safely"
    if accelerators_in_use():
        return "it uses a GPU, which a copy of it cannot"
    return None


def connect(name: str) -> Channel:
    """To the process that answers for a function. Raises UserError."""
    folder = os.environ.get(FOLDER)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if folder is None:
            raise FileNotFoundError
        with short_path(_address(folder, name)) as address:
            connection.connect(address)
    except OSError as error:
        connection.close()
        raise missing(name) from error
    return Channel(connection)


def refuse_unsent_functions(
    rewards: Iterable[AnyReward],
) -> None:
    """Raises UserError for a function that this process was not given."""
    folder = os.environ.get(FOLDER)
    for reward in rewards:
        if isinstance(reward, FunctionReward) and (
            folder is None or not _address(folder, reward.function).exists()
        ):
            raise missing(reward.function)


def missing(name: str) -> UserError:
    return UserError(
        f"the reward {name} is a Python function, which a run folder cannot hold",
        where="rewards",
        fix=f"give it in Python: bloomery.train(recipe, rewards=[{name}]), run.resume(rewards=[{name}]) or"
        f" bloomery.evaluate(run, rewards=[{name}])",
        code=2,
    )


def _address(folder: str, name: str) -> Path:
    return Path(folder) / hashlib.sha256(name.encode()).hexdigest()[:16]


@contextmanager
def _copy(listener: socket.socket, function: Reward) -> Iterator[None]:
    """A copy of this process answers; it ends with the block, or with this process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    ending, ours = os.pipe()  # closes when this process ends
    process = os.fork()
    if process == 0:
        try:
            os.setsid()  # Ctrl+C is for the parent
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.close(ours)
            os.dup2(ending, 0)
            die_with_parent(parent)
            # Threads do not survive a fork: a pool of several would be waited for without end.
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)
            _answer(listener, function, copied=True)
        finally:
            os._exit(1)
    os.close(ending)
    try:
        yield
    finally:
        kill_group(process)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # before it had a group of its own
        os.close(ours)
        os.waitpid(process, 0)


@contextmanager
def _thread(listener: socket.socket, function: Reward) -> Iterator[None]:
    """A thread of this process answers; a function that hangs outlives the block."""
    thread = threading.Thread(target=_answer, args=(listener, function), name="reward", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):  # it wakes `accept`
            listener.shutdown(socket.SHUT_RDWR)


def _answer(listener: socket.socket, function: Reward, *, copied: bool = False) -> None:
    """One training process after the other: a run that is restarted connects again."""
    is_limited = False
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the end of the block
            return
        with connection, suppress(BrokenPipeError, ConnectionResetError):
            messages = requests({"socket": connection.fileno()})
            job: dict[str, Any] | None = next(messages, None)
            if job is None:
                continue
            if copied and not is_limited:
                limit_memory(address_space() + job["memory"])
                is_limited = True
            serve_rewards(function, {**job, "socket": connection.fileno()}, messages)


def address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
