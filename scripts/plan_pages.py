"""Rewrites the output of `bloomery plan` in the docs: `python scripts/plan_pages.py`.

A fenced block that begins with `$ bloomery plan ... --gpu ...` holds what the command prints on a computer with
PyTorch 2.13 and no prepared dataset. A recipe of the page ("`NAME.yaml` is ..." above a block of YAML) exists there.
Where a block's last line is `...`, the output ends after memory, time and layouts. Between `<!-- holds: GPU, ... -->`
and `<!-- end -->` is a table: memory and speed of each fine-tuning recipe on these GPUs.
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from bloomery.cli.plan import command
from bloomery.core.units import GIB, two_digits
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs.specs import find_gpu
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.recipe.load import load_recipe, packaged

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```\n\$ (bloomery plan [^\n]* --gpu [^\n]*)\n(.*?)```", re.DOTALL)
RECIPE = re.compile(r"`(\w+\.yaml)`[^\n]*\n```yaml\n(.*?)```", re.DOTALL)
HOLDS = re.compile(r"<!-- holds: ([^\n]*) -->\n.*?<!-- end -->", re.DOTALL)
LATER = ("claims", "warnings", "suggested", "settings")  # what `...` leaves out begins with one of these


def pages() -> list[Path]:
    found = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))}
    return [path for path, text in found.items() if BLOCK.search(text) or HOLDS.search(text)]


def refreshed(text: str) -> str:
    """The page with today's output in each of its blocks."""
    recipes = dict(RECIPE.findall(text))
    text = BLOCK.sub(lambda match: _block(match[1], recipes, cut=match[2].split()[-1:] == ["..."]), text)
    return HOLDS.sub(lambda match: _table(match[1]), text)


def _table(gpus: str) -> str:
    names = gpus.split(", ")
    head = ["| recipe | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    rows = [f"| `{recipe}` | " + " | ".join(_cell(recipe, gpu) for gpu in names) + " |" for recipe in tuning()]
    return "\n".join([f"<!-- holds: {gpus} -->", *head, *rows, "<!-- end -->"])


def tuning() -> list[str]:
    """Packaged recipes that start from a model of the Hub."""
    return [name for name in packaged() if (load_recipe(name).recipe.model.from_ or "").count("/") == 1]


def _cell(recipe: str, gpu: str) -> str:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": "/nonexistent"}):
        loaded = load_recipe(recipe)
        plan = resolve(loaded, facts_of(loaded, with_gpu(computer(), find_gpu(gpu))))
    needs = plan.memory.total / GIB
    if not plan.fits:
        return f"no: {needs:.1f}"
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step) if plan.step_seconds else None
    again = "*" if plan.train.activation_checkpointing == "full" else ""
    return f"{needs:.1f}{again}" + (f", {two_digits(rate.value)}/s" if rate else "")


def _block(words: str, recipes: Mapping[str, str], *, cut: bool) -> str:
    lines = printed(words, recipes)
    if cut:
        lines = [*lines[: next(at for at, line in enumerate(lines) if line.startswith(LATER))], "..."]
    return "\n".join(["```", f"$ {words}", *lines, "```"])


def printed(words: str, recipes: Mapping[str, str]) -> list[str]:
    """The output of the command on a computer that is the same everywhere, in a folder with these recipes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _away(folder),
        patch("bloomery.hardware.detect.detect.detect", computer),
    ):
        for name, recipe in recipes.items():
            Path(name).write_text(recipe, encoding="utf-8")
        result = CliRunner().invoke(command, shlex.split(words)[2:], standalone_mode=False, catch_exceptions=False)
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
        system="Linux", cpu_name="a CPU", cpu_cores=8, cpu_flags=("avx2",), memory_bytes=64 * GIB,
        memory_free_bytes=60 * GIB, disk_free_bytes=500 * GIB, compiler="/usr/bin/g++",
    )  # fmt: skip
    return Machine(accelerators=(), host=host, software=Software(python="3.12.4", torch="2.13.0", build="cpu"))


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        page.write_text(refreshed(before), encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)}{'' if refreshed(before) == before else ' is rewritten'}\n")
