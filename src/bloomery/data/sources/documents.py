"""Read files of all formats as a stream of documents, in constant memory."""

import gzip
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Example, to_wire
from bloomery.data.chat.formats import (
    FORMATS,
    ROW_FORMATS,
    RequiredFormat,
    columns_of_examples,
    documents_of,
    format_of_row,
    refuse_text,
    refuse_unknown_roles,
    row_to_example,
)
from bloomery.data.sources import builtin
from bloomery.data.sources.files import SourceFile, list_files, other_splits
from bloomery.data.sources.readers import JSON_KINDS, READERS, BadRow, Value, column_types, open_bytes, text_of
from bloomery.recipe.schema import Data, Source

TEXT_COLUMNS = ("text", "content", "code", "body", "document", "completion")
_IGNORED = -100  # the label that torch and transformers mask
_AGAIN = "copy or download it again"
_REACH = "check its owner, its permissions and the disk"
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids")
MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask", "loss_mask")  # a label of -100 is masked
ATTENTION = "attention_mask"  # 0 for padding


@dataclass(frozen=True)
class Document:
    """A text, an example or pre-tokenized tokens, and its place ("file.jsonl:17").

    `loss_mask`: the tokens to train on, where the row has a mask. `padding`: the number of tokens removed by its
    attention mask; None without one.
    """

    source: str
    content: str | Example = ""
    tokens: tuple[int, ...] | None = None
    loss_mask: tuple[bool, ...] | None = None
    padding: int | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else ""

    @property
    def example(self) -> Example | None:
        return None if isinstance(self.content, str) else self.content

    @cached_property
    def wire(self) -> bytes:
        """The content as bytes, for the hash and the worker process."""
        return (self.content if isinstance(self.content, str) else to_wire(self.content)).encode()


@dataclass
class ReadStats:
    """Counters of a reader."""

    skipped: int = 0
    first_skipped: str = ""
    bytes_read: int = 0  # sizes of the files that are read
    formats: set[str] = field(default_factory=set)  # of conversations and pairs
    padding: int = 0  # padding tokens left out

    def skip(self, bad_row: BadRow) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{bad_row.where}: {bad_row.problem}"


@dataclass(frozen=True)
class Dataset:
    """The files of one source and the format of its rows."""

    path: str
    files: tuple[SourceFile, ...]
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    format: str = "auto"  # the recipe's data.format
    required_format: RequiredFormat = "text"
    builtin: str | None = None
    split: str | None = None  # a split other than train

    @property
    def tokens(self) -> bool:
        """Whether the recipe sets format: tokens."""
        return self.format == "tokens"

    @property
    def bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    @property
    def text_bytes(self) -> float:
        """The approximate bytes of the files that become documents."""
        return self.bytes * builtin.SHARES.get(self.builtin or "", 1.0)


def open_datasets(data: Data, required_format: RequiredFormat = "text") -> list[Dataset]:
    """The datasets of the data section, for an objective's required format. Raises UserError when it names none, too
    many, or missing files.
    """
    given = [name for name in ("path", "builtin", "sources") if getattr(data, name)]
    if len(given) != 1:
        problem = "names no dataset" if not given else f"names {' and '.join(given)}, which exclude each other"
        fix = "set one of data.path, data.sources and data.builtin"
        raise UserError(f"the recipe {problem}", where="data", fix=fix)
    if data.builtin:
        if data.builtin != "stdlib-code" and required_format == "text":
            raise UserError(f"{data.builtin} is not for pretraining", where="data.builtin", fix="use stdlib-code")
        return [
            Dataset(data.builtin, tuple(builtin.stdlib_files()), required_format=required_format, builtin=data.builtin)
        ]
    return [open_dataset(source, required_format) for source in sources_of(data)]


def sources_of(data: Data) -> list[Source]:
    """The recipe's sources; data.path is one source."""
    whole = Source(path=data.path or "", glob=data.glob, format=data.format, columns=data.columns)
    return [] if data.builtin else data.sources or [whole]


def open_dataset(source: Source, required_format: RequiredFormat = "text", *, split: str | None = None) -> Dataset:
    """Raises UserError as `open_datasets` does. `split`: a split other than train."""
    if source.format in FORMATS and required_format == "text":
        problem = f"format {source.format} is not plain text"
        raise UserError(problem, where="data.format", fix="set data.format to text, code, jsonl, ...")
    refuse_unknown_roles(source)
    rows = required_format in ROW_FORMATS
    files = list_files(source, rows=rows) if split is None else other_splits(source, rows=rows).get(split, [])
    path = source.path if split is None else f"{source.path}, split {split}"
    return Dataset(path, tuple(files), source.columns, source.weight, source.format, required_format, split=split)


def read_documents(dataset: Dataset, *, on_error: str, stats: ReadStats) -> Iterator[Document]:
    """Every document in the order of the files. Raises UserError for a row that cannot be read; with on_error "skip"
    counts it in `stats`.
    """
    if dataset.builtin in ("stdlib-chat", "stdlib-pairs"):
        stats.formats.add(dataset.path)
        for example in (builtin.pairs if dataset.builtin == "stdlib-pairs" else builtin.conversations)(dataset.files):
            for one in documents_of(example, dataset.required_format):
                yield Document(one.source, one)
        stats.bytes_read += dataset.bytes
        return
    for file in dataset.files:
        for document in _read_file(file, dataset, stats):
            if isinstance(document, Document):
                if document.example is None and dataset.required_format in ("pairs", "kto"):
                    raise refuse_text(dataset.required_format, document.source)
                yield document
            elif on_error == "skip":
                stats.skip(document)
            else:
                raise document.error()
        stats.bytes_read += file.path.stat().st_size


def _read_file(file: SourceFile, dataset: Dataset, stats: ReadStats) -> Iterator[Document | BadRow]:
    try:
        typed = file.format in ("parquet", "arrow")
        yield from _typed_rows(file, dataset, stats) if typed else _rows(file, dataset, stats)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield BadRow(file.shown, f"is truncated or damaged: {error or 'it ends too early'}", _AGAIN)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(file.path), fix=_REACH) from error


def _typed_rows(file: SourceFile, dataset: Dataset, stats: ReadStats) -> Iterator[Document | BadRow]:
    import pyarrow as pa

    try:
        types = column_types(file.path, file.format)
        read, columns = _typed_reader(file, dataset, types, stats)
        for value in READERS[file.format](file.path, file.shown, columns):
            yield from read(value)
    except UnicodeDecodeError:
        yield BadRow(file.shown, "holds a column whose name is not UTF-8", "rename the column")
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0][:120]  # pyarrow raises OSError without a number for damaged files
        yield BadRow(file.shown, f"is no {file.format} file, or a damaged one: {reason}", _AGAIN)


_Read = Callable[[Value | BadRow], Iterator[Document | BadRow]]


def _typed_reader(
    file: SourceFile, dataset: Dataset, types: dict[str, str], stats: ReadStats
) -> tuple[_Read, list[str] | None]:
    """The reader of the file's rows, and the columns that it needs."""
    columns = None if dataset.required_format == "text" else columns_of_examples(dataset.columns, types)
    first = next(READERS[file.format](file.path, file.shown, columns), None) if columns else None
    found = _format_of(first, dataset, plain=any(types.get(name) == "text" for name in TEXT_COLUMNS))
    if found is not None:
        return _examples(*found, dataset, stats), columns
    kinds = {name: kind for name, kind in types.items() if kind in ("text", "tokens")}
    role, column = _choose(kinds, types, dataset, file.shown)
    masks = _mask_columns(role, types, dataset, stats)
    return lambda value: iter([_document(value, role, column, masks)]), [column, *masks]


def _rows(file: SourceFile, dataset: Dataset, stats: ReadStats) -> Iterator[Document | BadRow]:
    read: _Read | None = None
    for value in READERS[file.format](file.path, file.shown, None):
        row = isinstance(value, Value) and (isinstance(value.content, dict) or dataset.format in FORMATS)
        if row and read is None:
            read = _reader(value, dataset, stats)
        yield from read(value) if row and read is not None else [_document(value, "text", "")]


def _reader(first: Value | BadRow, dataset: Dataset, stats: ReadStats) -> _Read:
    assert isinstance(first, Value)
    found = _format_of(first, dataset, plain=_has_text(first.content))
    if found is not None:
        return _examples(*found, dataset, stats)
    kinds = dict[str, str]()
    for name, value in first.content.items():
        if isinstance(value, str):
            kinds[name] = "text"
        elif isinstance(value, list) and value and all(isinstance(item, int) for item in value[:16]):
            kinds[name] = "tokens"
    role, column = _choose(kinds, first.content, dataset, first.where)
    masks = _mask_columns(role, {name: kind for name, kind in kinds.items() if kind == "tokens"}, dataset, stats)
    return lambda value: iter([_document(value, role, column, masks)])


def _has_text(row: object) -> bool:
    """Whether it has a usual text column."""
    return isinstance(row, dict) and any(isinstance(row.get(name), str) for name in TEXT_COLUMNS)


def _format_of(first: Value | BadRow | None, dataset: Dataset, *, plain: bool) -> tuple[str, dict[str, str]] | None:
    if dataset.format in FORMATS:
        return dataset.format, dataset.columns
    if not isinstance(first, Value) or dataset.tokens or {"text", "tokens"} & set(dataset.columns):
        return None
    return format_of_row(first.content, dataset.columns, required_format=dataset.required_format, plain=plain)


def _examples(format: str, columns: dict[str, str], dataset: Dataset, stats: ReadStats) -> _Read:
    guessed = "" if columns == dataset.columns else f" ({describe_columns(columns)})"
    stats.formats.add(format + guessed)

    def read(value: Value | BadRow) -> Iterator[Document | BadRow]:
        found = value if isinstance(value, BadRow) else row_to_example(value, format, columns)
        if isinstance(found, BadRow):
            yield found
            return
        for example in documents_of(found, dataset.required_format):
            yield Document(example.source, example)

    return read


def _mask_columns(role: str, types: dict[str, str], dataset: Dataset, stats: ReadStats) -> list[str]:
    """The columns of the attention mask and, for fine-tuning, the loss mask of pre-tokenized rows."""
    if role != "tokens":
        return []
    flags = [name for name in types if types[name] == "tokens" or "bool" in types[name]]
    found = next((name for name in MASK_COLUMNS if name in flags and dataset.required_format == "sft"), None)
    masks = [name for name in (ATTENTION, found) if name is not None and name in flags]
    if found is not None:
        stats.formats.add(f"tokens with {found}")
    return masks


def _choose(kinds: dict[str, str], present: Collection[str], dataset: Dataset, where: str) -> tuple[str, str]:
    """Role and name of the column to train on: the recipe's, else a usual name, else the only text."""
    for role, column in ((role, name) for role, name in dataset.columns.items() if role in ("text", "tokens")):
        if column not in present:
            raise _no_column(f"has no column {column!r}", present, where)
        return role, column
    names = {role: [name for name, kind in kinds.items() if kind == role] for role in ("text", "tokens")}
    usual_text = [name for name in TEXT_COLUMNS if name in names["text"]]
    usual_tokens = [name for name in TOKEN_COLUMNS if name in names["tokens"]]
    if usual_text and not dataset.tokens:
        return "text", usual_text[0]
    if usual_tokens or (dataset.tokens and len(names["tokens"]) == 1):
        return "tokens", (usual_tokens or names["tokens"])[0]
    if len(names["text"]) == 1 and not dataset.tokens:
        return "text", names["text"][0]
    meant = (
        "tokens" if dataset.tokens else "text" if dataset.required_format in ("text", "any") else "text or a response"
    )
    column = {"sft": "messages", "pairs": "chosen", "kto": "label"}.get(dataset.required_format, "text")
    refused = _no_column(f"has no column with a usual name for the {meant}", present, where, column)
    if any(name not in present for name in dataset.columns.values()):
        fix = "set data.columns={}: it maps another dataset"
        raise UserError(refused.problem, where=refused.where, fix=fix)
    raise refused


def _no_column(problem: str, present: Collection[str], where: str, role: str = "text") -> UserError:
    names = ", ".join(list(present)[:12])
    return UserError(f"{problem}; it has: {names}", where=where, fix=f"name it: data.columns={{{role}: NAME}}")


def _document(value: Value | BadRow, role: str, column: str, masks: Sequence[str] = ()) -> Document | BadRow:
    if isinstance(value, BadRow):
        return value
    content, where = value.content, value.where
    if column:
        where = f"{where}, field {column}"
        if not isinstance(content, dict) or column not in content:
            return BadRow(where, "is missing")
        content = content[column]
    if role == "text" and isinstance(content, str):
        text = text_of(content, where)
        return text if isinstance(text, BadRow) else Document(value.where, text)
    ids = content if role == "tokens" and isinstance(content, list) else None
    if ids is None or not all(type(item) is int and 0 <= item < 2**32 for item in ids):
        what = JSON_KINDS.get(type(content).__name__, f"a {type(content).__name__}")
        return BadRow(where, f"is {what}, not {'a list of token ids' if role == 'tokens' else 'a text'}")
    found, attended = Document(value.where, tokens=tuple(ids)), None
    for mask in masks:
        flags, where = value.content.get(mask), f"{value.where}, field {mask}"
        if not isinstance(flags, list) or len(flags) != len(ids):
            size = f"{len(flags):,} entries" if isinstance(flags, list) else "no list"
            return BadRow(where, f"has {size} where {column} has {len(ids):,} tokens")
        if not all(isinstance(flag, int) for flag in flags):
            return BadRow(where, "has entries that are neither a number nor true or false")
        if mask == ATTENTION:
            attended = [bool(flag) for flag in flags]
        else:
            none = _IGNORED if mask == "labels" else 0
            found = replace(found, loss_mask=tuple(flag != none for flag in flags))
    return found if attended is None else _kept(found, attended)


def _kept(document: Document, flags: Sequence[bool]) -> Document:
    """The document without the tokens whose flag is false."""
    assert document.tokens is not None
    tokens, loss_mask = tuple(compress(document.tokens, flags)), document.loss_mask
    flagged = None if loss_mask is None else tuple(compress(loss_mask, flags))
    return replace(document, tokens=tokens, loss_mask=flagged, padding=len(document.tokens) - len(tokens))


def unpadded(document: Document, *, pad_id: int | None, ends: Collection[int | None]) -> Document:
    """A pre-tokenized document without padding. Without an attention mask, runs of the padding token at both ends are
    removed; of a padding token that is also BOS or EOS (`ends`) one stays in each run.
    """
    tokens = document.tokens
    if tokens is None or document.padding is not None or pad_id is None or pad_id not in (tokens[:1] + tokens[-1:]):
        return document
    size, spared = len(tokens), int(pad_id in ends)
    front = next((index for index, token in enumerate(tokens) if token != pad_id), size)
    back = next((index for index, token in enumerate(reversed(tokens)) if token != pad_id), size)
    start, stop = max(front - spared, 0), size - max(back - spared, 0) if front < size else 0
    return _kept(document, [start <= index < stop for index in range(size)])


def peek(source: Source) -> tuple[str, dict[str, str]] | None:
    """The format and columns of a source's first row; None for text, tokens and rows that cannot be read. Raises
    UserError without files.
    """
    import pyarrow as pa

    dataset = open_dataset(source, "sft")
    file = dataset.files[0]
    try:
        first = next(READERS[file.format](file.path, file.shown, None), None)
    except (EOFError, OSError, zlib.error, pa.ArrowException):
        return None
    if not isinstance(first, Value) or not isinstance(first.content, dict):
        return None
    return _format_of(first, dataset, plain=_has_text(first.content))


def describe_columns(columns: dict[str, str]) -> str:
    """ "a is the instruction, b the output"."""
    first, *rest = (f"{name} is the {role}" for role, name in columns.items())
    return ", ".join([first, *(words.replace(" is the ", " the ") for words in rest)])


def read_file(path: Path) -> str:
    """One whole text file, for prompts and evaluation. Raises UserError when it is not UTF-8 or too large."""
    file = SourceFile(path, path.name, "code")
    with open_bytes(path):
        pass
    return next(read_documents(Dataset(str(path), (file,)), on_error="stop", stats=ReadStats())).text


__all__ = ["Dataset", "Document", "ReadStats", "open_dataset", "open_datasets", "read_documents", "read_file"]
