"""Which documents are kept for validation: decided by their content, so that copies of one stay together."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bloomery.data.documents import Corpus, Document, Tally, open_corpus, read_documents
from bloomery.data.example_rows import Wants
from bloomery.errors import UserError
from bloomery.recipe.schema import Data, Source
from bloomery.units import counted

_SALT = b"exam"


def content_key(document: Document) -> int:
    """64 bits of the content; of a marked answer those of its question, so that both answers to one stay together."""
    example = document.example
    if example is not None and example.kind == "kto" and example.prompt:
        content = repr(example.prompt).encode()
    else:
        content = document.text.encode() if document.tokens is None else np.array(document.tokens, np.uint32).tobytes()
    return int.from_bytes(blake2b(content, digest_size=8, salt=_SALT).digest(), "big")


@dataclass(frozen=True)
class Splitter:
    """A document whose key is below `threshold` is kept for validation; train documents among `held` are left out."""

    threshold: int
    held: frozenset[int] = frozenset()

    def keeps(self, key: int) -> bool:
        return key < self.threshold


def validation_share(data: Data) -> float | None:
    """The share that `data.validation` asks for, None when it is a path. Raises UserError when it is no share."""
    said = data.validation
    try:
        share = (
            float(said.rstrip("% ")) / (100 if said.rstrip().endswith("%") else 1)
            if isinstance(said, str)
            else float(said)
        )
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise UserError(
            f"{said} is no share of the corpus",
            where="data.validation",
            remedy="write 5%, 0, or the path of a file or folder",
        )
    return share


def validation_corpus(data: Data, wants: Wants = "text") -> Corpus | None:
    """The corpus that `data.validation` names, when it names one."""
    if validation_share(data) is not None:
        return None
    source = Source(path=str(data.validation), glob=data.glob, format=data.format, columns=data.columns)
    return open_corpus(source, wants)


def make_splitter(corpora: Iterable[Corpus], data: Data, wants: Wants = "text") -> Splitter:
    """Reads until both sides have a document, which takes some 1 / share of them; only a tiny corpus is read whole.

    With two different documents or more neither side stays empty: the lowest key is always kept for validation, the
    highest never.
    """
    held = validation_corpus(data, wants)
    if held is not None:
        return Splitter(0, _held_keys(held, on_error=data.on_error))
    threshold = round((validation_share(data) or 0.0) * 2**64)
    lowest, highest = 2**64, -1
    for corpus in corpora if threshold else ():
        for document in read_documents(corpus, on_error=data.on_error, tally=Tally()):
            key = content_key(document)
            lowest, highest = min(lowest, key), max(highest, key)
            if lowest < threshold <= highest:
                return Splitter(threshold)
    if lowest >= highest:
        return Splitter(0)
    return Splitter(min(max(threshold, lowest + 1), highest))


def _held_keys(held: Corpus, *, on_error: str) -> frozenset[int]:
    """Raises UserError when there is nothing in it: then nothing would tell learning from memorising."""
    tally = Tally()
    documents = read_documents(held, on_error=on_error, tally=tally)
    keys = frozenset(content_key(document) for document in documents if document.text or document.tokens)
    if not keys:
        told = f": {counted(tally.skipped, 'rows')} skipped, the first: {tally.first_skipped}" if tally.skipped else ""
        remedy = "name another file, or a share of the text: data.validation=1%; 0 keeps none for validation"
        raise UserError(f"there is no text in it{told}", where=f"data.validation: {held.path}", remedy=remedy)
    return keys


def repeated_lines(held_out: Iterable[str], train: Iterable[str]) -> float:
    """The share of held-out lines (blank ones apart, as they stand) that also occur in train. Memory: the held-out
    lines' hashes.
    """
    lines = [_line_key(line) for text in held_out for line in text.splitlines() if line.strip()]
    wanted, seen = set(lines), set[int]()
    for text in train:
        seen.update(key for line in text.splitlines() if (key := _line_key(line)) in wanted)
    return sum(line in seen for line in lines) / len(lines) if lines else 0.0


def _line_key(line: str) -> int:
    return int.from_bytes(blake2b(line.encode(), digest_size=8).digest(), "big")
