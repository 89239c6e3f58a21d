"""The model that an adapter adapts, and whether its weights are those that the adapter was trained on. No torch."""

import json
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.seals import digest_of, digests_of_file
from bloomery.hub import fetch_model, is_hub_id
from bloomery.model.io.stored import INDEX, LARGEST_CONFIG, SINGLE, read_object

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
AGAIN = "download or save the adapter again"


@dataclass(frozen=True)
class Base:
    folder: str
    digest: str

    @property
    def name(self) -> str:
        """The Hub id of a folder in the Hub's cache, else the folder."""
        cached = Path(self.folder).parent.parent.name  # models--x--y/snapshots/<commit>
        return cached.removeprefix("models--").replace("--", "/", 1) if cached.startswith("models--") else self.folder

    def refuse_change(self, digest: str, *, where: str, fix: str | None = None) -> None:
        """Raises UserError when the adapter in `where` was trained on other weights than these."""
        if digest != self.digest:
            raise UserError(
                f"the adapter was trained on other weights than those in {self.folder}", where=where,
                fix=fix or "put the base model back that it was trained on",
            )  # fmt: skip


def base_of(folder: Path) -> Base:
    return Base(str(folder.resolve()), digest(folder))


def digest(folder: Path) -> str:
    """Of every byte of the weights and of config.json: as fast as the disk, or some GB/s where memory holds them."""
    paths = [path for path in (folder / "config.json", folder / INDEX, *_weights(folder)) if path.is_file()]
    moments = [(path, path.stat()) for path in paths]
    lines = (f"{path.name} {_content(path, at.st_size, at.st_mtime_ns)}\n" for path, at in moments)
    return digest_of("".join(lines).encode())


@lru_cache(maxsize=256)  # a run asks several times before it begins
def _content(path: Path, size: int, mtime_ns: int) -> str:
    del mtime_ns
    return f"{size} {digest_of(''.join(digests_of_file(path)).encode())}"


def _weights(folder: Path) -> list[Path]:
    """The files that the model is read from."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [path for path in sorted(folder.glob("*.safetensors")) if path.name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = "the index of the weights cannot be read"
            raise UserError(problem, where=str(index), fix="download or save the model again") from error
    return [single] if single.is_file() else []


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises UserError when it is none."""
    path = folder / CONFIG
    said = read_object(path, fix=AGAIN)
    if not isinstance(said.get("peft_type"), str):
        raise UserError(f"{CONFIG} names no peft_type", where=str(path), fix=AGAIN)
    return said


def base_folder(folder: Path) -> Path:
    """The model that the adapter in `folder` names: a local folder first, else one of the Hub. Raises UserError."""
    name, where = read_settings(folder).get("base_model_name_or_path"), str(folder / CONFIG)
    fix = f"name the base yourself: BASE+{folder.name}"
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UserError("the adapter names no base model", where=where, fix=fix)
    moved = [folder.parent.parent / "base"] if folder.parent.name == "checkpoints" else []  # a run that was moved
    for place in (Path(name), folder / name, *moved):
        if len(name) < 4000 and (place / "config.json").is_file():
            return place
    if not is_hub_id(name):
        raise UserError(f"the adapter's base is not here: {name[:200]}", where=where, fix=fix)
    return fetch_model(name)


def right_base(folder: Path) -> str:
    """The fix for an adapter on another base: the arguments with the base that it was trained on."""
    name = read_settings(folder).get("base_model_name_or_path")
    known = isinstance(name, str) and bool(name) and name.isprintable() and len(name) < 4000
    return f"name the base that it was trained on: {shlex.quote(f'{name}+{folder}') if known else 'BASE+ADAPTER'}"


def refuse_other_base(folder: Path, base: Path) -> None:
    """Raises UserError when a run's own checkpoint was trained on other weights than those in `base`."""
    path = folder / "state.json"
    if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
        return
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"base": {"digest": str(noted), **told}}:
                given = base_of(base)
                fix = None if given.folder == told.get("folder", given.folder) else right_base(folder)
                given.refuse_change(noted, where=str(folder), fix=fix)
    except (ValueError, RecursionError) as error:
        raise UserError(f"state.json is not JSON: {error}"[:200], where=str(path), fix=AGAIN) from error
