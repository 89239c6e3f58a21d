"""The one exception that a person is meant to read, and how names that a stranger chose are shown in it"""

import errno
import re


class UserError(Exception):
    """What is wrong, where, and what to do about it. The command line prints it and exits with `code`."""

    def __init__(self, problem: str, *, where: str = "", fix: str = "", code: int = 1) -> None:
        super().__init__(problem, where, fix)
        self.problem, self.where, self.fix, self.code = problem, where, fix, code

    def __str__(self) -> str:
        parts = [f"error: {_own_lines(self.problem)}"]
        if self.where:
            parts.append(f"where: {_own_lines(self.where)}")
        if self.fix:
            parts.append(f"fix:   {self.fix}")
        return "\n".join(parts)


def one_line(text: str) -> str:
    """What a stranger chose, such as a file's name, as one line of plain text: newlines and other control characters
    as escapes, bytes that are not UTF-8 as \\xff.
    """
    return text if text.isprintable() else "".join(map(_plain, text))


_OWN = re.compile(r"(\n(?:why:   |       ))")  # how our own sentences begin another line


def _own_lines(text: str) -> str:
    """Several lines where we wrote several, each as `one_line`."""
    return "".join(part if number % 2 else one_line(part) for number, part in enumerate(_OWN.split(text)))


def _plain(letter: str) -> str:
    if letter.isprintable():
        return letter
    number = ord(letter)
    return f"\\x{number - 0xDC00:02x}" if 0xDC80 <= number <= 0xDCFF else letter.encode("unicode_escape").decode()


_FREE_SPACE = "free some space, then run the same command again: what is complete is kept"
_SYSTEM_ERRORS = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EROFS: ("the file system is read-only", "mend its rights, or copy the folder to a disk that can be written"),
    errno.EACCES: ("access was refused", "check the owner and the permissions, or choose another folder"),
    errno.EPERM: ("access was refused", "check the owner and the permissions, or choose another folder"),
    errno.EMFILE: ("too many files are open", "raise the limit: ulimit -n 4096"),
    errno.EFBIG: ("a file would grow beyond the limit that is set", "raise it: ulimit -f unlimited"),
    errno.ENAMETOOLONG: ("a name is longer than the file system takes", "choose a shorter one"),
    errno.ELOOP: ("links lead round in a circle", "name the file itself"),
    errno.EISDIR: ("a folder stands where a file should be", "move it away, then run the same command again"),
    errno.ENOTDIR: ("a file stands where a folder should be", "move it away, then run the same command again"),
    errno.EIO: ("the disk cannot be read or written", "check it (`dmesg`), then run the same command again"),
    errno.EPIPE: ("nobody reads what is printed any more", "let the reader go on, or write into a file"),
}


def shorten(text: str, width: int) -> str:
    """The text, or its beginning and end."""
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def of_the_system(error: OSError) -> UserError | None:
    """Its sentence; None for an error that only a bug of ours explains."""
    known = _SYSTEM_ERRORS.get(error.errno or 0)
    return known and UserError(known[0], where=shorten(str(error.filename or ""), 200), fix=known[1])
