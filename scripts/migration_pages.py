"""Rewrites the tables of docs/how-to/migrate-from-*.md: `python scripts/migration_pages.py`.

Between `<!-- keys: PROGRAM -->` and `<!-- end -->` is a table. Its first column, a line of YAML, is written by hand;
the other is the answer of the recipe's aliases to that line.
"""

import re
import sys
from pathlib import Path

import yaml

from bloomery.recipe.aliases import look_up

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/how-to").glob("migrate-from-*.md"))
TABLE = re.compile(r"<!-- keys: ([^\n]*) -->\n(.*?)<!-- end -->", re.DOTALL)
FIRST = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
SIBLINGS = {
    "per_device_train_batch_size": 2,
    "micro_batch_size": 2,
    "batch_size": 2,
    "dataset_dir": "data",
}


def refreshed(text: str) -> str:
    """The page with today's answers."""
    return TABLE.sub(lambda found: _table(found[1], FIRST.findall(found[2])), text)


def _table(program: str, lines: list[str]) -> str:
    rows = [f"| `{line}` | {answer(line, program)} |" for line in lines]
    return "\n".join(
        [
            f"<!-- keys: {program} -->",
            f"| {program} | Bloomery |",
            "|---|---|",
            *rows,
            "<!-- end -->",
        ]
    )


def answer(line: str, program: str) -> str:
    """What to write for a line of YAML of another program. Raises KeyError where the aliases have no answer."""
    data, path = yaml.safe_load(line), []
    while isinstance(data, dict) and len(data) == 1 and "." in line.partition(":")[0]:
        ((name, data),) = data.items()
        path += name.split(".")
    if not path:
        ((name, data),) = data.items()
        path = [name]
    if (found := look_up(tuple(path), data, SIBLINGS, program=program)) is None:
        raise KeyError(line)
    edits = "<br>".join(f"`{edit}`" for edit in found.edits)
    return f"{edits} ({found.reason})" if edits and found.reason else edits or found.reason


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        page.write_text(refreshed(before), encoding="utf-8")
        sys.stdout.write(
            f"{page.relative_to(ROOT)}{'' if refreshed(before) == before else ' is rewritten'}\n"
        )
