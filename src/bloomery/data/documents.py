"""Files of many formats to a stream of documents, in constant memory."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.data import builtin
from bloomery.data.files import SourceFile, list_files
from bloomery.data.formats import READERS, Value, column_types
from bloomery.data.streams import Flaw, open_bytes, text_of
from bloomery.errors import UserError
from bloomery.recipe.schema import Data, Source

TEXT_COLUMNS = ("text", "content", "code", "body", "document", "completion")
_AGAIN = "copy or download it again"
_REACH = "check its owner, its permissions and the disk"
_KINDS = {"NoneType": "null", "int": "a number", "float": "a number", "bool": "true or false", "dict": "an object"}
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids")


@dataclass(frozen=True)
class Document:
    """One text, or tokens that somebody else made, and where it stood ("file.jsonl:17")."""

    source: str
    text: str = ""
    tokens: tuple[int, ...] | None = None


@dataclass
class Tally:
    """What a reader has met so far."""

    skipped: int = 0
    first_skipped: str = ""
    bytes_read: int = 0  # sizes of the files that are behind it

    def skip(self, flaw: Flaw) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{flaw.where}: {flaw.problem}"


@dataclass(frozen=True)
class Corpus:
    """The files of one source and how its rows are read."""

    path: str
    files: tuple[SourceFile, ...]
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    tokens: bool = False  # the recipe says that it holds tokens

    @property
    def bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)


def open_corpora(data: Data) -> list[Corpus]:
    """What the data section means on this machine. Raises UserError when it names nothing, too much, or files that
    are not there.
    """
    given = [
        name for name, value in (("path", data.path), ("builtin", data.builtin), ("sources", data.sources)) if value
    ]
    if len(given) != 1:
        problem = "names no text" if not given else f"names {' and '.join(given)}, which exclude each other"
        raise UserError(
            f"the recipe {problem}", where="data", remedy="set one of data.path, data.sources and data.builtin"
        )
    if data.builtin:
        if data.builtin != "stdlib-code":
            raise UserError(f"{data.builtin} is not for pretraining", where="data.builtin", remedy="use stdlib-code")
        return [Corpus("stdlib-code", tuple(builtin.stdlib_files()))]
    whole = Source(path=data.path or "", glob=data.glob, format=data.format, columns=data.columns)
    return [open_corpus(source) for source in data.sources or [whole]]


def open_corpus(source: Source) -> Corpus:
    unknown = set(source.columns) - {"text", "tokens"}
    if unknown:
        raise UserError(
            f"no such role: {sorted(unknown)[0]}", where="data.columns", remedy="write {text: NAME} or {tokens: NAME}"
        )
    return Corpus(source.path, tuple(list_files(source)), source.columns, source.weight, source.format == "tokens")


def read_documents(corpus: Corpus, *, on_error: str, tally: Tally) -> Iterator[Document]:
    """Every document in the order of the files. A row that cannot be read raises UserError, or is counted in `tally`
    with on_error "skip".
    """
    for file in corpus.files:
        for found in _read_file(file, corpus):
            if isinstance(found, Document):
                yield found
            elif on_error == "skip":
                tally.skip(found)
            else:
                raise found.error()
        tally.bytes_read += file.path.stat().st_size


def _read_file(file: SourceFile, corpus: Corpus) -> Iterator[Document | Flaw]:
    try:
        yield from _typed_rows(file, corpus) if file.format in ("parquet", "arrow") else _rows(file, corpus)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Flaw(file.name, f"is truncated or damaged: {error or 'it ends too early'}", _AGAIN)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(file.path), remedy=_REACH) from error


def _typed_rows(file: SourceFile, corpus: Corpus) -> Iterator[Document | Flaw]:
    import pyarrow as pa

    try:
        role, column = _typed_column(file, corpus)
        for value in READERS[file.format](file.path, file.name, [column]):
            yield _document(value, role, column)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0][:120]  # pyarrow raises OSError without a number for damaged files
        yield Flaw(file.name, f"is no {file.format} file, or a damaged one: {reason}", _AGAIN)


def _rows(file: SourceFile, corpus: Corpus) -> Iterator[Document | Flaw]:
    chosen: tuple[str, str] | None = None
    for value in READERS[file.format](file.path, file.name, None):
        if isinstance(value, Value) and isinstance(value.content, dict):
            chosen = chosen or _column(value, corpus)
            yield _document(value, *chosen)
        else:
            yield _document(value, "text", "")


def _typed_column(file: SourceFile, corpus: Corpus) -> tuple[str, str]:
    types = column_types(file.path, file.format)
    return _choose({name: kind for name, kind in types.items() if kind in ("text", "tokens")}, types, corpus, file.name)


def _column(row: Value, corpus: Corpus) -> tuple[str, str]:
    kinds = {}
    for name, value in row.content.items():
        if isinstance(value, str):
            kinds[name] = "text"
        elif isinstance(value, list) and value and all(isinstance(item, int) for item in value[:16]):
            kinds[name] = "tokens"
    return _choose(kinds, row.content, corpus, row.where)


def _choose(kinds: dict[str, str], present: object, corpus: Corpus, where: str) -> tuple[str, str]:
    """Role and name of the column that is learned: what the recipe says, else a usual name, else the only text."""
    for role, column in corpus.columns.items():
        if column not in present:  # type: ignore[operator]
            raise _no_column(f"has no column {column!r}", present, where)
        return role, column
    names = {role: [name for name, kind in kinds.items() if kind == role] for role in ("text", "tokens")}
    usual_text = [name for name in TEXT_COLUMNS if name in names["text"]]
    usual_tokens = [name for name in TOKEN_COLUMNS if name in names["tokens"]]
    if usual_text and not corpus.tokens:
        return "text", usual_text[0]
    if usual_tokens or (corpus.tokens and len(names["tokens"]) == 1):
        return "tokens", (usual_tokens or names["tokens"])[0]
    if len(names["text"]) == 1 and not corpus.tokens:
        return "text", names["text"][0]
    raise _no_column("has no column that is plainly the " + ("tokens" if corpus.tokens else "text"), present, where)


def _no_column(problem: str, present: object, where: str) -> UserError:
    names = ", ".join(str(name) for name in list(present)[:12])  # type: ignore[call-overload]
    return UserError(f"{problem}; it has: {names}", where=where, remedy="name it: data.columns={text: NAME}")


def _document(value: Value | Flaw, role: str, column: str) -> Document | Flaw:
    if isinstance(value, Flaw):
        return value
    content, where = value.content, value.where
    if column:
        where = f"{where}, field {column}"
        if not isinstance(content, dict) or column not in content:
            return Flaw(where, "is missing")
        content = content[column]
    if role == "text" and isinstance(content, str):
        text = text_of(content, where)
        return text if isinstance(text, Flaw) else Document(value.where, text)
    if (
        role == "tokens"
        and isinstance(content, list)
        and all(type(item) is int and 0 <= item < 2**32 for item in content)
    ):
        return Document(value.where, tokens=tuple(content))
    what = _KINDS.get(type(content).__name__, f"a {type(content).__name__}")
    return Flaw(where, f"is {what}, not {'a list of token ids' if role == 'tokens' else 'a text'}")


def read_file(path: Path) -> str:
    """One whole text file, for prompts and examinations. Raises UserError when it is no UTF-8 text of a size that
    fits.
    """
    file = SourceFile(path, path.name, "code")
    with open_bytes(path):
        pass
    return next(read_documents(Corpus(str(path), (file,)), on_error="stop", tally=Tally())).text


__all__ = ["Corpus", "Document", "Tally", "open_corpora", "open_corpus", "read_documents", "read_file"]
