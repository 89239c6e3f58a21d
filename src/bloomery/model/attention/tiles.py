"""The tiles of Triton's attention kernels on each GPU architecture. No torch: the plan reads them, too."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

KERNELS = ("forward", "backward_q", "backward_kv")
WIDTHS = (
    16,
    32,
    64,
    128,
    256,
)  # head widths that a kernel computes with; others are padded to the next
MAX_WIDTH = WIDTHS[-1]


@dataclass(frozen=True)
class TileShape:
    """Queries and keys of one step of a kernel's program, and the warps that share it."""

    rows: int
    keys: int
    warps: int


def padded_width(width: int) -> int:
    """The width that a kernel computes with, for heads of `width` numbers; at most `MAX_WIDTH`."""
    return next(padded for padded in WIDTHS if padded >= width)


def tile_shape(kernel: str, *, arch: str, width: int) -> TileShape:
    """Of one of `KERNELS`, for heads of `width` numbers. `arch`: such as gfx1030; unknown ones use small tiles."""
    rows = [row for row in _table() if row["width"] >= padded_width(width)]
    for name in (arch, "any"):
        fitting = [row for row in rows if name in row["archs"]]
        if fitting:
            return TileShape(*min(fitting, key=lambda row: row["width"])[kernel])
    raise AssertionError("the rows of any architecture end the table")


@cache
def _table() -> list[dict[str, Any]]:
    text = files("bloomery.model.attention").joinpath("tiles.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["tile"]
    return rows
