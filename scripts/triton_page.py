"""Writes docs/reference/triton-kernels.md from src/bloomery/model/attention/compiled_tiles.json, which
scripts/triton_tiles.py writes: `python scripts/triton_page.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bloomery.model.attention.tiles import COMPILED_AS, KERNELS, KernelRun, reason_against

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "src/bloomery/model/attention/compiled_tiles.json"
PAGE = ROOT / "docs/reference/triton-kernels.md"
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
HEAD = """# Triton kernels: what each Triton makes of them

The three kernels of [`train.attention=triton`](../how-to/attention.md#triton-kernels-for-gpus-without-flash-attention),
compiled for GPUs that were not there, by `scripts/triton_tiles.py` with the first tile of each row of
`src/bloomery/model/attention/tiles.toml`. No GPU ran them. Written by `scripts/triton_page.py`; `make test` compiles a
row again, `make soak` all.

- `auto`: whether `train.attention: auto` can take the kernels with dropout: no register of any of the three in memory,
  and a dot or matrix instruction.
- *registers* of a thread, and *spilled* ones (in memory): with documents / with dropout, too / with window and
  soft-cap, too; one number where they are alike.
- *LDS*: bytes of shared memory of a program.
- *instructions* per attention score, with dropout: vector slots (a quarter-rate instruction takes four) + those of
  other units.

Heads of 80 and 96 numbers compile to the code of 128; narrower ones than 64 are planned as 64. {alike}

"""
COLUMNS = (
    "Triton",
    "type",
    "head width",
    "kernel",
    "tile: queries x keys, warps",
    "registers",
    "spilled",
    "LDS",
    "dot",
    "instructions",
    "`auto`",
)


def page(rows: list[dict[str, Any]]) -> str:
    by_code: dict[str, list[str]] = {}
    for arch, code in COMPILED_AS.items():
        by_code.setdefault(code, []).append(arch)
    alike = "; ".join(f"{', '.join(archs)} as {code}" for code, archs in by_code.items())
    text = HEAD.format(alike=f"Compiled as others: {alike}.")
    for arch in dict.fromkeys(row["arch"] for row in rows):
        text += f"## {arch}\n\n"
        text += f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
        text += "".join(line for row in rows if row["arch"] == arch for line in _lines(row)) + "\n"
    return text.rstrip() + "\n"


def _lines(row: dict[str, Any]) -> list[str]:
    start = f"| {row['triton']} | {PRECISIONS[row['dtype']]} |"
    if "problem" in row:
        problem = row["problem"]
        if "PassManager" in problem:
            problem = "the compiler refuses: unsupported target"
        return [f"{start} all | {problem} | | | | | | | no |\n"]
    lines = []
    run = KernelRun(
        row["triton"], row["arch"], row["width"], PRECISIONS[row["dtype"]], dropout=True
    )
    verdict = "no" if reason_against(run) else "yes"
    for kernel in KERNELS:
        figures = row[kernel]
        rows, keys, warps = figures["tile"]
        spills = [figures[variant][0] for variant in ("documents", "dropout", "all")]
        spilled = str(spills[0]) if len(set(spills)) == 1 else " / ".join(map(str, spills))
        _, vector, beside = figures["dropout"]
        lines.append(
            f"{start} {row['width']} | {kernel} | {rows} x {keys}, {warps} | {figures['registers']} | {spilled} |"
            f" {figures['shared_bytes']:,} | {figures['dot'] or 'none'} | {vector:.0f} + {beside:.0f} | {verdict} |\n"
        )
    return lines


def main() -> int:
    PAGE.write_text(page(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
