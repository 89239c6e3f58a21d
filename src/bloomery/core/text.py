"""Untrusted text: redact secrets before it is stored, remove control characters before it is printed."""

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PAGE_COLUMNS = 100
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
# 40 hexadecimal digits alone may be a commit.
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


# These change the order in which characters are displayed.
_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROLS = {
    code: None for code in (*range(32), *range(127, 160), *_BIDI) if chr(code) not in "\n\t"
}
# Bytes of a file name that are not UTF-8, and halves of pairs that JSON has escaped.
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
_UNPRINTED = _CONTROLS | _SURROGATES


def harmless(text: str) -> str:
    """`text` without control characters except newlines and tabs, which could control a terminal.

    For all text that Bloomery prints and that comes from datasets, models or file names.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_UNPRINTED)


def encodable(text: str) -> str:
    """`text` as UTF-8 can encode it: half of a surrogate pair becomes the replacement character."""
    return text if text.isascii() else text.translate(_SURROGATES)


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
    similar_names = closest(word, names, cutoff=cutoff)
    return f"did you mean {shown.format(similar_names[0])}?" if similar_names else otherwise


def misspelled(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` is with a letter or two wrong, missing, added or swapped; None for anything else.

    A stricter rule than `closest`: one mistake in a word of up to five letters, two in a longer one. A beginning of
    three letters or more that only one name has is that name.
    """
    candidates = list(dict.fromkeys(names))
    if len(word) >= 3:
        beginnings = [name for name in candidates if name.startswith(word)]
        if len(beginnings) == 1:
            return beginnings[0]
    if len(word) < 3:
        return None
    mistakes = {name: letters_apart(word, name) for name in candidates}
    best = min(candidates, key=lambda name: mistakes[name], default="")
    return best if best and mistakes[best] <= (1 if len(word) <= 5 else 2) else None


def letters_apart(word: str, other: str) -> int:
    """The distance of two words in letters replaced, left out, added, or swapped with their neighbor.

    The optimal string alignment distance (Damerau 1964, without overlapping edits).
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(word, start=1):
        row = [i]
        for j, other_letter in enumerate(other, start=1):
            cost = min(
                rows[i - 1][j] + 1, row[j - 1] + 1, rows[i - 1][j - 1] + (letter != other_letter)
            )
            is_swap = i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == other_letter
            row.append(min(cost, rows[i - 2][j - 2] + 1) if is_swap else cost)
        rows.append(row)
    return rows[-1][-1]


def broken(command: str, width: int) -> list[str]:
    """A command as several lines that end with a backslash, never broken within quotes."""
    lines = [command]
    while len(lines[-1]) > width:
        gaps = [gap for gap in _gaps(lines[-1]) if 4 < gap <= width - 2]
        if not gaps:
            break
        last_gap = max(gaps)
        lines[-1:] = [lines[-1][:last_gap] + " \\", "    " + lines[-1][last_gap + 1 :]]
    return lines


def fitted(lines: Iterable[str], width: int, *, page: int = PAGE_COLUMNS) -> list[str]:
    """Lines of a page of `page` columns for a narrower terminal: the last column of a long line is wrapped below.

    A remark at the right margin moves to the left; a command is broken by backslashes, its remark goes below.
    """
    fitted_lines: list[str] = []
    # What the line before left over, the column at which that belongs, and the length that the line had.
    remainder = ""
    column = 0
    previous_length = 0
    for line in lines:
        first_word = line.lstrip().partition(" ")[0]
        indent = len(line) - len(line.lstrip())
        length = len(line)

        # A line continues the paragraph of the line before when it begins below it, or two columns further,
        # and its first word found no room above: then the remainder goes in front of it.
        begins_below = indent in (column, column + 2)
        if remainder and column and begins_below and previous_length + 1 + len(first_word) > page:
            line = " " * column + remainder + " " + line.lstrip()
        elif remainder:
            fitted_lines.append(" " * column + remainder)
        remainder = ""
        previous_length = length

        # A remark at the right margin moves to the left, as far as the gap before it allows.
        gaps = [gap for gap in re.finditer(" {2,}", line) if gap.end() < len(line)]
        excess = len(line) - width
        if excess > 0 and gaps and gaps[-1].end() > width * 2 // 3:
            remark_gap = gaps[-1]
            if len(remark_gap[0]) >= excess + 2:
                line = line[: remark_gap.start()] + line[remark_gap.start() + excess :]
        column = max((gap.end() for gap in gaps if gap.end() <= width * 2 // 3), default=0)

        # A command is broken by backslashes, so that it can still be copied; its remark goes below.
        if len(line) > width and line[column:].startswith("bloomery "):
            command, *remarks = re.split(" {3,}", line[column:], maxsplit=1)
            first_part, *parts = broken(command, width - column)
            for remark in remarks:
                parts += [f"    {part}" for part in textwrap.wrap(remark, width - column - 4)]
            fitted_lines += [line[:column] + first_part, *(" " * column + part for part in parts)]
            continue

        # Anything else is wrapped at spaces, below its last column.
        while len(line) > width and (space := line.rfind(" ", column + 1, width + 1)) > column:
            remainder = line[space + 1 :].lstrip()
            line = line[:space]
            if len(remainder) > width - column:
                fitted_lines.append(line.rstrip())
                line = " " * column + remainder
                remainder = ""
        fitted_lines.append(line.rstrip())
    if remainder:
        fitted_lines.append(" " * column + remainder)
    return fitted_lines


def labelled(label: str, command: str, *, indent: int, width: int) -> list[str]:
    """A command after its label, on as many lines of `width` as needed."""
    parts = broken(command, width - indent)
    labels = [label, *[""] * (len(parts) - 1)]
    return [f"{label:<{indent}}{part}" for label, part in zip(labels, parts, strict=True)]


def _gaps(line: str) -> Iterator[int]:
    """The positions of spaces outside of quotes."""
    quote = ""
    for position, letter in enumerate(line):
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == " " and not quote:
            yield position
