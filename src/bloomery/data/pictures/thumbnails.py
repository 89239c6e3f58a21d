"""Small copies of pictures, which pages about a run show."""

import base64
import hashlib
import io
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably

SIDE = 480  # pixels of the longer side, at most
MAX_BYTES = 2**20  # of a file that is shown
_JPEG = b"\xff\xd8\xff"


_PLACE = re.compile(r"samples/[A-Za-z0-9_-]+-([0-9]{1,3})x([0-9]{1,3})-[0-9a-f]{8}\.jpg")


@dataclass(frozen=True)
class Shown:
    """A small copy on a page. `url`: a data URL."""

    url: str
    width: int
    height: int


def thumbnail(content: bytes) -> tuple[bytes, int, int]:
    """A JPEG of a picture as `PictureReader` leaves it, its width and its height."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        picture.draft("RGB", (2 * SIDE, 2 * SIDE))
        small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85)
    return written.getvalue(), *small.size


def write_thumbnail(content: bytes, name: str, run_dir: Path) -> str:
    """Its path in the run folder. `name`: of the picture's file. Another picture of that name has another path."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(name).stem)[:40].strip("-") or "image"
    jpeg, width, height = thumbnail(content)
    place = f"samples/{stem}-{width}x{height}-{hashlib.sha256(content).hexdigest()[:8]}.jpg"
    path = run_dir / place
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, jpeg)
    return place


def shown_thumbnail(run_dir: Path, place: str) -> Shown | None:
    """None where the file is missing, or anything but such a copy in this run folder."""
    named = _PLACE.fullmatch(place)
    if named is None:
        return None
    try:
        content = read_whole(run_dir / place, most=MAX_BYTES)
    except (OSError, UserError):
        return None
    if not content.startswith(_JPEG):
        return None
    return shown(content, int(named[1]), int(named[2]))


def shown_picture(content: bytes) -> Shown | None:
    """Of a prepared dataset; None where nothing is installed that decodes it."""
    if find_spec("PIL") is None:
        return None
    return shown(*thumbnail(content))


def shown(jpeg: bytes, width: int, height: int) -> Shown:
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode("ascii")
    return Shown(url, width, height)
