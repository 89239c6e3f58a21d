"""Exports as downloads of a browser: a file as it is, a folder as one zip, streamed and not compressed. No torch."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import final
from urllib.parse import quote, urlencode

from nicegui import ui
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.studio.frame import notify
from bloomery.studio.stored_models import stored_models

ADDRESS = "/download"
PIECE_BYTES = 2**20
_ZIP64 = 2**31 - 1  # from where zipfile writes sizes with 64 bits
_NO_GZIP = {
    "Content-Encoding": "identity"
}  # weights do not get smaller, and their size stays known


def address_of_download(model: str) -> str:
    """`model`: the argument of an export or a GGUF file, as the list has it."""
    return f"{ADDRESS}?{urlencode({'model': model})}"


def start_download(model: str) -> None:
    """By the browser of this page. What cannot be sent is told instead."""
    try:
        _checked(model)
    except UserError as error:
        notify(error)
    else:
        ui.download.from_url(address_of_download(model))


def download(request: Request) -> Response:
    """The export that `model` names. Only what the list of models has is sent: an address names no path."""
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return PlainTextResponse("a page of another origin downloads nothing\n", 403)
    try:
        folder, files = _checked(request.query_params.get("model", ""))
    except UserError as error:
        return PlainTextResponse(f"{error.problem}: {error.where}\nfix: {error.fix}\n", 404)
    if files == [folder]:
        return FileResponse(folder, filename=folder.name, headers=_NO_GZIP)
    headers = {
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(folder.resolve().name)}.zip",
        "Content-Length": str(zip_bytes(folder, files)),
        **_NO_GZIP,
    }
    return StreamingResponse(zipped(folder, files), media_type="application/zip", headers=headers)


def _checked(asked: str) -> tuple[Path, list[Path]]:
    """The file or folder of a model of the list, and its files. Raises UserError for another one."""
    model = next((one for one in stored_models() if one.argument == asked), None)
    if model is None or not model.is_downloadable:
        fix = "choose an export in the list of models; a run is exported first"
        raise UserError("no such export", where=harmless(asked)[:120], fix=fix)
    if model.folder.is_file():
        _refuse_link(model.folder, model.folder.parent)
        return model.folder, [model.folder]
    return model.folder, files_of(model.folder)


def files_of(folder: Path) -> list[Path]:
    """The files of an export, in order; none whose name begins with a dot. Raises UserError where a link leads out."""
    files = list[Path]()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith("."):
                _refuse_link(path, folder)
                files += [path] if path.is_file() else []  # no pipe
    return files


def _refuse_link(path: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        fix = "export it again, or replace the link by a copy"
        raise UserError("a link leads out of the export", where=harmless(str(path)), fix=fix)


def zipped(folder: Path, files: list[Path]) -> Iterator[bytes]:
    """A zip of these files of a folder, under its name, piece by piece. Sizes have 64 bits throughout."""
    sink = _Sink()
    top = folder.resolve().name
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for path in files:
            name = f"{top}/{path.relative_to(folder).as_posix()}"
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                left = entry.file_size  # of a file that grows meanwhile, what it was
                while left and (piece := source.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    target.write(piece)
                    yield sink.take()
    yield sink.take()


def zip_bytes(folder: Path, files: list[Path]) -> int:
    """How long that zip becomes, by the format's fields (APPNOTE 4.3): a browser then shows how much is left."""
    top = folder.resolve().name
    position = directory = 0
    for path in files:
        name = len(f"{top}/{path.relative_to(folder).as_posix()}".encode())
        size = path.stat().st_size
        # Sizes and the place of the entry have fields of their own where 32 bits are too few.
        wide = 2 * (size > _ZIP64) + (position > _ZIP64)
        directory += 46 + name + (4 + 8 * wide if wide else 0)
        position += 30 + name + 20 + size + 24
    is_wide = position > _ZIP64 or directory > _ZIP64 or len(files) >= 2**16
    return position + directory + (76 if is_wide else 0) + 22


@final
class _Sink:
    """Mutable: what has been written, until it is taken. A stream that cannot seek."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(bytes(piece))
        return len(piece)

    def flush(self) -> None:
        """Everything is there already."""

    def close(self) -> None:
        """Nothing is open."""

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
