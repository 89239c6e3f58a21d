"""Where a row says that a picture is: a path in the dataset's folder, or the picture itself in base64."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_at_most
from bloomery.core.units import MIB, format_bytes
from bloomery.data.examples import BadRow, kind_of
from bloomery.facts.columns import PICTURE_SUFFIXES, is_empty

MAX_BYTES = 32 * MIB  # of one picture, encoded
MAX_PIXELS = 40_000_000  # before decoding: 120 MB of RGB
DATA_URL = re.compile(r"data:[\w/+.;=-]{0,100}?;base64,", re.ASCII | re.IGNORECASE)
OWN_DATA = "data:;base64,"  # how bytes of a table are kept until they are read
# Types of parts that are pictures: transformers' and TRL's, OpenAI's Chat Completions and Responses.
PICTURE_PARTS = ("image", "image_url", "input_image")
# Keys of a part, and of an object in a column. `source` is Anthropic's, `inline_data` Gemini's.
PART_KEYS = ("image", "path", "url", "image_url", "base64", "bytes", "source", "inline_data")
_BYTES_KEYS = ("bytes", "base64", "data")  # base64, where they are a text
_PATH_KEYS = ("url", "path", "image", "file_name")
# Of an uploaded file, which only the service that stores it has.
_UPLOADED = ("file_id", "file_uri", "fileUri")
# How pictures of usual formats begin in base64: JPEG, PNG, RIFF (WebP), GIF, TIFF.
_ENCODED = re.compile(r"(/9j/|iVBORw0KGgo|UklGR|R0lGOD|SUkqA|TU0AK)[\w+/\s]+=*\s*", re.ASCII)
_DOWNLOAD = "download it into the dataset's folder, and name its file"
_SHOWN = 120  # characters of a path in a message


def reference_in_part(part: Mapping[str, Any], where: str) -> str | None:
    """The reference in a part of a message's content; None of a bare mark, whose picture is in a column.

    Raises BadRow.
    """
    for key in PART_KEYS:
        if part.get(key) is not None:
            value = {key: part[key]} if key in _BYTES_KEYS else part[key]
            return reference_of(value, f"{where}.{key}")
    uploaded = next((key for key in _UPLOADED if not is_empty(part.get(key))), None)
    if uploaded is not None:
        problem = "names a file that a service stores, and training fetches nothing"
        raise BadRow(f"{where}.{uploaded}", problem, _DOWNLOAD)
    return None


def reference_of(value: object, where: str) -> str:
    """A path, or a data URL. Raises BadRow for what is no picture, and for one that is on the network."""
    if isinstance(value, Mapping):
        content = next((value[key] for key in _BYTES_KEYS if value.get(key)), None)
        if isinstance(content, str):
            return _encoded_text(content, where)
        if content is not None:
            return reference_of(content, where)
        inner = next((value[key] for key in _PATH_KEYS if value.get(key)), None)
        if inner is None:
            raise BadRow(where, "is an object without bytes, a path or a URL")
        return reference_of(inner, where)
    if isinstance(value, bytes | bytearray):
        return _own_data(value, where)
    if not isinstance(value, str):
        raise BadRow(where, f"is {kind_of(value)}, not the path of a picture, its URL or its bytes")
    if not value.strip():
        raise BadRow(where, "is an empty text, not the path of a picture, its URL or its bytes")
    prefix = DATA_URL.match(value)
    if prefix is not None:
        return _encoded_text(value[prefix.end() :], where)
    if value[:5].lower() == "data:":
        raise BadRow(where, "is a data URL without base64", "write it as data:image/png;base64,...")
    if len(value) > 255 and _ENCODED.fullmatch(value):  # longer than the name of a file can be
        return _encoded_text(value, where)
    address = urlsplit(value)
    if address.scheme.lower() == "file":
        if address.netloc in ("", "localhost"):
            return unquote(address.path)
        problem = f"is a file URL of another machine, {address.netloc[:40]}"
        raise BadRow(where, problem, "write the path alone, or file:///PATH")
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
    # Windows writes other slashes, which are letters of names elsewhere: the path as it stands comes first.
    spellings = dict.fromkeys((reference, reference.replace("\\", "/")))
    try:
        roots = [folder.resolve() for folder in folders]
        paths = [(root / spelling).resolve() for spelling in spellings for root in roots]
        inside = [path for path in paths if any(path.is_relative_to(root) for root in roots)]
        files = [path for path in inside if path.is_file()]
    except (ValueError, OSError, RuntimeError) as error:  # NUL, a long name, links in a circle
        reason = getattr(error, "strerror", None) or str(error).partition(":")[0]
        problem = f"names a picture by what is no path ({reason}): {_shown(reference)}"
        raise BadRow(where, problem) from error
    if not inside:
        fix = f"copy the picture into {roots[0]}, or name its folder with data.pictures"
        raise BadRow(
            where, f"names a picture outside of the dataset's folder: {_shown(reference)}", fix
        )
    return str((files or inside)[0])


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
        with open_input(path) as file:
            content = read_at_most(file, MAX_BYTES + 1)  # a file may grow while it is read
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            problem = f"names a picture that is not there: {_shown(reference)}"
            raise BadRow(where, problem, _fix_of_missing(path)) from error
        problem = f"names a picture, and {error.problem}: {_shown(reference)}"
        raise BadRow(where, problem) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        problem = f"names a picture that cannot be read ({reason}): {_shown(reference)}"
        raise BadRow(where, problem) from error
    if len(content) > MAX_BYTES:
        raise _too_large(where)
    return content


def _fix_of_missing(path: Path) -> str:
    """Names a file beside `path` that differs from it by the suffix alone."""
    suffixes = [spelling for suffix in PICTURE_SUFFIXES for spelling in (suffix, suffix.upper())]
    others = [path.with_suffix(suffix) for suffix in suffixes] if path.name else []
    present = next((other.name for other in others if other.is_file()), None)
    if present is not None:
        return f"{present} is there: name it, or set data.on_error=skip"
    return (
        "correct it, name the folder of the pictures with data.pictures, or set data.on_error=skip"
    )


def _shown(reference: str) -> str:
    """The end of a long path says more than its beginning."""
    return reference if len(reference) <= _SHOWN else f"...{reference[-_SHOWN:]}"


def _encoded_text(text: str, where: str) -> str:
    if len(text) > MAX_BYTES * 1.4 + 200:  # four letters for three bytes, and ends of lines
        raise _too_large(where)
    return OWN_DATA + "".join(text.split())


def _own_data(content: bytes | bytearray, where: str) -> str:
    if len(content) > MAX_BYTES:
        raise _too_large(where)
    return OWN_DATA + base64.b64encode(content).decode("ascii")


def _too_large(where: str) -> BadRow:
    problem = f"holds a picture of more than {format_bytes(MAX_BYTES)}"
    return BadRow(where, problem, "store it smaller: models resize pictures anyway")
