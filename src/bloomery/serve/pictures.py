"""Pictures of requests: where they may come from, how many there may be, and who decodes them."""

import time
from pathlib import Path
from typing import final
from urllib.parse import urlsplit

from bloomery.data.examples import BadRow
from bloomery.data.pictures.reader import Picture, PictureReader
from bloomery.data.pictures.references import DATA_URL, MAX_PIXELS, located, reference_of
from bloomery.serve.limits import Limits, Refused

MOST_PIXELS = 2 * MAX_PIXELS  # of a request's pictures together: 240 MB as bytes
SECONDS = 30.0  # for the pictures of a request, after which no other one of it is begun
LONGEST_SCHEME = 200  # characters of an address in which its kind is looked for
_DATA_URL = "send it as a data URL: data:image/png;base64,..."
FOLDER_OPTION = "--allowed-local-media-path"


def refuse_count(count: int, limits: Limits) -> None:
    """Raises Refused for more pictures than a request may have."""
    if count > limits.pictures:
        raise _refused(
            f"{count} images in one request; this server takes at most {limits.pictures} (--max-images)"
        )


def picture_reference(address: str, number: int, folder: Path | None) -> str:
    """A data URL, or the path of a file in the folder. Raises Refused with a sentence that names the image's number."""
    scheme = urlsplit(address[:LONGEST_SCHEME]).scheme
    if scheme in ("http", "https"):
        raise _refused(
            f"image {number} is on the network, and this server fetches nothing: {_DATA_URL}"
        )
    if scheme == "file" and folder is None:
        raise _refused(
            f"image {number} is a file of the server, which reads none: {_DATA_URL}, or start the server with"
            f" {FOLDER_OPTION} FOLDER"
        )
    if scheme == "data" and not DATA_URL.match(address):
        raise _refused(f"image {number} is a data URL without base64: {_DATA_URL}")
    if scheme not in ("data", "file"):
        raise _refused(f"image {number} is no data URL: {_DATA_URL}")
    try:
        reference = reference_of(address, "")
    except BadRow as error:
        raise _refused(f"image {number} {error.reason}") from error
    if scheme == "data":
        return reference
    assert folder is not None
    try:
        return located(reference, [folder], "")
    except (BadRow, ValueError, OSError, RuntimeError) as error:  # no path at all, or endless links
        raise _refused(f"image {number} is not in the folder of {FOLDER_OPTION}") from error


@final
class PictureIntake:
    """Reads the pictures of one request after the other, in a process of its own, which begins with the first.

    Mutable, for one thread. `close` ends the process.
    """

    def __init__(self) -> None:
        self._reader = PictureReader(plain=True)
        self.begin()

    def begin(self) -> None:
        """What is read from now on belongs to another request."""
        self._began = time.monotonic()
        self._count = 0
        self._num_pixels = 0

    def read(self, reference: str, where: str) -> Picture:
        """The next picture of the request, as a file of its pixels alone. Raises Refused, which tells its number."""
        self._count += 1
        if self._count > 1 and time.monotonic() - self._began > SECONDS:
            raise _refused(
                f"the first {self._count - 1} images took more than {SECONDS:g} seconds to decode"
            )
        try:
            picture = self._reader.read(reference, where)
        except BadRow as error:
            reason = error.reason.removeprefix("holds a picture that ")
            raise _refused(f"image {self._count} {reason}") from error
        self._num_pixels += picture.width * picture.height
        if self._num_pixels > MOST_PIXELS:
            raise _refused(
                f"the first {self._count} images have {self._num_pixels:,} pixels, and a request may have"
                f" {MOST_PIXELS:,}"
            )
        return picture

    def close(self) -> None:
        self._reader.close()


def _refused(problem: str) -> Refused:
    return Refused(400, problem, code="invalid_image", parameter="messages")
