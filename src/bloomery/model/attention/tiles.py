"""The tiles of Triton's attention kernels on each GPU architecture. No torch: the plan reads them, too."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

KERNELS = ("forward", "backward_q", "backward_kv")
WIDTHS = (
    16,
    32,
    64,
    128,
    256,
)  # head widths that a kernel computes with; others are padded to the next
MAX_WIDTH = WIDTHS[-1]


class TileShape(NamedTuple):
    """Queries and keys of one step of a kernel's program, and the warps that share it."""

    rows: int
    keys: int
    warps: int


# Keys of a cache that one program of the kernel `decode` reads: few texts then still fill a GPU.
SPLIT_KEYS = 256


def decode_tile(arch: str) -> TileShape:
    """Of the kernel `decode`: heads and keys, the fewest that a dot instruction takes.

    With eight waves of 32 threads a GPU of the series gfx10 keeps heads of 256 numbers in registers.
    """
    return TileShape(16, 16, 8 if arch.startswith("gfx1") else 4)


def padded_width(width: int) -> int:
    """The width that a kernel computes with, for heads of `width` numbers; at most `MAX_WIDTH`."""
    return next(padded for padded in WIDTHS if padded >= width)


def tile_shape(kernel: str, *, arch: str, width: int) -> TileShape:
    """Of one of `KERNELS`, for heads of `width` numbers. `arch`: such as gfx1030; unknown ones use small tiles.

    The one that `use_tile` was given in this process, else the table's first.
    """
    fastest = _in_use.get((kernel, arch, padded_width(width)))
    return fastest or tile_candidates(kernel, arch=arch, width=width)[0]


def use_tile(kernel: str, tile: TileShape, *, arch: str, width: int) -> None:
    """From now on `tile_shape` returns this tile. A run has one for each kernel, from its first step to its last."""
    _in_use[kernel, arch, padded_width(width)] = tile


def tile_candidates(kernel: str, *, arch: str, width: int) -> tuple[TileShape, ...]:
    """The tiles to try, the best first by the instructions that the compiler makes of them."""
    rows = [row for row in _table() if row["width"] >= padded_width(width)]
    for name in (arch, "any"):
        fitting = [row for row in rows if name in row["archs"]]
        if fitting:
            narrowest = min(fitting, key=lambda row: row["width"])
            return tuple(TileShape(*numbers) for numbers in narrowest[kernel])
    raise AssertionError("the rows of any architecture end the table")


# By kernel, architecture and padded width; a process trains or serves one model.
_in_use: dict[tuple[str, str, int], TileShape] = {}


@cache
def _table() -> list[dict[str, Any]]:
    text = files("bloomery.model.attention").joinpath("tiles.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["tile"]
    return rows
