"""The exception for users; control characters in untrusted names are escaped."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A problem, its place and its fix. The command line prints it and exits with `code`.

    `host`: of several hosts, the one at fault, or "n3,n4" where it is one of these; "" where no host would help.
    """

    def __init__(
        self, problem: str, *, where: str = "", fix: str = "", code: int = 1, host: str = ""
    ) -> None:
        super().__init__(problem, where, fix)
        self.problem = problem
        self.where = where
        self.fix = fix
        self.code = code
        self.host = host

    def __str__(self) -> str:
        """As the terminal shows it: `error:`, `where:` and `fix:`, without those that are empty."""
        parts = [f"error: {_own_lines(self.problem)}"]
        if self.where:
            parts.append(f"where: {_own_lines(self.where)}")
        if self.fix:
            parts.append(f"fix:   {self.fix}")
        return "\n".join(parts)


def one_line(text: str) -> str:
    """Untrusted text, such as a file name, as one line: newlines and other control characters are escaped, bytes
    that are not UTF-8 become \\xff.
    """
    return text if text.isprintable() else "".join(map(_plain, text))


_OWN = re.compile(r"(\n       )")  # starts another line of a message


def _own_lines(text: str) -> str:
    """The lines of a message, each as `one_line`."""
    return "".join(
        part if number % 2 else one_line(part) for number, part in enumerate(_OWN.split(text))
    )


def _plain(letter: str) -> str:
    if letter.isprintable():
        return letter
    number = ord(letter)
    return (
        f"\\x{number - 0xDC00:02x}"
        if 0xDC80 <= number <= 0xDCFF
        else letter.encode("unicode_escape").decode()
    )


_FREE_SPACE = "free disk space, then run the same command again: complete files are kept"
_SYSTEM_ERRORS = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EROFS: (
        "the file system is read-only",
        "remount it read-write, or copy the folder to a writable disk",
    ),
    errno.EACCES: (
        "permission denied",
        "check the owner and the permissions, or choose another folder",
    ),
    errno.EPERM: (
        "permission denied",
        "check the owner and the permissions, or choose another folder",
    ),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n 4096"),
    errno.EFBIG: ("file size limit exceeded", "raise the limit: ulimit -f unlimited"),
    errno.ENAMETOOLONG: ("file name too long", "choose a shorter name"),
    errno.ELOOP: ("symbolic links form a loop", "pass the path of the file itself"),
    errno.EISDIR: (
        "a folder exists at the path of a file",
        "move it away, then run the same command again",
    ),
    errno.EEXIST: (
        "something else exists at this path",
        "move it away, then run the same command again",
    ),
    errno.ENOTDIR: (
        "a file exists at the path of a folder",
        "move it away, then run the same command again",
    ),
    errno.EIO: ("disk I/O error", "check the disk with `dmesg`, then run the same command again"),
    errno.EPIPE: (
        "stdout was closed (broken pipe)",
        "keep the reading program open, or redirect to a file",
    ),
}


def shorten(text: str, width: int) -> str:
    """The text, or its start and end."""
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def of_the_system(error: OSError) -> UserError | None:
    """The error for the user; None for an error that can only be a bug in Bloomery."""
    entry = _SYSTEM_ERRORS.get(error.errno or 0)
    return entry and UserError(
        entry[0], where=shorten(str(error.filename or ""), 200), fix=entry[1]
    )


@contextmanager
def system_errors_worded() -> Iterator[None]:
    """Raises UserError for what the operating system refuses, such as a file name that is too long."""
    try:
        yield
    except OSError as error:
        worded = of_the_system(error)
        if worded is None:
            raise
        raise worded from error
