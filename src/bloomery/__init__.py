"""Bloomery: language models on whatever GPUs you have."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder

__version__ = "0.1.0"


def load(folder: str | Path) -> "Decoder":
    """The decoder in a folder of Hugging Face's layout (a checkpoint, an export, a download), ready to evaluate."""
    from bloomery.model.weights import load_decoder

    return load_decoder(Path(folder))


def __getattr__(name: str) -> ModuleType:
    """`bloomery.plan(recipe)`, `bloomery.train(recipe)`: packages, imported when asked for, that can be called."""
    if name in ("plan", "train"):
        return importlib.import_module(f"bloomery.{name}")
    raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
