"""One reader per file format: a path to a stream of values, in constant memory."""

import codecs
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from bloomery.core.errors import UserError
from bloomery.core.files import open_input
from bloomery.core.units import MIB, format_bytes

MAX_BYTES = 64 * MIB  # of one document, line or field
BLANK = MIB  # of white space in one run: a compressed file of some kilobytes may expand to hours of it
COMPRESSED = (".gz", ".zst")
JSON_KINDS = {"NoneType": "null", "int": "a number", "float": "a number", "bool": "true or false", "dict": "an object",
              "list": "a list", "str": "a text"}  # fmt: skip
_PREDICATES = ("is ", "has ", "holds ", "begins ", "ends ")  # first words of problems whose subject is their place
_CHUNK = 1024  # compressed bytes at a time: zstd expands one to at most some 30 MB


@dataclass(frozen=True)
class BadRow:
    """Why a document cannot be read: an error with data.on_error stop, a count with skip."""

    where: str
    problem: str
    fix: str = "correct it, or set data.on_error to skip"

    def error(self) -> UserError:
        """The subject of a problem that has none ("is missing") is the innermost part of its place."""
        subject = Path(self.where.rpartition(", ")[2]).name + " " if self.problem.startswith(_PREDICATES) else ""
        return UserError(subject + self.problem, where=self.where, fix=self.fix)


class Damaged(EOFError):
    """A compressed file ends in the middle, or is none."""


class _Zstd(io.RawIOBase):
    """A zstd file as a raw stream. The library's own reader does not report a truncated last frame; this one raises
    Damaged.
    """

    def __init__(self, source: BinaryIO) -> None:
        import zstandard

        self._library, self._source = zstandard, source
        self._frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
        self._ready, self._unused, self._inside = memoryview(b""), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, target: object) -> int:
        view = memoryview(cast(bytearray, target))
        while not self._ready:
            chunk = self._unused or self._source.read(_CHUNK)
            if not chunk:
                if self._inside:
                    raise Damaged("it ends too early")
                return 0
            self._decompress(chunk)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, chunk: bytes) -> None:
        self._inside, self._unused = True, b""
        try:
            self._ready = memoryview(self._frame.decompress(chunk))
        except self._library.ZstdError as error:
            raise Damaged(str(error)) from error
        if self._frame.eof:
            self._unused, self._inside = self._frame.unused_data, False
            self._frame = self._library.ZstdDecompressor(max_window_size=2**27).decompressobj()

    def close(self) -> None:
        self._source.close()
        super().close()


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of `path`, buffered. Raises UserError when it cannot be opened."""
    with open_input(path) as raw:
        if path.suffix == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif path.suffix == ".zst":
            yield cast(BinaryIO, io.BufferedReader(_Zstd(raw), MIB))
        else:
            yield raw


def lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes | BadRow]]:
    """Numbered lines; one longer than MAX_BYTES is a BadRow. Reading ends after a
    run of white space longer than BLANK."""
    number = run = 0
    while line := stream.readline(MAX_BYTES + 1):
        number += 1
        run = run + len(line) if line.isspace() else 0
        if run > BLANK:
            yield number, blank(f"{name}:{number}")
            return
        if len(line) > MAX_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MIB)) and not rest.endswith(b"\n"):
                pass
            yield number, too_long(f"{name}:{number}", "a line")
            continue
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def blank(where: str) -> BadRow:
    problem = f"more than {format_bytes(BLANK)} of white space in a row"
    return BadRow(where, problem, "remove it; text after it is not read")


def too_long(where: str, what: str) -> BadRow:
    return BadRow(
        where, f"{what} is longer than {format_bytes(MAX_BYTES)}, which is no document", "cut it into smaller documents"
    )


def decode(data: bytes, where: str) -> str | BadRow:
    """UTF-8 text, or what else the bytes look like."""
    if data.startswith(codecs.BOM_UTF32_LE):
        return BadRow(where, "is UTF-32, not UTF-8", "convert it: iconv -f UTF-32 -t UTF-8")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return BadRow(where, "is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
    if b"\0" in data[:MIB]:
        return BadRow(
            where, "is binary, not text: it has NUL bytes", "leave it out with data.glob, or set data.on_error to skip"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8: byte 0x{data[error.start]:02x} in line {line}"
        return BadRow(where, problem, "convert it (iconv -f LATIN1 -t UTF-8), or set data.on_error to skip")


def text_of(value: str, where: str) -> str | BadRow:
    """A decoded string, or a BadRow when UTF-8 cannot encode it: JSON may escape half of a surrogate pair."""
    if value.isascii():
        return value if len(value) <= MAX_BYTES else too_long(where, "the text")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        return BadRow(where, f"holds half of a surrogate pair, \\u{ord(value[error.start]):04x}, which is no character")
    return value if size <= MAX_BYTES else too_long(where, "the text")


WHOLE = 4 * MIB  # of a text that is one document, which every tokenizer can encode in memory


@dataclass(frozen=True)
class Value:
    """A row or a whole text, and its place."""

    where: str
    content: Any


Reader = Callable[[Path, str, list[str] | None], Iterator[Value | BadRow]]  # path, name in messages, columns


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}"
    return f"is not JSON: {error}".partition(";")[0]  # without Python's advice on long numbers


def read_text(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """The file as one text. A longer one than WHOLE comes in pieces cut at ends of lines."""
    del columns
    with open_bytes(path) as stream:
        data = stream.read(MAX_BYTES + 1)
        if len(data) <= WHOLE:
            text = decode(data.removeprefix(codecs.BOM_UTF8), name)
            yield text if isinstance(text, BadRow) else Value(name, text)
            return
        yield from _pieces(data, stream, name)


def _pieces(data: bytes, stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    part = run = 0
    while data:
        part += 1
        end = len(data) if len(data) <= 4 * MIB else data.rfind(b"\n", 0, 4 * MIB) + 1 or data.find(b"\n") + 1
        if end > BLANK // 8 and data[:end].isspace() and (run := run + end) > BLANK:
            yield blank(f"{name}, part {part}")
            return
        if end == 0 and len(data) > MAX_BYTES:
            yield too_long(f"{name}, part {part}", "a line")
            return
        end = end or len(data)
        text = decode(data[:end].removeprefix(codecs.BOM_UTF8), f"{name}, part {part}")
        yield text if isinstance(text, BadRow) else Value(f"{name}, part {part}", text)
        data = data[end:]
        if len(data) < 4 * MIB:
            data += stream.read(MAX_BYTES + 1 - len(data))


def read_code(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """The file as one text, whatever its size up to MAX_BYTES."""
    del columns
    with open_bytes(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    text = too_long(name, "the file") if len(data) > MAX_BYTES else decode(data.removeprefix(codecs.BOM_UTF8), name)
    yield text if isinstance(text, BadRow) else Value(name, text)


def read_jsonl(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """One value a line; blank lines are skipped."""
    del columns
    with open_bytes(path) as stream:
        for number, line in lines(stream, name):
            if isinstance(line, BadRow):
                yield line
            elif not line.isspace():
                yield _parse(line, f"{name}:{number}")


def _parse(line: bytes, where: str) -> Value | BadRow:
    text = decode(line, where)
    if isinstance(text, BadRow):
        return text
    try:
        return Value(where, _DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        return BadRow(where, _reason(error))


def read_json(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """A list of rows, rows one after the other, or one object that holds a list of rows under some key.

    Rows of a list are parsed one by one. Text after a row that cannot be parsed is not read, as its end is unknown.
    """
    del columns
    with open_bytes(path) as stream:
        for value in _json_values(stream, name):
            rows = _only_list(value.content) if isinstance(value, Value) else None
            yield from (
                [value] if rows is None or not isinstance(value, Value) else (Value(value.where, row) for row in rows)
            )


def _only_list(content: object) -> list[Any] | None:
    """The rows under some key. Turns of a conversation are not rows."""
    if not isinstance(content, dict) or any(isinstance(value, str) for value in content.values()):
        return None
    lists = [value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return lists[0] if len(lists) == 1 and not {"role", "from"} & set(lists[0][0]) else None


def _json_values(stream: BinaryIO, name: str) -> Iterator[Value | BadRow]:
    """Values of a list or of a plain sequence. A value that does not parse may be incomplete: more is read, twice as
    much each time.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, line, want, ended, run = "", 1, MIB, False, 0
    while True:
        stripped = buffer.lstrip(" \t\r\n,[]")
        run = 0 if stripped else run + len(buffer)
        if run > BLANK:
            yield blank(f"{name}:{line}")
            return
        line += buffer.count("\n", 0, len(buffer) - len(stripped))
        buffer = stripped
        try:
            content, end = _DECODER.raw_decode(buffer) if buffer else (None, 0)
        except (ValueError, RecursionError) as error:
            if ended or isinstance(error, RecursionError):
                yield BadRow(f"{name}:{line}", _reason(error))
                return
            content, end = None, 0
        if end and (ended or end < len(buffer)):
            yield Value(f"{name}:{line}", content)
            line += buffer.count("\n", 0, end)
            buffer = buffer[end:]
        elif ended:
            return
        else:
            if len(buffer) > MAX_BYTES:
                yield too_long(f"{name}:{line}", "a value")
                return
            chunk = stream.read(max(want, len(buffer)))
            ended = not chunk
            try:
                buffer += decoder.decode(chunk, final=ended)
            except UnicodeDecodeError as error:
                yield BadRow(name, f"is not UTF-8: byte 0x{error.object[error.start]:02x}", "convert it to UTF-8")
                return


def read_csv(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """Rows of a comma-separated file with a header (tab-separated for .tsv)."""
    del columns
    csv.field_size_limit(MAX_BYTES)
    delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    with open_bytes(path) as stream:
        rows = csv.reader(_strict_text(stream, name), delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            for row in rows if header else ():
                where = f"{name}:{rows.line_num}"
                if row and header and len(row) != len(header):
                    yield BadRow(where, f"has {len(row)} fields where the header names {len(header)}")
                elif row and header:
                    yield Value(where, dict(zip(header, row, strict=True)))
        except csv.Error as error:
            yield BadRow(f"{name}:{rows.line_num}", f"is not CSV: {error}; is a quote unbalanced?")
        except _Unreadable as error:
            yield error.bad_row


class _Unreadable(Exception):
    """Carries a BadRow through the csv module."""

    def __init__(self, bad_row: BadRow) -> None:
        super().__init__(bad_row)
        self.bad_row = bad_row


def _strict_text(stream: BinaryIO, name: str) -> Iterator[str]:
    for number, line in lines(stream, name):
        text = line if isinstance(line, BadRow) else decode(line, f"{name}:{number}")
        if isinstance(text, BadRow):
            raise _Unreadable(text)
        yield text


def read_parquet(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """Rows, page by page; only the columns that are needed are read."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True) as file:
        yield from _batches(file.iter_batches(batch_size=64, columns=columns), file.schema_arrow, name, columns)


def read_arrow(path: Path, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    """Rows of an Arrow stream (what datasets writes) or file, memory-mapped."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            batches = iter(reader)
        selected = (batch.select(columns) if columns else batch for batch in batches)
        yield from _batches(selected, reader.schema, name, columns)


def _batches(batches: Iterator[Any], schema: Any, name: str, columns: list[str] | None) -> Iterator[Value | BadRow]:
    for column in columns or schema.names:
        field = schema.field(column)
        if b"ARROW:extension:name" in (field.metadata or {}) or hasattr(field.type, "extension_name"):
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
            except UnicodeDecodeError:  # pyarrow does not check the bytes of text columns before
                contents = [_row(part, index, f"{name}, row {row + index + 1}") for index in range(part.num_rows)]
            for content in contents:
                row += 1
                yield content if isinstance(content, BadRow) else Value(f"{name}, row {row}", content)


def _row(batch: Any, index: int, where: str) -> Any:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        problem = f"holds text that is not UTF-8: byte 0x{error.object[error.start]:02x}"
        return BadRow(where, problem, "write the column again as UTF-8, or set data.on_error to skip")


READERS: dict[str, Reader] = {
    "text": read_text, "code": read_code, "jsonl": read_jsonl, "json": read_json,
    "csv": read_csv, "tsv": read_csv, "parquet": read_parquet, "arrow": read_arrow,
}  # fmt: skip


def column_types(path: Path, kind: str) -> dict[str, str]:
    """Columns of a parquet or Arrow file and what they hold: "text", "tokens" or the type's own name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        schema = pq.read_schema(path)
    else:
        with pa.memory_map(str(path)) as source:
            file = source.read(6) == b"ARROW1"
            source.seek(0)
            schema = (pa.ipc.open_file(source) if file else pa.ipc.open_stream(source)).schema
    return {field.name: _holds(field.type) for field in schema}


def _holds(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) and types.is_integer(
        kind.value_type
    ):
        return "tokens"
    return str(kind)
