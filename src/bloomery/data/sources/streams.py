"""Bytes of a file, decompressed, a bounded piece at a time: no input makes these functions hold more than MAX_BYTES."""

import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from bloomery.core.errors import UserError
from bloomery.core.files import open_input
from bloomery.core.units import MIB, format_bytes

MAX_BYTES = 64 * MIB  # of one document, line or field
BLANK = MIB  # of white space in one run: what a file of some kilobytes may expand to for hours
COMPRESSED = (".gz", ".zst")
_CHUNK = 1024  # compressed bytes at a time: zstd expands one to at most some 30 MB


@dataclass(frozen=True)
class Flaw:
    """Why a document cannot be read: an error when the recipe says stop, counted when it says skip."""

    where: str
    problem: str
    remedy: str = "mend it, or set data.on_error to skip"

    def error(self) -> UserError:
        return UserError(self.problem, where=self.where, remedy=self.remedy)


class Damaged(EOFError):
    """A compressed file ends in the middle, or is none."""


class _Zstd(io.RawIOBase):
    """A zstd file as a raw stream. The library's own reader says nothing when the last frame is cut short; this one
    raises Damaged.
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


def lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes | Flaw]]:
    """Numbered lines; one longer than MAX_BYTES comes as a Flaw and is passed over piece by piece. Nothing is read
    behind a run of white space longer than BLANK.
    """
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


def blank(where: str) -> Flaw:
    problem = f"more than {format_bytes(BLANK)} of white space follow each other"
    return Flaw(where, problem, "remove it; what follows is not read")


def too_long(where: str, what: str) -> Flaw:
    return Flaw(
        where, f"{what} is longer than {format_bytes(MAX_BYTES)}, which is no document", "cut it into smaller documents"
    )


def decode(data: bytes, where: str) -> str | Flaw:
    """UTF-8 text, or what else the bytes look like."""
    if data.startswith(codecs.BOM_UTF32_LE):
        return Flaw(where, "is UTF-32, not UTF-8", "convert it: iconv -f UTF-32 -t UTF-8")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Flaw(where, "is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
    if b"\0" in data[:MIB]:
        return Flaw(
            where,
            "is binary, not text: it holds NUL bytes",
            "leave it out with data.glob, or set data.on_error to skip",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8: byte 0x{data[error.start]:02x} in line {line}"
        return Flaw(where, problem, "convert it (iconv -f LATIN1 -t UTF-8), or set data.on_error to skip")


def text_of(value: str, where: str) -> str | Flaw:
    """A decoded string, or a Flaw when UTF-8 cannot hold it: JSON may escape half of a surrogate pair."""
    if value.isascii():
        return value if len(value) <= MAX_BYTES else too_long(where, "the text")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        return Flaw(where, f"holds half of a surrogate pair, \\u{ord(value[error.start]):04x}, which is no character")
    return value if size <= MAX_BYTES else too_long(where, "the text")
