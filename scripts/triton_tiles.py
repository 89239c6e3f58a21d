"""Compiles Triton's attention kernels for GPUs that are not here: registers, spills, shared memory, instructions.

    python scripts/triton_tiles.py [--arch gfx1030 gfx906] [--width 64 128] [--dtype fp16] [--search]

Without --search: the tiles of src/bloomery/model/attention/tiles.toml. With it: every tile that could be one, the best
last: no spills, then the fewest instructions per score; the last three that do not spill are the table's. A line of
JSON each. Needs a Triton that can be imported, and no GPU: what it prints says nothing about time.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bloomery.model.attention import triton_kernels
from bloomery.model.attention.tiles import (
    KERNELS,
    SPLIT_KEYS,
    WIDTHS,
    TileShape,
    decode_tile,
    tile_candidates,
)

WAVE_SIZES = {"gfx906": 64, "gfx908": 64, "gfx90a": 64, "gfx942": 64, "gfx950": 64}  # others: 32
ARCHS = ("gfx906", "gfx908", "gfx1012", "gfx1030", "gfx1100", "gfx1201", "gfx942")
HEADS = frozenset(
    {
        "q_heads",
        "k_heads",
        "v_heads",
        "out_heads",
        "d_out_heads",
        "dq_heads",
        "dk_heads",
        "dv_heads",
    }
)
FLOATS = frozenset({"scale", "softcap", "boost"})
DOT = (
    "v_dot2",
    "v_mfma",
    "v_wmma",
    "v_swmmac",
)  # instructions that multiply and add pairs or tiles
# (queries, keys, warps); larger tiles spill on the GPUs without matrix instructions, and smaller ones share less
CANDIDATES = [
    TileShape(*numbers)
    for numbers in (
        (64, 16, 8),
        (64, 16, 4),
        (32, 32, 8),
        (32, 16, 8),
        (32, 16, 4),
        (16, 32, 8),
        (16, 32, 4),
        (16, 16, 8),
        (16, 16, 4),
    )
]


def compiled(
    kernel: str,
    arch: str,
    width: int,
    tile: TileShape,
    *,
    dtype: str = "fp16",
    dropout: bool = True,
    documents: bool = True,
) -> dict[str, Any]:
    """What the compiler made of a kernel with documents, or "problem", its refusal."""
    function = getattr(triton_kernels, kernel)
    constants = {
        "HAS_DOCUMENTS": documents,
        "HAS_WINDOW": False,
        "HAS_SOFTCAP": False,
        "HAS_DROPOUT": dropout,
        "E": width,
        "WIDTH": width,
        "HAS_COUNTS": True,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": SPLIT_KEYS,
    }
    constants = {name: constants[name] for name in function.arg_names if name.isupper()}
    signature = {name: _type(name, dtype) for name in function.arg_names}
    # As the launch would find them: rows of whole heads are multiples of 16 numbers.
    divisible = {
        (index, part): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in HEADS
        for part in range(4)
    }
    target = GPUTarget("hip", arch, WAVE_SIZES.get(arch, 32))
    try:
        source = ASTSource(function, signature=signature, constexprs=constants, attrs=divisible)
        binary = triton.compile(
            source, target=target, options={"num_warps": tile.warps, "num_stages": 1}
        )
    except Exception as error:  # the compiler has no class of its own for a refusal
        return {"problem": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
    return _figures(binary.asm["amdgcn"], binary.metadata.shared, tile)


def table_tiles(kernel: str, arch: str, width: int) -> Sequence[TileShape]:
    if kernel == "decode":
        return [decode_tile(arch)]
    return tile_candidates(kernel, arch=arch, width=width)


def _type(name: str, dtype: str) -> Any:
    if name in HEADS:
        return (f"*{dtype}", "i32", "i32", "i32")
    if name in ("first_pointer", "stop_pointer", "counts_pointer"):
        return "*i32"
    if name.endswith("_pointer"):
        return "*fp32"
    if name in FLOATS:
        return "fp32"
    return "constexpr" if name.isupper() else "i32"


def _figures(assembly: str, shared_bytes: int, tile: TileShape) -> dict[str, Any]:
    """`instructions`: of the longest loop, for each score that its threads compute."""

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(match[1]) if match else 0

    wave_size = number("wavefront_size") or 64
    loop = max(_loops(assembly), key=len, default=[])
    scores_per_thread = tile.rows * tile.keys / (tile.warps * wave_size)
    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count"),
        "shared_bytes": shared_bytes,
        "dot": next((name for name in DOT if name in assembly), ""),
        "instructions": round(len(loop) / scores_per_thread, 1),
    }


def _loops(assembly: str) -> Iterator[list[str]]:
    """The instructions between each label and a jump back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in assembly.splitlines():
        if match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.match(r"\s+([sv]_\w+|ds_\w+|global_\w+|buffer_\w+|scratch_\w+)", line):
            instructions.append(match[1])
            jump = re.match(r"\s+s_c?branch\w*\s+(\.L\w+)", line)
            if jump and jump[1] in labels:
                yield instructions[labels[jump[1]] :]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=list(ARCHS))
    parser.add_argument("--width", nargs="+", type=int, default=list(WIDTHS[2:]))
    parser.add_argument("--kernel", nargs="+", default=[*KERNELS, "decode"])
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "bf16", "fp32"))
    parser.add_argument("--search", action="store_true")
    given = parser.parse_args()
    for arch in given.arch:
        for width in given.width:
            for kernel in given.kernel:
                tiles = CANDIDATES if given.search else table_tiles(kernel, arch, width)
                rows = [
                    (tile, compiled(kernel, arch, width, tile, dtype=given.dtype)) for tile in tiles
                ]
                rows.sort(
                    key=lambda row: (-row[1].get("spilled", 10**6), -row[1].get("instructions", 0))
                )
                for tile, figures in rows:
                    line = {
                        "triton": triton.__version__,
                        "arch": arch,
                        "width": width,
                        "kernel": kernel,
                    }
                    line |= {"tile": [tile.rows, tile.keys, tile.warps]} | figures
                    print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
