"""What training will see of a corpus: single documents as tokens, and the health of the whole."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.data.packing import Layout, part_rows
from bloomery.data.preparing import Work
from bloomery.data.shards import Manifest, Split
from bloomery.data.tokenizer import Tokenizer

Lengths = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK = 2**20  # tokens looked at together


@dataclass(frozen=True)
class Seen:
    """A document as training sees it. `pieces` are its tokens as text, `ids` the same as numbers."""

    source: str
    split: str
    ids: list[int]
    pieces: list[str]
    rows: int  # how many rows it touches at least
    cut: int  # tokens that no row holds


@dataclass(frozen=True)
class Health:
    """The whole corpus in figures; `lengths` are (tokens, up to and including; documents), shortest first."""

    documents: int
    empty: int
    skipped: int
    held_back: int
    duplicates: int  # documents equal to an earlier one of their split
    unknown: int  # tokens that stand for what the tokenizer does not know
    tokens: int
    rows: int
    longer: int  # documents longer than a row
    cut: int  # tokens that no row holds
    lengths: tuple[tuple[int, int], ...]
    warnings: tuple[str, ...]


def preview(work: Work, count: int, *, sequence_length: int, layout: Layout) -> Iterator[Seen]:
    """The first `count` documents. The tokenizer is trained and kept when it is not there yet; nothing else is
    written.
    """
    splitter, tokenizer = work.begin()
    for name, document in islice(work.documents(splitter), count):
        ids = tokenizer.encode(document.text) if document.tokens is None else list(document.tokens)
        whole = _with_ends(ids, tokenizer) if document.tokens is None else ids
        cut = max(len(whole) - 1 - sequence_length, 0) if layout == "padded" else 0
        rows = 1 if layout == "padded" else -(-len(whole) // sequence_length)
        yield Seen(document.source, name, whole, pieces(whole, tokenizer), rows, cut)


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


def health(folder: Path, manifest: Manifest, *, sequence_length: int, layout: Layout) -> Health:
    """Reads the shards of the train split once."""
    split = Split(folder, manifest, "train")
    bounds: Lengths = np.asarray(split.bounds).astype(np.int64)
    lengths: Lengths = bounds[1:] - bounds[:-1]
    counts = [
        part_rows(p.tokens, p.documents, sequence_length=sequence_length, layout=layout) for p in split.record.parts
    ]
    longer = lengths[lengths > sequence_length + 1]
    cut = int((longer - sequence_length - 1).sum()) if layout == "padded" else 0
    found = Health(
        documents=len(split), empty=manifest.empty, skipped=manifest.skipped, held_back=manifest.held_back,
        duplicates=_duplicates(split), unknown=_unknown(split, manifest.unk_id), tokens=manifest.train.tokens,
        rows=sum(counts), longer=len(longer), cut=cut, lengths=_histogram(lengths), warnings=(),
    )  # fmt: skip
    return Health(**{**vars(found), "warnings": tuple(_warnings(found, manifest, sequence_length))})


def _duplicates(split: Split) -> int:
    keys = array("Q")
    for index in range(len(split)):
        content = split.document(index).astype(np.uint32).tobytes()
        keys.append(int.from_bytes(blake2b(content, digest_size=8).digest(), "big"))
    return len(keys) - len(np.unique(np.frombuffer(keys, np.uint64))) if keys else 0


def _unknown(split: Split, unk_id: int | None) -> int:
    if unk_id is None:
        return 0
    starts = range(0, len(split.tokens), _CHUNK)
    return sum(int((split.tokens[start : start + _CHUNK] == unk_id).sum()) for start in starts)


def _histogram(lengths: Lengths) -> tuple[tuple[int, int], ...]:
    """Documents by length, in powers of two."""
    if not len(lengths):
        return ()
    edges = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return tuple((2 ** int(edge), int((edges == edge).sum())) for edge in range(edges.min(), edges.max() + 1))


def _warnings(found: Health, manifest: Manifest, sequence_length: int) -> Iterator[str]:
    if found.duplicates > 0.01 * found.documents:
        yield f"{found.duplicates / found.documents:.0%} of the documents repeat an earlier one word for word"
    if found.unknown > 0.001 * found.tokens:
        yield f"{found.unknown / found.tokens:.1%} of the tokens are unknown to the tokenizer, made for other text"
    if found.cut > 0.01 * found.tokens:
        yield f"{found.cut / found.tokens:.0%} of the tokens are cut off: packed would keep them"
    if found.skipped:
        yield f"{found.skipped} rows were skipped, the first: {manifest.first_skipped}"
    if 0 < manifest.validation.tokens < sequence_length:
        yield f"validation is {manifest.validation.tokens:,} tokens, less than one sequence: its loss will be noise"
    if not manifest.validation.tokens:
        yield "there is no validation text: nothing will tell learning from memorising"
