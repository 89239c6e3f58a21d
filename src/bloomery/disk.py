"""Files that appear whole or not at all, and are files: no link is followed, no pipe waited for."""

import errno
import os
import shutil
from pathlib import Path
from stat import S_ISREG

from bloomery.errors import UserError

LARGEST = 64 * 2**20  # bytes of a file that is read whole: manifests, plans, records of machines
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a pipe or a socket that nobody reads, a device


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
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise irregular(path)
    return descriptor


def irregular(path: Path) -> UserError:
    """For a name at which only a file may stand."""
    what = f"a link to {path.readlink()}" if path.is_symlink() else "not a regular file"
    return UserError(
        f"{path.name} is {what}: a run reads and writes only files in its own folder",
        where=str(path),
        remedy="delete it, or put the file itself in its place",
    )


def read_whole(path: Path, most: int = LARGEST) -> bytes:
    """Raises UserError for what `open_regular` refuses and for more than `most` bytes; OSError as open does."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(
            f"{path.name} has more than {most:,} bytes, and is not what its name says",
            where=str(path),
            remedy="delete it, or bring back the file that was there",
        )
    return content


def write_durably(path: Path, content: str) -> None:
    """The file holds the whole new content or, after a kill or a full disk, the whole old one."""
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush_to_disk(path.parent)


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
