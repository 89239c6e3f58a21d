"""The validation set: chosen by a hash of the content, so that copies of a document stay in one split."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.sources.documents import Dataset, Document, ReadStats, open_dataset, read_documents, sources_of
from bloomery.data.sources.files import other_splits, validation_split
from bloomery.data.sources.formats import ROW_FORMATS, RequiredFormat
from bloomery.hub import PREFIX, data_place
from bloomery.recipe.schema import Data, Source

_SALT = b"exam"
AUTO = "auto"
_USUAL_SHARE = 0.01  # where a dataset has no validation split


def content_key(document: Document) -> int:
    """64 bits of the content. For KTO of the prompt, so that all responses to a prompt stay in one split."""
    example = document.example
    if example is not None and example.kind == "kto" and example.prompt:
        content = repr(example.prompt).encode()
    else:
        content = document.wire if document.tokens is None else np.array(document.tokens, np.uint32).tobytes()
    return int.from_bytes(blake2b(content, digest_size=8, salt=_SALT).digest(), "big")


@dataclass(frozen=True)
class Splitter:
    """Documents with a key below `threshold` are the validation set. Train documents in `held` are left out."""

    threshold: int
    held: frozenset[int] = frozenset()

    def keeps(self, key: int) -> bool:
        return key < self.threshold


def validation_of(data: Data, required_format: RequiredFormat = "text") -> tuple[float, list[Dataset]]:
    """`data.validation`: a share, or datasets. Those are a path, a split of the sources that have it, or with auto the
    validation split of each source. Raises UserError for a share outside 0 to 1, and for no such path or split.
    """
    asked = data.validation
    if asked != AUTO:
        with suppress(ValueError):  # not a number
            percent = isinstance(asked, str) and asked.rstrip().endswith("%")
            share = float(asked.rstrip("% ") if isinstance(asked, str) else asked) / (100 if percent else 1)
            if not 0 <= share < 1:
                fix = "set a share such as 5%, 0, a path, or the name of a split of the dataset"
                raise UserError(f"{asked} is not a share of the dataset", where="data.validation", fix=fix)
            return share, []
    splits = [(source, other_splits(source, rows=required_format in ROW_FORMATS)) for source in sources_of(data)]
    if asked == AUTO:
        own = [(source, validation_split(names)) for source, names in splits]
        held = [open_dataset(source, required_format, split=split) for source, split in own if split is not None]
        return (0.0 if held else _USUAL_SHARE), held
    name = str(asked)
    held = [open_dataset(source, required_format, split=name) for source, names in splits if name in names]
    if not held and not data_place(name).exists() and not name.startswith(PREFIX):
        present = sorted({split for _, names in splits for split in names})
        others = f"one of its splits: {', '.join(present)}" if present else "the path of a file or folder"
        problem, where = "no such file, folder or split of the dataset", f"data.validation: {name}"
        raise UserError(problem, where=where, fix=f"set a share such as 1%, or {others}")
    whole = Source(path=name, glob=data.glob, format=data.format, columns=data.columns)
    return 0.0, held or [open_dataset(whole, required_format)]


def validation_datasets(data: Data, required_format: RequiredFormat = "text") -> list[Dataset]:
    """The datasets of `validation_of`, none when it is a share."""
    return validation_of(data, required_format)[1]


def make_splitter(datasets: Iterable[Dataset], data: Data, required_format: RequiredFormat = "text") -> Splitter:
    """Reads until both splits have a document, about 1 / share documents; a tiny dataset is read whole.

    From two different documents on, neither split is empty: the lowest key is always validation, the highest never.
    """
    share, held = validation_of(data, required_format)
    if held:
        return Splitter(0, frozenset().union(*(_held_keys(dataset, on_error=data.on_error) for dataset in held)))
    threshold = round(share * 2**64)
    lowest, highest = 2**64, -1
    for dataset in datasets if threshold else ():
        for document in read_documents(dataset, on_error=data.on_error, stats=ReadStats()):
            key = content_key(document)
            lowest, highest = min(lowest, key), max(highest, key)
            if lowest < threshold <= highest:
                return Splitter(threshold)
    if lowest >= highest:
        return Splitter(0)
    return Splitter(min(max(threshold, lowest + 1), highest))


def _held_keys(held: Dataset, *, on_error: str) -> frozenset[int]:
    """Raises UserError for an empty validation set."""
    stats = ReadStats()
    documents = read_documents(held, on_error=on_error, stats=stats)
    keys = frozenset(content_key(document) for document in documents if document.content or document.tokens)
    if not keys:
        skipped = f": {counted(stats.skipped, 'rows')} skipped, the first: {stats.first_skipped}"
        fix = "set data.validation to another file, to a share such as 1%, or to 0 for no validation set"
        problem = f"the validation set is empty{skipped if stats.skipped else ''}"
        raise UserError(problem, where=f"data.validation: {held.path}", fix=fix)
    return keys


def repeated_lines(validation: Iterable[str], train: Iterable[str]) -> float:
    """The share of validation lines, without blank ones, that also occur in train. Keeps their hashes in memory."""
    lines = [_line_key(line) for text in validation for line in text.splitlines() if line.strip()]
    keys, repeated = set(lines), set[int]()
    for text in train:
        repeated.update(key for line in text.splitlines() if (key := _line_key(line)) in keys)
    return sum(line in repeated for line in lines) / len(lines) if lines else 0.0


def _line_key(line: str) -> int:
    return int.from_bytes(blake2b(line.encode(), digest_size=8).digest(), "big")
