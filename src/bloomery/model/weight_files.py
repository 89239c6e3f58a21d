"""Which files hold a model's weights: plain files of its own folder, whole, and no pickles. Opens none of them."""

import json
from pathlib import Path

from bloomery.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 256 * 2**20
LONGEST_NAME = 200
AGAIN = "download or save the model again"


def weight_files(folder: Path) -> list[Path]:
    """Raises UserError for a missing file, a shard outside the folder, or pickled weights."""
    stated = weight_map(folder)
    return [inside(folder, name) for name in ([SINGLE] if stated is None else sorted(set(stated.values())))]


def is_bare(folder: Path) -> bool:
    """Whether nothing lies there that could be meant as weights: a shape, of which plans can be made."""
    return not any((folder / name).is_file() for name in (SINGLE, INDEX)) and _pickled(folder) is None


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the index says; None of a model in one file. Raises UserError."""
    index = folder / INDEX
    if index.is_file():
        return _stated(index)
    if not (folder / SINGLE).is_file():
        raise _nothing(folder)
    return None


def _nothing(folder: Path) -> UserError:
    if (pickled := _pickled(folder)) is None:
        return UserError("no model.safetensors is here", where=str(folder), remedy="give the folder of a saved model")
    return UserError(
        f"{pickled} is a pickle: opening it could run anything", where=str(folder),
        remedy="ask its author for safetensors, or save it again with transformers' save_pretrained",
    )  # fmt: skip


def _pickled(folder: Path) -> str | None:
    return next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)), None)


def _stated(index: Path) -> dict[str, str]:
    if index.stat().st_size > LARGEST_INDEX:
        raise UserError("the index is larger than 256 MiB", where=str(index), remedy=AGAIN)
    try:
        stated = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the index holds no weight_map", where=str(index), remedy=AGAIN) from error
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
        raise UserError("weight_map does not name a file for each tensor", where=str(index), remedy=AGAIN)
    return stated


def inside(folder: Path, name: str) -> Path:
    """A plain file name; a link may only lead to a file of the same folder or of the hub's cache beside it."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable() or len(name) > LONGEST_NAME:
        problem = f"the index names {name[:80]!r}, which is not a file of this folder"
        raise UserError(problem, where=str(folder), remedy="use a copy from a source that you trust")
    if not path.is_file():
        raise UserError(f"{name} is missing", where=str(folder), remedy="download the model again")
    target, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"  # models--x--y/snapshots/<commit>/file -> models--x--y/blobs/<hash>
    if target.parent not in (home, blobs if home.parent.name == "snapshots" else home):
        remedy = "put the file itself there, if you trust it"
        raise UserError(f"{name} is a link that leads out of the folder", where=str(folder), remedy=remedy)
    return path
