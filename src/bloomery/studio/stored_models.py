"""The models on disk: checkpoints and adapters of runs, and model folders next to them. Does not import torch."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError, one_line
from bloomery.core.files import read_whole
from bloomery.core.run_folder import all_runs
from bloomery.core.text import harmless
from bloomery.infer.model_folder import (
    best_on_disk,
    best_weight_steps,
    folder_of_step,
    saved_steps,
)
from bloomery.studio.watching import is_plain

ADAPTER = "adapter of"  # the kind of an adapter begins with it
DAMAGED = "damaged"
RENAME = "rename it: no page shows its name"
_EXPORT_FOLDERS = (Path(), Path("exports"), Path("models"))  # where exports are looked for


@final
@dataclass(frozen=True)
class ListedModel:
    """A model on disk. `model`: the MODEL argument of commands, without its step. `changed`: seconds since 1970."""

    model: str
    step: int | None
    kind: str
    size: int
    changed: float
    is_best: bool = False

    @property
    def argument(self) -> str:
        """As `bloomery serve` names it."""
        return self.model if self.step is None else f"{self.model}@{self.step}"

    @property
    def is_readable(self) -> bool:
        """Whether a command can open it."""
        return self.kind not in (DAMAGED, RENAME)


def stored_models() -> list[ListedModel]:
    """Checkpoints of the runs in `runs/`, and model folders next to it; the newest first."""
    models = list[ListedModel]()
    for run in all_runs():
        with suppress(UserError, OSError):  # a run that is deleted meanwhile, or not readable
            models += _of_run(run)
    for folder in _export_folders():
        with suppress(OSError):
            size, changed = _size_of(folder)
            models.append(ListedModel(f"./{folder}", None, kind_of_model(folder), size, changed))
    plain = [model if is_plain(model.model) else _renamed(model) for model in models]
    return sorted(plain, key=lambda model: -model.changed)


def _renamed(model: ListedModel) -> ListedModel:
    """With escapes, under which no command finds another model."""
    return replace(model, model=one_line(model.model), kind=RENAME)


def _of_run(run: Path) -> Iterator[ListedModel]:
    checkpoints = run / "checkpoints"
    best = best_on_disk(checkpoints)
    for step in sorted({*saved_steps(checkpoints), *best_weight_steps(checkpoints)}):
        folder = folder_of_step(checkpoints, step)
        with suppress(FileNotFoundError):  # a newer checkpoint has replaced it
            size, changed = _size_of(folder)
            yield ListedModel(
                f"runs/{run.name}", step, kind_of_model(folder), size, changed, is_best=step == best
            )


def _export_folders() -> Iterator[Path]:
    places = [*_EXPORT_FOLDERS, *all_runs()]
    for place in places:
        with suppress(OSError):
            for folder in sorted(place.iterdir()) if place.is_dir() else ():
                has_model = any(
                    (folder / name).is_file() for name in ("config.json", "adapter_config.json")
                )
                if has_model and not folder.name.startswith("."):
                    yield folder


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
    return harmless(f"{ADAPTER} {Path(str(text)).name}" if is_adapter else f"full, {text}")
