"""Byte-level BPE, remembered word by word: text repeats itself, so most words of it were merged before.

The library cuts a text into words with a regular expression and merges each word alone; the expression is the greater
part of its time. For ASCII the same expression runs in Python's own engine, and a dictionary answers for the words. Ids
are the library's to the last one; what this cannot prove to be the same (other alphabets, other pipelines) goes to the
library whole.
"""

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, final

import numpy as np

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 500_000  # some 75 MB; later words are merged each time they come
_LINE = re.compile(r"(?<=[!-~])(?=\n)")  # where a word of GPT2_PATTERN ends for certain
# Byte-level BPE spells a byte as a letter: a visible one as itself, the others as 256, 257, ... in their order (GPT-2).
_SPELLING = {byte: 256 + order for order, byte in enumerate([*range(33), 127])}

Ids = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[str], list[int]]


class _Merged(dict[str, bytes]):
    """Word -> its ids as bytes."""

    def __init__(self, merge: Encode, dtype: str) -> None:
        super().__init__()
        self._merge, self._dtype = merge, dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._merge(word), dtype=self._dtype).tobytes()
        if len(self) < _MAX_WORDS and len(word) <= 64:
            self[word] = ids
        return ids


@final
class WordEncoder:
    """Encodes ASCII by `pattern`, its words (in byte-level spelling) by `merge`, and all else by `whole`."""

    def __init__(self, pattern: str, added: list[str], whole: Encode, merge: Encode, dtype: str) -> None:
        self._words = re.compile(ascii_pattern(pattern), re.ASCII).findall
        self._lines = pattern == GPT2_PATTERN
        self._added = (
            re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))) if added else None
        )
        self._whole, self._dtype = whole, dtype
        self._merged = _Merged(lambda word: merge(word.translate(_SPELLING)), dtype)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(self._encode(text), dtype=self._dtype)

    def _encode(self, text: str) -> bytes:
        if self._added and self._added.search(text):
            return self._library(text)
        if text.isascii():
            return self._ascii(text)
        return b"".join(self._line_parts(text)) if self._lines else self._library(text)

    def _ascii(self, text: str) -> bytes:
        words: list[str] = self._words(text)
        complete = sum(map(len, words)) == len(text)
        return b"".join(map(self._merged.__getitem__, words)) if complete else self._library(text)

    def _line_parts(self, text: str) -> Iterator[bytes]:
        """Runs of ASCII lines and of others, each as a whole."""
        for ascii_only, lines in groupby(_LINE.split(text), str.isascii):
            yield (self._ascii if ascii_only else self._library)("".join(lines))

    def _library(self, text: str) -> bytes:
        return np.array(self._whole(text), dtype=self._dtype).tobytes()


def ascii_pattern(pattern: str) -> str:
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
