"""Atomic writes, reads of regular files only, and digests of files, to detect damage and mix-ups. No torch.

No links are followed, reads never wait for a pipe. A small file is checked as a whole. A large file has a digest per
BLOCK, which is checked when the block is first used. Digests do not protect against an attacker, who can change them.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, final

from bloomery.core.errors import UserError

LARGEST = 64 * 2**20  # bytes of a file that is read into memory: manifests, plan.json, machine.json
_PIECE = 2**20  # bytes that are read at once
# A link, a pipe or socket without a reader, a device.
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV)

_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file; O_CREAT creates it with mode 0666 minus the umask.

    Raises UserError for a link, a pipe or a device, otherwise OSError like os.open.
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
    """Locks an open file; False if another process holds the lock. True also on file systems without locks (Lustre
    without -o flock, some NFS folders). The kernel releases the lock when the process ends.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
    except ImportError:  # not POSIX
        return True
    try:
        flock(descriptor, (LOCK_SH if shared else LOCK_EX) | LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def unlock(descriptor: int) -> None:
    """Ends the lock at once; closing the file would not while a process that was forked meanwhile has it open."""
    with suppress(ImportError, OSError):
        from fcntl import LOCK_UN, flock

        flock(descriptor, LOCK_UN)


def in_place(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one at `path`: it was neither deleted nor replaced."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def irregular(path: Path) -> UserError:
    """The error for a path that must be a regular file."""
    kind = f"a link to {path.readlink()}" if path.is_symlink() else "not a regular file"
    return UserError(
        f"{path.name} is {kind}: a run uses only regular files in its folder",
        where=str(path),
        fix="delete it, or replace it with the file itself",
    )


def read_at_most(stream: BinaryIO, most: int) -> bytes:
    """The next `most` bytes of a stream, or what is left of it.

    `stream.read(most)` allocates `most` bytes before it reads one: a manifest of 200 bytes would take 64 MiB.
    """
    content = bytearray()
    while piece := stream.read(min(_PIECE, most - len(content))):
        content += piece
    return bytes(content)


def read_whole(path: Path, most: int = LARGEST) -> bytes:
    """Raises UserError for anything but a regular file of at most `most` bytes; OSError like open."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = read_at_most(file, most + 1)
    if len(content) > most:
        raise UserError(
            f"{path.name} is larger than {most:,} bytes",
            where=str(path),
            fix="delete it, or restore the original file",
        )
    return content


def open_input(path: Path, *, pipes: bool = False, code: int = 1) -> BufferedReader:
    """The file at `path`, opened for reading without blocking. `pipes`: pipes are allowed; one without a writer is
    empty. Raises UserError (with `code`) if it cannot be opened or is not a file.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        fix = "check the path, the owner, the permissions and the disk"
        raise UserError(
            f"file cannot be read: {error.strerror}", where=str(path), fix=fix, code=code
        ) from error
    except ValueError as error:  # a NUL, or a character that this locale cannot encode
        problem = "invalid file name"
        fix = "pass another file, or set LANG=C.UTF-8"
        raise UserError(problem, where=str(path), fix=fix, code=code) from error
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        os.set_blocking(number, True)
        return os.fdopen(number, "rb")
    os.close(number)
    kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
    raise UserError(
        f"the path is {kind}, not a file", where=str(path), fix="pass a regular file", code=code
    )


def read_input(path: Path, most: int = LARGEST, *, pipes: bool = False, code: int = 1) -> bytes:
    """The content of a file of at most `most` bytes. Raises UserError like `open_input`, and for a larger file."""
    with open_input(path, pipes=pipes, code=code) as file:
        try:
            content = read_at_most(file, most + 1)
        except OSError as error:
            problem = f"file cannot be read: {error.strerror}"
            raise UserError(problem, where=str(path), fix="check the disk", code=code) from error
    if len(content) > most:
        problem = f"file is larger than {most:,} bytes"
        fix = "pass another file, or a part of it"
        raise UserError(problem, where=str(path), fix=fix, code=code)
    return content


@contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends without an exception. After a kill, a full disk, a power loss or
    an exception, `path` has its old content.
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
    """Writes atomically: after a kill or a full disk, the file has its old content."""
    with replace_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def flush_to_disk(path: Path) -> None:
    """Makes the content of a file or folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_writing(file: BinaryIO, start: int) -> None:
    """Lets the kernel write what follows `start` now: it would wait for fsync, and the disk for the program."""
    file.flush()
    if hasattr(os, "posix_fadvise"):  # Linux; its DONTNEED begins to write, and does not wait
        os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path) -> None:
    """Removes a file, a folder with its content, or a link, never the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def abandoned(path: Path) -> bool:
    """Whether this is a draft, `.tmp-NAME-PID`, of a process that has ended."""
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
    """The state folder of this user: in $XDG_STATE_HOME, otherwise ~/.local/state."""
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "bloomery"
    )


def private_folder(path: Path) -> bool:
    """Creates the folder where it is missing; whether only this user can read and write it. Follows no link.

    Raises OSError where it cannot be created.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o077


def cache_folder() -> Path:
    """The cache folder of this user, for measurements of this machine and compiled code.

    Where it cannot be written, as in a home folder on a read-only disk, one in TMPDIR that is this user's alone: each
    command would measure and compile again.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "bloomery"
    if _can_be_written(folder):
        return folder
    temporary_folder = temporary_cache()
    with suppress(OSError):
        if private_folder(temporary_folder):
            return temporary_folder
    return folder


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in the folder, or the folder itself, which is not made here."""
    if folder.is_dir():
        return os.access(folder, os.W_OK | os.X_OK)
    parent = next((parent for parent in folder.parents if parent.exists()), Path("/"))
    try:
        # Rights do not tell it: nobody can make a folder in /proc.
        Path(tempfile.mkdtemp(prefix=".bloomery-", dir=parent)).rmdir()
    except OSError:
        return False
    return True


def temporary_cache() -> Path:
    """The cache in place of one in the home folder. Others can create it, too: `private_folder` tells."""
    return Path(tempfile.gettempdir()) / f"bloomery-{os.getuid()}"


def write_json(path: Path, value: object) -> bool:
    """Writes atomically, readable by this user only; False if the folder is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(value, indent=1).encode())
    except OSError:
        return False
    return True


# Bytes. A random sequence takes 1 ms more if its block is new, and the manifest holds 35 bytes per block.
BLOCK = 2**20
_TASK = 16 * BLOCK  # bytes that a thread hashes at once
_THREADS = min(8, os.cpu_count() or 1)
_STAMP = "sha256"


def digest_of(content: bytes | memoryview) -> str:
    """32 hexadecimal digits of BLAKE2b, which is as fast as a disk even on CPUs without SHA instructions."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digests_of_file(
    path: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> tuple[str, ...]:
    """The digest of each BLOCK of a file, by several threads. `on_bytes` is called with the number of new bytes."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        descriptor = file.fileno()

        def digests_from(start: int) -> list[str]:
            content = memoryview(_read_at(descriptor, start, min(_TASK, size - start)))
            blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
            return [digest_of(block) for block in blocks]

        digests = []
        if size <= BLOCK:
            digests += [digests_from(0)] if size else []
            on_bytes(size)
        else:
            with ThreadPoolExecutor(_THREADS) as threads:
                try:
                    starts = range(0, size, _TASK)
                    parts = _a_few_ahead(threads, digests_from, starts)
                    for start, part in zip(starts, parts, strict=True):
                        digests.append(part)
                        on_bytes(min(_TASK, size - start))
                finally:
                    threads.shutdown(cancel_futures=True)
    return tuple(digest for part in digests for digest in part)


def _a_few_ahead(
    threads: ThreadPoolExecutor, task: Callable[[int], list[str]], starts: Iterable[int]
) -> Iterator[list[str]]:
    """Results in order; few tasks run at a time, so that Ctrl+C works and memory stays small."""
    remaining = iter(starts)
    futures = [threads.submit(task, start) for start in islice(remaining, 2 * _THREADS)]
    while futures:
        yield futures.pop(0).result()
        futures += [threads.submit(task, start) for start in islice(remaining, 1)]


def _read_at(descriptor: int, start: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(descriptor, count, start)
        if not part:
            break  # truncated meanwhile: the digest does not match
        parts.append(part)
        start = start + len(part)
        count = count - len(part)
    return b"".join(parts)


@final
class Blocks:
    """The memory-mapped content of a file; each block is checked once."""

    def __init__(
        self, content: memoryview, digests: tuple[str, ...], path: Path, *, fix: str
    ) -> None:
        """Raises UserError if the number of blocks differs."""
        self._content = content.cast("B")
        self._digests = digests
        self._path = path
        self._fix = fix
        if -(-len(self._content) // BLOCK) != len(digests):
            raise changed(path, fix=fix)
        self._checked = bytearray(len(digests))

    def check(self, start: int, stop: int) -> None:
        """Raises UserError if bytes [start, stop) have changed."""
        first_block = start // BLOCK
        end_block = -(-stop // BLOCK)
        if 0 in self._checked[first_block:end_block]:
            self.check_blocks(range(first_block, end_block))

    def check_blocks(self, numbers: Iterable[int]) -> None:
        """Raises UserError if one of these blocks has changed."""
        for number in numbers:
            if self._checked[number]:
                continue
            block = self._content[number * BLOCK : (number + 1) * BLOCK]
            if digest_of(block) != self._digests[number]:
                raise changed(self._path, fix=self._fix)
            self._checked[number] = 1


def changed(path: Path, *, fix: str) -> UserError:
    return UserError("file is damaged: its content has changed", where=str(path), fix=fix)


def check_file(path: Path, size: int, digests: tuple[str, ...], *, fix: str) -> None:
    """Raises UserError if the file is missing, or its size or content has changed."""
    if not path.is_file():
        raise UserError("file is missing", where=str(path), fix=fix)
    current_size = path.stat().st_size
    if current_size != size:
        problem = f"file has {current_size:,} bytes instead of {size:,}"
        raise UserError(problem, where=str(path), fix=fix)
    if digests_of_file(path) != digests:
        raise changed(path, fix=fix)


def added_to(folder: Path, listed: Iterable[str]) -> Path | None:
    """The first entry of a folder that is not `listed`; None without any. Hidden files and Markdown do not count."""
    names = set(listed)
    for path in sorted(folder.iterdir()):
        if path.name not in names and not path.name.startswith(".") and path.suffix != ".md":
            return path
    return None


def stamped(body: Mapping[str, Any]) -> str:
    """JSON with its own digest as the last entry."""
    return json.dumps({**body, _STAMP: stamp_of(body)}, indent=1)


def stamp_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def unstamped(path: Path) -> dict[str, Any]:
    """Reads the JSON of `stamped`. Raises FileNotFoundError, otherwise ValueError with the reason."""
    try:
        body: Any = json.loads(read_whole(path))
    except FileNotFoundError:
        raise
    except UserError as error:
        raise ValueError(error.problem) from error
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(body, dict):
        raise ValueError("its content has changed")
    stamped_entries = {key: value for key, value in body.items() if key != _STAMP}
    if body.get(_STAMP) != stamp_of(stamped_entries):
        raise ValueError("its content has changed")
    return body


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; a link counts itself."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    total = 0
    folders = [os.fspath(path)]
    while folders:
        # What is deleted meanwhile, or may not be read, has no size.
        with (
            suppress(FileNotFoundError, NotADirectoryError, PermissionError),
            os.scandir(folders.pop()) as entries,
        ):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_symlink() or entry.is_file():
                    with suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_size
    return total
