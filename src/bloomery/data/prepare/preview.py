"""What training will see of a corpus: single documents as tokens, and which of them are learned."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bloomery.data.chat.render import Encoded, Renderer, Sequence
from bloomery.data.loading.packing import Layout, kept_lengths
from bloomery.data.prepare.examples import kind_of
from bloomery.data.prepare.pipeline import Work
from bloomery.data.sources.documents import Document
from bloomery.data.sources.streams import Flaw
from bloomery.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Seen:
    """A document as training sees it. `pieces` are its tokens as text, `ids` the same as numbers, and `learned` says
    which of them are learned (None: all). `role`: what an answer is in its pair. `flaw`: why there are none. `kind`:
    what it is, where a run learns from several.
    """

    source: str
    split: str
    ids: list[int]
    pieces: list[str]
    rows: int  # how many rows it touches at least; 0: it is left out
    cut: int  # tokens that no row holds
    learned: list[bool] | None = None
    role: str = ""
    flaw: str = ""
    kind: str = ""


def preview(work: Work, count: int, *, sequence_length: int, layout: Layout) -> Iterator[Seen]:
    """The first `count` documents, of several sources some of each. The tokenizer is trained and kept when it is not
    there yet; nothing else is written.
    """
    splitter, tokenizer = work.begin()
    documents = work.first_documents(splitter, count)
    if work.rendering is None:
        yield from (_plain(*found, tokenizer, sequence_length, layout) for found in documents)
        return
    mixed = bool(work.kinds.plain)
    with work.rendering.renderer(tokenizer) as renderer:
        for name, document in documents:
            if kind_of(document) == "text":
                seen = _plain(name, document, tokenizer, sequence_length, layout)
                yield replace(seen, learned=[True] * len(seen.ids), kind="text")
                continue
            sides, kind = _encoded(document, renderer), "conversation" if mixed else ""
            if isinstance(sides, Flaw):
                yield Seen(document.source, name, [], [], 0, 0, flaw=sides.problem, kind=kind)
            else:
                found = _sides(name, document, sides, tokenizer, sequence_length)
                yield from (replace(seen, kind=kind) for seen in found)


def _encoded(document: Document, renderer: Renderer) -> Encoded | Flaw:
    """Of an example, or of tokens whose maker has said which are learned."""
    if document.example is not None:
        return renderer.encode_batch([document.example])[0]
    assert document.tokens is not None and document.learned is not None
    return (Sequence(list(document.tokens), list(document.learned)),)


def _plain(name: str, document: Document, tokenizer: Tokenizer, sequence_length: int, layout: Layout) -> Seen:
    ids = tokenizer.encode(document.text) if document.tokens is None else list(document.tokens)
    whole = _with_ends(ids, tokenizer) if document.tokens is None else ids
    cut = max(len(whole) - 1 - sequence_length, 0) if layout == "padded" else 0
    rows = 1 if layout == "padded" else -(-len(whole) // sequence_length)
    return Seen(document.source, name, whole, pieces(whole, tokenizer), rows, cut)


def _sides(name: str, document: Document, sides: Encoded, tokenizer: Tokenizer, sequence_length: int) -> Iterator[Seen]:
    """Both answers of a pair; of a marked answer its own alone, as its twin is never learned."""
    whole = np.array([[len(side.ids) for side in sides]], np.int64)
    kept = kept_lengths(whole, sequence_length)[0].tolist()
    fits = all(any(side.learned[1:count]) for side, count in zip(sides, kept, strict=True))
    roles = _roles(document)
    for side, count, role in zip(sides, kept, roles, strict=False):
        cut = len(side.ids) - count
        yield Seen(document.source, name, side.ids, pieces(side.ids, tokenizer), int(fits), cut, side.learned, role)


def _roles(document: Document) -> list[str]:
    example = document.example
    if example is None or example.kind in ("chat", "completion"):
        return [""]
    return ["chosen", "rejected"] if example.kind == "pair" else ["desirable" if example.desirable else "undesirable"]


def _with_ends(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id in (None, tokenizer.bos_id) else [tokenizer.eos_id]
    return [*begin, *ids, *[index for index in end if index is not None]]


def pieces(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Each id as text; a character that several tokens share shows in the last of them."""
    shown, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop])
        if text.endswith("�") and stop - start < 4 and stop < len(ids):
            shown.append("")
            continue
        shown.append(text)
        start = stop
    return shown
