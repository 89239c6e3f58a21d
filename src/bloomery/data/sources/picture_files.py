"""Pictures whose texts are in files of their own: archives of WebDataset, and texts beside pictures of their name."""

import codecs
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast, final

from bloomery.core.files import read_at_most
from bloomery.core.units import MIB, format_bytes
from bloomery.data.examples import MAX_BYTES, BadRow, too_long
from bloomery.data.sources.readers import Value, decode, open_bytes
from bloomery.facts.columns import PICTURE_SUFFIXES, PICTURES

CAPTIONED = "captioned"  # the format of a text beside a picture of its name
WEBDATASET = "webdataset"
_CAPTION = "caption"  # the column with that text
_TEXTS = (".txt", ".text", ".caption")
_SOUND_AND_VIDEO = {
    **dict.fromkeys((".mp4", ".avi", ".mov", ".mkv", ".webm"), "video"),
    **dict.fromkeys((".wav", ".mp3", ".flac", ".ogg"), "audio"),
}
_HEADERS = MIB  # of an archive, between two of its files
_FIX = "write the archive again, or set data.on_error=skip"


def is_picture(name: str) -> bool:
    """By its suffix."""
    return name.lower().endswith(PICTURE_SUFFIXES)


def with_pictures_beside(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Those of `names` that have a picture of the same name beside them, but for the suffix."""
    pictures = {str(PurePosixPath(name).with_suffix("")) for name in all_names if is_picture(name)}
    return [name for name in names if str(PurePosixPath(name).with_suffix("")) in pictures]


def picture_beside(path: Path) -> str | None:
    """The name of the picture of the same name beside a text."""
    suffixes = (spelling for each in PICTURE_SUFFIXES for spelling in (each, each.upper()))
    others = (path.with_suffix(suffix) for suffix in suffixes)
    return next((other.name for other in others if other.is_file()), None)


def read_captioned(path: Path, name: str) -> Iterator[Value | BadRow]:
    """A row with the picture beside a text, and the text."""
    with open_bytes(path) as stream:
        content = read_at_most(stream, MAX_BYTES + 1)
    try:
        if len(content) > MAX_BYTES:
            raise too_long(name, "the file")
        text = decode(content.removeprefix(codecs.BOM_UTF8), name).strip()
    except BadRow as bad_row:
        yield bad_row
        return
    yield Value(name, {"image": picture_beside(path), _CAPTION: text})


def read_webdataset(path: Path, name: str) -> Iterator[Value | BadRow]:
    """A row of each sample: files that follow each other in a tar archive, with one name up to its first dot.

    JSON gives the columns, a text the caption, pictures the column `images` unless the JSON names them itself.
    """
    sample = _Sample("")
    try:
        with open_bytes(path) as stream:
            for member, content in _members(stream):
                folder, _, file = member.rpartition("/")
                stem, dot, suffix = file.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if key != sample.key:
                    yield from sample.rows(name)
                    sample = _Sample(key)
                sample.add(member, (dot + suffix).lower(), content)
    except tarfile.TarError as error:
        reason = " ".join(str(error).split())[:120]
        yield BadRow(name, f"is no tar archive, or a damaged one: {reason}", _FIX)
        return
    yield from sample.rows(name)


def _members(stream: BinaryIO) -> Iterator[tuple[str, bytes | str]]:
    """The names of the plain files of an archive, with their bytes or the reason why these are not read."""
    bounded = _Bounded(stream)
    with tarfile.open(fileobj=cast(IO[bytes], bounded), mode="r|") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep the headers of all
            file_name = PurePosixPath(member.name).name
            bounded.allowed = member.size + _HEADERS
            if member.isdir() or file_name.startswith("."):
                continue
            file = archive.extractfile(member) if member.isreg() else None
            if file is None:
                yield member.name, "is a link or a device in an archive"
            elif member.size > MAX_BYTES:
                yield member.name, f"is larger than {format_bytes(MAX_BYTES)}"
            else:
                yield member.name, file.read()


@final
class _Bounded(io.RawIOBase):
    """A stream that ends in an error where more than `allowed` bytes are read at one go: tarfile keeps headers of any
    size in memory.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.allowed = _HEADERS

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self.allowed -= len(content)
        if self.allowed < 0:
            raise tarfile.ReadError("its headers are too large")
        return content


@final
class _Sample:
    """The files of one sample of an archive."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._pictures: dict[str, bytes] = {}
        self._columns: dict[str, Any] = {}
        self._refusal: str | None = None
        self._size = 0

    def add(self, member: str, suffix: str, content: bytes | str) -> None:
        if isinstance(content, str):
            self._refusal = self._refusal or content
            return
        self._size += len(content)
        if self._size > MAX_BYTES:
            self._refusal = f"has more than {format_bytes(MAX_BYTES)} of files"
            self._pictures.clear()
        last = suffix[suffix.rfind(".") :]
        try:
            if is_picture(suffix):
                self._pictures[member] = content
            elif last == ".json":
                self._add_json(json.loads(decode(content, member)))
            elif last in _TEXTS:
                self._columns[_CAPTION] = decode(content, member).strip()
            else:
                self._columns[_SOUND_AND_VIDEO.get(last, suffix.lstrip("."))] = member
        except BadRow as bad_row:
            self._refusal = bad_row.reason
        except (ValueError, RecursionError) as error:
            self._refusal = f"holds JSON that is damaged: {str(error)[:80]}"

    def _add_json(self, content: object) -> None:
        if not isinstance(content, dict):
            raise ValueError("it is no object with columns")
        self._columns = {**content, **self._columns}

    def rows(self, name: str) -> Iterator[Value | BadRow]:
        where = f"{name}, {self.key}"
        if self._refusal is not None:
            yield BadRow(where, self._refusal)
        elif self._pictures or self._columns:
            yield Value(where, self._row())

    def _row(self) -> dict[str, Any]:
        found = set[str]()
        row = {column: self._with_contents(value, found) for column, value in self._columns.items()}
        if self._pictures and not found:
            named = {column for column in row if column.lower() in PICTURES}
            row = {column: value for column, value in row.items() if column not in named}
            row["images"] = [
                {"bytes": content, "path": member} for member, content in self._pictures.items()
            ]
        return row

    def _with_contents(self, value: Any, found: set[str]) -> Any:
        """With the pictures of this sample where JSON names them."""
        if isinstance(value, str) and is_picture(value):
            member = next((each for each in self._pictures if _is_named(each, value)), None)
            if member is None:
                return value
            found.add(member)
            return {"bytes": self._pictures[member], "path": member}
        if isinstance(value, dict):
            return {key: self._with_contents(item, found) for key, item in value.items()}
        return (
            [self._with_contents(item, found) for item in value]
            if isinstance(value, list)
            else value
        )


def _is_named(member: str, value: str) -> bool:
    return member == value or member.rpartition("/")[2] == value.rpartition("/")[2]
