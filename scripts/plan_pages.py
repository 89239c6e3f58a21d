"""Rewrites the output of `bloomery plan` in the docs: `python scripts/plan_pages.py`.

A fenced block that begins with `$ bloomery plan ... --gpu ...` holds what the command prints on a computer with
PyTorch 2.13 and no prepared dataset. A recipe of the page ("`NAME.yaml` is ..." above a block of YAML) exists there.
Where a block's last line is `...`, the output ends after memory, time and layouts. Between `<!-- holds: GPU, ... -->`
and `<!-- end -->` is a table: memory and speed of each fine-tuning recipe on these GPUs. Between
`<!-- memory: RECIPE, GPU -->` and `<!-- end -->` each row of a table adds the edits of its first cell to those above,
and has the peak memory, what the edits saved, and the speed. Between `<!-- vram: MODEL, ... -->` and `<!-- end -->` is
the peak memory of fine-tuning each model by each method. A picture in docs/figures that names such a command in its
<desc> shows the same lines.
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from bloomery.cli.plan import command
from bloomery.core.units import GIB, two_digits
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe, packaged

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```(?:console)?\n\$ (bloomery plan [^\n]* --gpu [^\n]*)\n(.*?)```", re.DOTALL)
PICTURE = re.compile(r"<desc>(bloomery plan [^<]*)</desc>")
RECIPE = re.compile(r"`(\w+\.yaml)`[^\n]*\n```yaml\n(.*?)```", re.DOTALL)
HOLDS = re.compile(r"<!-- holds: ([^\n]*) -->\n.*?<!-- end -->", re.DOTALL)
MEMORY = re.compile(r"<!-- memory: ([^,\n]*), ([^\n]*) -->\n(.*?)<!-- end -->", re.DOTALL)
VRAM = re.compile(r"<!-- vram: ([^\n]*) -->\n.*?<!-- end -->", re.DOTALL)
SMALLEST = (
    "data.sequence_length=2048",
    "train.micro_batch_size=1",
    "train.activation_checkpointing=full",
)
METHODS = {  # column: edits of qwen2.5-1.5b-lora
    "QLoRA, nf4": ("adapter.target_modules=[all-linear]", "quantize.kind=nf4"),
    "LoRA, bf16": ("adapter.target_modules=[all-linear]",),
    "full, bfloat16-pure, Adafactor fused into backward": (
        "adapter.kind=none",
        "train.precision=bfloat16-pure",
        "optimizer.kind=adafactor",
        "optimizer.fused_backward=true",
        "train.tokens_per_step=2048",
    ),
    "full, mixed precision, AdamW": ("adapter.kind=none",),
}
# what `...` leaves out begins with one of these
LATER = ("claims", "warnings", "suggested", "settings")


def pages() -> list[Path]:
    found = {
        path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))
    }
    return [
        path
        for path, text in found.items()
        if any(part.search(text) for part in (BLOCK, HOLDS, MEMORY, VRAM))
    ]


def refreshed(text: str) -> str:
    """The page with today's output in each of its blocks."""
    recipes = dict(RECIPE.findall(text))
    text = BLOCK.sub(
        lambda match: _block(match[1], recipes, cut=match[2].split()[-1:] == ["..."]), text
    )
    text = MEMORY.sub(lambda match: _savings(*match.groups()), text)
    text = VRAM.sub(lambda match: _by_method(match[1]), text)
    return HOLDS.sub(lambda match: _table(match[1]), text)


def _savings(recipe: str, gpu: str, table: str) -> str:
    edits, rows, before = list[str](), list[str](), 0.0
    for cell in re.findall(r"^\| ([^|]*`[^|]*)\|", table, re.MULTILINE):
        edits += re.findall(r"`([^`]+)`", cell)
        plan = _planned(recipe, gpu, edits)
        needs = plan.memory.total / GIB
        speed = (
            two_digits(plan.step_seconds.inverse(plan.train.tokens_per_step).value)
            if plan.step_seconds
            else ""
        )
        rows.append(
            f"| {cell.strip()} | {needs:.1f} GiB | {f'{before - needs:.1f} GiB' if before else ''} | {speed} |"
        )
        before = needs
    head = [
        "| setting, added to the rows above | peak memory | saved | tokens/s |",
        "|---|--:|--:|--:|",
    ]
    return "\n".join([f"<!-- memory: {recipe}, {gpu} -->", *head, *rows, "<!-- end -->"])


def _by_method(models: str) -> str:
    rows = ["| model | " + " | ".join(METHODS) + " |", "|---|" + "--:|" * len(METHODS)]
    for model in models.split(", "):
        own = [f"model.from={model}", *SMALLEST]
        plans = [
            _planned("qwen2.5-1.5b-lora", "RTX 4090", [*own, *edits]) for edits in METHODS.values()
        ]
        needs = " | ".join(f"{plan.memory.total / GIB:,.1f}" for plan in plans)
        rows.append(f"| {model.partition('/')[2]} | {needs} |")
    return "\n".join([f"<!-- vram: {models} -->", *rows, "<!-- end -->"])


def _planned(recipe: str, gpu: str, edits: list[str]) -> RunPlan:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": "/nonexistent"}):
        loaded = load_recipe(recipe, edits)
        return resolve(loaded, facts_of(loaded, with_gpu(computer(), find_gpu(gpu))))


def _table(gpus: str) -> str:
    names = gpus.split(", ")
    head = ["| recipe | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    rows = [
        f"| `{recipe}` | " + " | ".join(_cell(recipe, gpu) for gpu in names) + " |"
        for recipe in tuning()
    ]
    return "\n".join([f"<!-- holds: {gpus} -->", *head, *rows, "<!-- end -->"])


def tuning() -> list[str]:
    """Packaged recipes that start from a model of the Hub, for one GPU."""
    names = [name for name in packaged() if not re.search(r"-\dgpu", name)]
    return [name for name in names if (load_recipe(name).recipe.model.from_ or "").count("/") == 1]


def _cell(recipe: str, gpu: str) -> str:
    plan = _planned(recipe, gpu, [])
    needs = plan.memory.total / GIB
    if not plan.fits:
        return f"no: {needs:.1f}"
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step) if plan.step_seconds else None
    again = "*" if plan.train.activation_checkpointing == "full" else ""
    return f"{needs:.1f}{again}" + (f", {two_digits(rate.value)}/s" if rate else "")


def _block(words: str, recipes: Mapping[str, str], *, cut: bool) -> str:
    lines = printed(words, recipes)
    if cut:
        lines = [
            *lines[: next(at for at, line in enumerate(lines) if line.startswith(LATER))],
            "...",
        ]
    return "\n".join(["```console", f"$ {words}", *lines, "```"])


def pictures() -> list[Path]:
    return [
        path
        for path in sorted((ROOT / "docs/figures").glob("*.svg"))
        if PICTURE.search(path.read_text("utf-8"))
    ]


def drawn(text: str) -> str:
    """The picture with today's output up to the choices: SVG in the colors of the reader's light or dark theme."""
    named = PICTURE.findall(text)[0]
    words = named.replace("&quot;", '"')
    lines = printed(words, {})
    lines = [
        f"$ {words}",
        *lines[: next(at for at, line in enumerate(lines) if line.startswith(LATER))],
    ]
    while not lines[-1].strip():
        lines.pop()
    wide, high = max(map(len, lines)), 19 * len(lines) + 24
    rows = [
        f'<text x="16" y="{27 + 19 * at}" textLength="{7.8 * len(line):.1f}"{kind}>{escape(line)}</text>'
        for at, line in enumerate(line.rstrip() for line in lines)
        for kind in [' class="command"' if at == 0 else ' class="first"' if at == 1 else ""]
        if line
    ]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {7.8 * wide + 32:.0f} {high}" role="img">',
        f"<title>Output of {escape(words)}</title>",
        f"<desc>{named}</desc>",
        "<style>text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#24292f;white-space:pre}",
        ".command{fill:#57606a}.first{font-weight:bold}rect{fill:#f6f8fa;stroke:#d0d7de}",
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.command{fill:#8d96a0}rect{fill:#161b22;stroke:#30363d}}",
        "</style>",
        f'<rect x="0.5" y="0.5" width="{7.8 * wide + 31:.0f}" height="{high - 1}" rx="6"/>',
    ]
    return "\n".join([*head, *rows, "</svg>", ""])


def printed(words: str, recipes: Mapping[str, str]) -> list[str]:
    """The output of the command on a computer that is the same everywhere, in a folder with these recipes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _away(folder),
        patch("bloomery.hardware.detect.detect", computer),
    ):
        for name, recipe in recipes.items():
            Path(name).write_text(recipe, encoding="utf-8")
        result = CliRunner().invoke(
            command, shlex.split(words)[2:], standalone_mode=False, catch_exceptions=False
        )
    return result.stdout.rstrip().split("\n")


@contextmanager
def _away(folder: str) -> Iterator[None]:
    """In an empty folder, with no measurements of one's own."""
    before = Path.cwd()
    os.chdir(folder)
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        yield
    os.chdir(before)


def computer() -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=8,
        cpu_flags=("avx2",),
        memory_bytes=64 * GIB,
        memory_free_bytes=60 * GIB,
        disk_free_bytes=500 * GIB,
        compiler="/usr/bin/g++",
    )
    return Machine(
        accelerators=(), host=host, software=Software(python="3.12.4", torch="2.13.0", build="cpu")
    )


if __name__ == "__main__":
    for picture in pictures():
        picture.write_text(drawn(picture.read_text(encoding="utf-8")), encoding="utf-8")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        page.write_text(refreshed(before), encoding="utf-8")
        sys.stdout.write(
            f"{page.relative_to(ROOT)}{'' if refreshed(before) == before else ' is rewritten'}\n"
        )
