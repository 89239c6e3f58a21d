"""The tiles of Triton's attention kernels on each GPU architecture, and what compilers made of them.

No torch: the plan reads both. compiled_tiles.json is written by scripts/triton_tiles.py.
"""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from bloomery.hardware.wheels import series

KERNELS = ("forward", "backward_q", "backward_kv")
WIDTHS = (
    16,
    32,
    64,
    128,
    256,
)  # head widths that a kernel computes with; others are padded to the next
MAX_WIDTH = WIDTHS[-1]
# Triton compiles for addresses that are multiples of so many numbers where they are. Where they are not, gfx1030 spills
# 8 to 19 registers for heads of 128 numbers (Triton 3.8).
ALIGNED = 16
# Architectures for which the compiler makes the same of a kernel; a soak test compiles for both.
COMPILED_AS = {
    "gfx1011": "gfx1012",
    **dict.fromkeys([f"gfx103{last}" for last in "123456"], "gfx1030"),
    "gfx1101": "gfx1100",
    "gfx1200": "gfx1201",
}
_TYPES = {"float16": ("fp16", "bf16"), "bfloat16": ("bf16", "fp16"), "float32": ("fp32",)}


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


# GPUs whose products of 16-bit types are vector instructions: a thread holds whole rows of both factors.
VECTOR_PRODUCTS = ("gfx906", "gfx10")
PART = 64  # columns: the fewest parts that fit


def columns_at_once(arch: str, width: int) -> int:
    """How many numbers of a head the products of `KERNELS` read at a time: all where they fit into registers."""
    padded = padded_width(width)
    return PART if padded > 128 and arch.startswith(VECTOR_PRODUCTS) else padded


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


@dataclass(frozen=True)
class KernelFigures:
    """What a version of Triton made of a kernel with its tile.

    Instructions of its loop, per score of a tile: `vector` in slots of the vector units, `beside` those that other
    units run. `spilled`: registers of a thread that lie in memory. `dot`: an instruction of its products, or empty.
    """

    tile: TileShape
    registers: int
    shared_bytes: int
    dot: str
    spilled: int
    vector: float
    beside: float


@dataclass(frozen=True)
class KernelRun:
    """Whose kernels: on which architecture, by which Triton, for which heads, precision and options."""

    triton: str  # a version, 3.7.1 or 3.7
    arch: str
    width: int
    precision: str  # of train.precision
    dropout: bool = False
    window: bool = False
    softcap: bool = False


def kernel_figures(run: KernelRun) -> dict[str, KernelFigures] | None:
    """By kernel; None where nobody has compiled them with this Triton for this architecture, or the compiler refused.

    Heads narrower than 64 count as 64 wide. Types of 16 bits count alike where one of them was compiled.
    """
    if run.width > MAX_WIDTH:
        return None
    release = series(run.triton)
    arch = COMPILED_AS.get(run.arch, run.arch)
    width = max(64, padded_width(run.width))
    variant = "all" if run.window or run.softcap else "dropout" if run.dropout else "documents"
    for dtype in _TYPES[run.precision.removesuffix("-pure")]:
        row = _compiled_rows().get((release, arch, dtype, width))
        if row is not None:
            return {kernel: _figures_of(row[kernel], variant) for kernel in KERNELS}
    return None


def refusal(run: KernelRun) -> str | None:
    """Why there are no such kernels: heads are too wide, or somebody has tried and the compiler did not make them."""
    if run.width > MAX_WIDTH:
        return f"the Triton kernels take heads of at most {MAX_WIDTH} numbers, not {run.width}"
    release = series(run.triton)
    arch = COMPILED_AS.get(run.arch, run.arch)
    for dtype in _TYPES[run.precision.removesuffix("-pure")]:
        row = _compiled_rows().get((release, arch, dtype, 0))
        if row is not None:
            triton = f"Triton {release[0]}.{release[1]}"
            return f"{triton} cannot compile the kernels for {run.arch}: {row['problem']}"
    return None


def reason_against(run: KernelRun) -> str | None:
    """Why `auto` leaves the kernels alone; None where this Triton keeps every number in registers."""
    if run.width % ALIGNED:
        return (
            f"heads of {run.width} numbers are no multiple of {ALIGNED}: the Triton kernels would be"
            " compiled for unaligned addresses, which takes more registers"
        )
    figures = kernel_figures(run)
    release = ".".join(map(str, series(run.triton)))
    if figures is None:
        return f"the Triton kernels were never compiled for {run.arch} in {run.precision} by Triton {release}"
    if any(of_kernel.spilled for of_kernel in figures.values()):
        return (
            f"on {run.arch} the Triton kernels for heads of {run.width} numbers in {run.precision}"
            " do not fit into registers"
        )
    if not all(of_kernel.dot for of_kernel in figures.values()):
        return (
            f"Triton {release} uses no dot or matrix instruction on {run.arch} in {run.precision}"
        )
    return None


def _figures_of(kernel: dict[str, Any], variant: str) -> KernelFigures:
    spilled, vector, beside = kernel[variant]
    return KernelFigures(
        TileShape(*kernel["tile"]),
        registers=kernel["registers"],
        shared_bytes=kernel["shared_bytes"],
        dot=kernel["dot"],
        spilled=spilled,
        vector=vector,
        beside=beside,
    )


@cache
def _compiled_rows() -> dict[tuple[tuple[int, int], str, str, int], dict[str, Any]]:
    folder = files("bloomery.model.attention")
    rows = json.loads(folder.joinpath("compiled_tiles.json").read_text(encoding="utf-8"))
    return {(series(row["triton"]), row["arch"], row["dtype"], row["width"]): row for row in rows}


@cache
def _table() -> list[dict[str, Any]]:
    text = files("bloomery.model.attention").joinpath("tiles.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["tile"]
    return rows
