"""Paths and commands as a shell reads them, the latter in lines that a person can copy."""

from collections.abc import Iterator
from pathlib import Path


def expanded(name: str | Path) -> Path:
    """A path with the home folder for `~`; as it is where `~name` is no user here."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def broken(command: str, width: int) -> list[str]:
    """A command over several lines, each but the last ending in a backslash; never within quotes."""
    lines = [command]
    while len(lines[-1]) > width:
        at = max((place for place in _gaps(lines[-1]) if 4 < place <= width - 2), default=0)
        if not at:
            break
        lines[-1:] = [lines[-1][:at] + " \\", "    " + lines[-1][at + 1 :]]
    return lines


def labelled(label: str, command: str, *, indent: int, width: int) -> list[str]:
    """A command behind its label, over as many lines of `width` as it needs."""
    parts = broken(command, width - indent)
    return [f"{label if at == 0 else '':<{indent}}{part}" for at, part in enumerate(parts)]


def _gaps(line: str) -> Iterator[int]:
    """Where blanks stand outside of quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == " " and not quote:
            yield place
