"""The one exception that a person is meant to read, and how names that a stranger chose are shown in it"""


class UserError(Exception):
    """What is wrong, where, and what to do about it. The command line prints it and exits with `code`."""

    def __init__(self, problem: str, *, where: str = "", remedy: str = "", code: int = 1) -> None:
        super().__init__(problem, where, remedy)
        self.problem, self.where, self.remedy, self.code = problem, where, remedy, code

    def __str__(self) -> str:
        parts = [f"error: {one_line(self.problem)}"]
        if self.where:
            parts.append(f"where: {one_line(self.where)}")
        if self.remedy:
            parts.append(f"mend:  {self.remedy}")
        return "\n".join(parts)


def one_line(text: str) -> str:
    """What a stranger chose, such as a file's name, as one line of plain text: newlines and other control characters
    as escapes, bytes that are not UTF-8 as \\xff.
    """
    return text if text.isprintable() else "".join(map(_plain, text))


def _plain(letter: str) -> str:
    if letter.isprintable():
        return letter
    number = ord(letter)
    return f"\\x{number - 0xDC00:02x}" if 0xDC80 <= number <= 0xDCFF else letter.encode("unicode_escape").decode()
