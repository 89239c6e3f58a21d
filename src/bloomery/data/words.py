"""Byte-level BPE, remembered word by word: text repeats itself, so most words of it were merged before.

The library cuts a text into words with a regular expression and merges each word alone; the expression is the greater
part of its time.
For ASCII the same expression runs in Python's own engine, and a dictionary answers for the words. Ids are the
library's to the last one;
what this cannot prove to be the same (other alphabets, other pipelines) goes to the library whole.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 2_000_000  # some 300 MB; later words are merged each time they come
_LINE = re.compile(
    r"(?<=[!-~])(?=\n)"
)  # every word of GPT2_PATTERN ends before a line end that follows something visible

Ids = np.ndarray[Any, np.dtype[Any]]


class _Merged(dict[str, bytes]):
    """Word -> its ids as bytes."""

    def __init__(self, merge: Callable[[str], list[int]], dtype: str) -> None:
        super().__init__()
        self._merge, self._dtype = merge, dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._merge(word), dtype=self._dtype).tobytes()
        if len(self) < _MAX_WORDS and len(word) <= 64:
            self[word] = ids
        return ids


@final
class WordEncoder:
    """Encodes ASCII by `pattern`, anything else through `whole`."""

    def __init__(
        self, pattern: str, added: list[str], whole: Callable[[list[str]], list[list[int]]], dtype: str
    ) -> None:
        self._words = re.compile(_ascii(pattern), re.ASCII).findall
        self._lines = pattern == GPT2_PATTERN
        self._added = (
            re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))) if added else None
        )
        self._whole, self._dtype = whole, dtype
        self._merged = _Merged(lambda word: whole([word])[0], dtype)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(b"".join(self._parts(text)), dtype=self._dtype)

    def _parts(self, text: str) -> Iterator[bytes]:
        if self._added and self._added.search(text):
            yield self._library(text)
        elif text.isascii():
            yield from self._ascii_parts(text)
        elif self._lines:
            yield from self._line_parts(text)
        else:
            yield self._library(text)

    def _ascii_parts(self, text: str) -> Iterator[bytes]:
        words: list[str] = self._words(text)
        if sum(map(len, words)) == len(text):
            yield from map(self._merged.__getitem__, words)
        else:
            yield self._library(text)

    def _line_parts(self, text: str) -> Iterator[bytes]:
        foreign: list[str] = []
        for line in _LINE.split(text):
            if not line.isascii():
                foreign.append(line)
                continue
            if foreign:
                yield self._library("".join(foreign))
                foreign = []
            yield from self._ascii_parts(line)
        if foreign:
            yield self._library("".join(foreign))

    def _library(self, text: str) -> bytes:
        return np.array(self._whole([text])[0], dtype=self._dtype).tobytes()


def _ascii(pattern: str) -> str:
    """The pattern for ASCII text in Python's dialect; ValueError when it has no such form."""
    inside = re.sub(r"\[[^\]]*\]", lambda match: match[0].replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9"), pattern)
    plain = inside.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")
    if re.search(r"\\[pPXbBwWdD]|\[\[|&&|\((?!\?)", plain):
        raise ValueError(f"no ASCII form of {pattern!r} is known")
    return plain


def word_pattern(description: dict[str, Any]) -> str | None:
    """The expression that cuts words in a tokenizer.json, when all that it does is cut, map bytes and merge; else
    None.
    """
    normalizer, cut, model = description.get("normalizer"), description.get("pre_tokenizer") or {}, description["model"]
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or (normalizer and normalizer.get("type") not in ("NFC", "NFKC"))
    ):
        return None
    steps = cut.get("pretokenizers", [cut])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or (normalizer and len(steps) == 1):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    first = steps[0]
    isolated = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if len(steps) != 2 or not isolated or last.get("use_regex", True):
        return None
    pattern = first.get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def plain_added(description: dict[str, Any]) -> bool:
    """Whether added tokens match as they stand, wherever they stand."""
    return not any(
        token.get(key) for token in description.get("added_tokens", []) for key in ("single_word", "lstrip", "rstrip")
    )
