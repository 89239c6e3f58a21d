"""Read files of all formats as a stream of documents, in constant memory."""

import shlex
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.data.examples import BadRow, Example, kind_of, text_of, to_wire
from bloomery.data.sources import arithmetic, builtin, shapes
from bloomery.data.sources.detection import columns_of_examples, format_of_row, like_examples
from bloomery.data.sources.files import SourceFile, list_files, other_splits
from bloomery.data.sources.formats import (
    FORMATS,
    ROW_FORMATS,
    ROWS_ALONE,
    RequiredFormat,
    documents_of,
    read_example,
    refuse_text,
    refuse_unknown_roles,
)
from bloomery.data.sources.picture_columns import holds_pictures, with_located
from bloomery.data.sources.plugin_formats import format_plugin, is_row_format, read_rows
from bloomery.data.sources.questions import (
    holds_turns,
    refuse_columns,
    refuse_known_rows,
    two_texts_fix,
)
from bloomery.data.sources.readers import (
    CHARACTERS,
    TABLES,
    Value,
    column_types,
    delimiter_of,
    read_values,
)
from bloomery.data.sources.sampled_cells import sample_cells
from bloomery.data.sources.turns import refuse_media
from bloomery.facts.columns import COLUMN_NAMES, PICTURES, ColumnUse, is_empty
from bloomery.recipe.schema import Data, Source

# Built-in datasets that are made from nothing, and not of Python's files.
MADE_HERE = {arithmetic.NAME: arithmetic, shapes.NAME: shapes}
TEXT_COLUMNS = ("text", "content", "code", "body", "document", "completion")
_IGNORED = -100  # the label that torch and transformers mask
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids")
# A label of -100 is masked.
MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask", "loss_mask")
ATTENTION = "attention_mask"  # 0 for padding
_PEEKED = 100  # rows, until one can be read


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
    first_fix: str = ""  # of the first row skipped
    file: str = ""  # that the last document came from
    bytes_read: int = 0  # sizes of the files that are read
    formats: set[str] = field(default_factory=set)  # of conversations and pairs
    use: ColumnUse = field(default_factory=ColumnUse)
    padding: int = 0  # padding tokens left out

    def skip(self, bad_row: BadRow) -> None:
        self.skipped += 1
        if not self.first_skipped:
            self.first_skipped = f"{bad_row.where}: {bad_row.reason}"
            self.first_fix = bad_row.fix or ""


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
    pictures: Path | None = (
        None  # the folder of those that rows name; None: that of the file or of the dataset
    )

    @property
    def bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    @property
    def text_bytes(self) -> float:
        """The approximate bytes of the files that become documents."""
        if self.builtin in MADE_HERE:
            size: int = MADE_HERE[self.builtin].num_bytes(self.required_format)
            return size
        return self.bytes * builtin.SHARES.get(self.builtin or "", 1.0)


def open_datasets(data: Data, required_format: RequiredFormat = "text") -> list[Dataset]:
    """The datasets of the data section, for an objective's required format. Raises UserError when it names none, too
    many, or missing files.
    """
    named_keys = [name for name in ("path", "builtin", "sources") if getattr(data, name)]
    if len(named_keys) != 1:
        problem = (
            "names no dataset"
            if not named_keys
            else f"names {' and '.join(named_keys)}, which exclude each other"
        )
        fix = "set one of data.path, data.sources and data.builtin"
        raise UserError(f"the recipe {problem}", where="data", fix=fix)
    if data.builtin:
        if data.builtin != "stdlib-code" and required_format == "text":
            raise UserError(
                f"{data.builtin} is not for pretraining",
                where="data.builtin",
                fix="use stdlib-code",
            )
        files = () if data.builtin in MADE_HERE else tuple(builtin.stdlib_files())
        return [Dataset(data.builtin, files, required_format=required_format, builtin=data.builtin)]
    return [open_dataset(source, required_format) for source in sources_of(data)]


def sources_of(data: Data) -> list[Source]:
    """The recipe's sources; data.path is one source."""
    source = Source(
        path=data.path or "",
        glob=data.glob,
        format=data.format,
        columns=data.columns,
        pictures=data.pictures,
    )
    return [] if data.builtin else data.sources or [source]


def open_dataset(
    source: Source, required_format: RequiredFormat = "text", *, split: str | None = None
) -> Dataset:
    """Raises UserError as `open_datasets` does. `split`: a split other than train."""
    if is_row_format(source.format) and required_format == "text":
        problem = f"format {source.format} is not plain text"
        raise UserError(
            problem, where="data.format", fix="set data.format to text, code, jsonl, ..."
        )
    refuse_unknown_roles(source)
    rows = required_format in ROW_FORMATS
    files = (
        list_files(source, rows=rows)
        if split is None
        else other_splits(source, rows=rows).get(split, [])
    )
    path = source.path if split is None else f"{source.path}, split {split}"
    return Dataset(
        path,
        tuple(files),
        source.columns,
        source.weight,
        source.format,
        required_format,
        pictures=None if source.pictures is None else Path(source.pictures),
    )


def read_documents(dataset: Dataset, *, on_error: str, stats: ReadStats) -> Iterator[Document]:
    """Every document in the order of the files. Raises UserError for a row that cannot be read; with on_error "skip"
    counts it in `stats`.
    """
    builtin_examples = _builtin_examples(dataset)
    if builtin_examples is not None:
        stats.formats.add(dataset.path)
        for example in builtin_examples:
            for unit in documents_of(example, dataset.required_format):
                yield Document(unit.source, unit)
        stats.bytes_read += dataset.bytes
        return
    for file in dataset.files:
        stats.file = file.shown
        for document in _read_file(file, dataset, stats):
            if isinstance(document, Document):
                if document.example is None and dataset.required_format in ROWS_ALONE:
                    raise refuse_text(dataset.required_format, document.source)
                yield document
            elif on_error == "skip":
                stats.skip(document)
            else:
                raise document
        stats.bytes_read += file.path.stat().st_size


def _builtin_examples(dataset: Dataset) -> Iterator[Example] | None:
    """The examples of a built-in dataset; None for one of files, also where these are built in."""
    match dataset.builtin:
        case "stdlib-chat":
            return builtin.conversations(dataset.files)
        case "stdlib-pairs":
            return builtin.pairs(dataset.files)
        case str(name) if name in MADE_HERE:
            made: Iterator[Example] = MADE_HERE[name].examples(dataset.required_format)
            return made
    return None


_Read = Callable[[Value], Sequence[Document]]  # of a row; raises BadRow


def _read_file(file: SourceFile, dataset: Dataset, stats: ReadStats) -> Iterator[Document | BadRow]:
    """Rows as the first of them, or the columns of a table; other values as texts."""
    columns = list[str]() or None
    reader = None
    try:
        if file.format in TABLES and format_plugin(dataset.format) is None:
            types = column_types(file.path, file.format)
            if dataset.required_format == "prompts":  # rewards may read any column
                columns = list(types)
            elif dataset.required_format != "text":
                columns = columns_of_examples(dataset.columns, types)
            # Of plain text and tokens the columns that may be these, so that one of them can be chosen.
            first_columns = columns or [name for name in types if _may_be_plain(types[name])]
            first_row = (
                next(read_values(file.path, file.shown, file.format, first_columns), None)
                if first_columns
                else None
            )
            reader, columns = _reader(first_row, types, dataset, stats, columns, file)
            stats.use.unread_columns |= {
                name: None
                for name, kind in types.items()
                if columns is not None and name not in columns and kind != "null"
            }
        for value in read_rows(file.path, file.shown, file.format, columns, format=dataset.format):
            if isinstance(value, BadRow):
                yield value
                continue
            row = isinstance(value.content, dict) or is_row_format(dataset.format)
            if row and reader is None:
                reader, _ = _reader(value, _types(value.content), dataset, stats, None, file)
            try:
                yield from (
                    reader(value) if row and reader is not None else [_document(value, "text", "")]
                )
            except BadRow as bad_row:
                yield bad_row
    except UnicodeDecodeError:
        yield BadRow(file.shown, "holds a column whose name is not UTF-8", "rename the column")
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            fix = "check its owner, its permissions and the disk"
            raise UserError(
                f"cannot be read: {error.strerror}", where=str(file.path), fix=fix
            ) from error
        damage = (
            f"is no {file.format} file, or a damaged one"
            if file.format in TABLES
            else "is truncated or damaged"
        )
        reason = (str(error).splitlines() or ["it ends too early"])[0][:120]
        yield BadRow(file.shown, f"{damage}: {reason}", "copy or download it again")


def _types(row: object) -> dict[str, str]:
    """The kinds of values in the columns of a row, as in `column_types`; "" for others."""

    def holds(value: Any) -> str:
        numbers = (
            isinstance(value, list) and value and all(isinstance(item, int) for item in value[:16])
        )
        return "text" if isinstance(value, str) else "tokens" if numbers else ""

    return {name: holds(value) for name, value in row.items()} if isinstance(row, dict) else {}


def _reader(
    first_row: Value | BadRow | None,
    types: Mapping[str, str],
    dataset: Dataset,
    stats: ReadStats,
    columns: list[str] | None,
    file: SourceFile,
) -> tuple[_Read, list[str] | None]:
    """The reader of rows such as `first_row`, and the columns that it needs; `columns`: those of examples."""
    where = first_row.where if isinstance(first_row, Value) else file.shown
    choice = _format_of(first_row, dataset, types)
    if choice is not None:
        format, columns_by_role = choice
        stats.formats.add(
            format
            if columns_by_role == dataset.columns
            else f"{format} ({describe_columns(columns_by_role)})"
        )

        def read(value: Value) -> list[Document]:
            example = read_example(
                value.content,
                format=format,
                columns=columns_by_role,
                where=value.where,
                use=stats.use,
                guesses=dataset.format in FORMATS and not dataset.columns,
            )
            if holds_pictures(example):
                example = with_located(example, _picture_folders(dataset, file))
            return [
                Document(part.source, part)
                for part in documents_of(example, dataset.required_format)
            ]

        return read, columns
    content = first_row.content if isinstance(first_row, Value) else {}
    role, column = _choose(types, dataset, where, content)
    if role == "text":
        _refuse_media(types, content, where)
    mask = _mask_column(types, dataset, content) if role == "tokens" else None
    masks = [name for name in (ATTENTION, mask) if name is not None and _holds_flags(types, name)]
    if mask is not None:
        stats.formats.add(f"tokens with {mask}")
    used = {column, *masks}
    stats.use.roles |= {role: column, **({} if mask is None else {"loss mask": mask})}

    def read_plain(value: Value) -> list[Document]:
        if isinstance(value.content, dict):
            stats.use.unread_columns |= {
                str(name): None
                for name, item in value.content.items()
                if name not in used and not is_empty(item)
            }
        return [_document(value, role, column, masks)]

    return read_plain, [column, *masks]


def _picture_folders(dataset: Dataset, file: SourceFile) -> tuple[Path, ...]:
    """Where the paths of a file's pictures begin: in its own folder, then in that of the dataset."""
    if dataset.pictures is not None:
        return (dataset.pictures,)
    root = Path(dataset.path)
    return (file.path.parent, root) if root.is_dir() else (file.path.parent,)


def _refuse_media(types: Mapping[str, str], row: object, where: str) -> None:
    """Raises BadRow for pictures next to a text. A text under such a name may be a link, which is no picture here."""
    cells = row if isinstance(row, dict) else {}
    nested = {
        name: True
        for name, kind in types.items()
        if kind.startswith(("list<", "struct<")) or isinstance(cells.get(name), list | dict)
    }
    refuse_media({name: cells.get(name, True) for name in nested}, where)
    pictures = next((name for name in nested if name.lower() in PICTURES), None)
    if pictures is not None:
        problem = (
            f"has {pictures!r} beside a text, and pictures are trained on in conversations alone"
        )
        fix = f"write its rows as messages, or remove {pictures!r} to train on the text alone"
        raise BadRow(where, problem, fix)


def _may_be_plain(kind: str) -> bool:
    return kind in ("text", "tokens") or "bool" in kind


def _holds_flags(types: Mapping[str, str], name: str) -> bool:
    return types.get(name) == "tokens" or "bool" in types.get(name, "")


def _mask_column(types: Mapping[str, str], dataset: Dataset, content: object) -> str | None:
    """The column that masks tokens: labels, or another one of a usual name. Pretraining trains on every token but those
    that labels mask; labels that mask none of the first row are a copy of the tokens.
    """
    names = [name for name in MASK_COLUMNS if _holds_flags(types, name)]
    if dataset.required_format == "any":
        names = [name for name in names if name == "labels" and _masks_any(content, name)]
    elif dataset.required_format != "sft":
        return None
    return next(iter(names), None)


def _masks_any(content: object, mask: str) -> bool:
    flags = content.get(mask) if isinstance(content, dict) else None
    ignored = _IGNORED if mask == "labels" else 0
    return isinstance(flags, list) and any(flag == ignored for flag in flags)


def _format_of(
    first_row: Value | BadRow | None,
    dataset: Dataset,
    types: Mapping[str, str],
    *,
    by_rows: bool = False,
) -> tuple[str, dict[str, str]] | None:
    """The format of the examples in rows such as `first_row`, and their columns; None for text and tokens. `by_rows`:
    no objective is chosen yet, and these rows decide it.
    """
    content = first_row.content if isinstance(first_row, Value) else None
    if isinstance(content, dict) and isinstance(first_row, Value) and not dataset.columns:
        error = refuse_columns(content, first_row.where)
        if error is not None:
            raise error
    if dataset.format in FORMATS:
        return dataset.format, dataset.columns
    if (
        not isinstance(first_row, Value)
        or dataset.format == "tokens"
        or {"text", "tokens"} & set(dataset.columns)
    ):
        return None
    return format_of_row(
        first_row.content,
        dataset.columns,
        required_format=None if by_rows else dataset.required_format,
        plain=_has_text(types),
    )


def _has_text(types: Mapping[str, str]) -> bool:
    """Whether a row has a text column of a usual name. A completion next to what it answers is none."""
    usual = [name for name in TEXT_COLUMNS if types.get(name) == "text"]
    answers = any(name.lower() in COLUMN_NAMES["instruction"] for name in types)
    return any(name != "completion" or not answers for name in usual)


def _choose(
    types: Mapping[str, str], dataset: Dataset, where: str, row: object = None
) -> tuple[str, str]:
    """Role and name of the column to train on: the recipe's, else a usual name, else the only text. Raises UserError
    where there is none, and where several may be meant: no column is chosen then. `row`: the first one, where it was
    read.
    """

    def refused(problem: str, role: str = "text") -> UserError:
        problem = f"the dataset {problem}; it has: {', '.join(list(types)[:12])}"
        return UserError(problem, where=where, fix=f"name it: data.columns={{{role}: NAME}}")

    for role, column in (
        (role, name) for role, name in dataset.columns.items() if role in ("text", "tokens")
    ):
        if column not in types:
            raise refused(f"has no column {column!r}")
        return role, column
    names = {
        role: [name for name, kind in types.items() if kind == role] for role in ("text", "tokens")
    }
    cells = row if isinstance(row, dict) else {}
    reads_answers = dataset.required_format == "sft" and dataset.format == "auto"
    usual_text = [name for name in TEXT_COLUMNS if name in names["text"]]
    if reads_answers:
        known_error = refuse_known_rows(cells, where, has_text=bool(usual_text))
        if known_error is not None:
            raise known_error
    usual_tokens = [name for name in TOKEN_COLUMNS if name in names["tokens"]]
    tokens = dataset.format == "tokens"
    if usual_text and not tokens:
        return "text", usual_text[0]
    if usual_tokens or (tokens and len(names["tokens"]) == 1):
        return "tokens", (usual_tokens or names["tokens"])[0]
    if len(names["text"]) == 1 and not tokens and not holds_turns(cells, names["text"][0]):
        return "text", names["text"][0]
    meant = {
        "text": "text",
        "any": "text",
        "sft": "messages or a response",
        "prompts": "prompts",
    }.get(dataset.required_format)
    role = {"sft": "messages", "pairs": "chosen", "kto": "label", "prompts": "prompt"}.get(
        dataset.required_format, "text"
    )
    error = refused(
        f"has no column with a usual name for the {'tokens' if tokens else meant or 'text or a response'}",
        role,
    )
    if any(name not in types for name in dataset.columns.values()):
        error.fix = "set data.columns={}: it maps another dataset"
    elif len(names["text"]) > 1 and role in ("messages", "text") and not tokens:
        # The first row alone says little where some of its cells are empty.
        longest_cells = sample_cells(dataset.files[0], dataset.format) or cells
        error.fix = two_texts_fix(names["text"], longest_cells, pretrains=role == "text")
    raise error


def _document(value: Value, role: str, column: str, masks: Sequence[str] = ()) -> Document:
    """The document in a column ("": in the value itself). Raises BadRow."""
    content = value.content
    where = value.where
    if column:
        where = f"{where}, field {column}"
        if not isinstance(content, dict) or column not in content:
            raise BadRow(where, "is missing")
        content = content[column]
    if role == "text":
        return Document(value.where, text_of(content, where))
    if not isinstance(content, list) or not all(
        type(item) is int and 0 <= item < 2**32 for item in content
    ):
        raise BadRow(where, f"is {kind_of(content)}, not a list of token ids")
    document = Document(value.where, tokens=tuple(content))
    attended = None
    for mask in masks:
        flags = value.content.get(mask)
        where = f"{value.where}, field {mask}"
        if not isinstance(flags, list) or len(flags) != len(content):
            size = f"{len(flags):,} entries" if isinstance(flags, list) else "no list"
            raise BadRow(where, f"has {size} where {column} has {len(content):,} tokens")
        if not all(isinstance(flag, int) for flag in flags):
            raise BadRow(where, "has entries that are neither a number nor true or false")
        if mask == ATTENTION:
            attended = [bool(flag) for flag in flags]
        else:
            ignored = _IGNORED if mask == "labels" else 0
            document = replace(document, loss_mask=tuple(flag != ignored for flag in flags))
            if mask == "labels" and any(
                label not in (token, _IGNORED) for label, token in zip(flags, content, strict=True)
            ):
                fix = "write labels that are the tokens themselves, or -100 to mask one"
                raise BadRow(where, f"holds other tokens than {column}", fix)
    return document if attended is None else _kept(document, attended)


def _kept(document: Document, flags: Sequence[bool]) -> Document:
    """The document without the tokens whose flag is false."""
    assert document.tokens is not None
    tokens = tuple(compress(document.tokens, flags))
    loss_mask = document.loss_mask
    flagged = None if loss_mask is None else tuple(compress(loss_mask, flags))
    return replace(
        document, tokens=tokens, loss_mask=flagged, padding=len(document.tokens) - len(tokens)
    )


def unpadded(document: Document, *, pad_id: int | None, ends: Collection[int | None]) -> Document:
    """A pre-tokenized document without padding. Without an attention mask, runs of the padding token at both ends are
    removed; of a padding token that is also BOS or EOS (`ends`) one stays in each run.
    """
    tokens = document.tokens
    if (
        tokens is None
        or document.padding is not None
        or pad_id is None
        or pad_id not in (tokens[:1] + tokens[-1:])
    ):
        return document
    size = len(tokens)
    spared = int(pad_id in ends)
    front = next((index for index, token in enumerate(tokens) if token != pad_id), size)
    num_trailing = next(
        (index for index, token in enumerate(reversed(tokens)) if token != pad_id), size
    )
    start = max(front - spared, 0)
    stop = size - max(num_trailing - spared, 0) if front < size else 0
    return _kept(document, [start <= index < stop for index in range(size)])


def peek(
    source: Source, required_format: RequiredFormat | None = None
) -> tuple[str, dict[str, str]] | None:
    """The format and columns of a source's first row that can be read; None for text, and for tokens that are all
    trained on. `required_format`: of the objective; without one, the rows decide it. Raises UserError without files,
    without rows, for files of which no row among the first can be read, and for rows that may mean several things.
    """
    dataset = open_dataset(source, required_format or "sft")
    file = dataset.files[0]
    bad_row: BadRow | None = None
    try:
        values = read_rows(file.path, file.shown, file.format, format=dataset.format)
        for value in islice(values, _PEEKED):
            if isinstance(value, Value):
                if not isinstance(value.content, dict):
                    return None
                return _format_or_tokens(value, dataset, by_rows=required_format is None)
            bad_row = bad_row or value
    except (EOFError, OSError, zlib.error):  # which reading the dataset reports
        return None
    if bad_row is not None:
        raise bad_row
    if len(dataset.files) > 1:
        return None
    raise UserError("the dataset is empty", where=file.shown, fix="add rows, or set data.path")


def _format_or_tokens(
    value: Value, dataset: Dataset, *, by_rows: bool
) -> tuple[str, dict[str, str]] | None:
    """As `peek`, of one row. Tokens with a loss mask are of the format "tokens"."""
    types = _types(value.content)
    choice = _format_of(value, dataset, types, by_rows=by_rows)
    if choice is not None or dataset.required_format not in ("sft", "any"):
        return choice
    role, _ = _choose(types, dataset, value.where, value.content)
    masks = [name for name in MASK_COLUMNS if _holds_flags(types, name)]
    is_masked = role == "tokens" and any(_masks_any(value.content, mask) for mask in masks[:1])
    return ("tokens", {}) if is_masked else None


def column_use(source: Source, required_format: RequiredFormat, *, rows: int) -> ColumnUse:
    """What becomes of the columns of the first rows of a source: nothing where it has no files here. Invalid rows say
    nothing: reading the dataset reports them.
    """
    stats = ReadStats()
    try:
        dataset = open_dataset(source, required_format)
        for _ in islice(_read_file(dataset.files[0], dataset, stats), rows):
            pass
    except UserError:
        return stats.use
    return stats.use


def describe_rows(source: Source, required_format: RequiredFormat) -> str | None:
    """How the rows of a source are read, where that was a choice: the delimiter of a table, columns found by their
    names, and plain text of one column among others. None without a choice. Raises UserError without files.
    """
    dataset = open_dataset(source, required_format)
    file = dataset.files[0]
    parts = list[str]()
    if (
        file.format in ("csv", "tsv")
        and (delimiter := delimiter_of(file.path, file.shown)) is not None
    ):
        parts.append(f"separated by {CHARACTERS[delimiter]}s")
    try:
        values = read_rows(file.path, file.shown, file.format, format=dataset.format)
        first_row = next(values, None)
    except (
        UserError,
        EOFError,
        OSError,
        zlib.error,
    ):  # which reading the dataset reports, of the columns it needs
        first_row = None
    if isinstance(first_row, Value) and isinstance(first_row.content, dict):
        parts += _chosen_columns(first_row, dataset)
    return f"{Path(file.shown).name}: {'; '.join(parts)}" if parts else None


def _chosen_columns(first_row: Value, dataset: Dataset) -> list[str]:
    """The columns that are read of rows such as `first_row`, unless the recipe names them all."""
    types = _types(first_row.content)
    choice = _format_of(first_row, dataset, types)
    if choice is not None:
        guessed = [describe_columns(choice[1])] if choice[1] != dataset.columns else []
        every = dataset.required_format in ("text", "any")
        return [*guessed, *(["every token of them is trained on"] if every and guessed else [])]
    try:
        role, column = _choose(types, dataset, first_row.where, first_row.content)
    except UserError:  # which reading the dataset raises
        return []
    other_columns = [name for name in first_row.content if name != column]
    if (
        role != "text"
        or "text" in dataset.columns
        or (column in TEXT_COLUMNS and not like_examples(other_columns))
    ):
        return []
    unread = (
        f"; not read: {', '.join(other_columns[:4])}{' ...' if len(other_columns) > 4 else ''}"
        if other_columns
        else ""
    )
    lines = [f"column {column!r} is plain text, every token of it is trained on{unread}"]
    example = format_of_row(first_row.content, {}, required_format="sft", plain=False)
    if example is not None:
        roles = ", ".join(f"{role}: {name}" for role, name in example[1].items())
        columns = f" data.columns={shlex.quote('{' + roles + '}')}" if roles else ""
        lines.append(f"to train on responses: data.format={example[0]}{columns}")
    return lines


def describe_columns(columns: dict[str, str]) -> str:
    """ "a is the instruction, b the output"."""
    first_text, *rest = (f"{name} is the {role}" for role, name in columns.items())
    return ", ".join([first_text, *(text.replace(" is the ", " the ") for text in rest)])


def read_file(path: Path) -> str:
    """One whole text file, for prompts and evaluation. Raises UserError when it is not UTF-8 or too large."""
    dataset = Dataset(str(path), (SourceFile(path, path.name, "code"),))
    return next(read_documents(dataset, on_error="stop", stats=ReadStats())).text
