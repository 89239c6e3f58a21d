"""One reader per file format: a path to a stream of values, in constant memory."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast, final

from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_at_most
from bloomery.core.units import MIB, counted, format_bytes
from bloomery.data.examples import MAX_BYTES, BadRow, too_long
from bloomery.data.sources.task_sets import TASK_SETS, task_rows
from bloomery.facts.columns import known_columns

# Bytes of white space in one run: a compressed file of some kilobytes may expand to hours of it.
BLANK = MIB
COMPRESSED = (".gz", ".zst")
WHOLE = 4 * MIB  # of a text that is one document, which every tokenizer can encode in memory


@dataclass(frozen=True)
class Value:
    """A row or a whole text, and its place."""

    where: str
    content: Any


def read_values(
    path: Path, name: str, format: str, columns: list[str] | None = None
) -> Iterator[Value | BadRow]:
    """The rows or texts of a file, whose `name` is in messages. `columns`: those to read of a parquet or Arrow file."""
    if format in TABLES:
        yield from _table_rows(path, name, format, columns)
        return
    if format == TASK_SETS:
        for number, row in enumerate(task_rows(path), 1):
            yield Value(f"{name}, task {number}", row)
        return
    with open_bytes(path) as stream:
        try:
            yield from STREAMS[format](stream, name)
        except BadRow as bad_row:  # text after it is not read
            yield bad_row


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of `path`, buffered. Raises UserError when it cannot be opened."""
    with open_input(path) as raw:
        if path.suffix == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif path.suffix == ".zst":
            import pyarrow as pa

            yield cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), MIB))
        else:
            yield raw


def lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes | BadRow]]:
    """Lines and their places; one longer than MAX_BYTES is a BadRow. Raises BadRow after a run of white space longer
    than BLANK.
    """
    number = run = 0
    while line := stream.readline(MAX_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        run = run + len(line) if line.isspace() else 0
        if run > BLANK:
            raise blank(where)
        if len(line) > MAX_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MIB)) and not rest.endswith(b"\n"):
                pass
            yield where, too_long(where, "a line")
        else:
            yield where, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def blank(where: str) -> BadRow:
    problem = f"more than {format_bytes(BLANK)} of white space in a row"
    return BadRow(where, problem, "remove it; text after it is not read")


def decode(data: bytes, where: str, *, of_line: bool = False) -> str:
    """UTF-8 text. Raises BadRow that names what else the bytes look like. `of_line`: `where` names the line."""
    if (encoding := _wide_encoding(data)) is not None:
        raise BadRow(
            where,
            f"is {encoding}, not UTF-8",
            f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW",
        )
    if b"\0" in data[:MIB]:
        fix = "leave it out with data.glob, or set data.on_error=skip"
        raise BadRow(where, "is binary, not text: it has NUL bytes", fix)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        location = f"at byte {error.start + 1} of the line" if of_line else f"in line {line}"
        raise _not_utf8(where, data[error.start], location) from error


def _wide_encoding(data: bytes) -> str | None:
    """UTF-16 or UTF-32, by its byte order mark or, of Latin letters, by every other byte."""
    if data.startswith(codecs.BOM_UTF32_LE):
        return "UTF-32"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    sample = data[:4096]
    even_zeros = sample[0::2].count(0)
    odd_zeros = sample[1::2].count(0)
    if (
        len(sample) >= 8
        and max(even_zeros, odd_zeros) > 0.4 * len(sample)
        and min(even_zeros, odd_zeros) <= 1
    ):
        return "UTF-16LE" if odd_zeros > even_zeros else "UTF-16BE"
    return None


def _not_utf8(where: str, byte: int, location: str) -> BadRow:
    """A byte of another encoding; what Excel and Windows write is named with its letter."""
    letter = bytes([byte]).decode("cp1252", "replace")
    looks = (
        f', "{letter}" in Windows-1252, as Excel writes it'
        if letter.isprintable() and letter.isascii() is False
        else ""
    )
    fix = (
        "convert it (iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW; in Excel: save as CSV UTF-8), "
        "or set data.on_error=skip"
    )
    return BadRow(where, f"is not UTF-8: byte 0x{byte:02x} {location}{looks}", fix)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(error.doc.rstrip())
        hint = (
            ", where it ends: is a closing brace missing?"
            if at_end and error.doc.lstrip()[:1] in ("{", "[")
            else ""
        )
        return f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}{hint}"
    return f"is not JSON: {error}".partition(";")[0]  # without Python's advice on long numbers


def _value(
    data: bytes, where: str, parse: Callable[[str], Any] = str, *, of_line: bool = False
) -> Value | BadRow:
    """The decoded text, parsed."""
    try:
        return Value(where, parse(decode(data, where, of_line=of_line)))
    except BadRow as bad_row:
        return bad_row
    except (ValueError, RecursionError) as error:
        return BadRow(where, _reason(error))


def read_text(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """The file as one text. A longer one than WHOLE comes in pieces cut at ends of lines."""
    data = read_at_most(stream, MAX_BYTES + 1)
    if len(data) <= WHOLE:
        yield _value(data.removeprefix(codecs.BOM_UTF8), name)
        return
    part = run = 0
    while data:
        part += 1
        where = f"{name}, part {part}"
        end = (
            len(data)
            if len(data) <= WHOLE
            else data.rfind(b"\n", 0, WHOLE) + 1 or data.find(b"\n") + 1
        )
        if end > BLANK // 8 and data[:end].isspace() and (run := run + end) > BLANK:
            raise blank(where)
        if end == 0 and len(data) > MAX_BYTES:
            raise too_long(where, "a line")
        end = end or len(data)
        yield _value(data[:end].removeprefix(codecs.BOM_UTF8), where)
        data = data[end:]
        if len(data) < WHOLE:
            data += stream.read(MAX_BYTES + 1 - len(data))


def read_code(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """The file as one text, whatever its size up to MAX_BYTES."""
    data = read_at_most(stream, MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise too_long(name, "the file")
    yield _value(data.removeprefix(codecs.BOM_UTF8), name)


@final
class _Rejoined:
    """A stream whose beginning was already read. As much of a BinaryIO as the readers of lines and of JSON use."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int) -> bytes:
        piece = self._head[:size]
        self._head = self._head[size:]
        return piece or self._stream.read(size)

    def readline(self, limit: int) -> bytes:
        end = self._head.find(b"\n") + 1
        line = self._head[: end or None][:limit]
        self._head = self._head[len(line) :]
        return (
            line if end or len(line) == limit else line + self._stream.readline(limit - len(line))
        )


def read_jsonl(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """One value a line; blank lines are skipped. A file that is one JSON list is read as such, row by row."""
    head = stream.read(4096)
    rejoined = cast(BinaryIO, _Rejoined(head, stream))
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        yield from read_json(rejoined, name)
        return
    for where, line in lines(rejoined, name):
        if isinstance(line, BadRow):
            yield line
        elif not line.isspace():
            yield _value(line.rstrip(b"\r\n"), where, _DECODER.decode, of_line=True)


_TURNS = ({"role", "content"}, {"from", "value"})  # keys of a message


def read_json(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """A list of rows, rows one after the other, or one object that holds a list of rows under some key.

    Rows of a list are parsed one by one. Raises BadRow for a row that cannot be parsed, as its end is unknown.
    """
    for value, is_listed in _json_values(stream, name):
        if isinstance(value.content, dict) and any(turn <= value.content.keys() for turn in _TURNS):
            fix = 'write each conversation as a row: {"messages": [...]}'
            raise BadRow(
                value.where, "is one message, not a row: the list is a conversation of its own", fix
            )
        rows = _only_list(value.content, is_listed=is_listed)
        yield from [value] if rows is None else (Value(value.where, row) for row in rows)


# Names of columns of rows: an object with one of them next to its list is a row.
_ROW_NAMES = (known_columns() | {"text", "content"}) - {"label"}


def _only_list(content: object, *, is_listed: bool) -> list[Any] | None:
    """The rows under the only key with a list of objects, such as {"version": "1", "data": [...]}. Turns of a
    conversation are not rows, and an object that is in a list (`is_listed`) is one itself.
    """
    if not isinstance(content, dict) or is_listed:
        return None
    lists = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    if len(lists) != 1:
        return None
    [(list_name, rows)] = lists.items()
    others = [str(name).lower() for name in content if str(name) != list_name]
    is_row = any(name in _ROW_NAMES for name in [*others, list_name.lower() if others else ""])
    is_row = is_row or list_name.lower() == "segments"  # Axolotl's input_output
    return None if is_row or {"role", "from"} & rows[0].keys() else rows


def _json_values(stream: BinaryIO, name: str) -> Iterator[tuple[Value, bool]]:
    """Values of a list or of a plain sequence, each with whether it is in a list.

    A value that does not parse may be incomplete: more is read, twice as
    much each time.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    buffer = ""
    line = 1
    at_end = False
    run = 0
    brackets = ""
    while True:
        stripped = buffer.lstrip(" \t\r\n,[]")
        run = 0 if stripped else run + len(buffer)
        if run > BLANK:
            raise blank(f"{name}:{line}")
        between = buffer[: len(buffer) - len(stripped)]
        line += between.count("\n")
        buffer = stripped
        where = f"{name}:{line}"
        # Brackets are those of one list around all rows: what is in a second one is no row, but a part of one.
        brackets += re.sub(r"[^][]", "", between)[:8]
        if "[" in brackets[1:]:
            fix = 'name the list of each row, such as {"messages": [...]}'
            raise BadRow(where, "is a list of lists, and a row is an object with columns", fix)
        try:
            content, end = _DECODER.raw_decode(buffer) if buffer else (None, 0)
        except (ValueError, RecursionError) as error:
            if at_end or isinstance(error, RecursionError):
                raise BadRow(where, _reason(error)) from error
            content = None
            end = 0
        if end and (at_end or end < len(buffer)):
            yield Value(where, content), bool(brackets)
            line += buffer.count("\n", 0, end)
            buffer = buffer[end:]
        elif at_end:
            return
        elif len(buffer) > MAX_BYTES:
            raise too_long(where, "a value")
        else:
            chunk = stream.read(max(MIB, len(buffer)))
            at_end = not chunk
            if line == 1 and not buffer and (encoding := _wide_encoding(chunk)) is not None:
                raise BadRow(
                    name,
                    f"is {encoding}, not UTF-8",
                    f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW",
                )
            try:
                buffer += decoder.decode(chunk, final=at_end)
            except UnicodeDecodeError as error:
                number = line + buffer.count("\n") + error.object.count(b"\n", 0, error.start)
                raise _not_utf8(name, error.object[error.start], f"in line {number}") from error


DELIMITERS = (",", ";", "\t", "|")
_SNIFFED = 64 * 1024  # characters of a CSV file, from which the delimiter is chosen


def read_csv(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """Rows of a CSV file with a header, by the delimiter that fits its first rows. Raises BadRow as `decode` does."""
    csv.field_size_limit(MAX_BYTES)
    delimiter, decoded = _csv_lines(stream, name)
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    try:
        header = next((row for row in rows if row), [])
        odd = (
            re.fullmatch(r"\w+([^\w\s.,()/-])\w+(\1\w+)*", header[0]) if len(header) == 1 else None
        )
        if odd is not None:
            problem = f"has one column, {header[0]!r}: the delimiter is none of comma, semicolon, tab and vertical bar"
            raise BadRow(
                f"{name}:{rows.line_num}",
                problem,
                f"write the file again with a comma instead of {odd[1]}",
            )
        if repeated := [column for column in header if column and header.count(column) > 1]:
            raise BadRow(
                f"{name}:{rows.line_num}",
                f"has the column {repeated[0]!r} twice",
                "rename one of them",
            )
        for row in rows if header else ():
            where = f"{name}:{rows.line_num}"
            if row and len(row) != len(header):
                problem = f"has {counted(len(row), 'fields')} where the header names {len(header)}"
                character = CHARACTERS[delimiter]
                fix = f"put a text that holds a {character} in double quotes, or set data.on_error=skip"
                yield BadRow(where, f"{problem} (separated by {character})", fix)
            elif row:
                yield Value(where, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        problem = f"is not CSV: {error}; is a quote unbalanced?"
        raise BadRow(f"{name}:{rows.line_num}", problem) from error


CHARACTERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}


def _csv_lines(stream: BinaryIO, name: str) -> tuple[str, Iterator[str]]:
    """The delimiter, and the decoded lines from the header on. Excel may write `sep=;` above it."""

    def decoded() -> Iterator[str]:
        for where, line in lines(stream, name):
            if isinstance(line, BadRow):
                raise line
            yield decode(line, where, of_line=True)

    text = decoded()
    head = list[str]()
    size = 0
    for line in text:
        head.append(line)
        size += len(line)
        if size >= _SNIFFED:
            break
    usual_delimiter = "\t" if ".tsv" in Path(name).suffixes[-2:] else ","
    stated = re.fullmatch(r"sep=(.)\s*", head[0]) if head else None
    if stated is not None and stated[1] in DELIMITERS:
        # An empty line instead of `sep=` keeps the numbers of those below.
        return stated[1], chain(["\n"], head[1:], text)
    return find_delimiter(head, usual_delimiter, cut=size >= _SNIFFED), chain(head, text)


def find_delimiter(head: Sequence[str], usual_delimiter: str = ",", *, cut: bool = False) -> str:
    """The delimiter of a table by its first lines: of those that split the header, the one with which most rows have as
    many fields as it. It is `usual_delimiter`, unless another does better. `cut`: the last of these rows may be
    incomplete.
    """
    best = usual_delimiter
    best_score = 0.0
    for delimiter in (
        usual_delimiter,
        *(candidate for candidate in DELIMITERS if candidate != usual_delimiter),
    ):
        try:
            rows = [row for row in csv.reader(head, delimiter=delimiter) if row]
        except csv.Error:
            continue
        header, *data_rows = rows[: len(rows) - cut] or [[]]
        score = (
            sum(len(row) == len(header) for row in data_rows) / len(data_rows) if data_rows else 1.0
        )
        if (
            len(header) > 1
            and score > best_score
            and (delimiter == usual_delimiter or score >= 0.5)
        ):
            best = delimiter
            best_score = score
    return best


def delimiter_of(path: Path, name: str) -> str | None:
    """The delimiter of a CSV or TSV file where it is not the one of its suffix. None also where it cannot be read."""
    try:
        with open_bytes(path) as stream:
            delimiter, _ = _csv_lines(stream, name)
    except (UserError, OSError, EOFError, zlib.error):
        return None
    return None if delimiter == ("\t" if ".tsv" in path.suffixes[-2:] else ",") else delimiter


STREAMS: dict[str, Callable[[BinaryIO, str], Iterator[Value | BadRow]]] = {
    "text": read_text,
    "code": read_code,
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_csv,
}
TABLES = ("parquet", "arrow")  # rows with types


@contextmanager
def _open_table(
    path: Path, format: str, columns: list[str] | None
) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema, and batches of rows: pages of parquet; an Arrow stream (what datasets writes) or file, memory-mapped.
    Raises OSError without a number for a damaged file, as pyarrow does for some.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if format == "parquet":
            with pq.ParquetFile(
                path, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True
            ) as file:
                yield file.schema_arrow, file.iter_batches(batch_size=64, columns=columns)
            return
        with pa.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = (
                map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
            )
            yield reader.schema, (batch.select(columns) if columns else batch for batch in batches)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def _table_rows(
    path: Path, name: str, format: str, columns: list[str] | None
) -> Iterator[Value | BadRow]:
    with _open_table(path, format, columns) as (schema, batches):
        for column in columns or schema.names:
            field = schema.field(column)
            if b"ARROW:extension:name" in (field.metadata or {}) or hasattr(
                field.type, "extension_name"
            ):
                raise UserError(
                    f"column has the extension type {field.type}, which is not supported",
                    where=f"{name}, column {column}",
                    fix="name another column: data.columns={text: NAME}",
                )
        row = 0
        for batch in batches:
            for start in range(0, batch.num_rows, 64):
                part = batch.slice(start, 64)
                try:
                    contents = part.to_pylist()
                except (
                    UnicodeDecodeError
                ):  # pyarrow does not check the bytes of text columns before
                    contents = [
                        _row(part, index, f"{name}, row {row + index + 1}")
                        for index in range(part.num_rows)
                    ]
                for content in contents:
                    row += 1
                    yield (
                        content
                        if isinstance(content, BadRow)
                        else Value(f"{name}, row {row}", content)
                    )


def _row(batch: Any, index: int, where: str) -> Any:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        problem = f"holds text that is not UTF-8: byte 0x{error.object[error.start]:02x}"
        return BadRow(where, problem, "write the column again as UTF-8, or set data.on_error=skip")


def column_types(path: Path, format: str) -> dict[str, str]:
    """Columns of a parquet or Arrow file and what they hold: "text", "tokens" or the type's own name."""
    with _open_table(path, format, None) as (schema, _):
        return {field.name: _holds(field.type) for field in schema}


def _holds(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return "tokens" if lists and types.is_integer(kind.value_type) else str(kind)
