"""One text under two tokenizers: the spans in which tokens of both begin and end at the same byte. No torch."""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from bloomery.data.tokenizer.tokenizer import Tokenizer

# A text that follows another one is encoded behind one of these, which keeps off the space that SentencePiece writes
# before a text. Several, as some texts merge with some of them.
ANCHORS = ("\n", "0", ".", "x")


class Span(NamedTuple):
    """Tokens `start` to `end` of one tokenizer have the bytes of tokens `other_start` to `other_end` of the other."""

    start: int
    end: int
    other_start: int
    other_end: int


def aligned_spans(ends: Sequence[int], other_ends: Sequence[int]) -> list[Span]:
    """The smallest spans from the beginning of a text on.

    `ends`: the byte after each token, counted from the same place for both.
    """
    spans = []
    start = other_start = 0
    token = other_token = 0
    while token < len(ends) and other_token < len(other_ends):
        if ends[token] == other_ends[other_token]:
            spans.append(Span(start, token + 1, other_start, other_token + 1))
            token += 1
            other_token += 1
            start, other_start = token, other_token
        elif ends[token] < other_ends[other_token]:
            token += 1
        else:
            other_token += 1
    return spans


def token_ends(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """The byte after each token, of tokens that stand for text."""
    return list(accumulate(len(tokenizer.spelled(id_)) for id_ in ids))


def continuing_ids(tokenizer: Tokenizer, text: str, markup: Collection[str] = ()) -> list[int]:
    """The ids of a text that follows another one, as far as they spell it: a normalization of Unicode may not, and a
    control token that the text spells out is none of its letters, but for those of `markup`.
    """
    for anchor in ANCHORS:
        anchor_ids = tokenizer.encode(anchor)
        ids = tokenizer.encode(anchor + text)
        num_anchor = len(anchor_ids)
        spelled_anchor = b"".join(map(tokenizer.spelled, anchor_ids))
        if ids[:num_anchor] == anchor_ids and spelled_anchor.removeprefix(b" ") == anchor.encode():
            return _that_spell(tokenizer, ids[num_anchor:], text.encode(), markup)
    return []


def _that_spell(
    tokenizer: Tokenizer, ids: list[int], content: bytes, markup: Collection[str]
) -> list[int]:
    """The first ids, as long as they spell these bytes, and no control token: what follows one is another message."""
    end = 0
    for number, id_ in enumerate(ids):
        spelled = tokenizer.spelled(id_)
        if not _is_text(tokenizer, id_, markup) or not content.startswith(spelled, end):
            return ids[:number]
        end += len(spelled)
    return ids


def text_of(tokenizer: Tokenizer, ids: Sequence[int], markup: Collection[str] = ()) -> str:
    """The text of the first ids, up to a control token that is not of `markup`, or to bytes that are no UTF-8."""
    num_of_text = next(
        (n for n, id_ in enumerate(ids) if not _is_text(tokenizer, id_, markup)), len(ids)
    )
    content = b"".join(map(tokenizer.spelled, ids[:num_of_text]))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start].decode()


def _is_text(tokenizer: Tokenizer, id_: int, markup: Collection[str]) -> bool:
    """Whether a token stands for its bytes: a control token does as a part of `markup` alone."""
    sizes = tokenizer.token_bytes()
    if id_ >= len(sizes):  # a row of the embedding without a token
        return False
    return bool(sizes[id_]) or tokenizer.spelled(id_).decode(errors="replace") in markup
