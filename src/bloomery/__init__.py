"""Bloomery: language models on whatever GPUs you have."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder

__version__ = "0.1.0"


def load(folder: str | Path) -> "Decoder":
    """The decoder in a folder of Hugging Face's layout (a checkpoint, an export, a download), ready to evaluate."""
    from bloomery.model.weights import load_decoder

    return load_decoder(Path(folder))
