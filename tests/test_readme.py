"""The README's tree is the map of the house: every source file on it once, and none that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bloomery"


def files_on_the_map() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("<!-- tree -->")[1]
    found, folder = [], ""
    for line in tree.splitlines():
        if match := re.match(r"^(\S+/)\s", line):
            folder = "" if match[1] == "src/bloomery/" else match[1]
        elif match := re.match(r"^  (\S+\.(?:py|toml))\s+\S", line):
            found.append(folder + match[1])
    return found


def test_tree_has_one_line_per_source_file() -> None:
    there = {str(path.relative_to(SOURCE)) for pattern in ("*.py", "*.toml") for path in SOURCE.rglob(pattern)}
    there = {name for name in there if (SOURCE / name).read_text(encoding="utf-8").strip() and not name.endswith("/__init__.py")}
    listed = files_on_the_map()
    assert sorted(listed) == sorted(there)
