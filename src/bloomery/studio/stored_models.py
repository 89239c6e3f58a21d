"""The models on disk: checkpoints and adapters of runs, and model folders next to them. Does not import torch."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError, one_line
from bloomery.core.files import read_whole
from bloomery.core.run_folder import every_run
from bloomery.core.text import harmless
from bloomery.hub import cached_model, hub_cache_folder
from bloomery.infer.model_folder import (
    best_on_disk,
    best_weight_steps,
    folder_of_step,
    saved_steps,
)
from bloomery.plan.store import read_plan
from bloomery.studio.watching import is_plain, method_of, model_of, short_source

ADAPTER = "adapter of"  # the kind of an adapter begins with it
DAMAGED = "damaged"
GGUF = "GGUF file, for llama.cpp"
RENAME = "rename it: no page shows its name"
CARD_BYTES = 4000  # of the card of an export, whose head names its base
MOST_HEAD_BYTES = 2**27  # of a file of weights
_EXPORT_FOLDERS = (Path(), Path("exports"), Path("models"))  # where exports are looked for


@final
@dataclass(frozen=True)
class ListedModel:
    """A model on disk. `model`: the MODEL argument of commands, without its step. `changed`: seconds since 1970.
    `origin`: what it was trained from, and how; "" where nothing says so.
    """

    model: str
    step: int | None
    kind: str
    size: int
    changed: float
    folder: Path  # of its weights, or the GGUF file
    is_best: bool = False
    origin: str = ""

    @property
    def argument(self) -> str:
        """As `bloomery serve` names it."""
        return self.model if self.step is None else f"{self.model}@{self.step}"

    @property
    def is_readable(self) -> bool:
        """Whether a command can open it."""
        return self.kind not in (DAMAGED, RENAME, GGUF)

    @property
    def is_export(self) -> bool:
        """Whether `bloomery push` uploads it."""
        return self.step is None and self.is_readable

    @property
    def is_downloadable(self) -> bool:
        """Whether a browser may have its files: an export or a GGUF file, no checkpoint with its optimizer."""
        return self.is_export or self.kind == GGUF


def stored_models() -> list[ListedModel]:
    """Checkpoints of the runs in `runs/` and its sweeps, model folders next to it, and those elsewhere that these runs
    began with; the newest first.
    """
    models = list[ListedModel]()
    bases = dict[Path, None]()
    for run in every_run():
        with suppress(UserError, OSError):  # a run that is deleted meanwhile, or not readable
            models += _of_run(run)
        if (base := _base_of(run)) is not None:
            bases[base] = None
    exports = list(_export_folders())
    export_folders = {folder.resolve() for folder in exports}
    elsewhere = [base for base in bases if base not in export_folders]
    for folder in [*exports, *elsewhere]:
        with suppress(OSError):
            size, changed = _size_of(folder)
            kind = kind_of_model(folder)
            origin = origin_of_export(folder)
            name = _name_of(folder)
            models.append(ListedModel(name, None, kind, size, changed, folder, origin=origin))
    for file in _gguf_files():
        with suppress(OSError):
            stat = file.stat()
            models.append(ListedModel(f"./{file}", None, GGUF, stat.st_size, stat.st_mtime, file))
    plain = [model if is_plain(model.model) else _renamed(model) for model in models]
    return sorted(plain, key=lambda model: -model.changed)


def _name_of(folder: Path) -> str:
    """As a command names it: what lies below the working folder by its way from there."""
    here = Path.cwd()
    if folder.is_absolute() and not folder.is_relative_to(here):
        return str(folder)
    return f"./{folder.relative_to(here) if folder.is_absolute() else folder}"


def _renamed(model: ListedModel) -> ListedModel:
    """With escapes, under which no command finds another model."""
    return replace(model, model=one_line(model.model), kind=RENAME)


def _of_run(run: Path) -> Iterator[ListedModel]:
    checkpoints = run / "checkpoints"
    best = best_on_disk(checkpoints)
    origin = origin_of_run(run)
    name = run.relative_to("runs").as_posix()  # SWEEP/RUN of a sweep
    for step in sorted({*saved_steps(checkpoints), *best_weight_steps(checkpoints)}):
        folder = folder_of_step(checkpoints, step)
        with suppress(FileNotFoundError):  # a newer checkpoint has replaced it
            size, changed = _size_of(folder)
            yield ListedModel(
                f"runs/{name}",
                step,
                kind_of_model(folder),
                size,
                changed,
                folder,
                is_best=step == best,
                origin=origin,
            )


def _base_of(run: Path) -> Path | None:
    """The folder of the model that a run began with, where it is a model folder of the user's and no checkpoint: one
    that was imported, converted, or exported to another place.
    """
    try:
        source = read_plan(run / "plan.json").model.source
    except (UserError, OSError):  # none yet, or of another version
        return None
    folder = Path(str(source))
    if source is None or not folder.is_absolute() or not (folder / "config.json").is_file():
        return None
    folder = folder.resolve()
    is_of_the_hub = folder.is_relative_to(hub_cache_folder().resolve())
    is_of_a_run = folder.parent.name == "checkpoints"
    return None if is_of_the_hub or is_of_a_run else folder


def _export_folders() -> Iterator[Path]:
    parent_folders = [*_EXPORT_FOLDERS, *every_run()]
    for parent_folder in parent_folders:
        with suppress(OSError):
            for folder in sorted(parent_folder.iterdir()) if parent_folder.is_dir() else ():
                has_model = any(
                    (folder / name).is_file() for name in ("config.json", "adapter_config.json")
                )
                if has_model and not folder.name.startswith("."):
                    yield folder


def _gguf_files() -> Iterator[Path]:
    for place in _EXPORT_FOLDERS:
        with suppress(OSError):
            yield from sorted(place.glob("*.gguf"))


def origin_of_run(run: Path) -> str:
    """Model, method and data of its plan."""
    try:
        plan = read_plan(run / "plan.json")
    except (UserError, OSError):  # none yet, or of another version
        return ""
    return harmless(f"{model_of(plan)}, {method_of(plan)}")


def origin_of_export(folder: Path) -> str:
    """The model that the card of an export names as its base."""
    try:
        head = read_whole(folder / "README.md")[:CARD_BYTES].decode("utf-8", errors="replace")
    except (UserError, OSError):
        return ""
    found = re.search(r"^base_model: *(?:\n *- *)?([^\s\[\]]+)", head, flags=re.MULTILINE)
    return harmless(f"from {found[1].strip(chr(39))}") if found else ""


def merged_weights(folder: Path) -> Path | None:
    """The folder whose weights a merged export has as many as: the folder itself, or an adapter's base where that is on
    this disk.
    """
    config = folder / "adapter_config.json"
    if not config.is_file():
        return folder
    try:
        base = str(json.loads(read_whole(config))["base_model_name_or_path"])
        return cached_model(base, weights=True)
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return None


def num_parameters(folder: Path) -> int | None:
    """Of the weights in a folder, by the heads of its files; None where one cannot be read."""
    count = 0
    try:
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > MOST_HEAD_BYTES:
                    return None
                tensors = json.loads(file.read(size))
            shapes = (one["shape"] for name, one in tensors.items() if name != "__metadata__")
            count += sum(math.prod(shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return count or None


def _size_of(folder: Path) -> tuple[int, float]:
    """Bytes of the weights, and when the folder was written. Raises OSError."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return weights, folder.stat().st_mtime


def kind_of_model(folder: Path) -> str:
    """A full model by its architecture, an adapter by its base; "damaged" where that cannot be read."""
    is_adapter = (folder / "adapter_config.json").is_file()
    name = "adapter_config.json" if is_adapter else "config.json"
    try:
        config = json.loads(read_whole(folder / name))
        text = config["base_model_name_or_path"] if is_adapter else config["model_type"]
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return DAMAGED
    return harmless(f"{ADAPTER} {short_source(str(text))}" if is_adapter else f"full, {text}")
