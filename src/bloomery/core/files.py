"""Files that appear whole or not at all, and are files: no link is followed, no pipe waited for."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from bloomery.core.errors import UserError

LARGEST = 64 * 2**20  # bytes of a file that is read whole: manifests, plans, records of machines
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a pipe or a socket that nobody reads, a device

_KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
          stat.S_IFIFO: "a pipe"}  # fmt: skip


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file, made with mode 0666 less the umask where O_CREAT says so.

    Raises UserError for a link, a pipe or a device, else OSError as os.open does.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise irregular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise irregular(path)
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether this process has the kernel's lock of an open file now, or nobody can have it: some file systems of
    clusters know no locks (Lustre without -o flock, folders on NFS). The kernel drops it with its holder.
    """
    try:
        flock(descriptor, (LOCK_SH if shared else LOCK_EX) | LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def irregular(path: Path) -> UserError:
    """For a name at which only a file may stand."""
    what = f"a link to {path.readlink()}" if path.is_symlink() else "not a regular file"
    return UserError(
        f"{path.name} is {what}: a run reads and writes only files in its own folder",
        where=str(path),
        fix="delete it, or put the file itself in its place",
    )


def read_whole(path: Path, most: int = LARGEST) -> bytes:
    """Raises UserError for what `open_regular` refuses and for more than `most` bytes; OSError as open does."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(
            f"{path.name} has more than {most:,} bytes, and is not what its name says",
            where=str(path),
            fix="delete it, or bring back the file that was there",
        )
    return content


def open_input(path: Path, *, pipes: bool = False, code: int = 1) -> BufferedReader:
    """The file at `path`, opened for reading without waiting for anyone. `pipes`: a pipe is read too, which is empty
    where nothing writes into it. Raises UserError (with `code`) for what cannot be opened and what is no file.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        fix = "check its name, its owner, its permissions and the disk"
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=fix, code=code) from error
    except ValueError as error:  # a NUL in the name, or a letter that this locale has no bytes for
        problem, fix = "no file can have this name here", "name another file, or set LANG=C.UTF-8"
        raise UserError(problem, where=str(path), fix=fix, code=code) from error
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        os.set_blocking(number, True)
        return os.fdopen(number, "rb")
    os.close(number)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise UserError(f"is {kind}, not a file", where=str(path), fix="name a file", code=code)


def read_input(path: Path, most: int = LARGEST, *, pipes: bool = False, code: int = 1) -> bytes:
    """All of a file of at most so many bytes. Raises UserError as `open_input` does, and for a larger one."""
    content = bytearray()
    with open_input(path, pipes=pipes, code=code) as file:
        try:
            while piece := file.read(min(2**22, most + 1 - len(content))):
                content += piece
                if len(content) > most:
                    problem, fix = f"is larger than {most:,} bytes", "name another file, or a part of this one"
                    raise UserError(problem, where=str(path), fix=fix, code=code)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            raise UserError(problem, where=str(path), fix="check the disk", code=code) from error
    return bytes(content)


@contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write into that takes the place of `path` when the block ends well; after a kill, a full disk, a
    power cut or an exception the old content stands there, whole.
    """
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush_to_disk(path.parent)


def write_durably(path: Path, content: str | bytes) -> None:
    """The file holds the whole new content or, after a kill or a full disk, the whole old one."""
    with replace_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def flush_to_disk(path: Path) -> None:
    """What `path` (a file or a folder) holds survives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file, a folder with all that it holds, or a link, never what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def abandoned(path: Path) -> bool:
    """Whether this is a draft, `.tmp-NAME-PID`, of a process that is gone."""
    writer = path.name.rpartition("-")[2]
    if not path.name.startswith(".tmp-") or not writer.isdecimal():
        return path.name.startswith(".tmp-")
    try:
        os.kill(int(writer), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def state_folder() -> Path:
    """Where programs keep what they note of this user: $XDG_STATE_HOME, else ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "bloomery"


def cache_folder() -> Path:
    """The user's own, shared by everything that Bloomery measures of a machine."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(told) if Path(told).is_absolute() else Path.home() / ".cache") / "bloomery"


def write_json(path: Path, value: object) -> bool:
    """Whole or not at all, for the user's eyes alone; False when the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(value, indent=1).encode())
    except OSError:
        return False
    return True
