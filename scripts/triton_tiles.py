"""Compiles Triton's attention kernels for GPUs that are not here: registers, spills, shared memory, instructions.

    python scripts/triton_tiles.py [--arch gfx1030 gfx906] [--width 64 128] [--dtype fp16] [--search]
    python scripts/triton_tiles.py --write

Without --search: the tiles of src/bloomery/model/attention/tiles.toml. With it: every tile that could be one, the best
last: no spills, then the fewest instructions per score; the last three that do not spill are the table's. A line of
JSON each. --write: what this version of Triton makes of every kernel, in place of its rows in compiled_tiles.json
beside tiles.toml, which the plan reads; scripts/triton_page.py makes a page of them. Needs a Triton that can be
imported (`PYTHONPATH`), and no GPU: what it prints says nothing about time.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
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
    columns_at_once,
    decode_tile,
    padded_width,
    tile_candidates,
)

FIGURES = Path(triton_kernels.__file__).with_name("compiled_tiles.json")
WAVE_SIZES = {"gfx906": 64, "gfx908": 64, "gfx90a": 64, "gfx942": 64, "gfx950": 64}  # others: 32
# The architectures of the table, with the types of inputs that their runs have.
DTYPES = {
    "gfx906": ("fp16", "fp32"),
    "gfx908": ("fp16", "bf16"),
    "gfx1010": ("fp16",),
    "gfx1012": ("fp16",),
    "gfx1030": ("fp16", "fp32"),
    "gfx90a": ("bf16",),
    "gfx942": ("bf16",),
    "gfx1100": ("bf16",),
    "gfx1201": ("bf16",),
    "sm_75": ("fp16",),
    "sm_80": ("bf16",),
    "sm_90": ("bf16",),
}
# What a kernel does besides its products. Documents are always there: without them no other code remains.
VARIANTS: dict[str, dict[str, bool]] = {
    "documents": {},
    "dropout": {"HAS_DROPOUT": True},
    "all": {"HAS_DROPOUT": True, "HAS_WINDOW": True, "HAS_SOFTCAP": True},
}
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
# instructions that multiply and add pairs or tiles; the last ones are NVIDIA's
DOT = ("v_dot2", "v_mfma", "v_wmma", "v_swmmac", "HMMA", "HGMMA")
# A quarter of the rate of others: exponentials, and products of whole 32-bit integers.
SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f32|v_mul_(lo|hi)_[iu]32|v_mad_u64_u32|MUFU")
# Of a wave, by other units of its processor, beside the vectors of other waves.
BESIDE = re.compile(r"s_|ds_|global_|buffer_|scratch_|flat_|LD|ST|BAR|BRA|DEPBAR|U[A-Z]")
# (queries, keys, warps); larger tiles spill on the GPUs without matrix instructions, and smaller ones share less
CANDIDATES = [
    TileShape(*numbers)
    for numbers in (
        (64, 32, 4),
        (64, 16, 8),
        (64, 16, 4),
        (32, 32, 8),
        (32, 32, 4),
        (32, 16, 8),
        (32, 16, 4),
        (32, 16, 2),
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
    variant: str = "dropout",
) -> dict[str, Any]:
    """What the compiler made of a kernel with documents, or "problem", its refusal. `width`: of a head."""
    function = getattr(triton_kernels, kernel)
    constants = {
        "HAS_DOCUMENTS": True,
        "HAS_WINDOW": False,
        "HAS_SOFTCAP": False,
        "HAS_DROPOUT": False,
        "E": width,
        "WIDTH": padded_width(width),
        "COLUMNS": columns_at_once(arch, width),
        "HAS_COUNTS": True,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": SPLIT_KEYS,
    } | VARIANTS[variant]
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
    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    try:
        source = ASTSource(function, signature=signature, constexprs=constants, attrs=divisible)
        binary = triton.compile(
            source, target=target, options={"num_warps": tile.warps, "num_stages": 1}
        )
    except Exception as error:  # the compiler has no class of its own for a refusal
        return {"problem": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
    scores_per_thread = tile.rows * tile.keys / (tile.warps * target.warp_size)
    parts = constants["WIDTH"] // constants.get("COLUMNS", constants["WIDTH"])
    figures = (
        _nvidia_figures(binary.asm["cubin"])
        if target.backend == "cuda"
        else _amd_figures(binary.asm["amdgcn"], parts)
    )
    loop = figures.pop("loop")
    beside = [name for name in loop if BESIDE.match(name)]
    slow = [name for name in loop if SLOW.match(name)]
    # Slots of the vector units: a slow instruction takes four.
    vector = len(loop) - len(beside) + 3 * len(slow)
    return figures | {
        "shared_bytes": binary.metadata.shared,
        "instructions": round(len(loop) / scores_per_thread, 1),
        "vector": round(vector / scores_per_thread, 1),
        "beside": round(len(beside) / scores_per_thread, 1),
    }


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


def _amd_figures(assembly: str, parts: int = 1) -> dict[str, Any]:
    """`loop`: the instructions of the longest loop. `parts`: how often it runs the loops over the columns of a head."""

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(match[1]) if match else 0

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count"),
        "dot": next((name for name in DOT if name in assembly), ""),
        "loop": _amd_loop(assembly, parts),
    }


def _amd_loop(assembly: str, parts: int) -> list[str]:
    """The instructions of the longest loop: those between a label and a jump back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[range] = []
    for line in assembly.splitlines():
        if match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.match(r"\s+([sv]_\w+|ds_\w+|global_\w+|buffer_\w+|scratch_\w+)", line):
            instructions.append(match[1])
            jump = re.match(r"\s+s_c?branch\w*\s+(\.L\w+)", line)
            if jump and jump[1] in labels:
                loops.append(range(labels[jump[1]], len(instructions)))

    def is_inside(inner: range, outer: range) -> bool:
        return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop

    # The innermost loops of a kernel that reads the columns of a head in parts are those over the parts.
    longest = max(loops, key=len, default=range(0))
    loop = instructions[longest.start : longest.stop]
    for inner in loops if parts > 1 else ():
        is_innermost = not any(is_inside(other, inner) for other in loops)
        if is_innermost and is_inside(inner, longest):
            loop += instructions[inner.start : inner.stop] * (parts - 1)
    return loop


def _nvidia_figures(cubin: bytes) -> dict[str, Any]:
    """Read with the tools that Triton brings; a register that goes to memory is 4 bytes of a thread's stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def output(option: str) -> str:
            return subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout

        usage = output("-res-usage")
        code = output("-sass")
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    assert registers is not None and stack is not None, usage
    return {
        "registers": int(registers[1]),
        "spilled": int(stack[1]) // 4,
        "dot": next((name for name in DOT if name in code), ""),
        "loop": max(_nvidia_loops(code), key=len, default=[]),
    }


def _nvidia_loops(code: str) -> Iterator[list[str]]:
    """The instructions between the target of a jump back and the jump, which names an address."""
    addresses: dict[int, int] = {}
    instructions: list[str] = []
    for line in code.splitlines():
        match = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)", line)
        if not match:
            continue
        addresses[int(match[1], 16)] = len(instructions)
        instructions.append(match[2])
        jump = re.search(r"0x([0-9a-f]+)", match[3]) if match[2].startswith("BRA") else None
        if jump and int(jump[1], 16) in addresses and int(jump[1], 16) < int(match[1], 16):
            yield instructions[addresses[int(jump[1], 16)] :]


def write_figures(archs: list[str]) -> None:
    """The rows of this version of Triton and these architectures, in place of those that are there."""
    order = list(DTYPES)
    for arch in archs:
        new_rows = [row for dtype in DTYPES[arch] for row in _rows_of_child(arch, dtype)]
        rows = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
        is_replaced = (triton.__version__, arch)
        rows = [row for row in rows if (row["triton"], row["arch"]) != is_replaced] + new_rows
        rows.sort(key=lambda row: (series(row["triton"]), order.index(row["arch"])))
        lines = ",\n".join(json.dumps(row) for row in rows)
        FIGURES.write_text(f"[\n{lines}\n]\n")
        print(triton.__version__, arch, flush=True)


def _rows_of_child(arch: str, dtype: str) -> list[dict[str, Any]]:
    """Compiled in another process: LLVM aborts where it has no instruction for an operation."""
    arguments = ("--row", "--arch", arch, "--dtype", dtype, "--width", "64", "128", "256")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        problem = "LLVM aborts the process"
        if selected := re.search(r"Cannot select: .*?= (\S+)", done.stderr):
            problem += f": it cannot select {selected[1]}"
        row = {"triton": triton.__version__, "arch": arch, "dtype": dtype, "width": 0}
        return [row | {"problem": problem}]
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _rows_of(
    arch: str, dtype: str, widths: tuple[int, ...] = (64, 128, 256)
) -> Iterator[dict[str, Any]]:
    """A row for each width: of every kernel registers and bytes, of each variant spills and instructions per score."""
    for width in widths:
        row: dict[str, Any] = {
            "triton": triton.__version__,
            "arch": arch,
            "dtype": dtype,
            "width": width,
        }
        for kernel in KERNELS:
            tile = tile_candidates(kernel, arch=arch, width=width)[0]
            variants = {
                variant: compiled(kernel, arch, width, tile, dtype=dtype, variant=variant)
                for variant in VARIANTS
            }
            problem = next((one["problem"] for one in variants.values() if "problem" in one), None)
            if problem is not None:
                # The compiler judges the architecture, not the kernel.
                yield row | {"width": 0, "problem": problem}
                return
            row[kernel] = {
                "tile": [tile.rows, tile.keys, tile.warps],
                "registers": max(one["registers"] for one in variants.values()),
                "shared_bytes": max(one["shared_bytes"] for one in variants.values()),
                "dot": variants["all"]["dot"],
            } | {
                variant: [one["spilled"], one["vector"], one["beside"]]
                for variant, one in variants.items()
            }
        yield row


def series(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split("."))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=list(DTYPES))
    parser.add_argument("--width", nargs="+", type=int, default=list(WIDTHS[2:]))
    parser.add_argument("--kernel", nargs="+", default=[*KERNELS, "decode"])
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "bf16", "fp32"))
    parser.add_argument("--variant", default="dropout", choices=tuple(VARIANTS))
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--row", action="store_true", help="a row of --write, printed")
    given = parser.parse_args()
    if given.write:
        write_figures(given.arch)
        return 0
    if given.row:
        for arch in given.arch:
            for row in _rows_of(arch, given.dtype, tuple(given.width)):
                print(json.dumps(row), flush=True)
        return 0
    for arch in given.arch:
        for width in given.width:
            for kernel in given.kernel:
                tiles = CANDIDATES if given.search else table_tiles(kernel, arch, width)
                rows = [
                    (
                        tile,
                        compiled(
                            kernel, arch, width, tile, dtype=given.dtype, variant=given.variant
                        ),
                    )
                    for tile in tiles
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
