"""Memory of tensors on a CPU, in blocks that fit into what others of their size have freed: `memory.cpp`."""

from pathlib import Path
from typing import Any

import torch

from bloomery.model.native import Library, library


def fill_freed_memory() -> None:
    """From here on a tensor takes the memory of a freed one of its size. Raises Uncompiled.

    Useful where the process keeps what it frees: `core.allocator`.
    """
    code: Any = library(Library("bloomery.model", "memory.cpp", flags=_torch_flags()))
    code.fill_freed_memory.restype = None
    code.fill_freed_memory()


def _torch_flags() -> tuple[str, ...]:
    """With which the code finds the headers of torch and its core library; torch's version is a part of them."""
    folder = Path(torch.__file__).parent
    return (
        f"-DTORCH={torch.__version__}",
        f"-I{folder / 'include'}",
        f"-L{folder / 'lib'}",
        f"-Wl,-rpath,{folder / 'lib'}",
        "-Wl,--no-as-needed",  # the library stands before the code
        "-lc10",
    )
