"""The sandbox of generated code: `python -I -S sandboxed.py`, started by programs.py. Standard library only.

Four processes. This one waits with a deadline. Its child is process 1 of namespaces of its own: no network, no other
processes, and a file system of Python's library, read-only, and an empty /tmp in memory. That one gives up its rights
and starts, with limits, the grader and the program (graded.py); when the grader ends, process 1 does, and the kernel
kills all that is left.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# mount, pid, network, IPC, host name
_NAMESPACES = 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
_NEW_USER = 0x10000000
# sys/mount.h
_PRIVATE = 1 << 18 | 1 << 14
_BIND = 1 << 12
_REMOUNT = 1 << 5
_READ_ONLY = 1
_NO_SUID = 2
_NO_DEVICES = 4
# linux/prctl.h
_DEATH_SIGNAL = 1
_NO_NEW_PRIVILEGES = 38
_UNPRIVILEGED = 65534
_SET_UP_FAILED = 70  # exit code of process 1
_MOST = 2000  # bytes of a verdict
_GIVEN = ("program", "prompt", "test", "entry_point", "banned")  # what the grader is told
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads a job as JSON from stdin, and prints {"result": text}, {"late": true} or {"refused": reason}."""
    job: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        os._exit(1)
    root = os.geteuid() == 0
    user = os.geteuid()
    group = os.getegid()
    if _libc.unshare(_NAMESPACES | (0 if root else _NEW_USER)) != 0:
        _answer(refused=f"namespaces: {os.strerror(ctypes.get_errno())}")
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123  # pathlib would be imported
                file.write(text)
    begun_at = time.monotonic()
    reading, writing = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(reading)
        _process_1(job, writing, root)
    os.close(writing)
    verdict = b""
    late = False
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while True:  # until the last process that holds the pipe ends
        seconds_left = begun_at + job["seconds"] - time.monotonic()
        if seconds_left <= 0 or len(verdict) > _MOST or not poll.poll(seconds_left * 1000):
            late = len(verdict) <= _MOST
            break
        if not (piece := os.read(reading, 4096)):
            break
        verdict += piece
    with suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)  # and with it all processes of its namespace
    code = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
    text = verdict[:_MOST].decode(errors="replace")
    if code == _SET_UP_FAILED:
        _answer(refused=text)
    _answer(late=True) if late else _answer(result=text)


def _answer(**answer: object) -> NoReturn:
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _process_1(job: Mapping[str, Any], verdict_pipe: int, root: bool) -> NoReturn:
    try:
        _build_root(job)
        if root:
            os.setgroups([])
            os.setresgid(_UNPRIVILEGED, _UNPRIVILEGED, _UNPRIVILEGED)
            os.setresuid(_UNPRIVILEGED, _UNPRIVILEGED, _UNPRIVILEGED)
        _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        (grader_end, job_end) = os.pipe()
        (requests_read, requests_write) = os.pipe()
        (answers_read, answers_write) = os.pipe()
        grader = os.fork()
        if grader == 0:
            os.close(job_end)
            _start(job, grader_end, "grader", answers_read, requests_write, verdict_pipe)
        if os.fork() == 0:
            _start(job, os.open("/dev/null", os.O_RDONLY), "program", requests_read, answers_write)
    except OSError as error:
        os.write(verdict_pipe, f"{error.filename or 'a mount'}: {error.strerror}".encode())
        os._exit(_SET_UP_FAILED)
    for pipe in (
        grader_end,
        requests_read,
        requests_write,
        answers_read,
        answers_write,
        verdict_pipe,
    ):
        os.close(pipe)
    with suppress(BrokenPipeError), os.fdopen(job_end, "wb") as jobs:
        jobs.write(json.dumps({name: job[name] for name in _GIVEN}).encode())
    ended_pid, status = os.wait()
    while ended_pid != grader:  # the program, or an orphan of it
        ended_pid, status = os.wait()
    os._exit(_SET_UP_FAILED if os.waitstatus_to_exitcode(status) == _SET_UP_FAILED else 0)


def _build_root(job: Mapping[str, Any]) -> None:
    """A root of read-only libraries and an empty /tmp, in the mount namespace alone. Raises OSError."""
    base = job["folder"]
    _mount("", "/", None, _PRIVATE)
    _mount("tmpfs", base, "tmpfs", _NO_SUID | _NO_DEVICES, "size=64k,nr_inodes=4k,mode=755")
    for path in dict.fromkeys((*_LIBRARIES, "/dev/null", *job["visible"])):
        if not os.path.exists(path):  # noqa: PTH110 - pathlib raises where this user may not look
            continue
        inner_path = base + path
        if os.path.isdir(path):  # noqa: PTH112 - as above
            Path(inner_path).mkdir(parents=True, exist_ok=True)
        elif not Path(inner_path).exists():
            Path(inner_path).parent.mkdir(parents=True, exist_ok=True)
            Path(inner_path).touch(0o644)
        _mount(path, inner_path, None, _BIND)
        if path != "/dev/null":
            # flags of the source, which cannot be taken away
            locked = os.statvfs(inner_path).f_flag & ~_READ_ONLY
            _mount(
                "",
                inner_path,
                None,
                _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEVICES | (locked & 0xC0F),
            )
    Path(base, "tmp").mkdir(exist_ok=True)
    _mount(
        "tmpfs",
        base + "/tmp",
        "tmpfs",
        _NO_SUID | _NO_DEVICES,
        f"size={job['folder_bytes']},nr_inodes=1k,mode=1777",
    )
    _mount("", base, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chroot(base)
    os.chdir("/tmp")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    failed = _libc.mount(
        source.encode(),
        target.encode(),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def _start(job: Mapping[str, Any], stdin: int, role: str, *pipes: int) -> NoReturn:
    """Becomes the Python of the grader or of the program: no rights, limits, no environment, these pipes alone."""
    os.setsid()
    os.dup2(stdin, 0)
    for pipe in pipes:
        os.set_inheritable(pipe, True)
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_NOFILE: job["open_files"],
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    try:
        os.execve(
            job["python"],
            [job["python"], "-I", "-S", "-c", job["code"], role, *map(str, pipes)],
            {},
        )
    except OSError as error:
        if role == "grader":
            os.write(pipes[-1], f"cannot start Python: {error.strerror}".encode())
        os._exit(1)


if __name__ == "__main__":
    main()
