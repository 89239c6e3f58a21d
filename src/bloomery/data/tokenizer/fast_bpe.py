"""Byte-level BPE with a cache of words: most words of a text were merged before.

The library splits a text into words with a regular expression and merges each word; the expression takes most of
the time. For ASCII the same expression runs in Python's engine, and a dictionary has the ids of words. All ids are
identical to the library's. Text without this guarantee (other alphabets, other pipelines) is encoded by the library.
"""

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.units import MIB, format_bytes

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The expressions of Llama 3, Qwen 2 and later, and GPT-4, which differ in the digits per word.
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A character that is no white space by any definition.
_DARK = r"[^\s\x00-\x20\x7f-\xa0\u1680\u180e\u2000-\u206f\u3000\ufeff]"
# Places where a word always ends, whatever the text around them.
_ENDS = {GPT2_PATTERN: re.compile(rf"(?<={_DARK})(?=\n| {_DARK})")} | dict.fromkeys(
    (_LATER % "", _LATER % "{1,3}"), re.compile(r"(?<=[A-Za-z0-9])(?=\n| [A-Za-z])")
)
PIECE = MIB // 4  # characters of a longer text that are encoded together
LONGEST_PIECE = 4 * MIB  # bytes: the library needs about 150 for each
LONGEST_PLACED = 3 * MIB  # bytes: 270 for each with the characters of each token
_MAX_WORDS = 500_000  # about 75 MB; later words are merged every time
_LINE = re.compile(r"(?<=[!-~])(?=\n)")  # where a word of GPT2_PATTERN always ends
# Byte-level BPE writes a byte as a character: a printable one as itself, the others as 256, 257, ... in order (GPT-2).
_SPELLING = {byte: 256 + order for order, byte in enumerate([*range(33), 127])}

Ids = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[str], list[int]]


class _Merged(dict[str, bytes]):
    """Word -> its ids as bytes."""

    def __init__(self, merge: Encode, dtype: str) -> None:
        super().__init__()
        self._merge = merge
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._merge(word), dtype=self._dtype).tobytes()
        if len(self) < _MAX_WORDS and len(word) <= 64:
            self[word] = ids
        return ids


@final
class WordEncoder:
    """Encodes ASCII with `pattern` and its words (byte-level) with `merge`; other text with `encode`."""

    def __init__(
        self, pattern: str, added: list[str], encode: Encode, merge: Encode, dtype: str
    ) -> None:
        expression = re.compile(ascii_pattern(pattern), re.ASCII)
        self._words = expression.findall
        self._each = expression.finditer
        self._lines = pattern == GPT2_PATTERN
        self._added = (
            re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
            if added
            else None
        )
        self._encode_text = encode
        self._dtype = dtype
        self._merged = _Merged(lambda word: merge(word.translate(_SPELLING)), dtype)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(self._encode(text), dtype=self._dtype)

    def _encode(self, text: str) -> bytes:
        if self._added and self._added.search(text):
            return self._library(text)
        if text.isascii():
            return self._ascii(text)
        if not self._lines:
            return self._library(text)
        runs = groupby(_LINE.split(text), str.isascii)  # of ASCII lines and of others
        return b"".join(
            (self._ascii if plain else self._library)("".join(lines)) for plain, lines in runs
        )

    def _ascii(self, text: str) -> bytes:
        if len(text) <= PIECE:
            word_list: list[str] = self._words(text)
            complete = sum(map(len, word_list)) == len(text)
            return (
                b"".join(map(self._merged.__getitem__, word_list))
                if complete
                else self._library(text)
            )
        # Word by word: a list of all words would take ten times the memory.
        parts = list[bytes]()
        end = 0
        size = 0
        for match in self._each(text):
            if match.start() != end:
                return self._library(text)
            end = match.end()
            size = max(size, match.end() - match.start())
            refuse_long(size)
            parts.append(self._merged[match[0]])
        return b"".join(parts) if end == len(text) else self._library(text)

    def longest(self, text: str) -> int:
        """The longest word of ASCII text."""
        return max((match.end() - match.start() for match in self._each(text)), default=0)

    def _library(self, text: str) -> bytes:
        refuse_long(len(text.encode()))
        return np.array(self._encode_text(text), dtype=self._dtype).tobytes()


def refuse_long(size: int, limit: int | None = None) -> None:
    """Raises UserError for a piece of text that cannot be split and is above the size limit."""
    limit = LONGEST_PIECE if limit is None else limit
    if size > limit:
        raise UserError(
            f"the text holds {format_bytes(size)} in one piece, and {format_bytes(limit)} is the limit: "
            "the tokenizer cannot encode parts of it",
            fix="cut it into lines or smaller documents",
        )


def pieces(text: str, ends: re.Pattern[str] | None) -> Iterator[str]:
    """Parts of about PIECE characters of a long text, whose joined ids are those of the whole; the text itself where
    `ends` matches nowhere.
    """
    start = 0
    while ends is not None and len(text) - start > PIECE:
        stop = start + PIECE
        cut = next(
            (position for position in _breaks(text, start, stop) if ends.match(text, position)),
            None,
        )
        if cut is None:
            later = ends.search(text, stop)
            cut = later.start() if later else len(text)
        yield text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield text[start:]


def _breaks(text: str, start: int, stop: int) -> Iterator[int]:
    """Places of newlines and spaces, last first."""
    for sign in "\n ":
        position = text.rfind(sign, start + 1, stop)
        while position > start:
            yield position
            position = text.rfind(sign, start + 1, position)


def word_ends(description: dict[str, Any]) -> re.Pattern[str] | None:
    """The expression for places where a text can be split without changing its ids; None for unknown patterns."""
    pattern = _pattern(description)
    added = [token["content"] for token in description.get("added_tokens") or []]
    broken = any("\n" in token or " " in token for token in added)
    return (
        _ENDS.get(pattern)
        if pattern is not None and plain_added(description) and not broken
        else None
    )


def ascii_pattern(pattern: str) -> str:
    """The pattern for ASCII text in Python's dialect; ValueError when it has no such form."""
    widened = re.sub(
        r"\[[^\]]*\]",
        lambda match: match[0].replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9"),
        pattern,
    )
    plain = widened.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")
    if re.search(r"\\[pPXbBwWdD]|\[\[|&&|\((?!\?)", plain):
        raise ValueError(f"no ASCII form of {pattern!r} is known")
    return plain


def word_pattern(description: dict[str, Any]) -> str | None:
    """The expression that splits words in a tokenizer.json that only splits, maps bytes and merges; else None."""
    model = description.get("model") or {}
    return None if model.get("type") != "BPE" or model.get("dropout") else _pattern(description)


def _pattern(description: dict[str, Any]) -> str | None:
    """The expression that splits words, whatever the next steps."""
    normalizer = description.get("normalizer")
    cut = description.get("pre_tokenizer") or {}
    if normalizer and normalizer.get("type") not in ("NFC", "NFKC"):
        return None
    steps = cut.get("pretokenizers", [cut])
    last_step = steps[-1]
    if (
        last_step.get("type") != "ByteLevel"
        or last_step.get("add_prefix_space")
        or (normalizer and len(steps) == 1)
    ):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if last_step.get("use_regex", True) else None
    first_step = steps[0]
    isolated = (
        first_step.get("type") == "Split"
        and first_step.get("behavior") == "Isolated"
        and not first_step.get("invert")
    )
    if len(steps) != 2 or not isolated or last_step.get("use_regex", True):
        return None
    pattern = first_step.get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def plain_added(description: dict[str, Any]) -> bool:
    """Whether added tokens match their exact text anywhere."""
    return not any(
        token.get(key)
        for token in description.get("added_tokens", [])
        for key in ("single_word", "lstrip", "rstrip")
    )
