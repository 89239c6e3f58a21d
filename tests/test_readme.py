"""The code map has a line for every source file, with the file's own first line."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "tree.py"))


@pytest.fixture(scope="module")
def page(script: dict[str, Any]) -> str:
    text: str = script["page"]()
    return text


def test_the_code_map_is_what_the_files_say_of_themselves(
    script: dict[str, Any], page: str
) -> None:
    assert script["PAGE"].read_text(encoding="utf-8") == page, "run: python scripts/tree.py"


def test_every_source_file_has_a_line(script: dict[str, Any], page: str) -> None:
    modules = [path for path in script["SOURCE"].rglob("*.py") if path.name != "__init__.py"]
    assert [
        path.name
        for path in modules
        if f"[{path.relative_to(script['SOURCE']).as_posix()}]" not in page
    ] == []
