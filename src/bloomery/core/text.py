"""Untrusted text: redact secrets before it is stored, remove control characters before it is printed."""

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$")
_SHORTEST_SECRET = 8  # a shorter value, such as TOKEN=1, would redact normal text

# Token formats, as documented by Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Weights & Biases.
_START = r"(?<![A-Za-z0-9])"  # a preceding word can end with _
_SHAPES = (
    re.compile(_START + r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    re.compile(_START + r"(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})"),
    re.compile(_START + r"sk-[A-Za-z0-9_-]{20,}"),
    re.compile(_START + r"AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    re.compile(_START + r"wandb_v\d_\w{20,}"),
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNED = re.compile(
    r"(?i)\b([\w.-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|auth[_-]?token|access[_-]?token))"
    r"(\"?\s*[=:]\s*\"?)([^\s\"',;&]{6,})"
)
# 40 digits alone may be a commit
_WANDB_KEY = re.compile(r"(?i)(wandb\S*[\s=:\"']+)[0-9a-f]{40}\b")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{16,}")
HIDDEN = "[hidden]"


def redact_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` without tokens of known formats, logins in URLs, and values of secret environment variables."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name.upper()):
            text = text.replace(value, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(HIDDEN, text)
    text = _WANDB_KEY.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


# they change the display order of characters
_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROLS = {
    code: None for code in (*range(32), *range(127, 160), *_BIDI) if chr(code) not in "\n\t"
}
# bytes of a name that are not UTF-8
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
_UNPRINTED = _CONTROLS | _SURROGATES


def harmless(text: str) -> str:
    """`text` without control characters except newlines and tabs, which could control a terminal.

    For all text that Bloomery prints and that comes from datasets, models or file names.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_UNPRINTED)


def expanded(name: str | Path) -> Path:
    """A path with `~` expanded; unchanged if `~name` is not a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def closest(word: str, names: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The `count` most similar names with a difflib ratio of at least `cutoff`, the best first."""
    from difflib import get_close_matches

    return get_close_matches(word, list(names), n=count, cutoff=cutoff)


def did_you_mean(
    word: str, names: Iterable[str], otherwise: str, *, shown: str = "{}", cutoff: float = 0.6
) -> str:
    """ "did you mean NAME?", with the name formatted by `shown`; `otherwise` if no name is similar."""
    near = closest(word, names, cutoff=cutoff)
    return f"did you mean {shown.format(near[0])}?" if near else otherwise


def broken(command: str, width: int) -> list[str]:
    """A command as several lines that end with a backslash, never broken within quotes."""
    lines = [command]
    while len(lines[-1]) > width:
        at = max((place for place in _gaps(lines[-1]) if 4 < place <= width - 2), default=0)
        if not at:
            break
        lines[-1:] = [lines[-1][:at] + " \\", "    " + lines[-1][at + 1 :]]
    return lines


def fitted(lines: Iterable[str], width: int, *, page: int = 100) -> list[str]:
    """Lines of a page of `page` columns for a narrower terminal: the last column of a long line is wrapped below.

    A remark at the right margin moves to the left; a command is broken by backslashes, its remark goes below.
    """
    found: list[str] = []
    # of the line before, with its length
    rest = ""
    column = 0
    before = 0
    for line in lines:
        word = line.lstrip().partition(" ")[0]
        indent = len(line) - len(line.lstrip())
        length = len(line)
        # The same paragraph: it starts below, or two columns further, because its first word found no room above.
        if rest and column and indent in (column, column + 2) and before + 1 + len(word) > page:
            line = " " * column + rest + " " + line.lstrip()
        elif rest:
            found.append(" " * column + rest)
        rest = ""
        before = length
        gaps = [gap for gap in re.finditer(" {2,}", line) if gap.end() < len(line)]
        over = len(line) - width
        if over > 0 and gaps and gaps[-1].end() > width * 2 // 3 and len(gaps[-1][0]) >= over + 2:
            line = line[: gaps[-1].start()] + line[gaps[-1].start() + over :]
        column = max((gap.end() for gap in gaps if gap.end() <= width * 2 // 3), default=0)
        if len(line) > width and line[column:].startswith("bloomery "):
            command, *remark = re.split(" {3,}", line[column:], maxsplit=1)
            first, *more = broken(command, width - column)
            more += [
                f"    {part}" for text in remark for part in textwrap.wrap(text, width - column - 4)
            ]
            found += [line[:column] + first, *(" " * column + each for each in more)]
            continue
        while len(line) > width and (at := line.rfind(" ", column + 1, width + 1)) > column:
            line, rest = line[:at], line[at + 1 :].lstrip()
            if len(rest) > width - column:
                found.append(line.rstrip())
                line = " " * column + rest
                rest = ""
        found.append(line.rstrip())
    return [*found, " " * column + rest] if rest else found


def labelled(label: str, command: str, *, indent: int, width: int) -> list[str]:
    """A command after its label, on as many lines of `width` as needed."""
    parts = broken(command, width - indent)
    return [f"{label if at == 0 else '':<{indent}}{part}" for at, part in enumerate(parts)]


def _gaps(line: str) -> Iterator[int]:
    """The positions of spaces outside of quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == " " and not quote:
            yield place
