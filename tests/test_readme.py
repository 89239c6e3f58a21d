"""The README's tree is the map of the house: every source file on it once, with its own first line."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tree_is_what_the_files_say_of_themselves() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tree.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["with_tree"](readme) == readme, "run: python scripts/tree.py"


def test_every_folder_of_the_package_is_on_the_tree() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tree.py"))
    there = {path.parent.relative_to(script["SOURCE"]).as_posix() for path in script["SOURCE"].rglob("*.py")}
    assert {folder or "." for folder in script["FOLDERS"]} == there
