"""Where a row says that a picture is: a path in the dataset's folder, or the picture itself in base64."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bloomery.core.units import MIB, format_bytes
from bloomery.data.examples import BadRow, kind_of

MAX_BYTES = 32 * MIB  # of one picture, encoded
DATA_URL = re.compile(r"data:[\w/+.;=-]{0,100}?;base64,", re.ASCII)
OWN_DATA = "data:;base64,"  # how bytes of a table are kept until they are read
# Types of parts that are pictures: transformers' and TRL's, OpenAI's Chat Completions and Responses.
PICTURE_PARTS = ("image", "image_url", "input_image")
PART_KEYS = ("image", "path", "url", "image_url", "base64", "bytes")
_DOWNLOAD = "download it into the dataset's folder, and name its file"


def reference_in_part(part: Mapping[str, Any], where: str) -> str | None:
    """The reference in a part of a message's content; None of a bare mark, whose picture is in a column.

    Raises BadRow.
    """
    for key in PART_KEYS:
        if part.get(key) is not None:
            return reference_of(part[key], f"{where}.{key}")
    return None


def reference_of(value: object, where: str) -> str:
    """A path, or a data URL. Raises BadRow for what is no picture, and for one that is on the network."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes | bytearray):
            return _own_data(value["bytes"], where)
        inner = next((value[key] for key in ("url", "path", "image") if value.get(key)), None)
        if inner is None:
            raise BadRow(where, "is an object without bytes, a path or a URL")
        return reference_of(inner, where)
    if isinstance(value, bytes | bytearray):
        return _own_data(value, where)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(where, f"is {kind_of(value)}, not the path of a picture, its URL or its bytes")
    if DATA_URL.match(value):
        if len(value) > MAX_BYTES * 4 / 3 + 200:
            raise _too_large(where)
        return value
    address = urlsplit(value)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return unquote(address.path)
    if address.scheme and "://" in value:
        raise BadRow(
            where, f"is on the network ({address.scheme}), and training fetches nothing", _DOWNLOAD
        )
    return value


def references_of(value: object, where: str) -> list[str]:
    """Those of a column: one picture, or a list of them. Raises BadRow."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [reference_of(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return [reference_of(value, where)]


def located(reference: str, folders: Sequence[Path], where: str) -> str:
    """A path of the row as an absolute one; a data URL as it is.

    `folders`: where it may begin. Raises BadRow for one outside of all of them.
    """
    if DATA_URL.match(reference):
        return reference
    roots = [folder.resolve() for folder in folders]
    paths = [(root / reference).resolve() for root in roots]
    inside = [path for path in paths if any(path.is_relative_to(root) for root in roots)]
    if not inside:
        fix = f"copy the picture into {roots[0]}, or name its folder with data.pictures"
        raise BadRow(
            where, f"names a picture outside of the dataset's folder: {reference[:80]}", fix
        )
    return str(next((path for path in inside if path.is_file()), inside[0]))


def encoded_bytes(reference: str, where: str) -> bytes:
    """The file or the base64 text of a located reference. Raises BadRow."""
    prefix = DATA_URL.match(reference)
    if prefix is not None:
        try:
            return base64.b64decode(reference[prefix.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRow(where, "holds a picture whose base64 text is damaged") from error
    path = Path(reference)
    try:
        if not path.is_file():
            raise BadRow(where, f"names a picture that is not there: {path}")
        if path.stat().st_size > MAX_BYTES:
            raise _too_large(where)
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadRow(where, f"names a picture that cannot be read ({reason}): {path}") from error


def _own_data(content: bytes | bytearray, where: str) -> str:
    if len(content) > MAX_BYTES:
        raise _too_large(where)
    return OWN_DATA + base64.b64encode(content).decode("ascii")


def _too_large(where: str) -> BadRow:
    problem = f"holds a picture of more than {format_bytes(MAX_BYTES)}"
    return BadRow(where, problem, "store it smaller: models resize pictures anyway")
